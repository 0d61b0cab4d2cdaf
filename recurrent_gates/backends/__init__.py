"""Faster forms of a recurrence, each held to the plain scan by tests."""
