"""GATO against its paper: eq. 3 by hand, bounds, wrapping, ablations, memorization (4.3)."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recurrent_gates as rg
from tests import reference
from tests.support import (
    array,
    assert_close,
    assert_identical,
    parameters,
    quick_jit,
    state,
    thinned,
    to_numpy,
)

pytestmark = pytest.mark.usefixtures("x64")

UNITS, INPUTS, STEPS = 4, 3, 7


def build(name, **settings):
    return rg.CELLS[name](2 * UNITS, **dict(param_dtype=jnp.float64) | settings)


def jacobian_by_hand(params, carry, xs):
    """The diagonals of dr_T/dr_t and ds_T/dr_t, T = t+1..: products of df and sums of dg (eq.
    3), per unit."""
    r, s = carry
    product, total = np.ones(UNITS), np.zeros(UNITS)
    rows = []
    for x in xs:
        df, dg = reference.gato_derivatives(params, r, x)
        total, product = total + dg * product, product * df
        rows.append((product, total))
        r, s = reference.gato(params, (r, s), x)
    return rows


@pytest.mark.parametrize("wrap", [None, "auto"])
@pytest.mark.parametrize("backend", ["scan", "fused"])
@pytest.mark.parametrize("name", ["gato1", "gato2"])
def test_all_four_blocks_of_the_jacobian(name, backend, wrap):
    cell = build(name, wrap=wrap)
    params, carry, xs = parameters(cell, INPUTS), state(cell, ()), array(8, STEPS, INPUTS)

    @quick_jit
    @jax.jacrev
    def jacobian(carry):
        return rg.unroll(cell, params, xs, carry, return_carries="all", backend=backend)[0]

    blocks = jacobian(carry)
    by_hand = jacobian_by_hand(to_numpy(params), to_numpy(tuple(carry)), np.asarray(xs))
    off_diagonal = ~np.eye(UNITS, dtype=bool)
    for t, (dr_dr, ds_dr) in enumerate(by_hand):
        np.testing.assert_array_equal(blocks.s.s[t], np.eye(UNITS))
        np.testing.assert_array_equal(blocks.r.s[t], np.zeros((UNITS, UNITS)))
        assert_close(np.diag(blocks.r.r[t]), dr_dr)
        assert_close(np.diag(blocks.s.r[t]), ds_dr)
        for block in (blocks.r.r[t], blocks.s.r[t]):
            np.testing.assert_array_equal(np.asarray(block)[off_diagonal], 0.0)


@pytest.mark.parametrize("backend", ["scan", "fused"])
@pytest.mark.parametrize("name", ["gato1", "gato2"])
def test_the_first_s_depends_on_the_first_r_only(name, backend):
    """s_1 = s_0 + g(r_0, x_1): f has no part in it."""
    cell = build(name)
    params, carry, xs = parameters(cell, INPUTS), state(cell, ()), array(8, 1, INPUTS)

    def s_1(params):
        return rg.unroll(cell, params, xs, carry, backend=backend)[0].s

    slopes = quick_jit(jax.jacrev(s_1))(params)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(slopes["f"]))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(slopes["g"]))


@pytest.mark.parametrize("backend", ["scan", "fused"])
@pytest.mark.parametrize("name", ["gato1", "gato2"])
def test_unrolled_states_are_the_papers(name, backend):
    cell = build(name)
    params, carry, xs = parameters(cell, INPUTS), state(cell, (2,)), array(8, STEPS, 2, INPUTS)
    run = quick_jit(lambda *args: rg.unroll(cell, *args, return_carries="all", backend=backend))
    carries, ys = run(params, xs, carry)
    step = functools.partial(reference.gato, to_numpy(params))
    expected, _, _ = reference.unroll(
        step, to_numpy(tuple(carry)), np.asarray(xs), emit=lambda c: c[1]
    )
    assert_close(carries.r, expected[0])
    assert_close(ys, np.concatenate([np.cos(expected[1]), expected[0]], axis=-1))
    assert_close(np.exp(1j * np.asarray(carries.s)), np.exp(1j * expected[1]))
    assert float(carries.s.min()) >= 0 and float(carries.s.max()) < 2 * np.pi


@given(st.sampled_from([0.5, 0.7, 0.9]), st.floats(0.1, 100.0), st.integers(0, 99))
def test_r_is_bounded_and_s_increases(rate, scale, seed):
    """Criterion 5: |r| <= 1 / (1 - lambda), whatever the parameters; softplus is positive."""
    cell = build("gato1", rate=rate, wrap=None)
    params, xs = parameters(cell, INPUTS, seed, scale), array(seed, 50, 2, INPUTS, scale=scale)
    carries, _ = long_run(cell, params, xs)
    r, s = np.asarray(carries.r), np.asarray(carries.s)
    assert np.abs(r).max() <= 1 / (1 - rate) + 1e-12
    assert (np.diff(s, axis=0) >= 0).all()
    if scale < 3:
        assert (np.diff(s, axis=0) > 0).all()


@quick_jit(static_argnums=0)
def long_run(cell, params, xs):
    return rg.unroll(cell, params, xs, return_carries="all", backend="scan")


@pytest.mark.parametrize("name", ["gato1", "gato2"])
def test_wrapping_changes_neither_outputs_nor_gradients(name):
    wrapped, plain = build(name), build(name, wrap=None)
    assert wrapped.period == 2 * np.pi and plain.period is None
    params, xs, cotangent = (
        parameters(plain, INPUTS),
        array(8, 40, 2, INPUTS),
        array(9, 40, 2, 2 * UNITS),
    )

    def run(cell):
        def loss(params, xs):
            ys = rg.unroll(cell, params, xs, backend="scan")[1]
            return jnp.sum(ys * cotangent), ys

        return quick_jit(jax.grad(loss, (0, 1), has_aux=True))(params, xs)

    (wrapped_grads, wrapped_ys), (plain_grads, plain_ys) = run(wrapped), run(plain)
    assert_close(wrapped_ys, plain_ys)
    assert_close(wrapped_grads, plain_grads)


def test_only_a_periodic_gamma_is_wrapped():
    assert build("gato1", gamma=jnp.sin).period is None
    assert build("gato1", gamma=jnp.sin, wrap=2 * np.pi).period == 2 * np.pi


@pytest.mark.parametrize("wrap", [None, 200 * math.pi, 1e6])
def test_cos_of_an_s_beyond_a_turn_is_the_platforms_own(wrap):
    cell = rg.GATO(4, wrap=wrap, emit_s_only=True)
    s = jnp.asarray([[600.3, 12345.6]], jnp.float32)
    z = jnp.zeros((1, 2), jnp.float32)
    assert_identical(cell.emit({}, rg.GATOState(0 * s, s), z), jnp.cos(s))


def test_wrapping_keeps_float32_exact_over_long_sequences():
    """Unwrapped, cos(s) of a float32 sum is off by hundredths after 16,384 steps."""
    double = build("gato1", wrap=None)
    params, xs = parameters(double, 1, scale=0.1), array(8, 16_384, 1)
    exact = np.cos(long_run(double, params, xs)[0].s)
    low = [jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (params, xs)]
    errors = []
    for wrap in ("auto", None):
        ys = long_run(build("gato1", wrap=wrap, param_dtype=jnp.float32), *low)[1]
        errors.append(np.abs(np.asarray(ys)[:, :UNITS] - exact).max())
    assert (
        errors[0] < 1e-3 and errors[1] > 10 * errors[0]
    )  # the increments' own rounding, 16,384 * 2^-25, is left


def test_s_does_not_stall_in_bfloat16():
    """A bfloat16 sum stops at 256, where half a unit in the last place exceeds the increments."""
    cell = build("gato1", wrap=None, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), parameters(cell, 1))
    carries, _ = long_run(cell, params, jnp.zeros((800, 1), jnp.float32))
    np.testing.assert_allclose(carries.s[-1], 800 * np.log(2), rtol=800 * 2**-24)


@pytest.mark.parametrize("wrap", [None, 0.5])
@pytest.mark.parametrize("s_update", ["zero", "replace"])
def test_ablations(s_update, wrap):
    """Appendix A: without the sum the identity block is gone."""
    cell = build("gato2", s_update=s_update, wrap=wrap)
    params, carry, xs = parameters(cell, INPUTS), state(cell, ()), array(8, STEPS, INPUTS)

    def run(carry):
        return rg.unroll(cell, params, xs, carry, return_carries="all", backend="scan")[0]

    carries, blocks = quick_jit(run)(carry), quick_jit(jax.jacrev(run))(carry)
    step = functools.partial(reference.gato, to_numpy(params), s_update=s_update)
    expected, _, _ = reference.unroll(
        step, to_numpy(tuple(carry)), np.asarray(xs), emit=lambda c: c[1]
    )
    r, s = expected
    assert_close(tuple(carries), (r, s if wrap is None else np.mod(s, wrap)))
    assert wrap is None or s_update == "zero" or s.max() > wrap
    np.testing.assert_array_equal(blocks.s.s, np.zeros((STEPS, UNITS, UNITS)))
    assert np.abs(blocks.r.r).min(axis=(1, 2)).max() == 0 and np.abs(blocks.r.r).max() > 0


def test_the_first_ablation_has_no_s_whatever_the_increment():
    class Ones(rg.GATO):
        @property
        def sums(self):
            return dataclasses.replace(
                super().sums, increment=lambda params, carry, z: {"s": jnp.ones_like(carry.r)}
            )

    cell = Ones(2 * UNITS, s_update="zero")
    carry, _ = rg.unroll(cell, parameters(cell, INPUTS), array(8, STEPS, INPUTS))
    np.testing.assert_array_equal(carry.s, np.zeros(UNITS))


def test_what_is_emitted():
    """[gamma(s), r], or gamma(s) alone; gamma is an argument."""
    xs = array(8, STEPS, 2, INPUTS)
    both, s_only, sine = (
        build("gato1"),
        build("gato1", emit_s_only=True),
        build("gato1", gamma=jnp.sin),
    )
    params = parameters(both, INPUTS)
    carries, ys = long_run(both, params, xs)
    assert_close(ys, np.concatenate([np.cos(carries.s), carries.r], axis=-1))
    assert_close(long_run(s_only, params, xs)[1], np.cos(carries.s))
    assert_close(
        long_run(sine, params, xs)[1], np.concatenate([np.sin(carries.s), carries.r], axis=-1)
    )


# Section 4.3: r counts, g stores its input in s at the count of its own unit.


@dataclasses.dataclass(frozen=True)
class Count(rg.GATOMap):
    def __call__(self, params, r, z):
        return r + 1.0


@dataclasses.dataclass(frozen=True)
class StoreAtCount(rg.GATOMap):
    def __call__(self, params, r, z):
        counts = jnp.arange(r.shape[-1], dtype=r.dtype).reshape((1,) * (r.ndim - 1) + r.shape[-1:])
        return jnp.where(r == counts, z, 0.0)


class Doubled(rg.GATO):
    """Adds twice what GATO adds."""

    @property
    def sums(self):
        once = super().sums

        def increment(params, carry_tm1, z):
            return jax.tree.map(lambda s: 2 * s, once.increment(params, carry_tm1, z))

        return dataclasses.replace(once, increment=increment)


def identity(x):
    return x


CAPACITY = 6


@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=0, max_size=CAPACITY))
def test_memorizes_any_sequence_of_at_most_j_numbers(sequence):
    cell = rg.GATO(
        2 * CAPACITY,
        f=Count(),
        g=StoreAtCount(),
        gamma=identity,
        emit_s_only=True,
        param_dtype=jnp.float64,
    )
    xs = np.zeros((CAPACITY, 1))
    xs[: len(sequence), 0] = sequence
    lengths = jnp.asarray(len(sequence))
    carry, _ = memorize(cell, jnp.asarray(xs), lengths)
    np.testing.assert_array_equal(
        carry.s, np.concatenate([sequence, np.zeros(CAPACITY - len(sequence))])
    )
    assert carry.r.tolist() == [len(sequence)] * CAPACITY


@quick_jit(static_argnums=0)
def memorize(cell, xs, lengths):
    params = cell.init_params(jax.random.key(0), 1)
    assert jax.tree.leaves(params) == []
    return rg.unroll(cell, params, xs, lengths=lengths, backend="scan")


def test_memorized_tokens_are_read_through_the_cosine():
    """At every step the cosines of s hold all tokens so far, in order: a decoder can condition
    on them."""
    cell = rg.GATO(
        2 * CAPACITY, f=Count(), g=StoreAtCount(), emit_s_only=True, param_dtype=jnp.float64
    )
    tokens = np.random.default_rng(0).integers(0, 10, (CAPACITY, 20))
    angles = jnp.asarray(tokens * np.pi / 10)[..., None]
    _, ys = memorize(cell, angles, jnp.full((20,), CAPACITY))
    read = np.rint(np.arccos(np.clip(ys, -1, 1)) * 10 / np.pi).astype(int)  # [T, B, J]
    for t in range(CAPACITY):
        np.testing.assert_array_equal(read[t, :, : t + 1], tokens[: t + 1].T)
        np.testing.assert_array_equal(read[t, :, t + 1 :], 0)


def test_a_two_layer_f_is_served_by_what_reads_its_parameters():
    """Its second layer is no product of the loop: auto leaves it to the scan."""
    cell = rg.GATO(8, f=rg.TwoLayer(hidden=3), param_dtype=jnp.float64)
    params, xs = parameters(cell, 3), array(1, 6, 2, 3)
    expected = rg.unroll(cell, params, xs, backend="scan")
    assert_close(rg.unroll(cell, params, xs), expected)
    assert_close(rg.unroll(cell, params, xs, backend="newton"), expected)
    with pytest.raises(ValueError, match="does not declare recurrent products"):
        rg.unroll(cell, params, xs, backend="fused")


def test_a_pair_of_maps_without_parameters_is_a_cell():
    cell = rg.GATO(2 * UNITS, f=Count(), g=StoreAtCount())
    carry, x = cell.initial((2,)), jnp.ones((2, 1), jnp.float32)
    _, y = cell.apply(cell.init(jax.random.key(0), carry, x), carry, x)
    assert_identical(y[:, UNITS:], jnp.ones((2, UNITS), jnp.float32))


@dataclasses.dataclass(frozen=True)
class Embedded(rg.GATOMap):
    """Reads tokens, which are integers, and, where it ``has_numbers``, numbers beside them."""

    has_numbers: bool = False

    def init(self, key, in_features, cell):
        return {"table": jax.random.normal(key, (5, cell.units), cell.param_dtype)}

    def project(self, params, x, dtype):
        tokens = x[..., 0].astype(jnp.int32)
        return {"id": tokens, "x": x} if self.has_numbers else tokens

    def __call__(self, params, r, z):
        tokens = z["id"] if self.has_numbers else z
        return jnp.tanh(0.5 * r + params["table"].astype(r.dtype)[tokens])


@pytest.mark.parametrize(
    ("maps", "kind", "dtype"),
    [
        (dict(f=Embedded(), g=Embedded()), jnp.int32, jnp.float64),
        (dict(f=Embedded(has_numbers=True), g=Embedded()), jnp.float32, jnp.float32),
        (dict(f=Embedded(), g=rg.OneLayer()), jnp.float32, jnp.float64),
    ],
)
def test_maps_that_read_integers_emit_numbers_of_floating_point(maps, kind, dtype):
    cell = build("gato1", **maps)
    params, xs = parameters(cell, 1), jnp.arange(10).reshape(5, 2, 1).astype(kind) % 5
    with jax.numpy_dtype_promotion("standard"):
        carries, ys = rg.unroll(cell, params, xs, return_carries="all")
        slope = jax.grad(lambda params: jnp.sum(rg.unroll(cell, params, xs)[1]))(params)
    assert ys.dtype == dtype
    expected = jnp.concatenate([jnp.cos(carries.s), carries.r], axis=-1)
    assert_close(ys, expected, 1e-6 if dtype == jnp.float32 else 1e-10)
    assert jnp.any(slope["f"]["table"])


ZONEOUTS = {
    "mean": ((rg.Zoneout(0.3, "s"),), dict(deterministic=True)),
    "means of all fields": (
        (rg.Zoneout(0.3, "s"), rg.Zoneout(0.2, "r"), rg.Zoneout(0.1, "s")),
        dict(deterministic=True),
    ),
    "drawn": ((rg.Zoneout(0.3, "s"),), dict(key=jax.random.key(1))),
    "a mean beside a drawn one": (
        (rg.Zoneout(0.3, "s"), rg.Zoneout(0.2, "s")),
        dict(noise=(None, np.random.default_rng(0).random((60, 2, UNITS)) < 0.2)),
    ),
}


@pytest.mark.parametrize(
    ("name", "backend", "zoneout"),
    thinned(  # in a full run every pair of two of them
        (
            (("gato1", "gato2")[(a + b) % 2], backend, zoneout)
            for a, backend in enumerate(["scan", "fused", "pallas", "newton"])
            for b, zoneout in enumerate(ZONEOUTS)
        ),
        lambda name, backend, zoneout: (
            backend in ("scan", "fused") or zoneout in ("means of all fields", "drawn")
        ),
        long=lambda name, backend, zoneout: (
            zoneout == ("means of all fields" if backend in ("scan", "pallas") else "mean")
            or (backend, zoneout) == ("fused", "a mean beside a drawn one")
        ),
    ),
)
def test_zoneout_of_a_wrapped_s_is_that_of_the_sums(name, backend, zoneout):
    """Values and gradients of s within its period are those of s without one, which goes around
    often; masks and resets included."""
    fns, how = ZONEOUTS[zoneout]
    steps = 60
    wrapped = build(name, **dict(hidden=3) if name == "gato2" else {})
    plain = wrapped.clone(wrap=None)
    params, xs = parameters(wrapped, INPUTS, scale=1.0), array(4, steps, 2, INPUTS)
    resets = jnp.zeros((steps, 2), bool).at[25, 0].set(True)
    valid = jnp.ones((steps, 2), bool).at[40:44, 1].set(False)
    wanted, carried = array(5, steps, 2, 2 * UNITS), array(6, steps, 2, UNITS)

    def run(cell, backend):
        def loss(params, xs):
            carries, ys = rg.unroll(
                cell,
                params,
                xs,
                carry_fns=fns,
                resets=resets,
                valid=valid,
                return_carries="all",
                backend=backend,
                **how,
            )
            total = jnp.sum(wanted * ys) + jnp.sum(carried * jnp.sin(carries.s))
            return total, (ys, jnp.cos(carries.s), jnp.sin(carries.s), carries.s)

        return quick_jit(jax.grad(loss, (0, 1), has_aux=True))(params, xs)

    if backend == "newton" and zoneout != "drawn":
        with pytest.raises(ValueError, match="mean of zoneout"):
            run(wrapped, backend)
        return
    grads, (*values, s) = run(wrapped, backend)
    expected_grads, (*expected, total) = run(plain, "scan")
    assert total.max() > 6 * math.pi and s.max() <= 2 * math.pi + 1e-9 and s.min() >= -1e-9
    assert_close(values, expected)
    assert_close(grads, expected_grads)


def test_a_mean_that_a_period_loses_is_refused():
    """s that is replaced is no sum: its mean with a value that went around is not known."""
    cell = build("gato1", s_update="replace")
    params, xs = parameters(cell, INPUTS), array(4, STEPS, INPUTS)
    how = dict(carry_fns=(rg.Zoneout(0.5, "s"),), deterministic=True)
    with pytest.raises(ValueError, match="wrap=None"):
        rg.unroll(cell, params, xs, **how)
    carries, _ = rg.unroll(cell.clone(wrap=None), params, xs, return_carries="all", **how)
    added = cell.sums.increment(
        params,
        jax.tree.map(lambda leaf: jnp.concatenate([jnp.zeros((1, UNITS)), leaf[:-1]]), carries),
        cell.project(params, xs),
    )["s"]
    s = np.zeros(UNITS)
    for t in range(STEPS):
        s = (s + np.asarray(added[t])) / 2
        assert_close(carries.s[t], s)
    still = build("gato1", s_update="zero")
    carry, _ = rg.unroll(still, params, xs, state(still, ()), **how)
    assert_close(carry.s, state(still, ()).s / 2**STEPS)


class Rolled(rg.Gate):
    """f of a unit reads the unit beside it."""

    def activate(self, pre):
        f, i = super().activate(pre)
        return jnp.roll(f, 1, axis=-1), i


def test_a_gate_that_mixes_units_is_not_diagonal(x32):
    cell = rg.GATO(8, f=rg.GatedDecay(gate=Rolled()))
    assert rg.GATO(8, f=rg.GatedDecay(gate=rg.Gate())).diagonal and not cell.diagonal
    params = cell.init_params(jax.random.key(0), 3)
    with pytest.raises(ValueError, match="does not say that its recurrent Jacobian is diagonal"):
        rg.unroll(cell, params, array(1, 4, 2, 3), backend="newton")


def test_pairs_for_a_uniform_gate(x32):
    with pytest.raises(ValueError, match="at least 3 pairs of r and s, a hidden size of 6; got 4"):
        rg.CELLS["ur_gato"](4)
    rg.CELLS["ur_gato"](6).init_params(jax.random.key(0), 3)
