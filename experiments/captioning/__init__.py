"""Say what a picture shows: ``python -m experiments.captioning``."""
