"""Copy a sequence after a long delay: ``python -m experiments.copy --cell=gato``."""

from experiments.command.main import experiment_main
from experiments.copy.settings import COPY

if __name__ == "__main__":
    experiment_main(COPY)
