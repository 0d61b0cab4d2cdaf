"""The papers' experiments, one binary per task: ``python -m experiments.copy --help``.

Run from a clone; the wheel holds the library alone. ``flags`` reads the command line,
``protocols`` turns it into a frozen ``config``, ``train.run(config, workdir)`` does the rest.
"""
