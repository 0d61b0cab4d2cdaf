"""Time and memory of the cells beside other frameworks, from a clone: ``python -m
benchmarks.speed`` and ``python -m benchmarks.scaling``.

Every measurement has a process of its own (``process``). ``work`` makes the arrays that both
sides of a comparison are given, ``ours`` and ``peers`` run them, ``pair`` checks that values and
gradients agree and only then takes times.
"""
