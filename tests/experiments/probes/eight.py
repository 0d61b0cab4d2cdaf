"""A process with eight devices: ``python -m tests.experiments.probes.eight DIRECTORY``.

It trains every probe, stopped after one step; notes what is said of a task that does not cut its
rows; and is killed in the middle of a run on one device.
"""

import os
import signal
import sys
from pathlib import Path
from unittest import mock

import jax

from experiments.training import loop
from experiments.training.learner import Learner
from tests.experiments.probes import support
from tests.experiments.probes.ragged import RaggedTask

KILLED = "text"
KILLED_AFTER = 6  # steps; the last checkpoint is two steps older


class KillAfter(support.StopAfter):
    """Kills the process after some steps."""

    def stop(self):
        os.kill(os.getpid(), signal.SIGKILL)


class CarelessTask(RaggedTask):
    """It gives every device the whole batch."""

    def draw(self, act, data, stream, key, step, rows):
        del act
        return self.batch(data["loaded"], key, step, rows.total), stream


def main(directory):
    try:
        Learner(support.config(CarelessTask())).check()
    except ValueError as error:
        (directory / "careless").write_text(str(error))
    for name, config in support.PROBES.items():
        learner = support.KeptLearner(config)
        assert learner.mesh.size == 8
        support.run(config, directory / name, support.StopAfter(1), learner)
        support.run(config, directory / name, learner=learner)
    first = jax.devices()[:1]
    with (
        mock.patch.object(jax, "devices", lambda: first),
        mock.patch.object(loop, "_CHECKPOINT_SECONDS", 0),
    ):
        config = support.PROBES[KILLED]
        support.run(config, directory / "killed", KillAfter(KILLED_AFTER))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
