"""What may be set: declarations, sources, and the way from a protocol to a config.

``fields`` says how a setting is declared, ``model`` and ``optimization`` declare the shared ones,
``sources`` and ``derived`` are what protocols are made of, ``resolver`` makes a ``config``.
Nothing here imports JAX until a config is made: ``--help`` is quick.
"""
