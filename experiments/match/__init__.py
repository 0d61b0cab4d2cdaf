"""Agents that must remember: ``python -m experiments.match``."""
