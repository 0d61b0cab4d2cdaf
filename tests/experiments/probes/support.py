"""What the probes share: configs, runs that are stopped, learners that serve several runs."""

import contextlib
import dataclasses
from unittest import mock

from experiments.machine.stopping import StoppedError, Stopping
from experiments.match.settings import MATCH
from experiments.settings.config import Config
from experiments.settings.fields import defaults
from experiments.settings.model import CarrySettings, ModelSettings
from experiments.settings.optimization import TrainingSettings
from experiments.settings.resolver import resolve
from experiments.training import loop
from experiments.training.learner import Learner
from tests.experiments.probes.bandit import BanditTask
from tests.experiments.probes.curriculum import CurriculumTask
from tests.experiments.probes.host_fed import HostFedTask
from tests.experiments.probes.pretrained import PretrainedTask
from tests.experiments.probes.ragged import RaggedTask
from tests.experiments.probes.text import TextTask

_TINY = {
    "cell": "rnn",
    "hidden_size": 8,
    "init": "torch",
    "embedding": 0,
    "decoder": (),
    "detach_state": "h",
    "learning_rates": (0.1,),
    "seeds": 3,
    "steps": 8,
    "batch_size": 8,
    "clip_norm": 0.0,
    "eval_every": 4,
}


def config(task, **settings):
    """A config that trains a tiny model, with three seeds."""
    shared = (ModelSettings, CarrySettings, TrainingSettings)
    known = {name: sourced.value for name, sourced in defaults(*shared)} | _TINY | settings
    filled = [
        cls(**{field.name: known.get(field.name) for field in dataclasses.fields(cls)})
        for cls in shared
    ]
    return Config("probe", {}, task, *filled)


def match(**settings):
    """A config of an agent in rooms that plays episodes of nine steps."""
    tiny = {
        "explore_steps": 1,
        "distractor_steps": 2,
        "reward_steps": 6,
        "hidden_size": 8,
        "code": 6,
        "decoder": (),
        "seeds": 3,
        "batch_size": 8,
        "held_out_episodes": 6,  # eight devices cannot share them evenly
        "steps": 8,
        "eval_every": 4,
    }
    return resolve(MATCH, "small", tiny | settings)


PROBES = {
    "text": config(TextTask()),  # 8 rows, 8 units: a carry that is cut along its units would do
    "ragged": config(RaggedTask()),
    "curriculum": config(CurriculumTask(), steps=12, eval_every=1),
    "bandit": config(BanditTask(), batch_size=32, steps=20, eval_every=10),
    "host_fed": config(HostFedTask()),
    "pretrained": config(PretrainedTask()),
    "match": match(window=5),
}


class StopAfter(Stopping):
    """Stops after some steps, which are taken one by one."""

    def __init__(self, steps):
        super().__init__()
        self._left = steps

    def pause(self):
        """An evaluation goes on."""

    def agree(self, together):
        if not self._left:
            self.stop()
        self._left -= 1
        return 1

    def stop(self):
        """A signal that the loop heeds."""
        raise StoppedError


class KeptLearner(Learner):
    """A learner for several runs of a config: it compiles once."""

    def prepare(self):
        if self._advance_compiled is None:
            super().prepare()

    def close(self):
        """Stays open."""


def run(of, workdir, stop=None, learner=None):
    """Trains without a figure.

    Args:
      of: the config.
      workdir: of the run.
      stop: stands in for signals.
      learner: of the config; default: a new one.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(loop.learning_curve, "draw"))
        if stop is not None:
            fake = contextlib.nullcontext(stop)
            stack.enter_context(mock.patch.object(loop, "stopping", lambda: fake))
        if learner is not None:
            stack.enter_context(mock.patch.object(loop, "Learner", lambda config: learner))
        return loop.run(of, workdir)


@contextlib.contextmanager
def ready(of):
    """A learner that is ready to advance."""
    learner = Learner(of)
    with contextlib.closing(learner):
        learner.check()
        learner.prepare()
        yield learner
