"""Is a review of a film in favour of it? ``python -m experiments.sentiment``."""
