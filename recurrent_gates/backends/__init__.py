"""Faster forms of a recurrence, each held to the plain scan by tests; see ``scan.Form``.

``shared`` holds what several of them are made of.
"""
