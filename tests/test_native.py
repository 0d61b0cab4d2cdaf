"""Kernels for the CPU against the scan in float64, in every form that they have.

They need a C++ compiler; test_native_library.py has what happens without one, and
test_native_threads.py what threads and devices share.
"""

import dataclasses
import functools
import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from recurrent_gates import target
from recurrent_gates.backends import native
from recurrent_gates.backends.native import backend
from recurrent_gates.scan import Loop, Settings, Stream
from tests.support import array, assert_close, assert_identical, randomize, thinned

TOLERANCE = 1e-5  # of float32 sums of a few hundred terms, beside float64
CELLS = {
    "lstm": rg.LSTM,
    "c_lstm": functools.partial(rg.CELLS["c_lstm"], bias_mode="frozen"),
    "two_biases": functools.partial(rg.LSTM, bias_vectors=2),
    "ur_lstm": rg.CELLS["ur_lstm"],
    "gru": rg.GRU,
    "gru_two_biases": functools.partial(rg.GRU, bias_vectors=2),
    "ur_gru": functools.partial(rg.GRU, gate=rg.GATES["ur"]),
    "gru_no_reset": functools.partial(rg.GRU, reset=False),
    "janet": rg.JANET,
    "r_janet": rg.CELLS["r_janet"],
    "gato1": lambda units: rg.CELLS["gato1"](2 * units),
    "gato1_emits_s": lambda units: rg.GATO(
        2 * units, g=rg.OneLayer(), emit_s_only=True, wrap=1.5, bias_vectors=2
    ),
    "gato2": lambda units: rg.GATO(2 * units, g=rg.TwoLayer(9), bias_vectors=2),
    "ur_lstm_two_biases": functools.partial(rg.CELLS["ur_lstm"], bias_vectors=2),
}
# (T, batch, D, F): odd widths; no batch and two axes of it; inputs projected before the loop, and
# as many that are projected in it; one step; weights in place, of four steps, two, and many
# units; threads that share rows; threads that share units.
SIZES = {
    "small": (5, (3,), 2, 5),
    "one_row": (4, (), 3, 17),
    "two_axes": (3, (2, 3), 1, 16),
    "wide_inputs": (3, (5,), 130, 6),
    "wide_inputs_of_many_rows": (3, (13,), 131, 37),
    "one_step": (1, (17,), 3, 33),
    "two_steps": (2, (1,), 140, 35),
    "few_steps_of_many_units": (2, (2,), 60, 300),
    "rows": (3, (41,), 9, 72),
    "units": (3, (9,), 5, 230),
}
# Whose inputs threads share, in stretches of rows; whose inputs' cotangents they share, a slot at a
# time; and one step, for which each thread packs weights more than once; one of weights in place,
# of unequal blocks of rows.
SHARED = {
    "stretches_of_wide_inputs": (5, (11,), 2100, 13),
    "slots_in_turn": (2, (7,), 150, 530),
    "one_step_of_many_units": (1, (13,), 5, 400),
    "five_rows_in_place": (1, (5,), 40, 512),
}
# As much work as threads of a GATO share, whose products are cheap.
LARGE = {"many_examples": (40, (64,), 30, 40), "many_units": (40, (9,), 30, 230)}
FNS = functools.partial(rg.Detach, 0.5), functools.partial(rg.Damp, 0.25)
HOW = {
    "plain": {},
    "reverse_carries": {"reverse": True, "return_carries": "all"},
    "detach": {"carry_fns": FNS},
    "chunks": {"remat": 2, "reverse": True},
    "valid": {"masks": ("valid",), "return_carries": "all"},
    "resets": {"masks": ("resets",)},
    "both": {"masks": ("valid", "resets"), "reverse": True, "carry_fns": FNS},
}
# Every cell in every form once, masks with the cells that differ in what they keep, at sizes by
# turns; and what is most of a program at each size.
MASKED = ("lstm", "ur_lstm", "gru", "janet", "gato2")
CASES = [
    (cell, how, list(SIZES)[(number + turn) % len(SIZES)])
    for (turn, cell), (number, how) in itertools.product(enumerate(CELLS), enumerate(HOW))
    if "masks" not in HOW[how] or cell in MASKED
]
CASES += [
    (cell, "both", size) for cell, size in itertools.product(("lstm", "gru"), [*SIZES, *SHARED])
]
CASES += [("gato2", "both", size) for size in ("rows", "units")]
CASES += [("gato1", "detach", size) for size in (*SIZES, "slots_in_turn", "five_rows_in_place")]
CASES = list(dict.fromkeys(CASES))
# In a default run sizes at which the kernels of LSTM and GRU go the same way meet masks, resets and
# carry functions with one of the two, and a cell that differs from another in its weights, or in
# what it emits, has every second of HOW.
VARIANTS = (
    "c_lstm",
    "two_biases",
    "gru_two_biases",
    "gato1_emits_s",
    "ur_lstm_two_biases",
    "gato2",
)
FEW = (*VARIANTS, "gru_no_reset", "r_janet")  # of those the default run has one of HOW
OF_ONE = {
    "lstm": {
        *("small", "two_axes", "wide_inputs_of_many_rows"),
        *("slots_in_turn", "one_step_of_many_units"),
    },
    "gru": {
        *("one_row", "wide_inputs", "one_step"),
        *("stretches_of_wide_inputs", "five_rows_in_place"),
    },
}


def in_turn(name, how, size):
    if name in VARIANTS:
        return (list(HOW).index(how) + VARIANTS.index(name)) % 2 == 0
    others = OF_ONE["gru" if name == "lstm" else "lstm"]
    return name not in OF_ONE or how != "both" or size not in others


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    """Two threads, whatever the machine: XLA's pool has as many as it has cores."""
    monkeypatch.setattr(target, "cores", lambda: 2)


def arrays(make, size):
    """(cell, (params, xs, carry)), in float32. Weights of many inputs saturate no gate."""
    steps, batch, inputs, features = (SIZES | SHARED | LARGE)[size]
    cell, scale = make(features), min(0.4, 4 / inputs**0.5)
    shapes = jax.eval_shape(lambda: cell.init_params(jax.random.key(0), inputs))
    params = randomize(shapes, 1, scale)
    carry = randomize(cell.initial(batch), 2, 0.5)
    values = params, array(3, steps, *batch, inputs), carry
    return cell, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), values)


def everything(cell, backend, carry_fns=(), masks=(), **how):
    """The carry, the outputs and all gradients of a sum that reads each of them differently.

    Carry functions are given without their field: they act on what feeds back. Masks are of half
    of all steps; a reset takes a carry that depends on the first one.
    """
    field = "r" if isinstance(cell, rg.GATO) else "h"
    how["carry_fns"] = tuple(fn(field=field) for fn in carry_fns)

    def loss(params, xs, carry):
        for n, name in enumerate(masks):
            shape = jax.tree.leaves(xs)[0].shape[:-1]
            how[name] = np.random.default_rng(n).random(shape) < 0.5
            how["reset_carry"] = jax.tree.map(lambda leaf: jnp.cos(3 * leaf), carry)
        out = rg.unroll(cell, params, xs, carry, key=jax.random.key(7), backend=backend, **how)
        leaves = jax.tree.leaves(out)
        return sum(jnp.sum(jnp.sin(leaf * (n + 1))) for n, leaf in enumerate(leaves)), out

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize(
    ("name", "how", "size"),
    thinned(CASES, in_turn, long=lambda name, how, _: name in FEW and how != "chunks"),
    ids=map("-".join, CASES),
)
def test_kernels_are_the_scan(name, how, size):
    cell, values = arrays(CELLS[name], size)
    actual = everything(cell, "native", **HOW[how])(*values)
    with jax.enable_x64(True):
        exact = cell.clone(param_dtype=jnp.float64)
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), values)
        expected = everything(exact, "scan", **HOW[how])(*wide)
    assert jax.tree.leaves(actual)[0].dtype == jnp.float32
    assert_close(actual, expected, TOLERANCE)


@pytest.mark.parametrize("name", ["ur_lstm", "gru", "janet", "gato1"])
def test_nan_stays_in_its_row(name):
    cell, (params, xs, carry) = arrays(CELLS[name], "rows")
    _, ys = rg.unroll(cell, params, xs.at[1, 4, 0].set(jnp.nan), carry, backend="native")
    bad = np.isnan(np.asarray(ys))
    assert bad[1:, 4].all()
    assert not np.delete(bad, 4, axis=1).any()
    assert not bad[0].any()


def test_saturated_gates_are_exact():
    """Pre-activations far beyond what exp and tanh are made for."""
    cell, (params, xs, carry) = arrays(CELLS["lstm"], "small")
    for size in (20.0, 100.0, 1e4, 1e30):
        large = {**params, "kernel": jax.tree.map(lambda k, size=size: size * k, params["kernel"])}
        _, ys = rg.unroll(cell, large, xs, carry, backend="native")
        _, expected = rg.unroll(cell, large, xs, carry, backend="scan")
        assert_close(ys, expected, 1e-5)


def test_large_increments_keep_s_in_its_period():
    """Of a sum of 1e4 float32 has some three digits behind the point."""
    cell, (params, xs, carry) = arrays(CELLS["gato1"], "small")
    for size, tolerance in ((20.0, 3e-5), (1e4, 3e-2)):
        large = {**params, "g": {**params["g"], "kernel": {"s": size * params["g"]["kernel"]["s"]}}}
        out, expected = (
            rg.unroll(cell, large, xs, carry, return_carries="all", backend=backend)[0]
            for backend in ("native", "scan")
        )
        assert np.min(out.s) > -tolerance
        assert np.max(out.s) < 2 * np.pi + tolerance
        assert_close(jnp.cos(out.s), jnp.cos(expected.s), tolerance)
    huge = {**params, "g": {**params["g"], "kernel": {"s": 1e30 * params["g"]["kernel"]["s"]}}}
    _, ys = rg.unroll(cell, huge, xs, carry, backend="native")
    assert np.max(np.abs(ys[..., : cell.units])) <= 1  # of such a sum a cosine has no digits


@pytest.mark.parametrize("pre", [9.0, 9.5, 30.0, 1e30, -9.0, -9.5, -30.0, -1e30])
def test_no_gradient_is_left_where_tanh_is_saturated(pre):
    """It is 1 there to the bit, so that its derivative is 0, however large what it multiplies."""
    cell, (params, xs, carry) = arrays(CELLS["janet"], "small")
    params = jax.tree.map(jnp.zeros_like, params)
    params["bias"]["u"] = jnp.full((cell.features,), jnp.float32(pre))
    (gradient, *_), (_, ys) = everything(cell, "native")(params, xs, carry)
    assert not np.any(gradient["bias"]["u"])
    assert_close(ys, rg.unroll(cell, params, xs, carry, backend="scan")[1], 1e-6)


# The portable form: what runs where a kernel cannot.


@pytest.mark.parametrize(
    "name", ["lstm", "ur_lstm", "gru", "janet", "gato1", "gato1_emits_s", "gato2"]
)
def test_vmap_runs_the_portable_form(name):
    cell, (params, xs, carry) = arrays(CELLS[name], "small")
    masks = () if name.startswith("gato") else ("valid", "resets")
    run = everything(cell, "native", FNS, masks, return_carries="all")
    lanes = jnp.stack([xs, 2 * xs])
    mapped = jax.jit(jax.vmap(run, in_axes=(None, 0, None)))
    assert "custom_call @recurrent_gates" not in mapped.lower(params, lanes, carry).as_text()
    actual = mapped(params, lanes, carry)
    for lane in range(2):
        one = jax.tree.map(lambda x, lane=lane: x[lane], actual)
        assert_close(one, run(params, lanes[lane], carry), TOLERANCE)


@pytest.mark.parametrize("name", ["lstm", "gato1"])
def test_the_portable_form_stays_in_float32_under_x64(name):
    cell, (params, xs, carry) = arrays(CELLS[name], "small")
    run = everything(cell, "native")
    with jax.enable_x64(True):
        actual = jax.jit(jax.vmap(run, in_axes=(None, 0, None)))(params, xs[None], carry)
        assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype(jnp.float32)}
    assert_close(jax.tree.map(lambda x: x[0], actual), run(params, xs, carry), TOLERANCE)


@pytest.mark.parametrize("name", ["gru", "gato1", "gato2"])
def test_exported_programs_hold_no_kernel(name):
    cell, values = arrays(CELLS[name], "small")
    run = everything(cell, "auto")
    assert "custom_call @recurrent_gates" in run.lower(*values).as_text()
    exported = jax.export.export(run)(*values)
    assert "custom_call @recurrent_gates" not in exported.mlir_module()
    restored = jax.export.deserialize(exported.serialize())
    assert_close(restored.call(*values), run(*values), TOLERANCE)


@pytest.mark.parametrize(
    ("name", "fns"), [("lstm", ()), ("gru", FNS), ("gato1", FNS), ("gato2", FNS)]
)
def test_second_derivatives_are_the_scans(name, fns):
    cell, operands = arrays(CELLS[name], "small")
    fns = tuple(fn(field="r" if name.startswith("gato") else "h") for fn in fns)
    options = dict(carry_fns=fns, noise=[np.arange(5) % 2 == 1, None] if fns else None)
    if name == "gru":
        masks = np.random.default_rng(0).random((2, 5, 3)) < 0.5
        options |= dict(valid=masks[0], resets=masks[1])

    def slopes(backend):
        def loss(*operands):
            return jnp.sum(jnp.sin(rg.unroll(cell, *operands, backend=backend, **options)[1]))

        def penalty(*operands):
            gradients = jax.grad(loss, (0, 1, 2))(*operands)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(gradients))

        return jax.jit(jax.grad(penalty, (0, 1, 2)))(*operands)

    assert_close(slopes("native"), slopes("scan"), 2e-5)


def test_a_gradient_that_is_not_finite_is_stopped():
    cell, (params, xs, carry) = arrays(rg.LSTM, "small")
    stop = (rg.Damp(1.0),)

    def slope(backend):
        def loss(h):
            start = carry._replace(h=h)
            ys = rg.unroll(cell, params, xs, start, carry_fns=stop, backend=backend)[1]
            return jnp.sum(jnp.where(ys > 9, ys, jnp.inf * ys))

        return jax.grad(loss)(carry.h)

    assert_identical(slope("native"), jnp.zeros_like(carry.h))
    assert_identical(slope("scan"), jnp.zeros_like(carry.h))


@pytest.mark.parametrize("name", ["lstm", "gato1", "gato2"])
def test_without_jit_it_runs(name):
    cell, values = arrays(CELLS[name], "small")
    with jax.disable_jit():
        out = everything(cell, "native")(*values)
    assert_close(out, everything(cell, "native")(*values), 1e-6)


def test_params_need_no_second_bias():
    """As `checks` and the scan have it: without one, a reset's own bias is zero."""
    cell, (params, xs, carry) = arrays(CELLS["gru"], "small")
    params = {name: leaf for name, leaf in params.items() if name != "recurrent_bias"}
    actual, expected = (everything(cell, name)(params, xs, carry) for name in ("native", "scan"))
    assert_close(actual, expected, TOLERANCE)


class _OneBias(rg.Gate):
    """One bias of the gate for all units."""

    def init(self, key, features, dtype=jnp.float32):
        return {name: leaf[:1] for name, leaf in super().init(key, features, dtype).items()}


def test_a_gates_bias_may_be_one_for_all_units():
    gate = _OneBias(**dataclasses.asdict(rg.GATES["ur"]))
    cell, values = arrays(functools.partial(rg.LSTM, gate=gate, bias_vectors=2), "small")
    assert values[0]["gate"]["b"].shape == (1,)
    actual, expected = (everything(cell, name)(*values) for name in ("native", "scan"))
    assert_close(actual, expected, TOLERANCE)


@pytest.mark.parametrize("maps", ["", "f", "g", "fg"])
def test_each_map_of_a_gato_may_have_a_second_bias(maps):
    cell, (params, xs, carry) = arrays(CELLS["gato1_emits_s"], "small")
    params = {
        name: {role: leaf for role, leaf in own.items() if name in maps or role != "recurrent_bias"}
        for name, own in params.items()
    }
    actual, expected = (everything(cell, name)(params, xs, carry) for name in ("native", "scan"))
    assert_close(actual, expected, TOLERANCE)


# What is served.


def loop(cell, fns=(), *, dtype=jnp.float32, stream=None, copies=None):
    params, xs = cell.init_params(jax.random.key(0), 3), jnp.zeros((5, 2, 3), dtype)
    start = cell.initial((2,))
    noise = rg.draw_noise(fns, jax.random.key(0), 5, (2,))
    stream = stream or Stream(noise=noise)
    xs = xs if copies is None else [xs] * copies
    return Loop(Settings(cell, batch_dims=1), params, xs, start, start, fns, stream)


class OpenGate(rg.Gate):
    """Starts elsewhere than a plain gate."""

    def init(self, key, features, dtype=jnp.float32):
        return {"b": jnp.full((features,), 6.0, dtype)}


class DoubledGate(rg.Gate):
    """Computes something else than a plain gate."""

    def activate(self, pre):
        return super().activate({name: 2 * value for name, value in pre.items()})


gato1 = functools.partial(rg.GATO, 8, g=rg.OneLayer())
MASK = jax.ShapeDtypeStruct((5, 2), bool)
REFUSED = {
    "another_cell": (loop(rg.Elman(4)), "no kernels for Elman"),
    "ordered_gates": (loop(rg.CELLS["om_lstm"](4)), "no kernels for LSTM"),
    "tied_without_refining": (loop(rg.LSTM(4, gate=rg.Gate(tied=True))), "no kernels for LSTM"),
    "a_gate_of_ones_own": (loop(rg.LSTM(4, gate=DoubledGate())), "no kernels for LSTM"),
    "reset_before": (loop(rg.GRU(4, reset="before")), "no kernels for GRU"),
    "heads": (loop(rg.LSTM(4, heads=2)), "no kernels for LSTM"),
    "two_layers_in_bfloat16": (loop(rg.GATO(4, dtype=jnp.bfloat16)), "float32"),
    "gated_gato": (loop(gato1(f=rg.GatedDecay(gate=rg.GATES["ur"]))), "no kernels for GATO"),
    "another_reading_of_s": (loop(gato1(gamma=jnp.sin)), "no kernels for GATO"),
    "a_sum_without_a_period": (loop(gato1(wrap=None)), "no kernels for GATO"),
    "a_long_period": (loop(gato1(wrap=6.5)), "no kernels for GATO"),
    "a_carry_in_float64": (
        loop(rg.LSTM(4)).replace(carry=rg.LSTMState(*[np.zeros((2, 4))] * 2)),
        "float32",
    ),
    "s_replaced": (loop(gato1(s_update="replace")), "no kernels for GATO"),
    "detached_s": (loop(gato1(), (rg.Detach(0.5, field="s"),)), "Detach and Damp of r"),
    "activation": (loop(rg.LSTM(4, activation=jax.nn.sigmoid)), "no kernels for LSTM"),
    "bfloat16": (loop(rg.LSTM(4), dtype=jnp.bfloat16), "float32"),
    "products_in_bfloat16": (loop(rg.LSTM(4, dtype=jnp.bfloat16)), "float32"),
    "a_list": (loop(rg.LSTM(4), copies=1), "one array"),
    "no_width": (loop(rg.LSTM(4)).replace(xs=jnp.zeros((5, 2, 0))), "some width"),
    "damping_by_unit": (loop(rg.LSTM(4), (rg.Damp(jnp.full(4, 0.5)),)), "Detach and Damp of h"),
    "masks": (loop(gato1(), stream=Stream(valid=MASK)), "masks and resets"),
    "resets": (loop(gato1(), stream=Stream(resets=MASK)), "masks and resets"),
    "zoneout": (loop(rg.LSTM(4), (rg.Zoneout(0.5),)), "Detach and Damp of h"),
    "by_example": (loop(rg.LSTM(4), (rg.Detach(0.5, per_example=True),)), "Detach and Damp of h"),
    "detached_c": (loop(rg.LSTM(4), (rg.Detach(0.5, field="c"),)), "Detach and Damp of h"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served(name):
    asked, reason = REFUSED[name]
    assert reason in native.unsupported(asked)


def test_a_gate_may_start_elsewhere():
    cell = rg.LSTM(33, gate=OpenGate(bias="uniform"))
    params, xs = cell.init_params(jax.random.key(0), 3), array(1, 4, 7, 3).astype(jnp.float32)
    carry = cell.initial((7,))
    actual, expected = (everything(cell, name)(params, xs, carry) for name in ("native", "scan"))
    assert_close(actual, expected, TOLERANCE)


def test_auto_takes_kernels():
    cell, values = arrays(CELLS["lstm"], "small")
    assert native.unsupported(loop(rg.LSTM(4))) is None
    lowered = jax.jit(functools.partial(rg.unroll, cell)).lower(*values).as_text()
    assert "custom_call @recurrent_gates_lstm_forward" in lowered


@pytest.mark.parametrize(("name", "numbers"), [("lstm", 4 + 2), ("gru", 3 + 1 + 1), ("janet", 3)])
def test_long_sequences_are_taken_in_chunks(name, numbers):
    """Numbers of a unit and step: pre-activations, a product that a reset keeps apart, carries."""
    cell = CELLS[name](256)
    step = 4 * 100 * 256 * numbers  # bytes of 100 rows
    most = backend._KEPT_BYTES // step
    for steps, expected in ((most, None), (most + 1, backend._CHUNK_BYTES // step)):
        asked = loop(cell).replace(
            xs=jax.ShapeDtypeStruct((steps, 100, 3), jnp.float32),
            carry=jax.eval_shape(lambda: cell.initial((100,))),
        )
        assert native.chunk(asked) == expected
