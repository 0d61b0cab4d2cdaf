"""Unlearn saturated forget gates while learning to add: ``python -m experiments.forgetting``."""
