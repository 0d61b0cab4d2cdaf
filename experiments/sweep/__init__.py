"""Train a grid of runs from a file: ``python -m experiments.sweep FILE``."""
