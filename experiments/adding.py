"""Add two marked numbers of a long sequence: ``python -m experiments.adding --cell=gato``."""

from experiments import flags

if __name__ == "__main__":
    flags.main("adding")
