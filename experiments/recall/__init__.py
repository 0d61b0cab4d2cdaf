"""Say again what was shown, and what came after it: ``python -m experiments.recall``."""
