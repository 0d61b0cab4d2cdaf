"""What acts on carries: h-detach by its theorems, damping as its mean, functions of one's own."""

import functools
import itertools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import recurrent_gates as rg
from recurrent_gates.carry import scale_gradient
from tests import reference
from tests.support import (
    array,
    assert_close,
    assert_identical,
    dot,
    parameters,
    quick_jit,
    randomize,
    state,
    to_numpy,
)
from tests.test_golden import initial, problem

pytestmark = pytest.mark.usefixtures("x64")

FEATURES, INPUTS, STEPS = 3, 2, 6
LSTM = ("c", "h")


def lstm(**settings):
    return rg.LSTM(FEATURES, param_dtype=jnp.float64, **settings)


@functools.cache
def setting(batch=()):
    cell = lstm()
    return cell, parameters(cell, INPUTS), state(cell, batch), array(8, STEPS, *batch, INPUTS)


def gradient(
    cell, params, xs, carry, cotangents, carry_fns=(), noise=None, backend="scan", **options
):
    """Gradients of a random linear loss on all outputs and the last carry, and the values."""

    def loss(params, xs, carry):
        out = rg.unroll(
            cell, params, xs, carry, carry_fns=carry_fns, noise=noise, backend=backend, **options
        )
        return dot(out, cotangents), out

    return jax.grad(loss, (0, 1, 2), has_aux=True)(params, xs, carry)


def cotangents(cell, batch=()):
    carry = cell.initial(batch)
    return jax.tree.map(lambda leaf: array(13, *leaf.shape), carry), array(
        14, STEPS, *batch, FEATURES
    )


# h-detach: the theorems.


def forward_by_matrices(params, carry, xs, xi, weight):
    """z_t of Theorem 2 for every t: products of (A_t + xi_t B_t) on z_0 = (0, 0, 1)."""
    width = len(carry[0])
    z, rows = np.concatenate([np.zeros(2 * width), np.ones(width)]), []
    for x, xi_t in zip(xs, xi, strict=True):
        a, b, carry = reference.detach_matrices(params, carry, x, *weight)
        z = (a + xi_t * b) @ z
        rows.append(z[: 2 * width].reshape(2, width))
    return np.stack(rows)  # [T, (c, h), F]


def all_weights(params):
    for role in ("kernel", "recurrent_kernel"):
        for slot in ("f", "i", "o", "u"):
            for row, column in np.ndindex(params[role][slot].shape):
                yield role, slot, row, column


def check_against_matrices(xi, carry_fn, noise, backend):
    """The Jacobian of every c_t and h_t in every weight, by autodiff and by the product of
    matrices."""
    cell, params, carry, xs = setting()

    def states(params):
        options = dict(carry_fns=(carry_fn,) if carry_fn else (), noise=noise, return_carries="all")
        return rg.unroll(cell, params, xs, carry, backend=backend, **options)[0]

    jacobian = to_numpy(quick_jit(jax.jacrev(states))(params))
    plain = (to_numpy(params), to_numpy(tuple(carry)), np.asarray(xs))
    for weight in all_weights(params):
        role, slot, row, column = weight
        expected = forward_by_matrices(*plain, xi, weight)
        for field, values in zip(LSTM, np.moveaxis(expected, 1, 0), strict=True):
            assert_close(getattr(jacobian, field)[role][slot][..., row, column], values)


@pytest.mark.parametrize("backend", ["scan", "fused"])
def test_theorem_1_the_plain_gradient(backend):
    check_against_matrices(np.ones(STEPS), None, None, backend)


@pytest.mark.parametrize("backend", ["scan", "fused"])
@pytest.mark.parametrize("mask", [(0, 1, 0, 0, 1, 0), (1, 0, 1, 1, 0, 1), (1,) * 6])
def test_theorem_2_a_detached_step_drops_its_b(mask, backend):
    noise = (jnp.asarray(mask, bool),)
    check_against_matrices(1 - np.asarray(mask), rg.Detach(p=0.5), noise, backend)


@pytest.mark.parametrize("backend", ["scan", "fused"])
@pytest.mark.parametrize("p", [0.25, 0.5])
def test_corollary_1_damping_is_the_product_of_expectations(p, backend):
    """p is the probability of detaching, so B_t is damped by 1 - p (the paper's theorems count
    the other way)."""
    check_against_matrices(np.full(STEPS, 1 - p), rg.Damp(p=p), (None,), backend)


def every_mask(bits):
    return np.asarray(list(itertools.product((False, True), repeat=bits)))


def mean_over(masks, p, function):
    """The mean of a tree-valued function over all masks, each weighted by its probability."""
    weights = (p**masks * (1 - p) ** ~masks).reshape(len(masks), -1).prod(axis=1)
    assert abs(weights.sum() - 1) < 1e-12
    trees = quick_jit(jax.vmap(function))(jnp.asarray(masks))
    return jax.tree.map(lambda leaf: np.tensordot(weights, np.asarray(leaf), axes=1), trees)


@pytest.mark.parametrize("backend", ["scan", "fused"])
@pytest.mark.parametrize(("field", "p"), [("h", 0.25), ("c", 0.25), ("h", 0.6)])
def test_the_mean_over_all_masks_is_the_damped_gradient(field, p, backend):
    cell, params, carry, xs = setting()
    wanted = cotangents(cell)

    def detached(mask):
        fns = (rg.Detach(p=p, field=field),)
        return gradient(cell, params, xs, carry, wanted, fns, (mask,), backend)[0]

    damped = quick_jit(
        lambda: gradient(
            cell, params, xs, carry, wanted, (rg.Damp(p=p, field=field),), None, backend
        )[0]
    )
    assert_close(mean_over(every_mask(STEPS), p, detached), damped())


@pytest.mark.parametrize("cell_name", ["gru", "rnn", "gato2"])
def test_the_mean_over_all_masks_holds_for_other_cells(cell_name):
    cell = rg.CELLS[cell_name](4, param_dtype=jnp.float64)
    params, carry, xs, p = parameters(cell, INPUTS), state(cell, ()), array(8, STEPS, INPUTS), 0.4
    field = "r" if cell_name == "gato2" else "h"
    wanted = jax.tree.map(
        lambda leaf: array(3, *leaf.shape), (cell.initial(()), jnp.zeros((STEPS, 4)))
    )

    def run(fn, noise):
        return gradient(cell, params, xs, carry, wanted, (fn,), noise)[0]

    mean = mean_over(every_mask(STEPS), p, lambda mask: run(rg.Detach(p=p, field=field), (mask,)))
    assert_close(mean, quick_jit(run)(rg.Damp(p=p, field=field), None))


@pytest.mark.parametrize("shared", [True, False])
def test_the_mean_over_all_masks_holds_for_two_layers(shared):
    """With one mask for both layers (2^6 masks), and with a mask of its own for each (2^12)."""
    stack, p = rg.Stack((lstm(), lstm()), time_major=True, backend="scan"), 0.3
    xs, wanted = array(8, STEPS, INPUTS), array(9, STEPS, FEATURES)
    params = randomize(stack.init(jax.random.key(0), xs), 1)

    def run(fn, noise):
        def loss(params, xs):
            return dot(stack.apply(params, xs, carry_fns=(fn,), noise=noise), wanted)

        return jax.grad(loss, (0, 1))(params, xs)

    def detached(mask):
        own = (mask, mask) if shared else (mask[:STEPS], mask[STEPS:])
        return run(rg.Detach(p=p), [(layer,) for layer in own])

    mean = mean_over(every_mask(STEPS if shared else 2 * STEPS), p, detached)
    assert_close(mean, quick_jit(lambda: run(rg.Damp(p=p), [(None,), (None,)]))())


# h-detach: values and ends.


@pytest.mark.parametrize(
    ("carry_fn", "mask_shape"),
    [
        (rg.Detach(p=0.5), (STEPS,)),
        (rg.Detach(p=0.5, field="c"), (STEPS,)),
        (rg.Detach(p=0.5, per_example=True), (STEPS, 4)),
        (rg.Damp(p=0.5), None),
        (rg.Damp(p=0.9, field="c"), None),
    ],
)
@pytest.mark.parametrize("backend", ["scan", "fused"])
def test_forward_bits_are_untouched(carry_fn, mask_shape, backend):
    """No mask changes a bit, and step by step neither does having the function at all.

    Two programs that XLA compiles may contract multiply-adds differently, so against the plain
    one the jitted values are held to a rounding.
    """
    cell, params, carry, xs = setting((4,))

    def run(fns, noise):
        return rg.unroll(cell, params, xs, carry, carry_fns=fns, noise=noise, backend=backend)

    jitted, masks = jax.jit(run), [None]
    if mask_shape:
        draws = (np.random.default_rng(seed).random(mask_shape) for seed in range(5))
        masks = [jnp.zeros(mask_shape, bool), *(jnp.asarray(draw < 0.5) for draw in draws)]
    first = jitted((carry_fn,), (masks[0],))
    assert_close(first, jitted((), None), 1e-14)
    for mask in masks[1:]:
        assert_identical(jitted((carry_fn,), (mask,)), first)
    with jax.disable_jit():
        assert_identical(run((carry_fn,), (masks[-1],)), run((), None))


@pytest.mark.parametrize(("p", "golden"), [(0.0, "lstm_plain"), (1.0, "lstm_h_detach_all")])
@pytest.mark.parametrize("per_example", [False, True])
def test_the_two_ends_of_p(p, golden, per_example):
    """p = 0 is the plain gradient, p = 1 the published code's with every h detached."""
    cell, params, grads, data, _, _ = problem(golden)
    wanted = (jax.tree.map(jnp.zeros_like, initial(data)), jnp.asarray(data["cotangent"]))
    fns = (rg.Detach(p=p, per_example=per_example),)
    run = quick_jit(lambda *args: gradient(cell, *args, wanted, fns, key=jax.random.key(0)))
    (grad_params, grad_x, _), _ = run(params, jnp.asarray(data["x"]), initial(data))
    assert_close(grad_params, grads)
    assert_close(grad_x, data["grad_x"])


def test_the_loss_at_the_end_still_reaches_the_parameters():
    """With every h detached the last loss goes through y_T itself: o's weights see step T and no
    other."""
    cell, params, carry, xs = setting((2,))
    wanted = array(9, 2, FEATURES)

    def loss(params):
        _, ys = rg.unroll(
            cell,
            params,
            xs,
            carry,
            carry_fns=(rg.Detach(p=1.0),),
            key=jax.random.key(0),
            backend="scan",
        )
        return dot(ys[-1], wanted)

    slope = quick_jit(jax.grad(loss))(params)
    step = functools.partial(reference.lstm, to_numpy(params))
    carries, _, _ = reference.unroll(
        step, to_numpy(tuple(carry)), np.asarray(xs), emit=lambda c: c[1]
    )
    x, h_tm1, c = np.asarray(xs)[-1], carries[1][-2], carries[0][-1]
    o = reference.sigmoid(reference.affine(to_numpy(params), "o", x, h_tm1))
    delta = np.asarray(wanted) * np.tanh(c) * o * (1 - o)
    assert_close(slope["kernel"]["o"], x.T @ delta)
    assert_close(slope["recurrent_kernel"]["o"], h_tm1.T @ delta)
    assert_close(slope["bias"]["o"], delta.sum(axis=0))
    for leaf in jax.tree.leaves(slope):
        assert np.abs(leaf).max() > 1e-6


def test_detaching_all_of_the_carry_leaves_one_step():
    """With both c and h detached nothing earlier than step T gets a gradient from y_T."""
    cell, params, carry, xs = setting()
    fns = (rg.Detach(p=1.0), rg.Detach(p=1.0, field="c"))

    def last(xs):
        return rg.unroll(
            cell, params, xs, carry, carry_fns=fns, key=jax.random.key(0), backend="scan"
        )[1][-1].sum()

    slope = np.asarray(quick_jit(jax.grad(last))(xs))
    np.testing.assert_array_equal(slope[:-1], 0.0)
    assert np.abs(slope[-1]).min() > 0


@pytest.mark.parametrize("p", [None, 0.25])
def test_second_derivatives_are_those_of_stop_gradient(p):
    """Of Detach by a mask, or of Damp with p, beside lax.stop_gradient in a loop by hand."""
    cell, *operands = setting((2,))
    params, carry, xs = operands[0], operands[1], operands[2][:3]
    mask = np.array([False, True, False])
    fn, noise = (rg.Detach(0.5), mask) if p is None else (rg.Damp(p), None)
    shares = mask.astype(float) if p is None else np.full(3, p)

    def by_hand(params, carry, xs):
        ys = []
        for x, share in zip(xs, shares, strict=True):
            read = (1 - share) * carry.h + share * jax.lax.stop_gradient(carry.h)
            carry = cell.step(params, carry._replace(h=read), cell.project(params, x))
            ys.append(carry.h)
        return jnp.stack(ys)

    def unrolled(backend, params, carry, xs):
        options = dict(carry_fns=(fn,), noise=(noise,), backend=backend)
        return rg.unroll(cell, params, xs, carry, **options)[1]

    def slopes(run):
        def penalty(*operands):
            loss = jax.grad(lambda *operands: jnp.sum(jnp.sin(run(*operands))), (0, 1, 2))
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(loss(*operands)))

        return quick_jit(jax.grad(penalty, (0, 1, 2)))(params, carry, xs)

    reference_slopes = slopes(by_hand)
    for backend in ("scan", "fused"):
        assert_close(slopes(functools.partial(unrolled, backend)), reference_slopes)


@pytest.mark.parametrize("scale", [0.0, 0.25])
def test_a_scaled_gradient_is_scaled_again(scale):
    """In values as they are, -0 and what is not finite included; the scale has no gradient."""
    x = jnp.array([-0.0, 0.0, 0.1, -3.7, jnp.inf, jnp.nan])
    value, _ = jax.jvp(lambda x: scale_gradient(x, jnp.float64(scale)), (x,), (x,))
    assert_identical(value, x)
    np.testing.assert_array_equal(np.signbit(value[:2]), [True, False])

    def slope(x, scale):
        return jax.grad(lambda x: x**2 * scale_gradient(x, scale) ** 3)(x)  # 2 x^4 + 3 s x^4

    of_x, of_scale = jax.grad(slope, (0, 1))(1.5, jnp.float64(scale))
    # By the product rule: the factor that is read through the scale counts s times each time.
    assert_close(of_x, 1.5**3 * (2 + 2 * 2 * 3 * scale + 6 * scale**2))
    assert of_scale == 0


def test_per_example_masks_act_on_their_own_example():
    cell, params, carry, xs = setting((4,))
    wanted = cotangents(cell, (4,))
    masks = np.random.default_rng(1).random((STEPS, 4)) < 0.5
    fns = (rg.Detach(p=0.5, per_example=True),)
    whole = quick_jit(
        lambda: gradient(cell, params, xs, carry, wanted, fns, (jnp.asarray(masks),))[0]
    )()
    alone = quick_jit(
        lambda n, mask: gradient(
            cell,
            params,
            xs[:, n],
            jax.tree.map(lambda leaf: leaf[n], carry),
            (jax.tree.map(lambda leaf: leaf[n], wanted[0]), wanted[1][:, n]),
            (rg.Detach(p=0.5),),
            (mask,),
        )[0]
    )
    examples = [alone(n, masks[:, n]) for n in range(4)]
    assert_close(
        whole[0], jax.tree.map(lambda *leaves: sum(leaves), *(example[0] for example in examples))
    )
    assert_close(whole[1], np.stack([example[1] for example in examples], axis=1))


# Draws.


def test_detach_draws_one_number_a_step_or_one_per_example():
    key = jax.random.key(3)
    shared = rg.Detach(p=0.25).draw(key, 40_000, (8,))
    own = rg.Detach(p=0.25, per_example=True).draw(key, 5_000, (4, 2))
    assert shared.shape == (40_000,) and own.shape == (5_000, 4, 2)
    for mask in (shared, own):  # 0.25 is the probability of detaching
        assert abs(float(mask.mean()) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 40_000)
        steps = np.asarray(mask).reshape(len(mask), -1)[:, 0]
        together = np.mean(steps[1:] & steps[:-1])  # neighbouring steps are independent
        assert abs(together - 1 / 16) < 4 * np.sqrt(1 / 16 / len(steps))
    for p, value in ((0.0, False), (1.0, True)):
        assert set(np.asarray(rg.Detach(p=p).draw(key, 1000, ())).tolist()) == {value}
    assert rg.Damp(p=0.5).draw(key, 4, (2,)) is None


def test_functions_of_one_list_draw_apart():
    first, second, none = rg.draw_noise(
        (rg.Detach(p=0.5), rg.Detach(p=0.5), rg.Damp(p=0.5)), jax.random.key(0), 64, ()
    )
    assert none is None and 16 < int((first != second).sum()) < 48
    again = rg.draw_noise((rg.Detach(p=0.5),), jax.random.key(0), 64, ())
    assert_identical(again[0], first)


EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, recurrent_gates as rg
from jax.sharding import Mesh, NamedSharding, PartitionSpec

assert jax.device_count() == 8
cell = rg.LSTM(4)
params = cell.init_params(jax.random.key(0), 2)
xs = jax.random.normal(jax.random.key(1), (5, 16, 2))
fns = (rg.Detach(p=0.5, per_example=True), rg.Zoneout(p=0.5, field="c"))

@jax.jit
def masks(key):
    detach, keys = rg.draw_noise(fns, key, 5, (16,))
    return detach, jax.random.key_data(keys)

@jax.jit
def run(params, xs, key):
    loss = lambda params: (rg.unroll(cell, params, xs, carry_fns=fns, key=key)[1] ** 2).sum()
    return jax.value_and_grad(loss)(params)

mesh = Mesh(np.array(jax.devices()), ("batch",))
place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))
key = jax.random.key(2)
for one, eight in zip(masks(key), masks(place(key)), strict=True):
    np.testing.assert_array_equal(one, eight)
one, eight = run(params, xs, key), run(place(params), place(xs, None, "batch"), place(key))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), one, eight)

# Each device computes its own part of the batch: no array is gathered.
for name in ("lstm", "gato1", "gato2"):
    cell = rg.CELLS[name](4)
    params = cell.init_params(jax.random.key(0), 2)
    loss = lambda params, xs: (rg.unroll(cell, params, xs)[1] ** 2).sum()
    inputs = (place(params), place(xs, None, "batch"))
    text = jax.jit(jax.value_and_grad(loss)).lower(*inputs).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text, name
print("equal")
"""


def test_masks_are_the_same_on_one_and_on_eight_devices():
    """The draws bit for bit; the loss and its gradient up to the order of float32 sums over 16."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES],
        capture_output=True,
        text=True,
        cwd=pathlib.Path(rg.__file__).parent.parent,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.strip() == "equal", done.stderr


# Fields, order, one's own functions.


@struct.dataclass
class Scale(rg.CarryFn):
    """A carry function of one's own: multiplies what the step reads, adds to what is kept."""

    added: float = 0.0

    def before(self, noise_t, carry):
        return carry._replace(h=carry.h * self.p)

    def after(self, noise_t, prev, new):
        return new._replace(h=new.h + self.added)


@struct.dataclass
class OwnZoneout(rg.Zoneout):
    """Uses its noise in a way of its own."""

    def after(self, noise_t, prev, new):
        return super().after(noise_t, new, prev)


@struct.dataclass
class OwnDetach(rg.Detach):
    """Detaches where its noise is False."""

    def before(self, noise_t, carry):
        return super().before(~noise_t, carry)


def test_a_subclass_promises_nothing():
    """Nor does fused skip the products of a step where only the parent would be detached."""
    for own in (rg.Detach, rg.Damp, rg.Zoneout):
        derived = type("Derived", (own,), {"__annotations__": {}})(0.5)
        assert own(0.5).elementwise and not derived.elementwise
        assert derived.changes_values and not derived.chooses
    assert not rg.Detach(0.5).changes_values and rg.Zoneout(0.5).chooses
    cell, params, carry, xs = setting()
    noise = jnp.asarray([True, False, True, True, False, True])

    def gradient(fn, noise, backend):
        def loss(params):
            how = dict(carry_fns=[fn], noise=[noise], backend=backend)
            return rg.unroll(cell, params, xs, carry, **how)[1].sum()

        return quick_jit(jax.grad(loss))(params)

    want = gradient(rg.Detach(0.5), ~noise, "scan")
    assert_close(gradient(OwnDetach(0.5), noise, "fused"), want)


def test_functions_act_left_to_right_around_the_step():
    cell = rg.CELLS["rnn"](FEATURES, param_dtype=jnp.float64)
    params, carry, xs = parameters(cell, INPUTS), state(cell, ()), array(8, 1, INPUTS)
    zone = rg.Zoneout(p=0.5)
    how = dict(deterministic=True, backend="scan")
    plain = reference.elman(to_numpy(params), (0.5 * np.asarray(carry.h),), np.asarray(xs[0]))[0]
    own = Scale(p=0.5, added=10.0)
    first, _ = rg.unroll(cell, params, xs, carry, carry_fns=(own, zone), **how)
    assert_close(first.h, 0.5 * np.asarray(carry.h) + 0.5 * (plain + 10.0))
    last, _ = rg.unroll(cell, params, xs, carry, carry_fns=(zone, own), **how)
    assert_close(last.h, 0.5 * np.asarray(carry.h) + 0.5 * plain + 10.0)


def test_fields_by_name_by_index_and_none():
    named = rg.LSTMState(c=array(0, 3), h=array(1, 3))
    for fn, carry in (
        (rg.Damp(p=1.0, field="h"), named),
        (rg.Damp(p=1.0, field=1), named),
        (rg.Damp(p=1.0, field=-1), tuple(named)),
        (rg.Damp(p=1.0, field=None), named.h),
    ):
        assert_identical(fn.before(None, carry), carry)
        slope = jax.grad(
            lambda carry, fn=fn: sum(map(jnp.sum, jax.tree.leaves(fn.before(None, carry))))
        )(carry)
        leaves = jax.tree.leaves(slope)
        np.testing.assert_array_equal(leaves[-1], 0.0)
        for other in leaves[:-1]:
            np.testing.assert_array_equal(other, 1.0)


@pytest.mark.parametrize(("field", "known"), [("x", "c, h"), (5, "c, h"), (None, "c, h")])
@pytest.mark.parametrize("fn", [rg.Detach, rg.Damp, rg.Zoneout])
def test_a_field_that_is_not_there_is_one_sentence(fn, field, known):
    cell, params, carry, xs = setting()
    with pytest.raises(ValueError, match=known) as error:
        rg.unroll(
            cell, params, xs, carry, carry_fns=(fn(p=0.5, field=field),), key=jax.random.key(0)
        )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("fn", [rg.Detach, rg.Damp, rg.Zoneout])
def test_a_probability_lies_between_0_and_1(fn, p):
    with pytest.raises(ValueError, match="probability"):
        fn(p=p)


def test_p_is_a_leaf_that_vmap_can_map():
    """One compiled function, a lane per probability: each equals its own run."""
    cell, params, carry, xs = setting()
    wanted, p = cotangents(cell), jnp.asarray([0.0, 0.3, 1.0])
    run = quick_jit(
        jax.vmap(lambda p: gradient(cell, params, xs, carry, wanted, (rg.Damp(p=p),))[0])
    )
    lanes = run(p)
    for n, own in enumerate(p.tolist()):
        alone = gradient(cell, params, xs, carry, wanted, (rg.Damp(p=own),))[0]
        assert_close(jax.tree.map(lambda leaf, n=n: leaf[n], lanes), alone)
    assert rg.Detach(p=0.5).field == "h"
    assert [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(rg.Detach(p=0.5))] == [0.5]


@struct.dataclass
class Scaled(rg.CarryFn):
    """What the step reads times a leaf of its own, and noise that is added to it."""

    gain: jax.Array = 1.0

    def before(self, noise_t, carry):
        return carry._replace(h=self.gain * carry.h + self.p * noise_t[:, None])


@pytest.mark.parametrize("backend", ["scan", "fused"])
def test_leaves_and_noise_get_no_gradient(backend):
    cell, xs = rg.LSTM(3, param_dtype=jnp.float64), jax.random.normal(jax.random.key(0), (6, 2, 3))
    params = cell.init_params(jax.random.key(1), 3)

    def loss(params, p, gain, noise):
        fns = [Scaled(p, gain=gain)]
        return jnp.sum(
            rg.unroll(cell, params, xs, carry_fns=fns, noise=[noise], backend=backend)[1]
        )

    at = params, jnp.float64(0.5), jnp.float64(2.0), jnp.ones((6, 2))
    gradient, *none = jax.grad(loss, argnums=(0, 1, 2, 3))(*at)
    assert np.abs(gradient["kernel"]["f"]).max() > 0
    assert loss(params, at[1], jnp.float64(3.0), at[3]) != loss(*at)
    for leaf in none:
        assert not np.any(leaf)
