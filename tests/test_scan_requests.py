"""What is asked of the driver: what it chooses by itself, and what it refuses."""

import inspect
import logging
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from recurrent_gates import target
from tests.support import array, assert_identical, parameters, quick_jit, state

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, INPUTS, FEATURES = 7, 3, 2, 4

CELL = rg.LSTM(FEATURES, param_dtype=jnp.float64)


def arguments():
    """Parameters, inputs and a carry."""
    return parameters(CELL, INPUTS), array(8, STEPS, BATCH, INPUTS), state(CELL, (BATCH,))


@pytest.mark.parametrize("backend", ["scan", "fused"])
@pytest.mark.parametrize(("platform", "wanted"), [("cpu", 1), ("gpu", 8)])
def test_the_steps_of_an_iteration_by_default(backend, platform, wanted, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    cell = rg.LSTM(4)
    params, xs = cell.init_params(jax.random.key(0), 3), jnp.ones((20, 2, 3), jnp.float32)
    program = jax.make_jaxpr(lambda xs: rg.unroll(cell, params, xs, backend=backend)[1])
    assert set(re.findall(r"unroll=(\d+)", str(program(xs)))) == {str(wanted)}


def test_what_auto_chose_is_logged_once(caplog):
    class Unheard(rg.Elman):
        pass

    cell = Unheard(3)
    params = cell.init_params(jax.random.key(0), 2)
    with caplog.at_level(logging.INFO, logger="recurrent_gates"):
        for _ in range(2):
            rg.unroll(cell, params, jnp.zeros((2, 1, 2)).astype(jnp.float32))
    lines = [record.getMessage() for record in caplog.records if "Unheard" in record.getMessage()]
    assert len(lines) == 1 and ("fused" in lines[0] or "scan" in lines[0])


@pytest.mark.parametrize(
    ("limit", "cores"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("", 8),
    ],
)
def test_a_containers_limit_of_time_is_one_of_cores(limit, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(target, "_LIMIT_OF_TIME", tmp_path / "cpu.max")
    assert target.cores() == 8  # there is no such file
    (tmp_path / "cpu.max").write_text(limit)
    assert target.cores() == cores


NEW: Any = object()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (dict(xs=jnp.zeros((STEPS, INPUTS, 1)), carry=NEW), "carry"),
        (dict(xs=jnp.zeros(STEPS)), "xs"),
        (dict(xs=jnp.zeros((STEPS, BATCH, INPUTS + 1))), "input"),
        (dict(lengths=jnp.ones((BATCH,), int), valid=jnp.ones((STEPS, BATCH), bool)), "not both"),
        (dict(lengths=jnp.ones((BATCH + 1,), int)), "lengths"),
        (dict(lengths=jnp.ones((BATCH,))), "lengths"),
        (dict(valid=jnp.ones((BATCH, STEPS), bool)), "valid"),
        (dict(resets=jnp.ones((STEPS,), bool)), "resets"),
        (
            dict(reset_carry=rg.LSTMState(jnp.zeros((BATCH, 1)), jnp.zeros((BATCH, 1)))),
            "reset_carry",
        ),
        (dict(carry=jnp.zeros((BATCH, FEATURES))), "carry"),
        (dict(carry_fns=(rg.Detach(p=0.5),)), "key"),
        (dict(carry_fns=(rg.Zoneout(p=0.5),)), "key"),
        (dict(carry_fns=(rg.Damp(p=0.5),), noise=()), "noise"),
        (dict(carry_fns=(rg.Detach(p=0.5),), noise=(jnp.ones((STEPS + 1,), bool),)), "noise"),
        (dict(return_carries="some"), "return_carries"),
        (dict(remat=0), "remat"),
        (dict(backend="quick"), "quick"),
        (dict(unroll=0), "unroll"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("backend", ["scan", "fused"])
def test_bad_requests_are_one_sentence(how, words, backend):
    params, xs, start = arguments()
    how = dict(xs=xs, backend=backend) | how
    how = {name: start if value is NEW else value for name, value in how.items()}
    with pytest.raises(ValueError, match=words) as error:
        rg.unroll(CELL, params, **how)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", list(rg.Backend)[2:], ids=str)
def test_every_backend_is_a_form_of_the_loop(backend):
    form = rg.scan._form(backend)
    for name in ("unsupported", "chunk", "segment"):
        wanted = list(inspect.signature(getattr(rg.scan.Form, name)).parameters)[1:]
        assert list(inspect.signature(getattr(form, name)).parameters) == wanted == ["loop"]


def test_a_deterministic_run_needs_no_key():
    params, xs, start = arguments()
    fns = (rg.Detach(p=0.5),)
    assert_identical(
        rg.unroll(CELL, params, xs, start, carry_fns=fns, deterministic=True),
        rg.unroll(CELL, params, xs, start),
    )


# Dtypes


@pytest.mark.parametrize(
    ("dtype", "steps"), [(np.int8, 200), (np.uint8, 300), (np.uint32, 5), (np.int64, 5)]
)
@pytest.mark.parametrize("jitted", [False, True])
def test_lengths_of_any_dtype_count_steps(dtype, steps, jitted):
    lengths = np.array([0, 5, 3])
    params, xs = parameters(CELL, INPUTS), array(8, steps, 3, INPUTS)
    run = lambda lengths: rg.unroll(CELL, params, xs, lengths=lengths)  # noqa: E731
    run = quick_jit(run) if jitted else run
    valid = np.arange(steps)[:, None] < lengths
    assert_identical(run(lengths.astype(dtype)), rg.unroll(CELL, params, xs, valid=valid))


@pytest.mark.parametrize("name", ["lstm", "gru", "slstm"])
def test_float64_beside_float32_is_one_sentence(name):
    cell = rg.CELLS[name](4)
    params = cell.init_params(jax.random.key(0), INPUTS)
    words = "float64 makes the carry of .* float64, and it starts as float32: give param_dtype"
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(ValueError, match=words) as error:
            rg.unroll(cell, params, np.ones((STEPS, BATCH, INPUTS)))
        with pytest.raises(ValueError, match=words):
            xs = jnp.ones((STEPS, BATCH, INPUTS), jnp.float32)
            rg.unroll(cell.clone(dtype=jnp.float64), params, xs)
    assert "\n" not in str(error.value)


def test_numpys_numbers_are_jaxs(x32):
    """float64 of NumPy is float32 of JAX: kernels serve it, with the same bits."""
    cell = rg.LSTM(4)
    params = cell.init_params(jax.random.key(0), INPUTS)
    xs = np.random.default_rng(0).standard_normal((STEPS, BATCH, INPUTS))
    numpys = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    got = rg.unroll(cell, numpys, xs, backend="native")
    assert_identical(got, rg.unroll(cell, params, jnp.asarray(xs), backend="native"))


def test_long_lengths_of_wide_integers_count_as_all_steps(x32):
    """Under jit, where their values are not known."""
    cell, xs = rg.LSTM(4), jnp.ones((5, 2, 3), jnp.float32)
    params = cell.init_params(jax.random.key(0), 3)
    ys = jax.jit(lambda lengths: rg.unroll(cell, params, xs, lengths=lengths)[1])
    assert_identical(ys(np.array([2**32 - 5, 3], np.uint32)), ys(np.array([5, 3], np.uint32)))
    with pytest.raises(ValueError, match=f"from 0 to T = 5, got {2**32 + 3}"):
        rg.unroll(cell, params, xs, lengths=np.array([2**32 + 3, 3]))
