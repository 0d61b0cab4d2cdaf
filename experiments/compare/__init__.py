"""Overlay the learning curves of runs: ``python -m experiments.compare DIR [DIR ...]``."""
