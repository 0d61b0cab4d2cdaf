"""Say what a picture shows: ``python -m experiments.captioning``."""

from experiments.captioning.settings import CAPTIONING
from experiments.command.main import experiment_main

if __name__ == "__main__":
    experiment_main(CAPTIONING)
