"""The way from a command line to a run, and to runs that belong together."""
