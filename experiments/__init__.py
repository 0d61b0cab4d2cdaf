"""The papers' experiments, a package each: ``python -m experiments.copy --help``.

Run from a clone; the wheel holds the library alone. ``settings`` says what may be set, ``command``
reads the command line, ``training.loop.run(config, workdir)`` does the rest.
"""
