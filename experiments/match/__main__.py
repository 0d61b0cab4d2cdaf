"""Agents that must remember: ``python -m experiments.match``."""

from experiments.command.main import experiment_main
from experiments.match.settings import MATCH

if __name__ == "__main__":
    experiment_main(MATCH)
