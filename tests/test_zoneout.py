"""Zoneout against its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import recurrent_gates as rg
from tests import reference
from tests.support import array, assert_close, assert_identical, parameters, quick_jit, to_numpy
from tests.test_carry import FEATURES, INPUTS, LSTM, STEPS, every_mask, mean_over, setting

pytestmark = pytest.mark.usefixtures("x64")


def zoneout(batch=(2,), p=0.5, **how):
    cell, params, carry, xs = setting(batch)
    fns = (rg.Zoneout(p=p, field="c"), rg.Zoneout(p=p, field="h"))
    run = quick_jit(
        lambda fns, noise: rg.unroll(
            cell, params, xs, carry, carry_fns=fns, noise=noise, backend="scan", **how
        )
    )
    return cell, params, carry, xs, fns, run


def test_a_raw_key_draws_what_a_typed_key_draws():
    """At F = 2 a raw key of two numbers could be taken for a mask of its units."""
    cell = rg.LSTM(2, param_dtype=jnp.float64)
    params, xs = parameters(cell, INPUTS), array(8, STEPS, 2, INPUTS)
    fns = (rg.Zoneout(p=0.5, field="c"), rg.Detach(p=0.5))
    raw, typed = (
        rg.unroll(cell, params, xs, carry_fns=fns, key=make(1))
        for make in (jax.random.PRNGKey, jax.random.key)
    )
    assert_identical(raw, typed)


def test_zoneout_keeps_old_units_by_its_mask():
    _, params, carry, xs, fns, run = zoneout()
    masks = [np.random.default_rng(seed).random((STEPS, 2, FEATURES)) < 0.5 for seed in (0, 1)]
    last, ys = run(fns, tuple(map(jnp.asarray, masks)))

    def after(t, old, new):
        return tuple(np.where(mask[t], o, n) for mask, o, n in zip(masks, old, new, strict=True))

    step = functools.partial(reference.lstm, to_numpy(params))
    _, expected, expected_ys = reference.unroll(
        step, to_numpy(tuple(carry)), np.asarray(xs), emit=lambda c: c[1], after=after
    )
    assert_close(tuple(last), expected)
    assert_close(ys, expected_ys)


@pytest.mark.parametrize("random", [True, False])
def test_the_two_ends_of_zoneout(random):
    how = dict(key=jax.random.key(0)) if random else dict(deterministic=True)
    _, _, carry, _, _, run = zoneout(p=1.0, **how)
    last, ys = run((rg.Zoneout(p=1.0, field="c"), rg.Zoneout(p=1.0, field="h")), None)
    assert_identical(last, carry)
    assert_identical(ys, jnp.broadcast_to(carry.h, ys.shape))
    never = (rg.Zoneout(p=0.0, field="c"), rg.Zoneout(p=0.0, field="h"))
    assert_close(run(never, None), run((), None), tolerance=1e-14)
    with (
        jax.disable_jit()
    ):  # each operation rounds by itself: no product and sum contracted into one
        assert_identical(run(never, None), run((), None))


@pytest.mark.parametrize(("field", "p"), [("h", 0.05), ("c", 0.5)])
def test_the_deterministic_form_is_the_mean_for_one_step(field, p):
    """z is the probability of keeping: over all 2^F masks the mean is z * old + (1 - z) * new."""
    cell, params, carry, xs = setting()
    fn = rg.Zoneout(p=p, field=field)

    def one_step(noise, **how):
        return rg.unroll(
            cell, params, xs[:1], carry, carry_fns=(fn,), noise=noise, backend="scan", **how
        )[0]

    mean = mean_over(every_mask(FEATURES), p, lambda mask: one_step((mask[None],)))
    deterministic = quick_jit(lambda: one_step(None, deterministic=True))()
    assert_close(mean, deterministic)
    new = reference.lstm(to_numpy(params), to_numpy(tuple(carry)), np.asarray(xs[0]))
    place = LSTM.index(field)
    assert_close(getattr(deterministic, field), p * np.asarray(carry[place]) + (1 - p) * new[place])


def test_zoneout_draws_per_step_example_and_unit():
    steps, batch, p = 200, 25, 0.2
    fn = rg.Zoneout(p=p)
    noise = fn.draw(jax.random.key(1), steps, (batch,))
    old, new = rg.HiddenState(jnp.zeros((batch, 16))), rg.HiddenState(jnp.ones((batch, 16)))
    kept = 1 - np.asarray(
        quick_jit(jax.vmap(lambda n: fn.after(n, old, new).h))(noise)
    )  # [T, B, F]
    assert abs(kept.mean() - p) < 4 * np.sqrt(p * (1 - p) / kept.size)
    for a, b in (
        (kept[1:], kept[:-1]),
        (kept[:, 1:], kept[:, :-1]),
        (kept[..., 1:], kept[..., :-1]),
    ):
        assert abs((a * b).mean() - p * p) < 4 * np.sqrt(
            p * p / a.size
        )  # neighbours in each direction: independent


@pytest.mark.parametrize("shape", [(), (2,), (1,), (2, FEATURES), (1, FEATURES), (2, 1)])
def test_a_mask_begins_with_the_axes_of_the_batch(shape):
    mask = jnp.asarray(np.random.default_rng(0).random(shape) < 0.5)
    old, new = rg.HiddenState(array(0, 2, FEATURES)), rg.HiddenState(array(1, 2, FEATURES))
    by_axes = np.asarray(mask).reshape(shape + (1,) * (2 - len(shape)))
    expected = np.where(by_axes, old.h, new.h)
    assert_identical(rg.Zoneout(0.5).after(mask, old, new).h, expected)


@pytest.mark.parametrize("shape", [(FEATURES,), (3, FEATURES), (2, 1, 1), (2, FEATURES + 1)])
def test_a_mask_of_other_axes_is_one_sentence(shape):
    carry = rg.HiddenState(array(0, 2, FEATURES))
    with pytest.raises(ValueError, match=r"mask of Zoneout .* \[\*batch, F\]: field 'h' has shape"):
        rg.Zoneout(0.5).after(jnp.ones(shape, bool), carry, carry)


def test_a_mean_of_integers_is_one_sentence():
    old, new = (array(0, 2), jnp.arange(2)), (array(1, 2), jnp.arange(2) + 1)
    with pytest.raises(ValueError, match="no mean of integers, and field 1 holds int64: draw its"):
        rg.Zoneout(0.5, 1).after(None, old, new)
    mixture = rg.Zoneout(0.5, 1).after(jnp.array([True, False]), old, new)
    assert_identical(mixture, (new[0], jnp.array([0, 2])))


@struct.dataclass
class Fields:
    h: jax.Array


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda h: Fields(h), "an object of the class Fields"),
        (lambda h: [h], "a list of 1"),
        (lambda h: {"h": h}, "a mapping of h"),
    ],
)
@pytest.mark.parametrize("field", ["h", 0, None])
def test_carries_without_fields_are_one_sentence(make, kind, field):
    carry = make(array(0, 2))
    with pytest.raises(ValueError, match=f"NamedTuple, a tuple or one array, got {kind}"):
        rg.Zoneout(0.5, field).after(None, carry, carry)
