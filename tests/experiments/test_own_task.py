"""What a task of one's own may get wrong: each is one sentence."""

import jax.numpy as jnp
import pytest

from experiments.copy.settings import COPY
from experiments.copy.task import CopyTask
from experiments.match.settings import MATCH
from experiments.pixels.settings import PIXELS
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.settings.sources import Sourced
from experiments.training.learner import Learner
from tests.experiments.probes import support
from tests.experiments.probes.ragged import RaggedTask


def with_protocol(**changes):
    """Copy with a protocol that has other settings; None: without it."""
    settings = {**COPY.protocols["small"].settings}
    for name, value in changes.items():
        settings.pop(name, None)
        if value is not None:
            settings[name] = Sourced(value, "ours")
    protocol = COPY.protocols["small"]._replace(settings=settings)
    return COPY._replace(protocols={"small": protocol})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"embedding": None, "clip_norm": None},
            "the protocol small of copy gives no embedding and no clip_norm, and there is no "
            "default.",
        ),
        (
            {"lenght": 4},
            "the protocol small of copy gives lenght, which no setting is called.",
        ),
        ({"learning_rates": 0.01}, "--learning_rates takes several values, such as (0.01,)."),
        ({"steps": "20"}, "--steps must be a whole number, got '20'."),
        ({"batch_size": 8.0}, "--batch_size must be a whole number, got 8.0."),
        ({"batch_size": True}, "--batch_size must be a whole number, got True."),
        ({"clip_norm": "one"}, "--clip_norm must be a finite number, got 'one'."),
        ({"keep_best": 1}, "--keep_best must be true or false, got 1."),
    ],
)
def test_a_protocol_that_cannot_be_is_one_sentence(changes, sentence):
    with pytest.raises(UserError) as refusal:
        resolve(with_protocol(**changes), "small", {})
    assert str(refusal.value) == sentence


def test_an_override_of_another_kind_is_one_sentence():
    with pytest.raises(UserError, match=r"^--steps must be a whole number, got '20'\.$"):
        resolve(COPY, "small", {"steps": "20"})


def test_an_experiment_and_its_task_have_one_name():
    wrong = COPY._replace(task=lambda: type("Wrong", (CopyTask,), {"name": "paste"}))
    with pytest.raises(UserError, match=r"^the experiment copy has a task of the name paste: they"):
        resolve(wrong, "small", {})


def test_a_name_may_be_a_property():
    named = type("Named", (CopyTask,), {"name": property(lambda self: "copy")})
    assert resolve(COPY._replace(task=lambda: named), "small", {}).task.name == "copy"


def test_what_a_protocol_leaves_open_may_be_given():
    assert (
        resolve(with_protocol(clip_norm=None), "small", {"clip_norm": 2.0}).training.clip_norm == 2
    )


def test_a_cell_has_settings_of_the_names_that_are_known():
    experiment = with_protocol()
    cells = {"gato": {}, "*": {"forget_bais": Sourced(1.0, "ours")}}
    protocol = experiment.protocols["small"]._replace(cells=cells)
    with pytest.raises(UserError, match="of copy gives forget_bais, which no setting is called"):
        resolve(experiment._replace(protocols={"small": protocol}), "small", {})


@pytest.mark.parametrize(
    ("experiment", "settings"),
    [
        (MATCH, {"challenge": "t_maze", "channels": (), "shuffled": False}),  # its default is True
        (MATCH, {"challenge": "t_maze", "channels": (), "apples": 0}),
        (PIXELS, {"data_dir": None}),
        (COPY, {"momentum": 0.0}),
    ],
)
def test_what_has_no_effect_may_be_turned_off(experiment, settings):
    resolve(experiment, "small", settings)


def test_sets_have_the_names_that_training_knows():
    class Wrong(RaggedTask):
        def held_out(self, data, devices):
            return {"dev": super().held_out(data, devices)["held_out"]}

    with pytest.raises(ValueError, match=r"^the task ragged has evaluation sets of the names dev:"):
        Learner(support.config(Wrong(), seeds=1))


@pytest.mark.parametrize("names", [("loss",), ("accuracy",), ()])
def test_a_score_has_the_loss_and_every_metric(names):
    class Wrong(CopyTask):
        def score(self, outputs, batch):
            return {name: jnp.zeros(batch.inputs.shape[1]) for name in names}

    settings = {"cell": "lstm", "backend": "fused"}  # which is not why
    learner = Learner(resolve(COPY._replace(task=lambda: Wrong), "small", settings))
    with pytest.raises(UserError, match=r"^the score of the task copy has no '[a-z_]+', it has "):
        learner.check()
