"""The kernels of a two-layer GATO's increment against sums that are written out in NumPy.

They need a C++ compiler, as in test_native.py, which has the whole cell.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import recurrent_gates as rg
from recurrent_gates import target
from recurrent_gates.backends.native import library, two_layer
from tests.support import assert_close, assert_identical
from tests.test_native import arrays, everything, two_cores

__all__ = ["two_cores"]


@pytest.fixture(autouse=True)
def registered():
    """What ``unroll`` asks for before it runs kernels."""
    assert library.missing(two_layer.NAME) is None


# (rows, inputs, units, hidden units): one of each; less than a vector and more; an odd number of
# hidden units; more columns than are summed at once; more rows than are kept at a time, and units
# that several threads share.
SIZES = [
    (1, 1, 1, 1),
    (7, 2, 5, 3),
    (33, 9, 17, 4),
    (16, 33, 32, 2),
    (70, 130, 3, 5),
    (700, 9, 37, 3),
    (640, 6, 300, 8),
]


def operands(rows, inputs, units, hidden):
    """x, r, first, on_r, out and the cotangent of the sum, in float32."""
    rng = np.random.default_rng(rows)
    shapes = [(rows, inputs), (rows, units), (hidden, inputs, units)]
    shapes += [(hidden, units), (hidden, units), (rows, units)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def by_hand(x, r, first, on_r, out, d):
    """The sum, and the cotangents of all that it is made of, in float64."""
    x, r, first, on_r, out, d = (np.asarray(a, np.float64) for a in (x, r, first, on_r, out, d))
    p = np.einsum("nc,icj->nij", x, first) + on_r * r[:, None]
    relu, d_p = np.maximum(p, 0), (p > 0) * out * d[:, None]
    return (out * relu).sum(1), (
        np.einsum("nij,icj->nc", d_p, first),
        np.einsum("nij,ij->nj", d_p, on_r),
        np.einsum("nij,nc->icj", d_p, x),
        np.einsum("nij,nj->ij", d_p, r),
        np.einsum("nij,nj->ij", relu, d),
    )


@jax.jit
def both(*operands):
    """The sum and the cotangents by kernels."""
    *inputs, d = operands
    total, pullback = jax.vjp(two_layer.total, *inputs)
    return total, pullback(d)


@pytest.mark.parametrize("size", SIZES)
def test_value_and_gradients(size):
    values = operands(*size)
    assert "custom_call @recurrent_gates_two_layer_backward" in both.lower(*values).as_text()
    for actual, expected in zip(
        jax.tree.leaves(both(*values)), jax.tree.leaves(by_hand(*values)), strict=True
    ):
        assert np.abs(actual - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("size", SIZES[-2:])
def test_threads_change_no_bit(size, monkeypatch):
    values = operands(*size)
    shared = both(*values)
    monkeypatch.setattr(target, "cores", lambda: 1)
    assert_identical(jax.jit(both.__wrapped__)(*values), shared)


def test_no_rows():
    total, slopes = both(*operands(0, 2, 3, 4))
    assert total.shape == (0, 3) and slopes[0].shape == (0, 2)
    assert not any(np.any(slope) for slope in slopes[2:])


def test_offset_inputs_lose_no_digits():
    """Inputs near 1,000 whose weighted sum the bias takes back to about zero."""
    values = operands(64, 2, 3, 18)
    values[0][:, 0] += 1000
    values[0][:, 1] = 1
    values[2][:, 0], values[2][:, 1] = 1, -1000
    _, expected = by_hand(*values)
    for ours, theirs in zip(both(*values)[1], expected, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-5 * np.linalg.norm(theirs)


def test_what_is_not_a_number_stays_so():
    """In its unit and its row; an inactive hidden unit passes nothing on, whatever the weights."""
    values = operands(20, 2, 3, 18)
    values[1][3, 1] = np.nan
    total, (d_x, d_r, d_first, d_on_r, d_out) = both(*values)
    bad = np.zeros((20, 3), bool)
    bad[3, 1] = True
    assert_identical(np.isnan(total), bad)
    assert not np.isnan(d_r).any() and not np.isnan(d_x).any()  # sums of weights and d alone
    others = [0, 2]
    assert np.isnan(d_on_r[:, 1]).all() and not np.isnan(d_on_r[:, others]).any()
    assert np.isnan(d_out[:, 1]).all() and not np.isnan(d_out[:, others]).any()
    assert not np.isnan(d_first).any()
    values = operands(20, 2, 3, 18)
    values[5][:] = np.inf
    values[2][4], values[3][4] = [[0], [-1]], 0  # never active: x_1 is 1
    values[0][:, 1] = 1
    d_first = both(*values)[1][2]
    assert_identical(d_first[4], np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("hidden", [1, 2])
def test_an_infinite_input_reaches_no_unit_that_is_off(hidden):
    """Nor a hidden unit that fills up a pair; nor does an infinite cotangent come back from one."""
    values = operands(5, 2, 3, hidden)
    values[0][2] = np.inf
    values[2][:] = -1
    total, _ = both(*values)
    assert_identical(np.asarray(total[2]), np.zeros(3, np.float32))
    values[0][2], values[1][2], values[3][:], values[5][2] = 1, 1, -1, np.inf
    _, (d_x, d_r, *_) = both(*values)
    assert not np.any(d_x[2]) and not np.any(d_r[2])


def test_the_cotangent_of_data_is_not_formed():
    """Of x where it is data; the others are the same to the bit."""
    *values, d = operands(*SIZES[2])

    def gradients(argnums):
        @jax.jit
        def compiled(*inputs):
            return jax.grad(lambda *inputs: jnp.vdot(two_layer.total(*inputs), d), argnums)(*inputs)

        return compiled(*values), compiled.lower(*values).as_text()

    own, text = gradients((1, 2, 3, 4))
    both_kinds, whole = gradients((0, 1, 2, 3, 4))
    assert_identical(own, both_kinds[1:])
    assert "of_x = 0" in text and "of_x = 1" in whole


def test_weights_beyond_a_cache_are_left_to_fused():
    cell, (params, _, carry) = arrays(lambda units: rg.GATO(2 * units), "small")
    params = cell.init_params(jax.random.key(0), 100)
    xs = jnp.ones((5, 3, 100))
    with pytest.raises(ValueError, match="one more than the inputs must be at most 3200"):
        rg.unroll(cell, params, xs, carry, backend="native")
    assert_close(
        rg.unroll(cell, params, xs, carry), rg.unroll(cell, params, xs, carry, backend="scan"), 1e-6
    )


def gato(units):
    return rg.GATO(2 * units, g=rg.TwoLayer(9))


@pytest.mark.parametrize(
    "cell",
    [
        rg.GATO(6, s_update="replace", gamma=jnp.tanh, emit_s_only=True),
        rg.GATO(6, f=rg.GatedDecay(gate=rg.GATES["ur"]), wrap=None),
    ],
    ids=["replaced", "gated"],
)
def test_any_f_and_any_reading_of_s(cell):
    params, xs, carry = arrays(lambda _: cell, "small")[1]
    actual, expected = (everything(cell, name)(params, xs, carry) for name in ("native", "scan"))
    assert_close(actual, expected, 1e-5)


def test_detached_s_is_served_too():
    cell, (params, xs, carry) = arrays(gato, "small")

    def slope(backend):
        def loss(xs):
            fns = (rg.Detach(0.5, field="s"), rg.Detach(0.5, field="r", per_example=True))
            key = jax.random.key(1)
            return jnp.sum(
                jnp.sin(
                    rg.unroll(cell, params, xs, carry, carry_fns=fns, key=key, backend=backend)[1]
                )
            )

        return jax.jit(jax.grad(loss))(xs)

    assert_close(slope("native"), slope("scan"), 1e-5)
