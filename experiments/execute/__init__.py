"""Execute short programs, read character by character: ``python -m experiments.execute``."""
