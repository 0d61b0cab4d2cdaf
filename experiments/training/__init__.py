"""The training loop, the same for every task.

``task`` is what a task offers, ``supervised`` the form that most have; ``models`` are the constant
parts around a cell, ``optimizers`` are optax's by name. ``state`` is what goes from step to step,
``lanes`` are the seeds and rates, ``feed`` reads ahead, ``update`` is a step, ``evaluate`` a score;
``learner`` compiles them and ``loop`` drives them.
"""
