"""Whether the newton backend's iteration converges, what it does where it does not, its report."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from recurrent_gates.analysis import newton_report
from recurrent_gates.backends.newton import backend as newton
from recurrent_gates.backends.newton import shooting
from recurrent_gates.scan import Loop, Settings
from tests import test_newton
from tests.support import array, assert_close, parameters, quick_jit, state
from tests.test_newton import (
    BATCH,
    FEATURES,
    INPUTS,
    RESETS,
    STEPS,
    WIDTH,
    Grow,
    Run,
    build,
    compare,
    gato,
    results,
)

pytestmark = pytest.mark.usefixtures("x64")
small = test_newton.small  # the fixture


def test_few_passes_at_the_start():
    cell, params = gato(features=512)
    xs = array(1, 2000, 2, 4)
    found = newton_report(cell, params, xs)
    assert 1 <= found.passes <= 4
    assert found.gaps.size > 20
    assert found.gaps.max() < 1e-14
    assert not found.damped.any()
    assert not found.fell_back.any()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_linear_cell_is_solved_by_one_correction(reverse, small):
    """Its blocks forget nothing: slopes are right or the solution is not found. The first two
    passes do not know them, the third has it but for roundings."""
    cell = Grow()
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    found = newton_report(cell, params, xs, reverse=reverse)
    assert found.passes in (3, 4)
    assert not found.damped.any()
    assert not found.fell_back.any()


@pytest.mark.parametrize("scale", [10, 30])
@pytest.mark.long
def test_hard_parameters(scale):
    """Units that hold one of two states: Newton's method alone would correct a block at a time."""
    cell, params = gato(scale)
    xs = array(1, 1500, 2, 4)
    found = newton_report(cell, params, xs)
    assert found.passes > shooting.PLAIN  # it is hard
    assert not found.fell_back.any()
    operands = (params, xs, cell.initial((2,)), cell.initial((2,)))
    got, want = (results(cell, {}, backend, *operands) for backend in ("newton", "scan"))
    assert_close(got, want)


@pytest.mark.parametrize("reverse", [False, True])
def test_late_values_excuse_no_early_gaps(reverse):
    """Values grow to 1e62: a gap that is nothing to the last of them is much to the first. The
    cotangents grow as much, in the other order. Each step is judged by its own size."""
    cell = Run()
    params, xs = parameters(cell, INPUTS), array(8, 1500, BATCH, INPUTS)
    start = cell.initial((BATCH,))
    found = newton_report(cell, params, xs, reverse=reverse)
    assert found.passes <= shooting.PLAIN
    assert not found.fell_back.any()

    def run(backend):
        @quick_jit
        def pull(params, xs, start):
            def forward(*operands):
                how = dict(reverse=reverse, return_carries="all", backend=backend)
                return rg.unroll(cell, *operands, **how)[0]

            carries, pullback = jax.vjp(forward, params, xs, start)
            return carries, pullback(array(31, *carries.shape))

        return pull(params, xs, start)

    (carries, (d_params, d_xs, d_start)), want = run("newton"), run("scan")
    np.testing.assert_allclose(carries, want[0], rtol=1e-10)
    np.testing.assert_allclose(d_xs, want[1][1], rtol=1e-10, atol=1e-10)
    assert_close((d_params, d_start), (want[1][0], want[1][2]))


@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_that_do_not_converge_run_in_sequence_and_are_reported(
    reverse, small, monkeypatch, caplog
):
    """One pass and no correction: every block whose first guess is off has to be run again."""
    monkeypatch.setattr(shooting, "PASSES", 1)
    cell = Grow()
    # A number of steps of its own: programs of other tests know other constants.
    params, xs = parameters(cell, INPUTS), array(8, STEPS - 1, BATCH, INPUTS)
    found = newton_report(cell, params, xs, reverse=reverse)
    count = found.fell_back.size
    assert found.passes == 1
    assert not found.fell_back[0]
    assert found.fell_back[1:].all()
    monkeypatch.setattr("tests.test_newton.STEPS", STEPS - 1)
    with caplog.at_level(logging.WARNING, "recurrent_gates"):
        compare(cell, dict(reverse=reverse))
        jax.effects_barrier()
    said = {record.getMessage() for record in caplog.records}
    for direction in ("forward", "backward"):
        begin = f"Grow: backend newton ran {count - 1} of {count} blocks of time in sequence"
        assert any(line.startswith(f"{begin} ({direction})") for line in said), said


def test_a_hard_stretch_falls_back_alone(small, monkeypatch):
    """A cell that forgets, but for 12 steps in the middle: only the blocks after them are off."""
    monkeypatch.setattr(shooting, "PASSES", 1)
    monkeypatch.setattr(shooting, "ROUNDINGS", 1e6)
    monkeypatch.setattr(shooting, "WARM_UP", 5)

    def step(carry, x):
        slope = jnp.where(x[..., 1:] > 0, 1.0, 0.0)
        return slope * carry + x[..., :1]

    hold = (jnp.arange(120) >= 50) & (jnp.arange(120) < 62)
    inputs = jnp.stack([array(8, 120), jnp.where(hold, 1.0, -1.0)], axis=-1)
    start = jnp.zeros((1,))
    solve = quick_jit(functools.partial(shooting.solve, step))
    last, states, found = solve(start, inputs)
    _, want = jax.lax.scan(lambda c, x: (step(c, x),) * 2, start, inputs)
    assert_close(states, want)
    assert_close(last, want[-1])
    assert 1 <= found.fell_back.sum() <= 3
    length = 120 // found.fell_back.size
    assert set(np.flatnonzero(found.fell_back)) <= set(range(50 // length, 62 // length + 2))


def test_no_warning_where_it_converges(small, caplog):
    with caplog.at_level(logging.WARNING, "recurrent_gates"):
        compare(build("gato1"), {})
        jax.effects_barrier()
    assert not caplog.records


def test_nan_stays_where_the_scan_has_it(small):
    cell = build("gato1")
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS).at[14, 0].set(jnp.nan)

    def run(backend):
        how = dict(resets=RESETS, return_carries="all", backend=backend)
        return quick_jit(lambda xs: rg.unroll(cell, params, xs, **how))(xs)

    for got, want in zip(*map(jax.tree.leaves, (run("newton"), run("scan"))), strict=True):
        assert np.isnan(want).any()
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_nan_after_a_reset_reaches_no_gradient_before_it(small):
    """One example is reset at step 20, the other never; both read a NaN at step 25."""
    cell = build("gato1")
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS).at[25].set(jnp.nan)
    resets = jnp.zeros((STEPS, BATCH), bool).at[20, 0].set(True)

    def slopes(backend):
        def loss(xs):
            return rg.unroll(cell, params, xs, resets=resets, backend=backend)[1].sum()

        return np.asarray(quick_jit(jax.grad(loss))(xs))

    got, want = slopes("newton"), slopes("scan")
    assert np.isfinite(want[:20, 0]).all() and np.abs(want[:20, 0]).min() > 0
    assert np.isnan(want[:25, 1]).all()
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_parameters_that_have_diverged_cost_one_pass(small):
    cell = build("gato1")
    params = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), parameters(cell, INPUTS))
    found = newton_report(cell, params, array(8, STEPS, BATCH, INPUTS))
    assert found.passes == 1
    assert not found.fell_back.any()


def test_report_follows_the_arguments_of_unroll(small):
    """The first guess is made from the carry: a block that is all invalid holds it."""
    cell = build("gato1")
    params, xs, start = parameters(cell, INPUTS), array(8, 36, BATCH, INPUTS), state(cell, (BATCH,))
    nothing = jnp.zeros((36, BATCH), bool)
    assert newton_report(cell, params, xs, start, valid=nothing).passes == 1
    assert newton_report(cell, params, xs, start, resets=~nothing, reverse=True).passes == 1
    assert newton_report(cell, params, xs, start).passes > 1


def test_report_checks_its_arguments_as_unroll_does(small):
    cell = build("gato1")
    params, xs, start = parameters(cell, INPUTS), array(8, 36, BATCH, INPUTS), state(cell, (BATCH,))
    valid = jnp.ones((36, BATCH), bool).at[14].set(False)
    want = newton_report(cell, params, xs.at[14].set(0), start, valid=valid)
    got = newton_report(cell, params, xs.at[14].set(jnp.nan), tuple(start), valid=valid)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for wrong in (dict(valid=valid[1:]), dict(resets=valid[:, :1])):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"{name} must have shape .*36, {BATCH}"):
            newton_report(cell, params, xs, **wrong)
    with pytest.raises(ValueError, match="carry"):
        newton_report(cell, params, xs, state(cell, (BATCH + 1,)))
    with pytest.raises(ValueError, match="xs must be"):
        newton_report(cell, params, xs[0, 0])


@pytest.mark.parametrize("shape", [(36, 0, INPUTS), (0, BATCH, INPUTS)])
def test_nothing_is_reported_without_trouble(shape, small):
    cell = build("gato2")
    found = newton_report(cell, parameters(cell, INPUTS), jnp.zeros(shape))
    assert found.passes <= 1
    assert not found.fell_back.any()


def test_an_empty_batch_is_a_segment_of_nothing(small):
    """The driver gives it to the scan; the backend itself has no trouble with it either."""
    cell, xs = build("gato2"), jnp.zeros((36, 0, INPUTS))
    params, start = parameters(cell, INPUTS), cell.initial((0,))
    loop = Loop(Settings(cell, batch_dims=1, keep_carries=True), params, xs, start, start)
    assert newton.chunk(loop) is None
    out = jax.eval_shape(newton.segment, loop)
    assert out.ys.shape == (36, 0, FEATURES)
    assert out.carries.s.shape == (36, 0, WIDTH)
