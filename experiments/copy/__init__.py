"""Copy a sequence after a long delay: ``python -m experiments.copy --cell=gato``."""
