"""A cell's gradients, gates and timescales: ``python -m experiments.diagnose --cell=lstm``."""
