"""A process with eight devices: ``python -m tests.experiments.probes.eight DIRECTORY NAME ...``.

It trains the probes, each stopped after one step; notes what is said of a task that does not cut
its rows; and is killed in the middle of a run on one device.
"""

import os
import signal
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from experiments.datasets import text
from experiments.language_model import task
from experiments.language_model.settings import LANGUAGE_MODEL
from experiments.settings.resolver import resolve
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


def language_model(mesh):
    """A learner of a text of seven words, which three devices cannot share evenly."""
    settings = {"dataset": "own", "data_dir": "nowhere", "cell": "gru", "hidden_size": 6}
    settings |= {"embedding": 4, "tied": True, "inputs": "embed", "window": 5, "batch_size": 4}
    settings |= {"clip_norm": 0.05, "steps": 6, "keep_best": True, "mesh": mesh}
    return Learner(resolve(LANGUAGE_MODEL, "small", settings))


def words(directory):
    """What a model is after three steps whose words devices share, and after three more, on the
    same devices, on others and on one."""
    part = text.Part(np.arange(60, dtype=np.int32) ** 2 % 7, np.zeros(60, bool))
    corpus = text.Corpus(tuple("abcdefg"), part, part, part)
    states, arrays = {}, {}
    with mock.patch.object(task, "_read", lambda *_: corpus):
        for mesh in ("vocab:3,data:2", "vocab:2", "data:1"):
            learner = language_model(mesh)
            learner.prepare()
            state = learner.initial()
            state, scores = learner.evaluate(learner.advance(state, 0, 3))
            states[mesh] = learner.fetch(state)
            for origin, whole in states.items():
                end = learner.fetch(learner.advance(learner.place(whole), 3, 6))
                for name, leaf in jax.tree_util.tree_leaves_with_path(end):
                    key = jax.tree_util.keystr(name, simple=True, separator=".")
                    arrays[f"{origin}/{mesh}/{key}"] = leaf
            arrays[f"{mesh}/{mesh}/score"] = scores["loss"]
            rows = state.params["softmax"]["bias"].addressable_shards[0].data.shape
            arrays[f"{mesh}/rows"] = np.array(rows)
    np.savez(directory / "words.npz", **arrays)


def main(directory, names):
    try:
        Learner(support.config(CarelessTask())).check()
    except ValueError as error:
        (directory / "careless").write_text(str(error))
    for name in names:
        config = support.PROBES[name]
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
    words(Path(sys.argv[1]))
    main(Path(sys.argv[1]), sys.argv[2:])
