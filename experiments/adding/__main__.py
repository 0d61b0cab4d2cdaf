"""Add two marked numbers of a long sequence: ``python -m experiments.adding --cell=gato``."""

from experiments.adding.settings import ADDING
from experiments.command.main import experiment_main

if __name__ == "__main__":
    experiment_main(ADDING)
