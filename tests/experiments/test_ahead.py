"""What is said of a step that is compiled for another machine: counts by hand, and sentences."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from experiments.command import ahead
from experiments.copy.settings import COPY
from experiments.execute.settings import EXECUTE
from experiments.machine import operations, topology
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.training.learner import Learner
from recurrent_gates import target


class Chip:
    """A device that is not there."""

    platform = "tpu"
    device_kind = "TPU v4"

    def __init__(self, *coords):
        self.coords = coords


def counted(function, *shapes):
    return operations.of(jax.make_jaxpr(function)(*(jnp.zeros(s, jnp.float32) for s in shapes)))


def test_operations_of_a_product():
    assert counted(lambda a, b: a @ b, (3, 5), (5, 7)) == (2 * 3 * 5 * 7, 4 * (15 + 35 + 21))
    batched = counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 5), (2, 5, 7))
    assert batched.operations == 2 * 2 * 3 * 5 * 7


def test_operations_of_a_convolution():
    def convolved(x, kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    work = counted(convolved, (2, 6, 6, 3), (3, 3, 3, 4))
    assert work.operations == 2 * (2 * 4 * 4 * 4) * (3 * 3 * 3)


def test_loops_count_as_often_as_they_run():
    def looped(h, w):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h), h, None, length=11)

    work = counted(looped, (2, 3), (3, 3))
    assert work.operations == 11 * 2 * 2 * 3 * 3
    assert work.bytes == 11 * 4 * (6 + 9 + 6) + 4 * 11 * 6  # a product's, and what is handed out

    def nested(h, w):
        return jax.lax.scan(lambda h, _: (jax.jit(looped)(h, w)[0], None), h, None, length=5)

    assert counted(nested, (2, 3), (3, 3)).operations == 5 * 11 * 2 * 2 * 3 * 3


def test_the_longer_branch_counts():
    def chosen(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)

    assert counted(chosen, (2, 3), (3, 3)).operations == 2 * 2 * (2 * 3 * 3)


def test_rows_are_read_and_written_by_themselves():
    def moved(table, row):
        return jax.lax.dynamic_update_slice(table, row, (0, 0)), table[jnp.array([3, 5])]

    assert counted(moved, (1000, 4), (1, 4)).bytes == 4 * (2 * 4 + 2 * 2 * 4)


@pytest.mark.parametrize("experiment", [COPY, EXECUTE], ids=["resident", "streamed"])
def test_what_is_compiled_is_the_runs_own_step(experiment):
    """From shapes alone it is the program that a run compiles once its data are there."""
    config = resolve(experiment, "small", {"cell": "lstm", "hidden_size": 8, "batch_size": 4})
    ahead_of_time, _ = Learner(config).lower()
    learner = Learner(config)
    learner.load()
    own = learner._advance_jit[experiment is EXECUTE].trace(*learner._advance_shapes())
    learner.close()
    assert str(ahead_of_time.jaxpr) == str(own.jaxpr)


def test_collectives_of_a_program():
    text = """
  %all-reduce.1 = (f32[10,4]{1,0}, bf16[3]{0}) all-reduce(%a, %b), replica_groups={{0,1}}
  %ag = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%c), dimensions={0}
  %done = f32[8,8]{1,0} all-gather-done(%ag)
  %x = f32[]{:T(128)} all-reduce(%y)
  %z = pred[7]{0} collective-permute(%w)
"""
    assert ahead.collectives(text) == {
        "all-reduce": {"count": 2, "bytes": 160 + 6 + 4},
        "all-gather": {"count": 1, "bytes": 256},
        "collective-permute": {"count": 1, "bytes": 7},
    }


def test_two_cores_share_a_chips_memory():
    cores = [Chip(x, 0, 0) for x in (0, 0, 1, 1)]
    assert topology.memory(cores) == 16 * 2**30
    assert topology.memory(cores[1:3]) == 32 * 2**30
    unknown = Chip(0)
    unknown.device_kind = "TPU v9"
    assert topology.memory([unknown]) is None


def test_programs_are_traced_for_the_target():
    assert target.platform() == "cpu"
    with target.compiling_for([Chip(0), Chip(1)]):
        assert (target.platform(), target.device_count()) == ("tpu", 2)
        assert [device.coords for device in target.devices()] == [(0,), (1,)]
    assert (target.platform(), target.devices()) == ("cpu", jax.devices())
    with (
        pytest.raises(ValueError, match=r"^devices must not be empty\.$"),
        target.compiling_for([]),
    ):
        pass


def test_what_cannot_be_is_a_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--compile_for needs TPU's compiler, libtpu, which"):
        topology.devices("v5e:4x4")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for name in ("v5e", "v5e:", ":2x2", "v5e:2xtwo"):
        with pytest.raises(UserError, match=rf"^--compile_for={name} is no topology such as v4:2"):
            topology.devices(name)


def test_nothing_else_goes_with_it(program):
    code, _, err = program("experiments.copy", "--compile_for=v5e:4x4", "--describe")
    assert code == 2
    assert err == (
        "experiments.copy: --compile_for and --describe exclude each other: give one of them.\n"
    )
