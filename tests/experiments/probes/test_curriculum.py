"""A curriculum: the level decides what is drawn, whose losses decide the level."""

import jax
import jax.numpy as jnp

from experiments.machine.mesh import Rows
from tests.experiments.probes.curriculum import CurriculumTask, Level

TASK = CurriculumTask()


def test_the_level_decides_what_is_drawn():
    rows = Rows(0, 4, 4)
    for level in (1, 3):
        stream = Level(jnp.int32(level), jnp.zeros(2))
        window, after = TASK.draw(None, (), stream, jax.random.key(0), 5, rows)
        assert (window.inputs[:level] != 0).all() and not window.inputs[level:].any()
        assert after is stream
