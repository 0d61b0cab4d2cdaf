"""Classify images pixel by pixel: ``python -m experiments.pixels --cell=ur_lstm``."""
