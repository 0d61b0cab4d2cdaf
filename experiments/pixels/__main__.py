"""Classify images pixel by pixel: ``python -m experiments.pixels --cell=ur_lstm``."""

from experiments.command.main import experiment_main
from experiments.pixels.settings import PIXELS

if __name__ == "__main__":
    experiment_main(PIXELS)
