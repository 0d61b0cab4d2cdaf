"""Jacobians, paths, bounds, gates and timescales against NumPy by hand and exact cases."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.flatten_util import ravel_pytree

import recurrent_gates as rg
from recurrent_gates import analysis, gate_theory
from recurrent_gates.cells import Exploding
from tests import reference
from tests.support import array, assert_close, assert_identical, parameters, quick_jit, state
from tests.support import to_numpy as numpy

pytestmark = pytest.mark.usefixtures("x64")

D, F, T, B = 3, 4, 6, 2


def quickly(name):
    """A function of the module, compiled in a fraction of the time."""
    settings = ("cell", "blocked", "of", "wrt", "in_features", "draws")
    function = getattr(analysis, name)
    known = inspect.signature(function).parameters
    return quick_jit(function, static_argnames=[s for s in settings if s in known])


step_jacobians = quickly("step_jacobians")
state_jacobians = quickly("state_jacobians")
gap_norms = quickly("gap_norms")
gradient_paths = quickly("gradient_paths")
lecture_paths = quickly("lecture_paths")
singular_bounds = quickly("singular_bounds")
largest_state = quickly("largest_state")
trajectory = quickly("trajectory")
gate_activations = quickly("gate_activations")
initial_timescales = quickly("initial_timescales")


def lstm(**fields):
    cell = rg.LSTM(F, param_dtype=jnp.float64, **fields)
    return cell, parameters(cell, D), array(5, T, D), state(cell, ())


class Linear(rg.Cell):
    """h_t = A h_tm1 + x_t, every power of A known."""

    features: int = 2
    bare: bool = False

    def init_params(self, key, in_features):
        del key, in_features
        return {"A": jnp.array([[1.0, 1.0], [0.0, 1.0]])}

    def initial(self, batch_shape):
        h = jnp.zeros((*batch_shape, self.features), jnp.float64)
        return h if self.bare else rg.HiddenState(h)

    def step(self, params, carry, z_t):
        if self.bare:
            return carry @ params["A"].T + z_t
        return rg.HiddenState(carry.h @ params["A"].T + z_t)


class Counting(rg.Cell):
    """A carry with an integer in it: (count, h), h_t = h_tm1 * count_t."""

    def init_params(self, key, in_features):
        del key, in_features
        return {"one": jnp.ones(())}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, 1), jnp.int32), jnp.zeros((*batch_shape, 2), jnp.float64)

    def step(self, params, carry, z_t):
        del z_t
        count = carry[0] + 1
        return count, carry[1] * params["one"] * count.astype(jnp.float64)

    def emit(self, params, carry, z):
        del params, z
        return carry[1]


# ---------------------------------------------------------------------------------------
# Jacobians
# ---------------------------------------------------------------------------------------


def theorem_1(params, carry, xs):
    """A_t and B_t of h-detach over (c, h), without the column of ones, for every step."""
    pairs = []
    for x in np.asarray(xs):
        a, b, carry = reference.detach_matrices(
            numpy(params), carry, x, "recurrent_kernel", "f", 0, 0
        )
        size = 2 * len(carry[0])
        pairs.append((a[:size, :size], b[:size, :size]))
    return tuple(np.stack(matrices) for matrices in zip(*pairs, strict=True))


def test_blocked_paths_are_the_matrices_of_h_detach():
    cell, params, xs, carry = lstm()
    A, B_ = theorem_1(params, tuple(map(np.asarray, carry)), xs)
    run = step_jacobians
    assert_close(run(cell, params, xs, carry, blocked=("h",)).matrix, A)
    assert_close(run(cell, params, xs, carry, blocked=("c",)).matrix, B_)
    both = run(cell, params, xs, carry)
    assert_close(both.matrix, A + B_)
    # Blocking by the carry function and dropping columns are one thing, bit for bit.
    assert_identical(both.without("h").matrix, run(cell, params, xs, carry, blocked=("h",)).matrix)
    assert not np.any(run(cell, params, xs, carry, blocked=("c", "h")).matrix)


def test_paths_are_norms_of_products():
    cell, params, xs, carry = lstm()
    A, B_ = theorem_1(params, tuple(map(np.asarray, carry)), xs)
    paths = gradient_paths(cell, params, xs, carry)
    assert list(paths) == [(), ("c",), ("h",)]
    for blocked, factors in {(): A + B_, ("h",): A, ("c",): B_}.items():
        product, want = np.eye(2 * F), [0.0]
        for factor in factors[::-1]:
            product = product @ factor
            want.append(np.log10(np.linalg.norm(product, 2)))
        np.testing.assert_allclose(paths[blocked], want, rtol=0, atol=1e-12)


def test_large_weights_suppress_the_gradient_through_the_cell_state():
    """h-detach, 2.2: the other paths are polynomials of the recurrent weights, whose order grows.

    The weights are doubled, three times, from their initialisation. After 100 steps the gradient
    through c alone, a product of A_t, is a smaller share of the whole each time, in the mean of
    three networks, and with each of them from first to last. (One of them may keep a forget gate
    near 1 on the way, by saturation.)
    """
    features = 64
    cell = rg.LSTM(features, param_dtype=jnp.float64)
    shares = []  # log10
    for seed in range(3):
        params = numpy(cell.init_params(jax.random.key(seed), D))
        start, xs = (np.zeros(features),) * 2, array(seed, 100, D)
        gradient = np.asarray(array(seed + 3, 2 * features))  # at the last step
        for scale in (1, 2, 4, 8):
            larger = {slot: scale * w for slot, w in params["recurrent_kernel"].items()}
            A, B_ = theorem_1({**params, "recurrent_kernel": larger}, start, xs)
            through_c, whole = (
                functools.reduce(np.matmul, path[::-1], gradient) for path in (A, A + B_)
            )
            shares.append(np.log10(np.linalg.norm(through_c) / np.linalg.norm(whole)))
    shares = np.reshape(shares, (3, 4))
    assert np.all(np.diff(shares.mean(0)) < -1), shares
    assert np.all(shares[:, -1] < shares[:, 0] - 1), shares


def test_norms_of_blocks():
    cell, params, xs, carry = lstm()
    steps = step_jacobians(cell, params, xs, carry)
    whole = np.asarray(state_jacobians(steps).matrix)
    want = np.log10([np.linalg.norm(m[:F, F:], 2) for m in whole[1:]])
    got = gap_norms(steps, of="c", wrt="h")
    assert got[0] == -np.inf
    np.testing.assert_allclose(got[1:], want, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="no field 'r'"):
        steps.block("r", "h")


@pytest.mark.parametrize("name", ["ur_lstm", "gru", "om_janet", "gato1", "exploding"])
def test_products_match_finite_differences(name):
    cell = rg.CELLS[name](F, param_dtype=jnp.float64)
    params, xs, carry = parameters(cell, D), array(3, T, D), state(cell, ())
    steps = step_jacobians(cell, params, xs, carry)
    got = np.asarray(state_jacobians(steps).matrix)[-1]
    leaves, structure = jax.tree.flatten(carry)
    flat, step = np.concatenate(leaves), 1e-6
    splits = np.cumsum([len(leaf) for leaf in leaves])[:-1]

    @quick_jit
    def last(flat):
        start = jax.tree.unflatten(structure, jnp.split(flat, splits))
        return jnp.concatenate(jax.tree.leaves(rg.unroll(cell, params, xs, start)[0]))

    columns = [
        (last(flat + step * e) - last(flat - step * e)) / (2 * step) for e in np.eye(len(flat))
    ]
    assert_close(got, np.stack(columns, axis=-1), 1e-8)


def test_products_are_exact_powers():
    cell = Linear()
    params = cell.init_params(None, 2)
    steps = step_jacobians(cell, params, jnp.ones((9, 2)))
    want = np.stack([np.array([[1.0, g], [0.0, 1.0]]) for g in range(10)])
    assert_identical(state_jacobians(steps).matrix, want)


@pytest.mark.parametrize("base", [2.0, 0.25])
def test_norms_go_beyond_the_range_of_floats(base):
    cell = Linear()
    gaps = 3000  # 2^3000 is 1e903
    steps = step_jacobians(cell, {"A": base * jnp.eye(2)}, jnp.ones((gaps, 2)))
    want = np.arange(gaps + 1) * np.log10(base)
    np.testing.assert_allclose(gap_norms(steps), want, rtol=1e-14, atol=0)


def test_gato_keeps_the_identity():
    """GATO eq. 3, block by block."""
    cell = rg.CELLS["gato2"](2 * F, hidden=3, param_dtype=jnp.float64)
    params, xs, carry = parameters(cell, D), array(3, T, D), state(cell, ())
    steps = step_jacobians(cell, params, xs, carry)
    got = state_jacobians(steps)
    assert_identical(got.block("s", "s"), np.broadcast_to(np.eye(F), (T + 1, F, F)))
    assert not np.any(got.block("r", "s"))
    r, df, dg = np.asarray(carry.r), [], []
    for x in np.asarray(xs):
        a, b = reference.gato_derivatives(numpy(params), r, x)
        df.append(a)
        dg.append(b)
        r, _ = reference.gato(numpy(params), (r, np.zeros(F)), x)
    for gap in range(1, T + 1):
        start = T - gap
        assert_close(got.block("r", "r")[gap], np.diag(np.prod(df[start:], axis=0)))
        total = sum(dg[k] * np.prod(df[start:k], axis=0) for k in range(start, T))
        assert_close(got.block("s", "r")[gap], np.diag(total))


def test_a_batch_is_its_examples():
    cell = rg.GRU(F, param_dtype=jnp.float64)
    params, xs, carry = parameters(cell, D), array(3, T, B, D), state(cell, (B,))
    run = step_jacobians
    together = run(cell, params, xs, carry).matrix
    for b in range(B):
        alone = run(cell, params, xs[:, b], jax.tree.map(lambda a, b=b: a[b], carry)).matrix
        assert_close(together[:, b], alone)


def test_carry_functions_act_on_jacobians():
    cell, params, xs, carry = lstm()
    A, B_ = theorem_1(params, tuple(map(np.asarray, carry)), xs)
    damped = step_jacobians(cell, params, xs, carry, carry_fns=(rg.Damp(0.25),))
    assert_close(damped.matrix, A + 0.75 * B_)  # h-detach, Corollary 1
    mask = np.array([True, False, True, True, False, True])
    detached = step_jacobians(
        cell, params, xs, carry, carry_fns=(rg.Detach(0.5),), noise=(jnp.asarray(mask),)
    )
    assert_close(detached.matrix, A + np.where(mask, 0.0, 1.0)[:, None, None] * B_)
    # Without noise detaching is off and zoneout takes its mean: p times the old value's identity.
    mean = step_jacobians(
        cell, params, xs[:1], carry, carry_fns=(rg.Detach(0.5), rg.Zoneout(0.4, "c"))
    )
    plain = (A + B_)[0]
    want = plain.copy()
    want[:F] = 0.6 * plain[:F] + 0.4 * np.eye(2 * F)[:F]
    assert_close(mean.matrix[0], want)


def test_fields_of_any_carry():
    assert analysis.field_names(rg.LSTMState(jnp.ones(1), jnp.ones(1))) == ("c", "h")
    bare = Linear(bare=True)
    steps = step_jacobians(bare, bare.init_params(None, 2), jnp.ones((3, 2)))
    assert steps.fields == (None,)
    assert_identical(steps.block(None, None)[0], np.array([[1.0, 1.0], [0.0, 1.0]]))
    counting = Counting()
    steps = step_jacobians(counting, counting.init_params(None, 1), jnp.ones((4, 1)))
    assert steps.fields == (1,)  # an integer has no derivative
    assert_identical(state_jacobians(steps).matrix[-1], 24.0 * np.eye(2))
    with pytest.raises(ValueError, match="NamedTuple, a tuple or an array"):
        analysis.field_names({"h": jnp.ones(1)})


@pytest.mark.parametrize("name", ["lstm", "rmc"])
def test_gates_over_valid_steps_are_those_of_the_sequences_without_the_others(name):
    sizes = dict(memory_slots=3) if name == "rmc" else {}
    cell = rg.CELLS[name](6, param_dtype=jnp.float64, **sizes)
    params, xs = parameters(cell, D), array(5, T, 2, D)
    valid = jnp.ones((T, 2), bool).at[:2, 0].set(False)
    padded = jnp.where(valid[..., None], xs, jnp.nan)
    means = analysis.gate_means(gate_activations(cell, params, padded, valid=valid), valid)
    each = [gate_activations(cell, params, x[:, None]) for x in (xs[2:, 0], xs[:, 1])]
    for gate, mean in means.items():
        both = np.concatenate([np.asarray(one[gate])[:, 0] for one in each])
        assert_close(mean, both.mean(axis=tuple(range(both.ndim - 1))))


@pytest.mark.parametrize("name", ["rmc", pytest.param("dnc", marks=pytest.mark.long)])
def test_jacobians_of_a_memory_are_those_of_all_its_numbers(name):
    """Slots that read each other; by reverse mode through the whole carry."""
    sizes = dict(memory_slots=3) if name == "rmc" else dict(memory_slots=3, word_size=2)
    cell = rg.CELLS[name](6, param_dtype=jnp.float64, **sizes)
    params, xs = parameters(cell, D), array(5, 2, B, D)
    run = trajectory(cell, params, xs)
    steps = step_jacobians(cell, params, xs)
    before, z = jax.tree.map(lambda leaf: leaf[1, 0], (run.before, run.z))
    start, unflatten = ravel_pytree(before)
    step = lambda x: ravel_pytree(cell.step(params, unflatten(x), z))[0]  # noqa: E731
    assert steps.matrix.shape == (2, B, start.size, start.size)
    assert_close(steps.matrix[1, 0], quick_jit(jax.jacrev(step))(start))
    for field, largest in largest_state(cell, params, xs).items():
        values = np.abs(np.asarray(getattr(run.after, field)))
        np.testing.assert_array_equal(largest[1:], values.reshape(2, B, -1).max(axis=-1))


def test_a_foreign_cell():
    module = nn.GRUCell(F, param_dtype=jnp.float64, dtype=jnp.float64)
    cell = rg.FlaxCell(module)
    params, xs = cell.init_params(jax.random.key(0), D), array(3, 1, D)
    start = (array(1, F), array(2, F))
    got = step_jacobians(cell, params, xs, start)
    want = jax.jacobian(lambda h: module.apply({"params": params}, h, xs[0])[0])(start[0])
    assert got.fields == (0, 1)
    assert_close(got.block(0, 0)[0], want)
    assert_close(got.block(1, 0)[0], want)  # y is h
    assert not np.any(got.block(analysis.ALL, 1))  # and feeds nothing


def test_the_trajectory_is_a_loop():
    cell, params, xs, carry = lstm()
    got = numpy(trajectory(cell, params, xs, tuple(carry)))
    c, h = map(np.asarray, carry)
    for t, x in enumerate(np.asarray(xs)):
        assert_close((got.before.c[t], got.before.h[t]), (c, h))
        c, h = reference.lstm(numpy(params), (c, h), x)
        assert_close((got.after.c[t], got.after.h[t]), (c, h))


@pytest.mark.parametrize("analyse", [trajectory, step_jacobians, largest_state, lecture_paths])
def test_a_carry_is_taken_by_its_names(analyse):
    """A dict's leaves are in the order of its names, and a carry of another cell is none."""
    cell, params, xs, carry = lstm()
    by_name = {"h": carry.h, "c": carry.c}
    assert_identical(analyse(cell, params, xs, by_name), analyse(cell, params, xs, carry))
    with pytest.raises(ValueError, match=r"carry must be LSTMState\(c, h\), got GATOState\(r, s\)"):
        analyse(cell, params, xs, rg.GATOState(*carry))


def test_a_run_of_no_steps():
    cell, params, xs, carry = lstm()
    steps = step_jacobians(cell, params, xs[:0], carry)
    assert_identical(state_jacobians(steps).matrix, np.eye(2 * F)[None])
    np.testing.assert_allclose(analysis.gap_norms(steps), [0.0], atol=1e-12)
    for field, largest in largest_state(cell, params, xs[:0], carry).items():
        np.testing.assert_array_equal(largest, [np.abs(getattr(carry, field)).max()])
    for path in lecture_paths(cell, params, xs[:0], carry):
        assert path.size == 0
    elman = rg.Elman(F, param_dtype=jnp.float64)
    bounds = analysis.singular_bounds(elman, parameters(elman, D), xs[:0])
    assert_identical((bounds.lower, bounds.upper), (np.zeros(1), np.zeros(1)))


# ---------------------------------------------------------------------------------------
# The lecture's paths, singular values, growth, clipping
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["standard", "ur"])
def test_the_lectures_two_paths(gate):
    cell, params, xs, carry = lstm(gate=rg.GATES[gate])
    got = lecture_paths(cell, params, xs, carry)
    c, h = map(np.asarray, carry)
    weights = numpy(params)
    b = weights.get("gate", {}).get("b")
    f, D_, read = [], [], None
    for x in np.asarray(xs):
        pre = {slot: reference.affine(weights, slot, x, h) for slot in cell.slots}
        f.append(reference.gate(gate, pre.get, b)[0])
        o = reference.sigmoid(reference.affine(weights, "o", x, h))
        c, h = reference.lstm(weights, (c, h), x, gate)
        D_.append(np.tanh(c) * o * (1 - o))
        read = o * (1 - np.tanh(c) ** 2)
    W = weights["recurrent_kernel"]["o"].T
    K = np.abs(D_).max()
    forget, output, bound = [], [], []
    product = np.eye(F)
    for n in range(T):
        forget.append(np.log10((read * np.prod(f[T - n :], axis=0)).max()))
        product = product @ (D_[T - 1 - n][:, None] * W)
        output.append(np.log10(np.linalg.norm(product, 2)))
        bound.append((n + 1) * np.log10(K * np.linalg.norm(W, 2)))
    np.testing.assert_allclose(got.forget, forget, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.output, output, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got.bound, bound, rtol=0, atol=1e-12)
    assert np.all(got.output <= got.bound)


def test_the_forget_path_is_the_product_without_h():
    cell, params, xs, carry = lstm()
    steps = step_jacobians(cell, params, xs, carry).without("h")
    blocked = gap_norms(steps, of="h", wrt="c")
    path = lecture_paths(cell, params, xs, carry).forget
    # At gap 0 the state is one carry, and dh/dc between its fields is 0, not the reading.
    np.testing.assert_allclose(path[1:], blocked[1:-1], rtol=0, atol=1e-12)


def test_singular_values_bound_the_gradient():
    cell = rg.Elman(F, param_dtype=jnp.float64)
    params, xs, carry = parameters(cell, D), array(3, T, D), state(cell, ())
    bounds = numpy(singular_bounds(cell, params, xs, carry))
    U = np.asarray(params["recurrent_kernel"]["h"])
    values = np.linalg.svd(U, compute_uv=False)
    assert_close((bounds.largest, bounds.smallest), (values[0], values[-1]))
    h, slopes = np.asarray(carry.h), []
    for x in np.asarray(xs):
        (h,) = reference.elman(numpy(params), (h,), x)
        slopes.append(1 - h**2)
    assert_close(bounds.slope_min, np.min(slopes))
    assert_close(bounds.slope_max, np.max(slopes))
    gaps = np.arange(T + 1)
    np.testing.assert_allclose(
        bounds.upper, gaps * np.log10(values[0] * np.max(slopes)), atol=1e-12
    )
    np.testing.assert_allclose(
        bounds.lower, gaps * np.log10(values[-1] * np.min(slopes)), atol=1e-12
    )
    whole = state_jacobians(step_jacobians(cell, params, xs, carry)).matrix
    found = np.log10(np.linalg.svd(np.asarray(whole), compute_uv=False))
    assert np.all(found <= bounds.upper[:, None] + 1e-12)
    assert np.all(found >= bounds.lower[:, None] - 1e-12)


@pytest.mark.parametrize("size", [1.5, 0.5])
def test_bounds_are_tight_for_a_linear_orthogonal_network(size):
    """GATO 2.2: above 1 / lambda it blows up, below it decays."""
    cell = rg.Elman(F, activation=lambda x: x, param_dtype=jnp.float64)
    params = parameters(cell, D)
    orthogonal = np.linalg.qr(np.asarray(array(7, F, F)))[0]
    params["recurrent_kernel"]["h"] = size * jnp.asarray(orthogonal)
    xs = array(3, 40, D)
    bounds = singular_bounds(cell, params, xs)
    want = np.arange(41) * np.log10(size)
    steps = step_jacobians(cell, params, xs)
    for line in (bounds.lower, bounds.upper, gap_norms(steps)):
        np.testing.assert_allclose(line, want, rtol=0, atol=1e-12)


def test_the_exploding_example_grows_and_the_gru_does_not():
    """GATO eq. 2 with z near -1: h becomes 2 tanh(W h) - h and gains 2 at every step."""
    cell = Exploding(1, param_dtype=jnp.float64)
    params = {
        "kernel": {"z": jnp.zeros((1, 1))},
        "bias": {"z": jnp.full((1,), -30.0)},
        "recurrent_kernel": {"z": jnp.zeros((1, 1)), "u": jnp.full((1, 1), -30.0)},
    }
    xs = jnp.zeros((50, 1))
    size = largest_state(cell, params, xs, rg.HiddenState(jnp.full((1,), 1.25)))["h"]
    np.testing.assert_allclose(size, 1.25 + 2 * np.arange(51), rtol=1e-12)

    gru = rg.GRU(F, param_dtype=jnp.float64)
    params = parameters(gru, D, scale=5.0)
    start = rg.HiddenState(jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (64, F))))
    sizes = np.asarray(largest_state(gru, params, array(2, 200, 64, D, scale=5.0), start)["h"])
    np.testing.assert_array_equal(sizes[0], np.abs(start.h).max(-1))
    assert sizes.max() <= 1
    assert sizes[1:].max() > 0.99  # and comes close


def test_clipping_by_norm_keeps_the_direction():
    gradient = {"a": array(1, 7, 3), "b": {"c": array(2, 5, scale=20.0)}}

    def after(clip):
        return analysis.alignment(gradient, clip.update(gradient, clip.init(gradient))[0])

    np.testing.assert_allclose(after(optax.clip_by_global_norm(0.1)), 1.0, rtol=0, atol=1e-14)
    flat = np.concatenate([np.ravel(gradient["a"]), gradient["b"]["c"]])
    small = np.clip(flat, -1, 1)
    want = flat @ small / np.linalg.norm(flat) / np.linalg.norm(small)
    np.testing.assert_allclose(after(optax.clip(1.0)), want, rtol=1e-12)
    assert want < 0.9


# ---------------------------------------------------------------------------------------
# Gates and timescales
# ---------------------------------------------------------------------------------------


def test_gates_over_time_and_batch():
    cell = rg.LSTM(F, gate=rg.GATES["u"], param_dtype=jnp.float64)
    params, xs, carry = parameters(cell, D), array(5, T, B, D), state(cell, (B,))
    got = gate_activations(cell, params, xs, carry)
    weights, (c, h) = numpy(params), map(np.asarray, carry)
    want = {name: [] for name in ("f", "i", "o", "u")}
    for x in np.asarray(xs):

        def pre(slot, x=x, h=h):
            return reference.affine(weights, slot, x, h)

        f, i = reference.gate("u", pre, weights["gate"]["b"])
        o, u = reference.sigmoid(pre("o")), np.tanh(pre("u"))
        for name, value in zip(want, (f, i, o, u), strict=True):
            want[name].append(value)
        c, h = reference.lstm(weights, (c, h), x, "u")
    want = {name: np.stack(values) for name, values in want.items()}
    assert_close(got, want)
    means = analysis.gate_means(got)
    assert_close(means, {name: values.reshape(-1, F).mean(0) for name, values in want.items()})
    counts, edges = analysis.histogram(means["f"], 8)
    expected, expected_edges = np.histogram(want["f"].mean((0, 1)), 8, (0, 1))
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_allclose(edges, expected_edges, rtol=0, atol=1e-15)
    assert_close(analysis.timescales(want["f"]), 1 / (1 - want["f"]))


LAWS = ["lstm", "c_lstm", "u_lstm", "o_lstm", "ur_gru", "cr_janet", "r_gru"]


@pytest.mark.parametrize("name", LAWS)
def test_timescales_at_the_start_follow_their_law(name):
    features, draws = 32, 60
    cell = rg.CELLS[name](features)
    periods = initial_timescales(cell, jax.random.key(2), in_features=D, draws=draws)
    assert periods.shape == (draws, features)
    law = gate_theory.gate_law(cell.gate, features)
    if name == "o_lstm":  # 1/n, 2/n, ... exactly
        f = np.arange(1, features) / features
        np.testing.assert_allclose(periods[0, :-1], 1 / (1 - f), rtol=1e-4)
        assert gate_theory.distance(periods, law) <= 1.001 / features
    elif name in ("lstm", "r_gru"):
        np.testing.assert_allclose(periods, 1 + np.e, rtol=1e-6)
        assert gate_theory.distance(periods, law) == 0
    else:  # the 1% point of Kolmogorov's distribution
        assert gate_theory.distance(periods, law) < 1.63 / np.sqrt(draws * features)


def test_an_analysis_names_the_cell_that_it_is_of():
    gru = rg.GRU(4)
    params = gru.init_params(jax.random.key(0), 3)
    xs = jnp.ones((5, 2, 3), jnp.float32)
    with pytest.raises(TypeError, match=r"^The lecture's paths are those of an LSTM, got an .*GRU"):
        analysis.lecture_paths(gru, params, xs)
    with pytest.raises(TypeError, match=r"^The bounds are those of an Elman network, got an .*GRU"):
        analysis.singular_bounds(gru, params, xs)
    with pytest.raises(
        TypeError, match=r"^gradient_paths needs a recurrent_gates cell, got the st"
    ):
        analysis.gradient_paths("gru", params, xs)
    gates, valid = analysis.gate_activations(gru, params, xs), jnp.ones((5, 3), bool)
    with pytest.raises(
        ValueError, match=r"^valid has the shape \(5, 3\); these gates need \(5, 2\)"
    ):
        analysis.gate_means(gates, valid)


def test_a_cell_without_the_gate_is_refused():
    with pytest.raises(ValueError, match="Exploding names no gate 'f'; it has z"):
        initial_timescales(rg.CELLS["exploding"](4), jax.random.key(0))


@pytest.mark.parametrize(("of", "wrt"), [("r", "r"), ("s", "r"), ("s", "s"), ("r", analysis.ALL)])
@pytest.mark.long
def test_the_norm_of_a_small_block_beside_a_large_one(of, wrt, x32):
    """GATO's s keeps its gradient, its r loses it by a power of ten every other step: far below
    what float32 holds beside 1."""
    cell, steps = rg.CELLS["gato1"](2 * F), 250
    params = cell.init_params(jax.random.key(0), D)
    xs = jax.random.normal(jax.random.key(1), (steps, D))
    jacobians = step_jacobians(cell, params, xs)
    got = np.asarray(gap_norms(jacobians, of=of, wrt=wrt))
    rows, columns = jacobians.where(of), jacobians.where(wrt)
    product, exponent, want = np.eye(2 * F), np.zeros(()), []
    spans = {"r": slice(0, F), "s": slice(F, 2 * F)}
    r = np.asarray(jacobians.matrix, np.float64)[:, spans["r"], spans["r"]]
    for gap in range(steps + 1):
        block = product[rows, columns]
        shift = exponent if of == "r" else 0.0
        with np.errstate(divide="ignore"):
            want.append(np.log10(np.linalg.norm(block, 2)) + shift)
        if gap == steps:
            break
        product = product @ np.asarray(jacobians.matrix[steps - 1 - gap], np.float64)
        if of == "r":  # r reads r alone, so its rows scale by themselves
            scale = np.abs(product[spans["r"], spans["r"]]).max()
            product[spans["r"]] /= scale
            exponent = exponent + np.log10(scale)
    assert (of == "s") == (want[-1] > -5) and len(r) == steps
    if of == "r":
        assert want[-1] < -80
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    log = quick_jit(analysis.gradient_paths, static_argnames=("cell", "of", "wrt"))
    np.testing.assert_array_equal(log(cell, params, xs, of=of, wrt=wrt)[()], got)
