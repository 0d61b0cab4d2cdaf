"""A long hospital stay, predicted from vital signs: ``python -m experiments.stay --cell=gato``."""
