"""Add two marked numbers of a long sequence: ``python -m experiments.adding --cell=gato``."""
