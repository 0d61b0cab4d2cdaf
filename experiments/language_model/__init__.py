"""Predict the next word or character of a text: ``python -m experiments.language_model``."""
