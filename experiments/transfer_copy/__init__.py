"""Copy after longer delays than in training: ``python -m experiments.transfer_copy``."""
