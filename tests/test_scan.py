"""The driver over time, with toy cells whose answers are obvious and with real ones; properties
by hypothesis."""

import functools
import itertools

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import recurrent_gates as rg
from tests.support import (
    array,
    assert_close,
    assert_identical,
    count_traces,
    dot,
    parameters,
    quick_jit,
    state,
    thinned,
)

pytestmark = pytest.mark.usefixtures("x64")

STEPS, BATCH, INPUTS, FEATURES = 7, 3, 2, 4


class Counter(rg.Cell):
    """Counts its steps; its carry is one bare array."""

    def init_params(self, key, in_features):
        return {}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, 1))

    def step(self, params, carry, z_t):
        return carry + 1.0


class Memory(rg.Cell):
    """Holds its last input, and the one before; its carry is a plain tuple."""

    width: int = INPUTS

    def init_params(self, key, in_features):
        return {"scale": jnp.ones((in_features,))}

    def initial(self, batch_shape):
        zeros = jnp.zeros((*batch_shape, self.width))
        return zeros, zeros

    def step(self, params, carry, z_t):
        scale = params["scale"].reshape((1,) * (z_t.ndim - 1) + (-1,))
        return z_t * scale, carry[0]

    def emit(self, params, carry, z):
        return carry[1]


CELLS = {
    "lstm": rg.LSTM(FEATURES, param_dtype=jnp.float64),
    "gru": rg.CELLS["ur_gru"](FEATURES, param_dtype=jnp.float64),
    "gato": rg.CELLS["gato2"](FEATURES, hidden=3, param_dtype=jnp.float64),
    "memory": Memory(),
}
BACKENDS = [
    (name, backend)
    for name in CELLS
    for backend in ("scan", "fused")
    if (name, backend) != ("memory", "fused")
]


@functools.cache
def setting(name):
    cell = CELLS[name]
    return cell, parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS), state(cell, (BATCH,))


@quick_jit(
    static_argnums=0,
    static_argnames=("backend", "reverse", "return_carries", "remat", "unroll", "deterministic"),
)
def run(cell, params, xs, carry=None, **how):
    return rg.unroll(cell, params, xs, carry, **how)


@quick_jit(static_argnums=0, static_argnames=("backend", "reverse", "remat"))
def gradients(cell, params, xs, carry, cotangents, **how):
    """Gradients of a linear loss on all outputs and the last carry."""

    def loss(params, xs, carry):
        return dot(rg.unroll(cell, params, xs, carry, **how), cotangents)

    return jax.grad(loss, (0, 1, 2))(params, xs, carry)


def cotangents(cell):
    carry = jax.tree.map(lambda leaf: array(21, *leaf.shape), cell.initial((BATCH,)))
    return carry, array(22, STEPS, BATCH, INPUTS if isinstance(cell, Memory) else FEATURES)


def row_of(tree, index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[..., index, :], tree)


each_backend = pytest.mark.parametrize(("name", "backend"), BACKENDS)
masks = st.lists(st.booleans(), min_size=STEPS * BATCH, max_size=STEPS * BATCH).map(
    lambda bits: jnp.asarray(bits).reshape(STEPS, BATCH)
)
rowlengths = st.lists(st.integers(0, STEPS), min_size=BATCH, max_size=BATCH).map(jnp.asarray)


# Toy cells: the answers are obvious.


def test_a_counter_counts():
    cell = Counter()
    carry, ys = run(cell, {}, jnp.zeros((STEPS, BATCH, INPUTS)))
    np.testing.assert_array_equal(carry, np.full((BATCH, 1), STEPS))
    np.testing.assert_array_equal(ys[..., 0], np.arange(1.0, STEPS + 1)[:, None] + np.zeros(BATCH))
    _, back = run(cell, {}, jnp.zeros((STEPS, BATCH, INPUTS)), reverse=True)
    np.testing.assert_array_equal(back, ys[::-1])


@given(masks, masks)
def test_a_counter_counts_valid_steps_since_its_reset(valid, resets):
    carry, ys = run(
        Counter(),
        {},
        jnp.zeros((STEPS, BATCH, 1)),
        jnp.full((BATCH, 1), 100.0),
        valid=valid,
        resets=resets,
    )
    count = np.full(BATCH, 100.0)
    for t in range(STEPS):
        started = np.where(
            resets[t], 0.0, count
        )  # a reset acts on the carry, also where the step is invalid
        count = np.where(valid[t], started + 1, started)
        np.testing.assert_array_equal(ys[t, :, 0], np.where(valid[t], count, 0.0))
    np.testing.assert_array_equal(carry[:, 0], count)


@given(st.booleans())
def test_outputs_stay_at_their_own_time(reverse):
    """The cell emits the input before: shifted by one, towards where the loop began."""
    cell, xs = Memory(), array(3, STEPS, BATCH, INPUTS)
    start = (array(4, BATCH, INPUTS), array(5, BATCH, INPUTS))
    carry, ys = run(cell, {"scale": jnp.ones(INPUTS)}, xs, start, reverse=reverse)
    whole = [start[0], *xs] if not reverse else [*xs, start[0]]
    np.testing.assert_array_equal(ys, np.stack(whole[:STEPS] if not reverse else whole[1:]))
    np.testing.assert_array_equal(carry[0], xs[0] if reverse else xs[-1])


# Properties of masks.


@each_backend
@given(lengths=rowlengths)
def test_rows_with_lengths_are_runs_on_their_own_part(name, backend, lengths):
    cell, params, xs, start = setting(name)
    carry, ys = run(cell, params, xs, start, lengths=lengths, backend=backend)
    all_carries, all_ys = run(cell, params, xs, start, return_carries="all", backend=backend)
    for row, length in enumerate(lengths.tolist()):
        own, whole = row_of(ys, row), row_of(all_ys, row)
        assert_close(own[:length], whole[:length], tolerance=1e-13)
        np.testing.assert_array_equal(own[length:], 0.0)
        if length == 0:
            assert_identical(row_of(carry, row), row_of(start, row))
        else:
            last = jax.tree.map(
                lambda leaf, length=length: leaf[length - 1], row_of(all_carries, row)
            )
            assert_close(row_of(carry, row), last, tolerance=1e-13)


@each_backend
@given(valid=masks)
def test_any_pattern_of_valid_steps_is_the_sequence_without_the_others(name, backend, valid):
    """Each row equals a run on its valid steps alone, moved together; values and all gradients."""
    cell, params, xs, start = setting(name)
    wanted = cotangents(cell)
    carry, ys = run(cell, params, xs, start, valid=valid, backend=backend)
    grads = gradients(cell, params, xs, start, wanted, valid=valid, backend=backend)
    order = jnp.argsort(~valid, axis=0, stable=True)[..., None]  # valid steps first
    packed_xs, packed_wanted = (jnp.take_along_axis(a, order, axis=0) for a in (xs, wanted[1]))
    lengths = valid.sum(axis=0)
    packed_carry, packed_ys = run(cell, params, packed_xs, start, lengths=lengths, backend=backend)
    packed = gradients(
        cell, params, packed_xs, start, (wanted[0], packed_wanted), lengths=lengths, backend=backend
    )
    assert_close(carry, packed_carry)
    assert_close(jnp.take_along_axis(ys, order, axis=0), packed_ys)
    np.testing.assert_array_equal(np.asarray(ys)[~np.asarray(valid)], 0.0)
    assert_close((grads[0], grads[2]), (packed[0], packed[2]))
    assert_close(jnp.take_along_axis(grads[1], order, axis=0), packed[1])
    np.testing.assert_array_equal(np.asarray(grads[1])[~np.asarray(valid)], 0.0)


@each_backend
@given(valid=masks)
def test_nan_in_padding_touches_nothing(name, backend, valid):
    cell, params, xs, start = setting(name)
    poisoned = jnp.where(valid[..., None], xs, jnp.nan)
    how = dict(valid=valid, backend=backend, reverse=True)
    assert_identical(run(cell, params, poisoned, start, **how), run(cell, params, xs, start, **how))
    wanted = cotangents(cell)
    clean, dirty = (gradients(cell, params, x, start, wanted, **how) for x in (xs, poisoned))
    assert_identical(dirty, clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dirty))


@each_backend
@given(resets=masks, reverse=st.booleans())
def test_a_reset_splits_the_sequence(name, backend, resets, reverse):
    """Every stretch between resets equals a run of its own from `reset_carry`; the first one starts
    from `carry`."""
    cell, params, xs, start = setting(name)
    reset_carry = state(cell, (BATCH,), seed=40)
    carry, ys = run(
        cell,
        params,
        xs,
        start,
        reset_carry=reset_carry,
        resets=resets,
        reverse=reverse,
        backend=backend,
    )
    times = range(STEPS - 1, -1, -1) if reverse else range(STEPS)
    for row in range(BATCH):
        c, outputs = row_of(start, row), [None] * STEPS
        for t in times:
            c = row_of(reset_carry, row) if resets[t, row] else c
            c, outputs[t] = one_step(cell, params, c, xs[t, row])
        assert_close((row_of(carry, row), row_of(ys, row)), (c, np.stack(outputs)))


@quick_jit(static_argnums=0)
def one_step(cell, params, carry, x):
    return cell.apply({"params": params}, carry, x)


@each_backend
def test_the_default_reset_takes_the_cells_initial_carry_and_never_the_argument(name, backend):
    cell, params, xs, start = setting(name)
    resets = jnp.zeros((STEPS, BATCH), bool).at[3].set(True)
    carry, ys = run(cell, params, xs, start, resets=resets, backend=backend)
    later, later_ys = run(cell, params, xs[3:], backend=backend)
    assert_close((carry, ys[3:]), (later, later_ys))
    first = jax.tree.map(jnp.zeros_like, start)
    grads = gradients(
        cell,
        params,
        xs,
        start,
        (cotangents(cell)[0], jnp.zeros_like(ys)),
        resets=resets,
        backend=backend,
    )
    assert_identical(
        grads[2], first
    )  # the argument lies before the reset: no gradient from after it


# Time in pieces.


@each_backend
@pytest.mark.parametrize("reverse", [False, True])
def test_single_calls_are_one_unroll(name, backend, reverse):
    cell, params, xs, start = setting(name)
    carry, ys = run(cell, params, xs, start, reverse=reverse, backend=backend)
    c, outputs = start, [None] * STEPS
    for t in reversed(range(STEPS)) if reverse else range(STEPS):
        c, outputs[t] = one_step(cell, params, c, xs[t])
    assert_close((carry, ys), (c, jnp.stack(outputs)), tolerance=1e-13)


@pytest.mark.parametrize(
    ("name", "backend", "cut"),
    thinned(
        [(*pair, 4) for pair in BACKENDS]
        + [(*pair, cut) for pair in (("lstm", "scan"), ("gato", "fused")) for cut in (0, STEPS)],
        lambda name, backend, cut: (
            (name, backend) == ("lstm", "scan") or (name, backend, cut) == ("gato", "fused", 4)
        ),
        pytest.mark.long,
    ),
)
def test_two_windows_are_one(name, backend, cut):
    """Carry passed on, slices of one noise, lengths as a mask: values and gradients equal the
    whole."""
    cell, params, xs, start = setting(name)
    field = {"gato": "r", "memory": 0}.get(name, "h")
    fns = (rg.Detach(p=0.5, field=field, per_example=True), rg.Zoneout(p=0.5, field=field))
    noise = rg.draw_noise(fns, jax.random.key(2), STEPS, (BATCH,))
    valid = jnp.asarray(np.random.default_rng(0).random((STEPS, BATCH)) < 0.8)
    wanted = cotangents(cell)

    def unroll(window, carry, params, xs):
        how = dict(
            valid=valid[window], noise=jax.tree.map(lambda leaf: leaf[window], noise), carry_fns=fns
        )
        return rg.unroll(cell, params, xs[window], carry, backend=backend, **how)

    def whole(params, xs, start):
        return unroll(slice(None), start, params, xs)

    def halves(params, xs, start):
        middle, head = unroll(slice(0, cut), start, params, xs)
        last, tail = unroll(slice(cut, None), middle, params, xs)
        return last, jnp.concatenate([head, tail])

    def value_and_gradient(function):
        loss = lambda *args: (lambda out: (dot(out, wanted), out))(function(*args))  # noqa: E731
        return quick_jit(jax.grad(loss, (0, 1, 2), has_aux=True))(params, xs, start)

    assert_close(value_and_gradient(halves), value_and_gradient(whole))


@each_backend
@pytest.mark.parametrize(
    ("steps", "reverse"),
    thinned(
        itertools.product((0, 1), (False, True)),
        lambda steps, reverse: bool(steps) == reverse,
        pytest.mark.long,
    ),
)
def test_no_step_and_one_step(name, backend, steps, reverse):
    cell, params, xs, start = setting(name)
    how = dict(reverse=reverse, backend=backend)
    carry, ys = run(cell, params, xs[:steps], start, **how)
    carries, _ = run(cell, params, xs[:steps], start, return_carries="all", **how)
    wanted = (cotangents(cell)[0], cotangents(cell)[1][:steps])
    grads = gradients(cell, params, xs[:steps], start, wanted, **how)
    if steps == 0:
        assert_identical(carry, start)
        assert ys.shape == (0, BATCH, wanted[1].shape[-1]) and ys.dtype == jnp.float64
        assert {leaf.shape[:2] for leaf in jax.tree.leaves(carries)} == {(0, BATCH)}
        assert_identical(grads[2], wanted[0])
        assert_identical(grads[0], jax.tree.map(jnp.zeros_like, params))
    else:
        new, y = one_step(cell, params, start, xs[0])
        assert_close((carry, ys), (new, y[None]), tolerance=1e-13)
        assert_close(carries, jax.tree.map(lambda leaf: leaf[None], new), tolerance=1e-13)


@each_backend
@pytest.mark.parametrize(
    ("remat", "reverse"),
    thinned(
        itertools.product((None, 3), (False, True)),
        lambda remat, reverse: reverse == (remat is None),
        pytest.mark.long,
    ),
)
def test_all_carries(name, backend, reverse, remat):
    """Those of the steps, each at its own time; the last of them in order of processing is the
    last carry."""
    cell, params, xs, start = setting(name)
    how = dict(reverse=reverse, backend=backend, remat=remat)
    last, ys = run(cell, params, xs, start, **how)
    carries, same = run(cell, params, xs, start, return_carries="all", **how)
    assert_close(same, ys, tolerance=1e-13)
    assert_close(
        jax.tree.map(lambda leaf: leaf[0 if reverse else -1], carries), last, tolerance=1e-13
    )
    before = jax.tree.map(lambda leaf: leaf[3 if reverse else 1], carries)
    assert_close(
        jax.tree.map(lambda leaf: leaf[2], carries), one_step(cell, params, before, xs[2])[0]
    )


@each_backend
@pytest.mark.parametrize("how", [dict(remat=3), dict(unroll=3)], ids=str)
def test_remat_and_unroll_change_no_value(name, backend, how):
    cell, params, xs, start = setting(name)
    fns = (rg.Zoneout(p=0.3, field={"gato": "s", "memory": 1}.get(name, "h")),)
    options = dict(backend=backend, carry_fns=fns, key=jax.random.key(1))
    assert_close(
        run(cell, params, xs, start, **options, **how),
        run(cell, params, xs, start, **options),
        tolerance=1e-13,
    )


# Draws by absolute time; what does and does not compile again.


def test_one_key_means_one_noise_for_every_way_to_run():
    cell, params, xs, start = setting("gato")
    fns = (rg.Zoneout(p=0.5, field="r"), rg.Zoneout(p=0.5, field="s"))
    key = jax.random.key(5)
    expected = run(
        cell,
        params,
        xs,
        start,
        carry_fns=fns,
        noise=rg.draw_noise(fns, key, STEPS, (BATCH,)),
        backend="scan",
    )
    for how in (
        dict(backend="scan"),
        dict(backend="fused"),
        dict(backend="scan", remat=3),
        dict(backend="fused", unroll=2),
    ):
        assert_close(run(cell, params, xs, start, carry_fns=fns, key=key, **how), expected)
    backwards = [
        run(
            cell,
            params,
            xs[::-1],
            start,
            carry_fns=fns,
            noise=jax.tree.map(lambda leaf: leaf[::-1], noise),
        )
        for noise in [rg.draw_noise(fns, key, STEPS, (BATCH,))]
    ]
    carry, ys = run(cell, params, xs, start, carry_fns=fns, key=key, reverse=True)
    assert_close((carry, ys), (backwards[0][0], backwards[0][1][::-1]))


@pytest.mark.parametrize("backend", ["scan", "fused", "auto"])
def test_nothing_compiles_again_when_values_change(backend):
    cell, params, xs, start = setting("lstm")
    chex.clear_trace_counter()
    function = chex.assert_max_traces(
        lambda p, key, lengths, resets, params: rg.unroll(
            cell,
            params,
            xs,
            start,
            carry_fns=(rg.Detach(p=p), rg.Zoneout(p=p, field="c"), rg.Damp(p=p)),
            key=key,
            lengths=lengths,
            resets=resets,
            backend=backend,
        ),
        n=1,
    )
    jitted = quick_jit(function)
    outputs = []
    for seed, p in enumerate((0.0, 0.25, 1.0)):
        draw = np.random.default_rng(seed)
        lengths, resets = (
            jnp.asarray(draw.integers(0, STEPS, BATCH)),
            jnp.asarray(draw.random((STEPS, BATCH)) < 0.3),
        )
        scaled = jax.tree.map(lambda leaf, seed=seed: leaf * (1.0 + seed), params)
        outputs.append(jitted(p, jax.random.key(seed), lengths, resets, scaled)[1])
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


@pytest.mark.parametrize("backend", ["scan", "fused", "newton", "pallas"])
def test_an_empty_batch_has_empty_results_and_gradients_of_zero(backend):
    cell = rg.CELLS["gato1"](4)
    params, xs = cell.init_params(jax.random.key(0), 2), jnp.zeros((3, 0, 2), jnp.float32)

    def loss(params):
        carry, ys = rg.unroll(cell, params, xs, backend=backend)
        assert ys.shape == (3, 0, 4) and carry.r.shape == (0, 2)
        return ys.sum()

    for gradient in jax.tree.leaves(jax.grad(loss)(params)):
        assert not gradient.any()


def test_a_carry_function_is_an_argument_of_a_jitted_step():
    """p is a leaf, the field is static: another p is another value, another field another
    program."""
    cell, params, xs, _ = setting("lstm")
    function, traces = count_traces(
        lambda fns, key: rg.unroll(cell, params, xs, carry_fns=fns, key=key)[1]
    )
    jitted = quick_jit(function)
    for p in (0.1, 0.9):
        jitted((rg.Detach(p=p),), jax.random.key(0))
    assert len(traces) == 1
    jitted((rg.Detach(p=0.1, field="c"),), jax.random.key(0))
    assert len(traces) == 2


@pytest.mark.parametrize("name", ["om_lstm", "gru", "gato2"])
@pytest.mark.parametrize("backend", ["scan", "fused"])
def test_bfloat16_compute_keeps_float32_carries(name, backend):
    cell = rg.CELLS[name](8, dtype=jnp.bfloat16)
    params = cell.init_params(jax.random.key(0), INPUTS)
    xs = array(8, STEPS, BATCH, INPUTS).astype(jnp.float32)
    carries, ys = run(cell, params, xs, return_carries="all", backend=backend)
    exact, exact_ys = run(rg.CELLS[name](8), params, xs, return_carries="all", backend=backend)
    assert ys.dtype == jnp.bfloat16 and exact_ys.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(carries)} == {jnp.dtype(jnp.float32)}
    assert_close(
        carries, exact, tolerance=STEPS * 12 * 2.0**-9
    )  # a rounding at 2^-9 in each of 12 terms, 7 times

    def slope(cell):
        def total(params):
            return rg.unroll(cell, params, xs, backend=backend)[1].astype(jnp.float32).sum()

        return quick_jit(jax.grad(total))(params)

    grads = slope(cell)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert_close(grads, slope(rg.CELLS[name](8)), tolerance=STEPS * 12 * 2.0**-9)


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("backend", ["scan", "fused"])
def test_any_number_of_batch_dimensions(batch, backend):
    cell, params, _, _ = setting("lstm")
    xs, lengths = (
        array(8, STEPS, *batch, INPUTS),
        jnp.asarray(np.random.default_rng(0).integers(1, STEPS, batch)),
    )
    fns = (rg.Zoneout(p=0.5), rg.Detach(p=0.5, per_example=True))
    noise = rg.draw_noise(fns, jax.random.key(0), STEPS, batch)
    how = dict(carry_fns=fns, backend=backend)
    carry, ys = run(cell, params, xs, lengths=lengths, noise=noise, **how)
    flat = lambda leaf: leaf.reshape(STEPS, -1, *leaf.shape[1 + len(batch) :])  # noqa: E731
    flat_carry, flat_ys = run(
        cell, params, flat(xs), lengths=lengths.reshape(-1), noise=jax.tree.map(flat, noise), **how
    )
    assert_close(flat(ys), flat_ys, tolerance=1e-13)
    assert_close(
        jax.tree.map(lambda leaf: leaf.reshape(-1, FEATURES), carry), flat_carry, tolerance=1e-13
    )


def test_a_carry_of_another_batch_is_one_sentence():
    cell, params, xs, _ = setting("lstm")
    for batch in ((), (BATCH + 1,), (STEPS, BATCH)):
        with pytest.raises(ValueError, match="carry") as error:
            rg.unroll(cell, params, xs, cell.initial(batch))
        assert "\n" not in str(error.value)


# In a shard_map each device has rows of the batch


SHARDED = [
    *(("scan", name) for name in ("lstm", "gato2", "rmc")),
    *(("fused", name) for name in ("ur_gru", "slstm", "gato1", "gato2")),
    *(("parallel", name) for name in ("minlstm", "lru")),
    *(("newton", name) for name in ("gato1", "gato2")),
]


@pytest.mark.parametrize(
    ("backend", "name"),
    thinned(
        SHARDED,
        lambda backend, name: name in ("lstm", "ur_gru", "minlstm"),
        pytest.mark.long,
    ),
)
def test_shard_map_needs_no_carry(backend, name):
    cell = rg.CELLS[name](4, param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(3, 200, BATCH, INPUTS)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    rows, resets = P(None, "batch"), jnp.asarray(np.arange(200)[:, None] == [50, 100, 199])

    def outputs(params, xs, resets):
        return rg.unroll(cell, params, xs, resets=resets, backend=backend)[1]

    def loss(outputs, params, xs):
        return jnp.sum(jnp.sin(outputs(params, xs, resets)))

    gradient = quick_jit(jax.grad(loss, argnums=(1, 2)), static_argnums=0)
    mapped = jax.shard_map(outputs, mesh=mesh, in_specs=(P(), rows, rows), out_specs=rows)
    assert_close(gradient(mapped, params, xs), gradient(outputs, params, xs))
