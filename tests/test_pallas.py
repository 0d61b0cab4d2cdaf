"""The Pallas kernels, interpreted, against the scan: every value and every gradient.

In float64, where a right kernel differs by roundings alone. What the compilers of a TPU and of
a GPU make of the kernels is in `tests/tpu` and `tests/cuda` and, as far as lowering, in
`test_pallas_platforms.py`.
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.experimental import pallas as pl

import recurrent_gates as rg
from recurrent_gates.backends.pallas import gato as pallas_gato
from recurrent_gates.backends.pallas import loop as pallas_loop
from recurrent_gates.backends.pallas import recurrence as pallas_recurrence
from recurrent_gates.backends.pallas.body import in_kernel
from recurrent_gates.backends.pallas.loop import OnGpu, time_loop
from tests.support import TWINS, array, assert_close, parameters, quick_jit, state, thinned
from tests.test_carry import OwnZoneout
from tests.test_gato import Count, Doubled

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, INPUTS, FEATURES = 5, 3, 3, 4
F64 = dict(param_dtype=jnp.float64)


def kernels_of(platform, monkeypatch):
    """Traces the kernels of this platform alone: those of the others take most of the time."""

    def on_platform(kernel_call, *args):
        return kernel_call(platform, *args)

    monkeypatch.setattr(pallas_loop, "on_platform", on_platform)
    monkeypatch.setattr(pallas_gato, "on_platform", on_platform)


@pytest.fixture(autouse=True)
def of_one_platform(request, monkeypatch):
    """Only a full run has the program that users get, of kernels for every platform."""
    if not request.config.getoption("full"):
        kernels_of("cpu", monkeypatch)


def compare(cell, batch=(BATCH,), around=lambda f: f, lanes=(), dtype=jnp.float64, **how):
    """Values, and gradients of params, inputs, carry and reset_carry, for random cotangents on ys
    and on the carries."""
    params = parameters(cell, INPUTS)
    xs = array(8, *lanes, STEPS, *batch, INPUTS).astype(dtype)
    carry, reset_carry = (state(cell, (*lanes, *batch), seed) for seed in (0, 50))

    def results(backend):
        def forward(params, xs, carry, reset_carry):
            return rg.unroll(
                cell, params, xs, carry, reset_carry=reset_carry, backend=backend, **how
            )

        @quick_jit
        def pull(*arguments):
            out, pullback = jax.vjp(around(forward), *arguments)
            cotangents = jax.tree.map(lambda leaf: array(31, *leaf.shape).astype(leaf.dtype), out)
            return out, pullback(cotangents)

        return pull(params, xs, carry, reset_carry)

    assert_close(results("pallas"), results("scan"))


GATES = [gate for gate in rg.GATES if gate not in TWINS]


@pytest.mark.parametrize(
    ("family", "gate"),
    thinned(
        itertools.product(("lstm", "gru", "janet"), GATES),
        lambda family, gate: family == "lstm" or gate in ("r", "om"),
        long=lambda family, gate: (
            gate in ("u", "r", "or") if family == "lstm" else (family, gate) == ("janet", "om")
        ),
    ),
)
def test_gates(family, gate):
    spec = rg.GATES[gate]
    if spec.master:
        spec = dataclasses.replace(spec, downsize=2)
    make = {"lstm": rg.LSTM, "gru": rg.GRU, "janet": rg.JANET}[family]
    compare(make(FEATURES, gate=spec, **F64))


CELLS = {
    "lstm": rg.LSTM(FEATURES, **F64),
    "gru": rg.GRU(FEATURES, bias_vectors=2, **F64),
    "gru before": rg.GRU(FEATURES, reset="before", **F64),
    "lecture": rg.LSTM(FEATURES, forget_gate=False, activation=jax.nn.sigmoid, **F64),
    "gru_d": rg.GRUD(FEATURES, **F64),
    "rnn": rg.Elman(FEATURES, **F64),
    "gato1": rg.CELLS["gato1"](FEATURES, bias_vectors=2, **F64),
    "gato2": rg.CELLS["gato2"](FEATURES, hidden=3, **F64),
    "zero": rg.CELLS["gato2"](FEATURES, hidden=3, s_update="zero", **F64),
    "replace": rg.CELLS["gato2"](FEATURES, hidden=3, s_update="replace", **F64),
    "gato2 two biases": rg.CELLS["gato2"](
        FEATURES, hidden=3, bias_vectors=2, wrap=None, gamma=jnp.sin, **F64
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells(name, monkeypatch):
    monkeypatch.setattr(pallas_loop, "MOST_STEPS", 2)  # 5 steps: two blocks and a rest
    compare(CELLS[name], return_carries="all")


def noise(*shape, p=0.5):
    return jnp.asarray(np.random.default_rng(1).random(shape) < p)


VALID, RESETS = noise(STEPS, BATCH, p=0.7), noise(STEPS, BATCH, p=0.3)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("lstm", dict(carry_fns=[rg.Detach(0.5)], noise=[noise(STEPS)])),
        ("gru", dict(carry_fns=[rg.Detach(0.5)], noise=[noise(STEPS)], resets=RESETS)),
        ("gru before", dict(carry_fns=[rg.Detach(0.5)], noise=[noise(STEPS)], valid=VALID)),
        (
            "lstm",
            dict(
                carry_fns=[rg.Detach(0.5, per_example=True), rg.Detach(0.5, field="c")],
                noise=[noise(STEPS, BATCH), noise(STEPS)],
            ),
        ),
        ("lstm", dict(carry_fns=[rg.Damp(0.4)], valid=VALID, resets=RESETS, reverse=True)),
        (
            "gru",
            dict(
                carry_fns=[rg.Zoneout(0.4), rg.Damp(0.2)],
                noise=[jax.random.split(jax.random.key(0), (STEPS, BATCH)), None],
                lengths=jnp.array([5, 2, 0]),
            ),
        ),
        ("lstm", dict(carry_fns=[rg.Zoneout(0.4, field="c")], deterministic=True)),
        (
            "lstm",
            dict(carry_fns=[rg.Zoneout(0.4)], noise=[jax.random.split(jax.random.key(0), STEPS)]),
        ),
        *(
            (
                name,
                dict(
                    carry_fns=[rg.Detach(0.5, field="r"), rg.Damp(0.3, field="s")],
                    noise=[noise(STEPS), None],
                    valid=VALID,
                    resets=RESETS,
                    reverse=True,
                ),
            )
            for name in ("gato2", "replace")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_carry_functions_masks_and_resets(name, how, monkeypatch):
    monkeypatch.setattr(pallas_loop, "MOST_STEPS", 2)
    compare(CELLS[name], **how)


@pytest.mark.parametrize("name", ["lstm", "gato2"])
def test_lanes_of_vmap(name):
    def around(forward):
        return jax.vmap(forward, (None, 0, 0, 0))

    compare(CELLS[name], around=around, lanes=(2,))


@pytest.mark.parametrize("batch", [(), (2, 2)], ids=str)
def test_batch_axes(batch):
    masks = dict(valid=noise(STEPS, *batch, p=0.7), resets=noise(STEPS, *batch, p=0.3))
    fns = (rg.Detach(0.5, per_example=True), rg.Zoneout(0.5, field="c"))
    draws = (noise(STEPS, *batch), noise(STEPS, *batch, FEATURES))
    compare(CELLS["lstm"], batch=batch, carry_fns=fns, noise=draws, **masks)


def test_chunks_that_the_driver_rematerialises():
    compare(CELLS["lstm"], remat=2)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The programs that a GPU gets, interpreted; those of few rows have one each."""
    call = pl.pallas_call
    gpu = types.SimpleNamespace(platform=lambda: "gpu")
    monkeypatch.setattr(pallas_recurrence, "target", gpu)

    def interpreted(*args, **how):
        return call(*args, **{**how, "interpret": True, "compiler_params": None})

    monkeypatch.setattr(pl, "pallas_call", interpreted)
    kernels_of("cuda", monkeypatch)


HEADS = {
    "lstm": rg.LSTM(6, heads=2, **F64),
    "um_lstm": rg.CELLS["um_lstm"](12, downsize=2, heads=2, **F64),
    "ur_gru": rg.CELLS["ur_gru"](9, heads=3, bias_vectors=2, **F64),
    "gru": rg.GRU(6, heads=3, **F64),
    "slstm": rg.SLSTM(6, heads=2, **F64),
}


@pytest.mark.parametrize(
    ("name", "gpu"),
    thinned(
        itertools.product(HEADS, (False, True)),
        lambda name, gpu: gpu or name in ("um_lstm", "gru"),
    ),
)
@pytest.mark.long
def test_a_head_at_a_time(name, gpu, monkeypatch, request):
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr(pallas_loop, "MOST_STEPS", 2)
    cell = HEADS[name]
    fns = [rg.Detach(0.5), rg.Zoneout(0.4)]
    how = dict(carry_fns=fns, noise=[noise(STEPS), noise(STEPS, BATCH, cell.features)])
    compare(cell, valid=VALID, resets=RESETS, reverse=gpu, return_carries="all", **how)


@pytest.mark.parametrize("name", ["lstm", "gato2"])
@pytest.mark.long
def test_sixteen_rows_in_a_program_of_a_gpu(name, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(pallas_loop, "GPU_HELD", 0)
    field = "s" if "gato" in name else "h"
    compare(CELLS[name], valid=VALID, carry_fns=[rg.Damp(0.3, field=field)])


ROWS = {
    "four matrices as one": CELLS["lstm"],
    "three, and zeros": CELLS["gru"],
    "two, and one by itself": CELLS["gru before"],
    "two": rg.JANET(FEATURES, **F64),
    "one": CELLS["rnn"],
    "five": rg.LSTM(FEATURES, gate=dataclasses.replace(rg.GATES["r"], tied=False), **F64),
    "of two shapes, and sums over units": rg.CELLS["om_lstm"](8, downsize=2, **F64),
    "a bias of their own": rg.CELLS["or_gru"](FEATURES, bias_vectors=2, **F64),
}


@pytest.mark.parametrize(
    ("name", "detach"),
    thinned(
        itertools.product(ROWS, (False, True)),
        lambda name, detach: detach or name in ("three, and zeros", "five"),
    ),
)
@pytest.mark.long
def test_one_row_in_a_program_of_a_gpu(name, detach, as_on_a_gpu):
    functions = dict(carry_fns=[rg.Detach(0.5)], noise=[noise(STEPS)]) if detach else {}
    compare(ROWS[name], valid=VALID, resets=RESETS, reverse=detach, **functions)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru", "gato1"])
@pytest.mark.long
def test_second_derivatives_are_the_scans(name, gpu, request):
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    cell = CELLS[name]
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    fns = [fn(0.25, field="r" if name == "gato1" else "h") for fn in (rg.Detach, rg.Damp)]
    acts = dict(carry_fns=fns, noise=[noise(STEPS), None]) if name != "lstm" else {}
    masks = dict(valid=VALID, resets=RESETS) | acts

    def penalty(backend, params, xs):
        def loss(xs):
            return jnp.sum(jnp.sin(rg.unroll(cell, params, xs, backend=backend, **masks)[1]))

        return jnp.sum(jax.grad(loss)(xs) ** 2)

    results = [
        quick_jit(jax.grad(functools.partial(penalty, backend), (0, 1)))(params, xs)
        for backend in ("pallas", "scan")
    ]
    assert_close(*results)


def test_second_derivatives_of_the_two_layer_increment_are_refused():
    cell = CELLS["gato2"]
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)

    def slope(x):
        return jax.grad(lambda x: jnp.sum(rg.unroll(cell, params, x * xs, backend="pallas")[1]))(x)

    with pytest.raises(ValueError, match="first derivatives alone of GATO's two-layer increment"):
        jax.eval_shape(jax.grad(slope), 1.0)


@pytest.mark.parametrize(
    ("name", "reverse"), [("gato1", False), ("gato2", True), ("replace", False)]
)
@pytest.mark.long
def test_the_blocks_of_units_of_a_gpu(name, reverse, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(pallas_loop, "GPU_UNITS", 1)  # 2 units: two programs for a row
    monkeypatch.setattr(pallas_loop, "GPU_AHEAD", 2)  # 5 steps: two pairs and a rest
    fns = [rg.Detach(0.5, field="r"), rg.Zoneout(0.4, field="s")]
    draws = [noise(STEPS), noise(STEPS, BATCH, CELLS[name].units)]
    how = dict(carry_fns=fns, noise=draws, valid=VALID, resets=RESETS)
    compare(CELLS[name], reverse=reverse, **how)


@dataclasses.dataclass(frozen=True)
class Places(rg.GatedDecay):
    """Decays at a rate by the unit's place."""

    def combine(self, params, r, product):
        count = r.shape[-1]
        rate = 0.9 * (1 + jax.lax.broadcasted_iota(r.dtype, r.shape, r.ndim - 1)) / count
        return rate * jax.nn.sigmoid(product("gate", r)) * r + jnp.tanh(product("candidate", r))


@struct.dataclass
class Normalised(rg.Damp):
    """Keeps carries of length 1."""

    def after(self, noise_t, prev, new):
        field = new.s
        return new._replace(s=field / (1 + jnp.sum(field**2, axis=-1, keepdims=True)))


def test_units_that_are_not_alike_stay_in_one_program_on_a_gpu(as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(pallas_loop, "GPU_UNITS", 1)
    compare(rg.GATO(FEATURES, f=Places(), g=rg.OneLayer(), **F64))


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_in_blocks_of_rows_and_time_is_lax_scan(reverse, monkeypatch):
    monkeypatch.setattr(pallas_loop, "ON_CHIP", 2**18)  # blocks of 8 rows and a few steps
    weights, rows, carry = array(0, 4, 4), array(1, 20, 4), array(2, 20, 4)
    xs = (array(3, 11, 20, 4), jnp.arange(11.0), noise(11, 20, 1))

    def body(weights, rows, c, x):
        wide, number, mask = x
        c = jnp.tanh(c @ weights + wide) + jnp.where(mask, rows, number)
        return c, {"y": 2 * c}

    def loop(*arguments):
        return time_loop(body, *arguments, reverse=reverse, gpu=OnGpu(16, 4))

    def scan(weights, rows, carry, xs):
        return jax.lax.scan(lambda c, x: body(weights, rows, c, x), carry, xs, reverse=reverse)

    trees = (rows, carry, carry), (xs, xs[0])
    sizes = pallas_loop._tpu_blocks(weights, *trees, 20, 11, lambda a: a.shape[-1])
    assert sizes[0] == 8 and 1 < sizes[1] < 11 and 11 % sizes[1]
    arguments = (weights, rows, carry, xs)
    assert_close(quick_jit(loop)(*arguments), quick_jit(scan)(*arguments))


@pytest.mark.parametrize(
    ("platform", "units"), [("tpu", 256), ("tpu", 192), ("tpu", 100), ("gpu", 256)]
)
@pytest.mark.long
def test_increments_in_blocks_of_rows_and_units(platform, units, monkeypatch, request):
    """550 rows: two blocks of a TPU and a rest, three of a GPU; 256 units: two, and four; other
    numbers of units: a rest, alone and after a block."""
    if platform == "gpu":
        request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr(pallas_gato, "ON_CHIP", 2**15)
    cell = rg.CELLS["gato2"](2 * units, hidden=2, **F64)
    params = parameters(cell, INPUTS)["g"]
    r, x, cotangent = array(5, 275, 2, units), array(6, 275, 2, INPUTS), array(7, 275, 2, units)

    def pull(function):
        out, pullback = jax.vjp(function, params, r, x)
        return out, pullback(cotangent)

    def kernel(params, r, x):
        return pallas_gato.two_layer_increment(params, r, x, None)

    def plain(params, r, x):
        return cell.g(params, r, cell.g.project(params, x, None))

    assert_close(
        quick_jit(pull, static_argnums=0)(kernel), quick_jit(pull, static_argnums=0)(plain)
    )


class Sines(rg.GATO):
    """Reads the sines of its inputs."""

    def project(self, params, x):
        return super().project(params, jnp.sin(x))


@pytest.mark.parametrize("make", [Doubled, Sines])
def test_what_a_subclass_of_gato_overrides_is_used(make):
    compare(make(FEATURES, g=rg.TwoLayer(hidden=3), **F64))


def test_bfloat16_products_are_close_to_the_scans(x32):
    """Products in bfloat16 round at 2^-9; through 5 steps both ways that stays below 2^-5."""
    cell = rg.LSTM(FEATURES, dtype=jnp.bfloat16)
    params = parameters(cell, INPUTS)
    xs = array(8, STEPS, BATCH, INPUTS).astype(jnp.bfloat16)

    @quick_jit(static_argnums=2)
    def run(params, xs, backend):
        def loss(params, xs):
            _, ys = rg.unroll(cell, params, xs, backend=backend)
            return jnp.sum(ys.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1))(params, xs)

    pallas, scan = (
        jax.tree.map(lambda a: a.astype(jnp.float32), run(params, xs, backend))
        for backend in ("pallas", "scan")
    )
    assert_close(pallas, scan, 2**-5)


def test_sums_over_features_are_products_in_a_kernel():
    x, calls = array(0, 3, 5), []

    def both(x):
        out, pullback = jax.vjp(lambda x: jnp.cumsum(jax.nn.relu(x), axis=-1), x)
        calls.append(1)
        return out, pullback(out)[0]

    assert "cumsum" not in str(jax.make_jaxpr(in_kernel(both))(x))
    assert_close(in_kernel(both)(x), both(x))
    with pytest.raises(NotImplementedError, match="last axis"):
        in_kernel(lambda x: jnp.cumsum(x, axis=0))(x)


def test_products_of_one_row_are_sums_in_a_kernel():
    row, matrix = array(0, 1, 3), array(1, 3, 5)

    def both(row, matrix):
        out, pullback = jax.vjp(lambda row: row @ matrix, row)
        return out, matrix.T @ row.T, pullback(out)[0]

    kernel = in_kernel(both, one_row=True)
    assert "dot_general" not in str(jax.make_jaxpr(kernel)(row, matrix))
    assert_close(kernel(row, matrix), both(row, matrix))
    with pytest.raises(ValueError, match=r"a matrix, got shapes \(2, 3\) and \(3, 5\); use"):
        in_kernel(jnp.matmul, one_row=True)(array(2, 2, 3), matrix)


# What is refused.


@struct.dataclass
class OwnKeys(rg.CarryFn):
    """Draws in the step, as a kernel cannot."""

    def draw(self, key, steps, batch_shape):
        return jax.random.split(key, steps)


class TallWeights(rg.LSTM):
    """Recurrent weights of four axes."""

    @property
    def products(self):
        two = super().products

        def weights(params):
            return jax.tree.map(lambda w: w[..., None, None], two.weights(params))

        return dataclasses.replace(two, weights=weights)


def refusal(cell, inputs=INPUTS, dtype=None, **how):
    """The sentence; nothing is computed."""

    def run(key):
        params, xs = cell.init_params(key, inputs), jnp.ones((2, BATCH, inputs), dtype)
        return rg.unroll(cell, params, xs, backend="pallas", **how)

    with pytest.raises(ValueError, match="The pallas backend does not serve this") as error:
        jax.eval_shape(run, jax.random.key(0))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_no_kernel_serves_is_refused(x32):
    assert "recurrent products" in refusal(rg.GATO(4, f=Count()))
    keys = jax.random.split(jax.random.key(0), 2)
    assert "no keys" in refusal(rg.LSTM(4), carry_fns=[OwnKeys(0.5)], noise=[keys])
    assert "scalars" in refusal(rg.LSTM(4), carry_fns=[rg.Damp(jnp.full(4, 0.5))])
    keys = jax.random.split(jax.random.key(0), (2, BATCH))
    assert "no keys" in refusal(rg.LSTM(4), carry_fns=[OwnZoneout(0.5)], noise=[keys])
    masks = noise(2, BATCH, 4, 1)
    assert "by step" in refusal(rg.LSTM(4), carry_fns=[rg.Zoneout(0.5)], noise=[masks])
    for cell in (
        rg.CELLS["or_gru"](6, heads=2),
        rg.CELLS["ur_lstm"](4, heads=2),
        rg.LSTM(6, heads=2, activation=jax.nn.softmax),
    ):
        assert "one head at a time" in refusal(cell)
    assert "may mix examples" in refusal(rg.LSTM(6), carry_fns=[Normalised(0.3)])


@pytest.mark.parametrize("backend", ["scan", "fused", "pallas"])
def test_a_weight_of_four_axes_is_an_error_everywhere(backend, x32):
    cell = TallWeights(4)
    params = cell.init_params(jax.random.key(0), INPUTS)
    with pytest.raises(ValueError, match=r"matrix \[F, width\], its blocks"):
        rg.unroll(cell, params, jnp.ones((2, BATCH, INPUTS)), backend=backend)


def test_what_a_chip_cannot_hold_is_refused_there(monkeypatch, x32):
    def on(platform):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)

    on("tpu")
    assert "stay on the chip" in refusal(rg.LSTM(1024))
    assert "4096" in refusal(rg.CELLS["gato2"](8), inputs=128)
    assert "multiples of 128" in refusal(rg.LSTM(128, heads=2))
    # Products of bfloat16 and float32 are in float32: 700 units are 4 * 700^2 * 4 bytes.
    with jax.numpy_dtype_promotion("standard"):
        assert "7840000 bytes" in refusal(rg.LSTM(700), dtype=jnp.bfloat16)
    on("gpu")
    assert "powers of two" in refusal(rg.LSTM(100))
    assert "stay on the chip" in refusal(rg.LSTM(256))
    on("METAL")
    assert "not written for METAL" in refusal(rg.LSTM(4))


@pytest.mark.parametrize(
    ("cell", "dtype"),
    [
        (rg.GATO(4), jnp.float64),
        (rg.LSTM(4, dtype=jnp.float32, param_dtype=jnp.float64), jnp.float32),  # its carry
        (rg.LSTM(4, param_dtype=jnp.float64), jnp.float32),
    ],
    ids=["inputs", "carry", "parameters"],
)
def test_a_tpu_takes_no_float64(cell, dtype, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with jax.numpy_dtype_promotion("standard"):
        assert "float64" in refusal(cell, dtype=dtype)


class Twice(rg.Elman):
    """Uses one product two times; a dict by slot would keep the second use alone."""

    def update(self, carry, inputs, product):
        return carry._replace(h=product("h", carry.h) + product("h", 2 * carry.h))


def test_a_product_that_is_used_twice_is_refused():
    with pytest.raises(TypeError, match="uses the product 'h' twice"):
        compare(Twice(FEATURES, **F64))
