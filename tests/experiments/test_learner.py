"""The compiled training step: lanes, divergence, what acts on the carry, keys, parts of a set."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments.copy.task import CopyTask
from experiments.machine.mesh import Rows
from experiments.records.checkpoints import _named_leaves
from experiments.settings.metrics import Metric
from experiments.training import lanes as lanes_module
from experiments.training import supervised
from experiments.training.learner import Learner
from experiments.training.models import EVALUATION, Pass, recurred
from experiments.training.state import Lane, Purpose, key_of
from experiments.training.supervised import Batch, SupervisedTask
from recurrent_gates import CELLS
from tests.experiments.support import TINY, leaves, run_binary, tiny


def prepared(**settings):
    """A compiled learner of a tiny config, for each way of training several lanes."""
    lanes = settings.get("seeds", 1) * len(settings.get("learning_rates", "1"))
    return _prepared(lanes_module._LANE_AFTER_LANE if lanes > 1 else None, **settings)


@functools.cache
def _prepared(way, **settings):
    return prepare(tiny(**settings))


def prepare(config):
    learner = Learner(config)
    learner.prepare()
    return learner


def after(steps, **settings):
    """The state of a tiny config after some steps, without a workdir."""
    learner = prepared(**settings)
    return learner.advance(learner.initial(), 0, steps)


def assert_near(actual, expected, tolerance):
    """Every leaf agrees, relative to its largest entry."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("cell", ["gru", "ur_lstm"])
def test_training_changes_every_parameter(cell):
    before = prepared(cell=cell).initial().params
    params = after(3, cell=cell).params
    for path, leaf in jax.tree_util.tree_leaves_with_path(before):
        trained = params
        for entry in path:
            trained = trained[entry.key]
        assert not np.array_equal(leaf, trained), jax.tree_util.keystr(path)


frozen_ur_lstm = functools.partial(CELLS["ur_lstm"], bias_mode="frozen")


@pytest.mark.long
def test_a_frozen_gate_bias_does_not_decay():
    settings = {"cell": f"{__name__}:frozen_ur_lstm", "optimizer": "adamw", "weight_decay": 0.1}
    before = jax.device_get(prepared(**settings).initial().params)["recurrent"]["cell"]
    moved = jax.tree.map(np.not_equal, before, after(2, **settings).params["recurrent"]["cell"])
    assert not moved["gate"]["frozen_b"].any()
    assert moved["kernel"]["f"].all()


# Lanes


@pytest.fixture(params=[(), ("cpu",)], ids=["vmap", "loop"])
def way(request, monkeypatch):
    """Both ways of training several lanes."""
    monkeypatch.setattr(lanes_module, "_LANE_AFTER_LANE", request.param)


@pytest.mark.usefixtures("way")
def test_lanes_equal_single_runs():
    lanes = after(3, seeds=2, learning_rates=(1e-2, 3e-3))
    for lane, seed, rate in ((0, 0, 1e-2), (3, 1, 3e-3)):
        single = after(3, seed=seed, learning_rates=(rate,))
        assert_near(jax.tree.map(lambda leaf, lane=lane: leaf[lane], lanes), single, 1e-5)


@pytest.mark.usefixtures("way")
def test_a_diverged_lane_changes_no_other():
    bad = after(3, learning_rates=(1e-3, 1e30))
    good = after(3, learning_rates=(1e-3, 2e-3))
    np.testing.assert_array_equal(bad.diverged_at, [-1, 1])
    for a, b in zip(jax.tree.leaves(bad.params), jax.tree.leaves(good.params), strict=True):
        np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(prepared(learning_rates=(1e-3, 1e30)).stopped(bad), [False, True])


def test_a_lane_alone_starts_with_the_same_bits():
    lanes = Learner(tiny(cell="lstm", seeds=2)).initial().params
    single = Learner(tiny(cell="lstm", seed=1)).initial().params
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[1], one), lanes, single)


def test_a_loss_beyond_return_has_diverged():
    """A bounded state that is read by a linear map: the loss stays finite at any rate."""
    settings = {"decoder": (), "learning_rates": (1e-3, 1e18)}
    state = after(3, **settings)
    assert np.isfinite(state.loss_total).all()
    np.testing.assert_array_equal(state.diverged_at, [-1, 1])


# One step by hand


RATE = 64.0  # such that a step is far above the rounding of the parameters


def descended(config):
    """What one step of gradient descent says: its loss and gradient, and the learner."""
    learner = prepare(
        dataclasses.replace(
            config,
            training=dataclasses.replace(
                config.training, optimizer="sgd", learning_rates=(RATE,), seeds=1
            ),
        )
    )
    before = jax.device_get(learner.initial().params)
    state = learner.advance(learner.initial(), 0, 1)
    gradient = jax.tree.map(lambda old, new: (old - new) / RATE, before, state.params)
    return learner, before, float(state.loss_total), gradient


def first_batch(learner):
    """The batch of the first step."""
    config = learner._config
    lane = Lane(jnp.int32(config.training.seed), jnp.float32(0))
    task, size = config.task, config.training.batch_size
    return task.batch(task.load(), key_of(lane, Purpose.DATA), jnp.int32(0), size)


def unrolled(cell, params, xs, before=lambda carry: carry, after=lambda old, new: new):
    """What a cell emits, step by step; ``before`` and ``after`` act on its carry."""
    z, carry, ys = cell.project(params, xs), cell.initial(xs.shape[1:2]), []
    for t in range(len(xs)):
        read = before(carry)
        carry = after(read, cell.step(params, read, jax.tree.map(lambda leaf, t=t: leaf[t], z)))
        ys.append(carry.h)
    return jnp.stack(ys)


def decoded(learner, params, ys, batch):
    """The mean scores of recurrent outputs."""
    model = learner._module
    outputs = model.decoder.apply({"params": params["decoder"]}, ys[-model.outputs :])
    return jax.tree.map(jnp.mean, learner.task.score(outputs, batch))


def slope_of(loss, learner):
    """The compiled ``(params, *others) -> (value, gradient)`` of ``loss(learner, params, batch,
    *others)`` on the first batch."""
    batch = first_batch(learner)
    return jax.jit(
        jax.value_and_grad(lambda params, *others: loss(learner, params, batch, *others))
    )


def assert_is_the_gradient(descent, slope, *others):
    """Loss and gradient of a step are those by hand."""
    _, params, loss, gradient = descent
    value, expected = slope(params, *others)
    assert loss == pytest.approx(float(value), rel=1e-5)
    assert_near(gradient, expected, 2e-5)


def damped(learner, params, batch, p):
    """A loss by hand in which the gradient through h is multiplied by 1 - p."""

    def before(carry):
        return carry._replace(h=(1 - p) * carry.h + p * jax.lax.stop_gradient(carry.h))

    cell, own = learner.cell, params["recurrent"]["cell"]
    ys = unrolled(cell, own, learner.encoded(params, batch.inputs), before)
    return decoded(learner, params, ys, batch)["loss"]


def test_damping_scales_the_gradient_through_h():
    """And nothing else; that of detaching at every step is the one with nothing left of it."""
    descent = descended(tiny(cell="lstm", damp_prob=0.3))
    slope = slope_of(damped, descent[0])
    assert_is_the_gradient(descent, slope, 0.3)
    with pytest.raises(AssertionError):
        assert_is_the_gradient(descent, slope, 0.0)
    assert_is_the_gradient(descended(tiny(cell="lstm", detach_prob=1.0)), slope, 1.0)


@pytest.mark.long
def test_detaching_can_end_before_training_does():
    ending = {"cell": "gru", "detach_prob": 1.0, "detach_off_steps": 2}
    always, never = {"cell": "gru", "detach_prob": 1.0}, {"cell": "gru"}
    assert_near(after(2, **ending), after(2, **always), 1e-6)
    two = jax.device_get(after(2, **ending))

    def go_on(settings):
        learner = prepared(**settings)
        return learner.advance(learner.place(two), 2, 4)

    assert_near(go_on(ending), go_on(never), 1e-6)
    with pytest.raises(AssertionError):
        assert_near(go_on(ending), go_on(always), 1e-4)


ZONEOUT = {"cell": "lstm", "zoneout_c": 0.5, "zoneout_h": 0.2}


def test_zoneout_is_its_mean_at_evaluation():
    learner = prepared(**ZONEOUT)
    state = learner.initial()
    state = state._replace(params=jax.tree.map(lambda leaf: 8 * leaf, state.params))  # it shows
    _, scores = learner.evaluate(state)

    def after_step(old, new):
        return new._replace(c=0.5 * old.c + 0.5 * new.c, h=0.2 * old.h + 0.8 * new.h)

    batch = learner.data["sets"]["held_out"]
    own = state.params["recurrent"]["cell"]
    xs = learner.encoded(state.params, batch.inputs)

    def expected(after_step):
        ys = unrolled(learner.cell, own, xs, after=after_step)
        return decoded(learner, state.params, ys, batch)

    for name, value in expected(after_step).items():
        assert scores[name] == pytest.approx(float(value), rel=2e-5), name
    plain = expected(lambda old, new: new)
    assert scores["loss"] != pytest.approx(float(plain["loss"]), rel=2e-4)


@pytest.mark.long
def test_zoneout_keeps_units_in_training():
    """With probability one nothing is ever written: the decoder reads zeros."""
    learner = prepared(cell="lstm", zoneout_c=1.0, zoneout_h=1.0)
    state = learner.initial()
    batch = first_batch(learner)
    ys = jnp.zeros((len(batch.inputs), 8, 6))
    value = decoded(learner, state.params, ys, batch)["loss"]
    moved = learner.advance(state, 0, 1)
    assert float(moved.loss_total) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.long
def test_zoneout_and_dropout_draw_anew_at_every_step():
    """From the same parameters and the same batch: another loss, and the same one again."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OneBatch(CopyTask):
        def batch(self, loaded, key, step, size):
            return super().batch(loaded, key, jnp.int32(0), size)

    for settings in (ZONEOUT, {"dropout": 0.5}, {"layers": 2, "layer_dropout": 0.5}):
        config = tiny(**settings)
        task = OneBatch(**dataclasses.asdict(config.task))
        learner = prepare(dataclasses.replace(config, task=task))
        losses = [
            float(learner.advance(learner.initial(), step, step + 1).loss_total)
            for step in (0, 1, 2, 0)
        ]
        assert len(set(losses)) == 3, settings
        assert losses[0] == losses[3], settings


class Draws(nn.Module):
    """Emits a number that the key of a purpose draws."""

    recurrent: nn.Module
    purpose: str

    @nn.compact
    def __call__(self, inputs, *, during=EVALUATION):
        weight = self.param("weight", nn.initializers.zeros, ())
        key = getattr(during, f"{self.purpose}_key", None)
        drawn = jnp.float32(0) if key is None else jax.random.uniform(key)
        return inputs[:1] + drawn + 0 * weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawTask(SupervisedTask):
    """Its loss is a number that the key of a purpose draws."""

    purpose: str
    name = "draw"
    metrics = (Metric("loss", False, 1.0, "baseline"),)

    def module(self, recurrent, model):
        return Draws(recurrent, self.purpose)

    def load(self):
        return ()

    def sets(self, loaded):
        return {"held_out": Batch(jnp.zeros((1, 8, 1)), jnp.zeros((1, 8)))}

    def drawn(self, purpose, key):
        return jax.random.uniform(key) if self.purpose == purpose else jnp.float32(0)

    def start(self, fresh, data, key, rows):
        return jnp.full(rows.count, self.drawn("stream", key))

    def batch(self, loaded, key, step, size):
        return Batch(jnp.full((1, size, 1), self.drawn("data", key)), jnp.zeros((1, size)))

    def draw(self, act, data, stream, key, step, rows):
        window, _ = super().draw(act, data, stream, key, step, rows)
        return window._replace(inputs=window.inputs + stream[None, :, None]), stream

    def update(self, descend, learned, window, key):
        return descend(learned, window._replace(inputs=window.inputs + self.drawn("update", key)))

    def score(self, outputs, batch):
        return {"loss": outputs[0, :, 0]}


class TwiceTask(DrawTask):
    """Draws with two descents on every window, of which the second is told."""

    def update(self, descend, learned, window, key):
        learned, _ = super().update(descend, learned, window, key)
        return super().update(descend, learned, window, key)


@pytest.mark.parametrize("purpose", ["noise", "dropout"])
def test_every_descent_has_its_own_noise(purpose):
    config = tiny(dropout=0.5, zoneout_h=0.5)
    once, twice = (
        prepare(dataclasses.replace(config, task=task(purpose=purpose)))
        for task in (DrawTask, TwiceTask)
    )
    first, second = (run.advance(run.initial(), 0, 1).loss_total for run in (once, twice))
    assert first != second


def test_every_purpose_seed_and_step_has_its_own_key():
    """But not every learning rate: lanes of a seed see the same. Nothing is drawn to evaluate."""
    config = tiny(dropout=0.5, zoneout_h=0.5, seeds=2, learning_rates=(1e-3, 1e-2))
    seen = []
    for purpose in ("noise", "dropout", "data", "stream", "update"):
        learner = prepare(dataclasses.replace(config, task=DrawTask(purpose=purpose)))
        steps = [learner.advance(learner.initial(), s, s + 1).loss_total for s in (0, 1)]
        of_seeds = np.asarray(steps).reshape(2, 2, 2)  # step, rate, seed
        np.testing.assert_array_equal(of_seeds[:, 0], of_seeds[:, 1])
        of_step = purpose not in ("data", "stream")
        seen += (of_seeds if of_step else of_seeds[:1])[:, 0].ravel().tolist()
        np.testing.assert_array_equal(learner.evaluate(learner.initial())[1]["loss"], np.zeros(4))
    assert len(set(seen)) == len(seen) == 16


# Layers


def stacked(learner, params, batch, masks):
    """The loss of two layers, one after the other."""
    ys = learner.encoded(params, batch.inputs)
    cells = learner._module.recurrent.cells
    for index, cell in enumerate(cells):
        ys = unrolled(cell, params["recurrent"][f"cells_{index}"], ys * (masks if index else 1))
    return decoded(learner, params, ys, batch)["loss"]


@pytest.mark.long
def test_two_layers_are_one_after_the_other_and_dropout_is_between_them():
    """The masks of the first step, drawn again, on the outputs of the first layer alone."""
    key = key_of(Lane(jnp.int32(0), jnp.float32(0)), Purpose.DROPOUT)
    descent = descended(tiny(cell="lstm", layers=2, layer_dropout=0.5))
    steps = len(first_batch(descent[0]).inputs)
    at = Pass(rows=Rows(0, 8, 8), dropout_key=jax.random.fold_in(key, 0), layer_dropout=0.5)
    (mask,) = at.layer_masks(steps, [6])
    slope = slope_of(stacked, descent[0])
    assert_is_the_gradient(descent, slope, mask)
    with pytest.raises(AssertionError):
        assert_is_the_gradient(descent, slope, jnp.roll(mask, 1, axis=1))
    plain = descended(tiny(cell="lstm", layers=2))
    assert_is_the_gradient(plain, slope, jnp.ones_like(mask))


def test_masks_between_layers():
    """Two values of mean 1, drawn for each layer, step, example and unit; rows are cut of them."""
    steps, size, width, rate = 20, 30, 40, 0.25
    whole = Pass(rows=Rows(0, size, size), dropout_key=jax.random.key(3), layer_dropout=rate)
    masks = np.stack(whole.layer_masks(steps, [width, width]))
    assert masks.shape == (2, steps, size, width)
    assert set(np.unique(masks).tolist()) == {0.0, np.float32(4 / 3)}
    assert abs(masks.mean() - 1) < 4 * np.sqrt(rate / (1 - rate) / masks.size)
    for axis in range(4):
        along = np.moveaxis(masks, axis, 0)
        assert len({entry.tobytes() for entry in along}) == len(along), axis
    for first in range(0, size, 10):
        own = dataclasses.replace(whole, rows=Rows(first, 10, size))
        np.testing.assert_array_equal(
            own.layer_masks(steps, [width, width]), masks[:, :, first : first + 10]
        )
    assert whole.layer_masks(steps, []) == ()
    assert dataclasses.replace(whole, layer_dropout=0.0).layer_masks(steps, [width]) is None
    assert dataclasses.replace(whole, dropout_key=None).layer_masks(steps, [width]) is None


def test_masks_on_embedded_inputs():
    """Two values of mean 1, drawn for each step, example and entry; rows are cut of them."""
    steps, size, width, rate = 20, 30, 40, 0.25
    whole = Pass(rows=Rows(0, size, size), dropout_key=jax.random.key(3), embedding_dropout=rate)
    mask = np.asarray(whole.embedding_mask(steps, (width,)))
    assert mask.shape == (steps, size, width)
    assert set(np.unique(mask).tolist()) == {0.0, np.float32(4 / 3)}
    assert abs(mask.mean() - 1) < 4 * np.sqrt(rate / (1 - rate) / mask.size)
    for axis in range(3):
        along = np.moveaxis(mask, axis, 0)
        assert len({entry.tobytes() for entry in along}) == len(along), axis
    own = dataclasses.replace(whole, rows=Rows(10, 5, size))
    np.testing.assert_array_equal(own.embedding_mask(steps, (width,)), mask[:, 10:15])
    assert dataclasses.replace(whole, embedding_dropout=0.0).embedding_mask(steps, ()) is None
    assert dataclasses.replace(whole, dropout_key=None).embedding_mask(steps, ()) is None
    layers = types.SimpleNamespace(encoder=lambda x: 2 * x, recurrent=lambda x, **_: x)
    read = recurred(layers, jnp.ones_like(mask), whole, None, {})
    np.testing.assert_array_equal(read, 2 * mask)


@pytest.mark.parametrize(
    "settings",
    [{}, {"dropout": 0.3}, {"embedding_dropout": 0.3}, {"layers": 2, "layer_dropout": 0.3}],
    ids=str,
)
def test_a_training_step_drops_what_the_settings_say(settings):
    learner = Learner(tiny(**settings))
    during = learner._update._training_pass(Lane(0, 0.0), 0, Rows(0, 8, 8), 0)
    rates = {
        name: getattr(during, name) for name in ("dropout", "layer_dropout", "embedding_dropout")
    }
    assert rates == dict.fromkeys(rates, 0) | {n: p for n, p in settings.items() if n in rates}
    assert (during.dropout_key is None) == (not settings)


def test_every_example_and_layer_has_its_own_mask_in_the_decoder():
    whole = Pass(rows=Rows(0, 30, 30), dropout_key=jax.random.key(3), dropout=0.5)
    masks = np.stack(whole.masks([40, 40]))
    assert masks.shape == (2, 1, 30, 40)
    assert len({row.tobytes() for row in masks.reshape(60, 40)}) == 60
    own = dataclasses.replace(whole, rows=Rows(10, 5, 30))
    np.testing.assert_array_equal(own.masks([40, 40]), masks[:, :, 10:15])


# Devices


def gradients(named):
    """Adam's first moments after one step: a tenth of the gradient."""
    found = {name: np.asarray(leaf) for name, leaf in named.items() if ".mu." in name}
    assert found
    return found


@pytest.mark.long
def test_masks_and_scores_are_the_same_on_1_and_7_devices(tmp_path):
    """Of each example; the 50 to score are no multiple of 7."""
    settings = dict(cell="lstm", batch_size=7, held_out_sequences=50, layers=2)
    settings |= dict(layer_dropout=0.2, dropout=0.3, zoneout_c=0.3, detach_prob=0.5)
    apart = settings | dict(detach_per_example=True)
    only = dict(decoder=16, learning_rates=0.01, steps=1, eval_every=1)
    argv = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in (TINY | apart | only).items()
    ]
    done = run_binary(*argv, f"--workdir={tmp_path}", devices=7)
    assert done.returncode == 0, done.stderr
    assert "on cpu x 7" in done.stdout
    one, other = (gradients(_named_leaves(after(1, **each))) for each in (apart, settings))
    assert_near(gradients(leaves(tmp_path, 1)), one, 1e-5)
    with pytest.raises(AssertionError):  # other masks would show
        assert_near(other, one, 1e-2)
    learner = prepared(**apart)
    _, begun = learner.evaluate(learner.initial())
    shared = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["held_out"]
    assert begun.keys() == shared.keys()
    for name, value in begun.items():
        assert shared[name] == [pytest.approx(float(value), rel=1e-5)], name


# Other settings


@pytest.mark.parametrize(
    "settings",
    [
        {"cell": "gato", "detach_prob": 0.5, "detach_per_example": True},
        {"cell": "gru", "dtype": "bfloat16"},
        {"cell": "gru", "layout": "delimiter", "sequences": 50, "loss_on": "all"},
    ],
    ids=str,
)
@pytest.mark.long
def test_settings_change_the_training_and_stay_finite(settings):
    state = after(2, **settings)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    plain = after(2, cell=settings["cell"])
    changed, default = state.params["recurrent"], plain.params["recurrent"]
    for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(default), strict=True):
        assert not np.array_equal(a, b)


@pytest.mark.parametrize(
    ("examples", "most", "steps"),
    [(40, 40, 2**18), (40, 7, 2**18), (13, 6, 2**18), (1, 4, 2**18), (40, 40, 8 * 5 + 4)],
)
@pytest.mark.long
def test_every_example_counts_once(examples, most, steps, monkeypatch):
    """Whatever the parts are that fit into memory."""
    monkeypatch.setattr(supervised, "_EVALUATION_ROWS", most)
    monkeypatch.setattr(supervised, "_EVALUATION_STEPS", steps)
    learner = Learner(tiny(held_out_sequences=examples, seeds=2))
    learner.load()
    batch = learner.data["sets"]["held_out"]
    parts = learner.task.held_out(learner.data, 1)["held_out"]
    assert parts.rows <= min(most, steps // len(batch.inputs))
    assert parts.windows * parts.rows < examples + parts.rows
    state = learner.initial()
    scores = learner.final_scores(state)
    for lane in range(2):
        params = jax.tree.map(lambda leaf, lane=lane: leaf[lane], state.params)
        outputs = learner._module.apply({"params": params}, batch.inputs)
        expected = jax.tree.map(jnp.mean, learner.task.score(outputs, batch))
        for name, value in scores.items():
            np.testing.assert_allclose(value[lane], expected[name], rtol=1e-6)
