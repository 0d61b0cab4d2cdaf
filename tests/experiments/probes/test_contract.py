"""The guards of the contract between tasks and the training room, and a task's own update."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments.machine.mesh import DeviceMesh, Rows, check_axes, map_axes, probed_axes, split
from experiments.settings.axes import DATA, VOCAB
from experiments.training import update
from experiments.training.evaluate import Evaluation
from experiments.training.lanes import Lanes
from experiments.training.learner import Learner
from experiments.training.models import Pass, fresh_carry
from experiments.training.task import Outcome
from recurrent_gates import CELLS, RNN, Detach, Stack, Zoneout, draw_noise
from tests.experiments.probes import support
from tests.experiments.probes.pretrained import PretrainedTask
from tests.experiments.probes.ragged import RaggedTask
from tests.experiments.probes.text import Stream, TextTask


@pytest.mark.parametrize(
    ("task", "axes", "sentence"),
    [
        (TextTask, {"axes": 0}, r"the axes of text say that axis 0 is the batch of 8 rows, but"),
        (TextTask, {"stream_axes": Stream(0, 2)}, "the stream axes of text say that axis 2 is"),
        (TextTask, {"stream_axes": Stream(1, 0)}, r"of 8 rows, but a leaf has the shape \(8,\)"),
    ],
)
def test_an_axis_that_is_not_the_batch_is_refused(task, axes, sentence):
    learner = Learner(support.config(type("Wrong", (task,), axes)(), seeds=1))
    with pytest.raises(ValueError, match=sentence):
        learner.check()


@pytest.mark.parametrize(("task", "axis"), [(TextTask, 0), (PretrainedTask, 1)])
def test_an_axis_of_outputs_that_is_not_the_batch_is_refused(task, axis):
    """The outputs of text are ``[T, B]``, those of pretrained ``[B]``."""
    learner = Learner(support.config(type("Wrong", (task,), {"output_axes": axis})(), seeds=1))
    learner.load()
    with pytest.raises(ValueError, match=f"the output axes of {task.name} say that axis {axis} is"):
        learner.evaluate(learner.initial())


def test_the_axes_of_several_lanes_are_one_later():
    specs, one = split({"inputs": 1, "level": None}), (0, 0.1)
    assert Lanes([one, one], "cpu").specs(specs) == {
        "inputs": PartitionSpec("lanes", None, "data"),
        "level": PartitionSpec("lanes"),
    }
    assert Lanes([one], "cpu").specs(specs) == specs


def on_each_device(function, *arguments):
    """A function as each of four devices runs it, the arguments split over them."""
    return jax.vmap(function, axis_name=DATA)(*arguments)


@pytest.fixture
def on_four(monkeypatch):
    """A learner, as one of a process with four devices."""
    learner = Learner(support.config(RaggedTask(), seeds=1))
    monkeypatch.setattr(learner.mesh, "size", 4)
    return learner


@pytest.mark.parametrize("weights", [[1.0, 4.0, 0.0, 3.0], [0.0] * 4])
def test_a_device_counts_by_its_weight(on_four, weights):
    """The mean over devices is the sum of totals over that of weights."""

    def mean(total, weight):
        loss, everywhere = on_four._update._mean(Outcome((total, weight), {}))
        return on_four.mesh.mean(loss), everywhere

    weights = np.array(weights, np.float32)
    totals = weights * np.array([2.0, 1.0, 5.0, 3.0], np.float32)
    loss, everywhere = on_each_device(mean, totals, weights)
    np.testing.assert_allclose(loss, np.full(4, totals.sum() / max(1, weights.sum())), rtol=1e-6)
    np.testing.assert_array_equal(everywhere, np.full(4, weights.sum()))


def test_a_weight_that_all_devices_share_is_a_number(on_four):
    loss, weight = on_four._update._mean(Outcome((jnp.float32(6), 8), {}))
    assert (float(loss), weight) == (6 / 8, 4 * 8)


def test_a_fault_in_a_part_of_the_words_is_one_of_all(monkeypatch):
    """Else some devices would leave an update out and others would not."""
    mesh = DeviceMesh(1)
    monkeypatch.setattr(mesh, "parts", 2)
    gradients = {"a": jnp.ones((2, 3)), "table": jnp.array([[1.0, 2.0], [jnp.nan, 3.0]])}
    faults = jax.vmap(
        lambda gradient: update._first_bad(jnp.float32(1), gradient, mesh), axis_name=VOCAB
    )(gradients)
    assert faults.tolist() == [2, 2]


@pytest.mark.parametrize("rows", [8, 6])
@pytest.mark.long
def test_every_row_is_added_once(on_four, rows):
    """Over four devices, whether they share the rows or each has all of them."""
    names = ("_config", "_module", "_mesh", "_lanes", "_params", "_name")
    known = on_four._evaluations["held_out"]
    one_set = SimpleNamespace(
        rows=rows,
        windows=1,
        draw=lambda act, data, stream, index, own: (own.of(data, 1), stream),
    )
    evaluation = Evaluation(*(getattr(known, name) for name in names), one_set)
    window = jax.tree.map(lambda leaf: leaf[:, :rows], on_four.task.load()["train"])
    params = on_four.initial().params

    def sums(device):
        del device
        return evaluation._window(params, (), window, jnp.int32(0))[0]["loss"]

    total, weight = on_each_device(sums, jnp.arange(4))
    expected = on_four.task.loss(
        lambda params, *args, **more: on_four._module.apply({"params": params}, *args, **more),
        params,
        window,
        (),
        False,
    ).sums["loss"]
    np.testing.assert_allclose(total, np.full(4, expected[0]), rtol=1e-5)
    np.testing.assert_array_equal(weight, np.full(4, expected[1]))


def test_a_leaf_without_a_batch_may_have_any_length():
    tree = {"h": np.zeros((4, 3)), "level": np.zeros(()), "text": np.zeros(9)}
    check_axes("axes", tree, {"h": 0, "level": None, "text": None}, 4)
    for wrong in (1, -1, 2):
        with pytest.raises(ValueError, match=rf"axes say that axis {wrong} is the batch of 4 rows"):
            check_axes("axes", tree, {"h": wrong, "level": None, "text": None}, 4)


@pytest.mark.parametrize("cell", [CELLS["lstm"](5), CELLS["lstm"](4)])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_carry_is_cut_along_its_rows(cell, stacked):
    layers = Stack([cell] * 2) if stacked else RNN(cell)
    whole = jax.tree.map(
        lambda leaf: jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape),
        fresh_carry(layers, 4),
    )
    cut = Rows(2, 2, 4).of(whole, 0)
    assert jax.tree.structure(cut) == jax.tree.structure(fresh_carry(layers, 2))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[2:]), cut, whole)


def test_the_rows_of_the_librarys_noise():
    """Draws for each example have a batch axis, those for the whole batch none."""
    fns = (Detach(0.5), Detach(0.5, per_example=True), Zoneout(0.1))
    for size in (3, 6):  # 6 is the number of steps, too

        def shapes(size):
            return jax.eval_shape(lambda: draw_noise(fns, jax.random.key(0), 6, (size,)))

        assert probed_axes(shapes, size) == (None, 1, 1)


def test_some_rows_get_the_noise_of_the_whole_batch():
    fns, key = (Detach(0.5), Detach(0.5, per_example=True), Zoneout(0.1)), jax.random.key(1)
    whole, per_example, zoned = Pass(fns, Rows(0, 6, 6), noise_key=key).noise(6)
    some = Pass(fns, Rows(2, 3, 6), noise_key=key).noise(6)
    np.testing.assert_array_equal(some[0], whole)
    np.testing.assert_array_equal(some[1], per_example[:, 2:5])
    data = jax.random.key_data
    np.testing.assert_array_equal(data(some[2]), data(zoned[:, 2:5]))


def test_every_layer_has_its_own_noise():
    fns = (Detach(0.5), Detach(0.5, per_example=True))
    layers = Pass(fns, Rows(0, 6, 6), noise_key=jax.random.key(1)).noise_of_layers(40, 3)
    for draws in zip(*layers, strict=True):
        assert len({np.asarray(draw).tobytes() for draw in draws}) == 3
    assert Pass(fns).noise_of_layers(40, 3) is None


def test_axes_may_be_a_prefix():
    tree = {"a": (np.zeros((2, 3)), np.zeros(3)), "b": None}
    assert map_axes(lambda axis, leaf: (axis, leaf.ndim), {"a": (1, 0), "b": 4}, tree) == {
        "a": ((1, 2), (0, 1)),
        "b": None,
    }
    assert map_axes(lambda axis, leaf: axis, None, tree) == {"a": (None, None), "b": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPasses(RaggedTask):
    """Ragged examples with two descents on every batch."""

    def update(self, descend, learned, window, key):
        del key
        learned, _ = descend(learned, window)
        return descend(learned, window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slowly(RaggedTask):
    """Ragged examples, each batch twice."""

    def batch(self, loaded, key, step, size):
        return super().batch(loaded, key, step // 2, size)


@pytest.mark.long
def test_a_task_with_its_own_update_descends_twice():
    def learnt(task, steps):
        with support.ready(support.config(task, seeds=1)) as learner:
            state = learner.advance(learner.initial(), 0, steps)
            return jax.device_get(state)

    twice, once = learnt(TwoPasses(), 2), learnt(Slowly(), 4)
    assert int(twice.optimizer[0].count) == 4
    for a, b in zip(jax.tree.leaves(twice.params), jax.tree.leaves(once.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    # The loss that is reported is that of the second descent.
    assert twice.loss_weight == once.loss_weight / 2
    assert twice.loss_total != once.loss_total
