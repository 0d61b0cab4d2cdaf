"""Results as data, and the page that is made of them: ``python -m experiments.results``."""
