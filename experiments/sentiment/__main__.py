"""Is a review of a film in favour of it? ``python -m experiments.sentiment``."""

from experiments.command.main import experiment_main
from experiments.sentiment.settings import SENTIMENT

if __name__ == "__main__":
    experiment_main(SENTIMENT)
