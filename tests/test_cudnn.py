"""The cuDNN backend where there is no GPU: its packing, its layouts and what it does not serve.

cuDNN itself is replaced by ``jax.experimental.rnn.lstm_ref``, which reads the packed weights as
cuDNN documents them; `tests/gpu` runs the library.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.experimental import rnn

import recurrent_gates as rg
from recurrent_gates.backends import cudnn
from tests.support import assert_close, randomize

STEPS, BATCH, INPUTS, FEATURES = 9, 3, 2, 4
TOLERANCE = 1e-5  # of float32, the only dtype: sums of some tens of terms


def reference(x, h, c, weights, lengths, inputs, features, layers, dropout, both, precision):
    del precision
    shape = (inputs, features, layers, both)
    unpacked = rnn.unpack_lstm_weights(weights, *shape)
    return rnn.lstm_ref(x, h, c, *unpacked, lengths, inputs, features, layers, dropout, both)


def lstm_fwd(x, h, c, weights, lengths, *sizes):
    return reference(x, h, c, weights, lengths, *sizes), (x, h, c, weights, lengths)


def lstm_bwd(*arguments):
    *sizes, (*arrays, lengths), cotangents = arguments
    _, pullback = jax.vjp(lambda *arrays: reference(*arrays, lengths, *sizes), *arrays)
    return (*pullback(cotangents), None)


@pytest.fixture
def gpu(monkeypatch):
    """As if there were a GPU, whose cuDNN is JAX's reference."""
    monkeypatch.setattr(cudnn, "_has_cuda", lambda: True)
    monkeypatch.setattr(rnn, "lstm_fwd", lstm_fwd)
    monkeypatch.setattr(rnn, "lstm_bwd", lstm_bwd)


def case(cell, seed=0):
    """Random float32 params, xs, carry and cotangents of ys and of the last carry."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (
        cell.init_params(keys[0], INPUTS),
        jnp.zeros((STEPS, BATCH, INPUTS)),
        cell.initial((BATCH,)),
        jnp.zeros((STEPS, BATCH, FEATURES)),
        cell.initial((BATCH,)),
    )
    return jax.tree.map(lambda x: x.astype(jnp.float32), randomize(shapes, seed + 3))


def step(cell, params, xs, carry, d_ys, d_last, **settings):
    """Last carry and outputs, and the gradients of their product with the cotangents."""
    run = functools.partial(rg.unroll, cell, **settings)
    out, pullback = jax.vjp(lambda *arrays: run(*arrays), params, xs, carry)
    return out, pullback((d_last, d_ys))


def programs(jaxpr):
    """A program and all that it calls."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(value, "eqns"):
                yield from programs(getattr(value, "jaxpr", value))


CELLS = {
    "plain": rg.LSTM(FEATURES),
    "two_biases": rg.LSTM(FEATURES, bias_vectors=2),
    "uniform": rg.CELLS["u_lstm"](FEATURES),  # a bias of the gate's own, with both signs
    "chrono": rg.CELLS["c_lstm"](FEATURES),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_it_is_the_scan(gpu, name, reverse):
    cell = CELLS[name]
    arrays = case(cell)
    got = step(cell, *arrays, reverse=reverse, backend="cudnn")
    assert_close(got, step(cell, *arrays, reverse=reverse, backend="scan"), TOLERANCE)


@pytest.mark.parametrize("remat", [None, 4])
@pytest.mark.parametrize("reverse", [False, True])
def test_lengths(gpu, reverse, remat):
    """An empty sequence keeps its carry, emits zeros and has no part in any gradient."""
    cell = CELLS["two_biases"]
    params, xs, *rest = case(cell)
    xs = xs.at[3:, 2].set(jnp.nan)
    how = dict(lengths=jnp.array([STEPS, 0, 3]), reverse=reverse)
    got = step(cell, params, xs, *rest, remat=remat, backend="cudnn", **how)
    assert_close(got, step(cell, params, xs, *rest, backend="scan", **how), TOLERANCE)


def test_layers_and_both_directions(gpu):
    """A bidirectional layer below another one, with lengths, as people write it."""
    lengths, xs = jnp.array([STEPS, 2, 5]), case(CELLS["plain"])[1]

    def results(backend):
        how = dict(time_major=True, backend=backend)
        each = [rg.RNN(rg.LSTM(FEATURES), **how) for _ in range(2)]
        both = nn.Bidirectional(*each, time_major=True)
        above = rg.Stack([rg.LSTM(FEATURES) for _ in range(2)], **how)

        def run(params, xs):
            ys = both.apply({"params": params[0]}, xs, seq_lengths=lengths)
            return above.apply({"params": params[1]}, ys, seq_lengths=lengths)

        wide = jnp.zeros((STEPS, BATCH, 2 * FEATURES))
        shapes = [
            jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
            for model, inputs in ((both, xs), (above, wide))
        ]
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), randomize(shapes, 7))
        out, pullback = jax.vjp(run, params, xs)
        return out, pullback(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    assert_close(results("cudnn"), results("scan"), TOLERANCE)


def test_lanes_and_chunks(gpu):
    cell = CELLS["plain"]
    lanes = jax.tree.map(lambda *leaves: jnp.stack(leaves), case(cell, 0), case(cell, 1))

    def lane(backend, remat=None):
        run = functools.partial(step, cell, backend=backend, remat=remat)
        return jax.jit(jax.vmap(run))(*lanes)

    expected = lane("scan")
    assert_close(lane("cudnn"), expected, TOLERANCE)
    assert_close(lane("cudnn", remat=4), expected, TOLERANCE)


def test_frozen_bias_gets_no_gradient(gpu):
    cell = rg.LSTM(FEATURES, gate=rg.Gate(bias="chrono", bias_mode="frozen"))
    _, (d_params, _, _) = step(cell, *case(cell), backend="cudnn")
    assert not jnp.any(d_params["gate"]["frozen_b"])


class Hard(rg.Gate):
    """Sigmoid by name, and with equations of its own."""

    def activate(self, pre):
        return jnp.clip(0.5 + pre["f"] / 4, 0, 1), jnp.clip(0.5 + pre["i"] / 4, 0, 1)


BAD = {
    "is not the plain LSTM": (rg.GRU(FEATURES), {}),
    "a forget and a free input gate": (rg.CELLS["ur_lstm"](FEATURES), {}),
    "tanh in the candidate": (rg.LSTM(FEATURES, activation=jax.nn.sigmoid), {}),
    "plain sigmoid gates": (rg.LSTM(FEATURES, gate=Hard()), {}),
    "nothing act on the carry": (rg.LSTM(FEATURES), {"carry_fns": (rg.Damp(0.5),)}),
    "no other masks": (rg.LSTM(FEATURES), {"valid": jnp.ones((STEPS, BATCH), bool)}),
    "no resets": (rg.LSTM(FEATURES), {"resets": jnp.zeros((STEPS, BATCH), bool)}),
    "the last c alone": (rg.LSTM(FEATURES), {"return_carries": "all"}),
    "is float32, got bfloat16, float32": (rg.LSTM(FEATURES, dtype=jnp.bfloat16), {}),
}


@pytest.mark.parametrize("sentence", BAD)
def test_what_it_does_not_serve(gpu, sentence):
    cell, settings = BAD[sentence]
    params, xs, *_ = case(cell)
    with pytest.raises(ValueError, match=f"cudnn backend does not serve this: .*{sentence}"):
        rg.unroll(cell, params, xs, backend="cudnn", **settings)


def test_lecture_form_batches_and_precision_are_not_served(gpu):
    cell = rg.LSTM(FEATURES, forget_gate=False)
    params, xs, *_ = case(cell)
    with pytest.raises(ValueError, match="a forget and a free input gate"):
        rg.unroll(cell, params, xs, backend="cudnn")
    params, xs, *_ = case(CELLS["plain"])
    with pytest.raises(ValueError, match=r"inputs must be \[T, B, D\], got shape \(9, 2\)"):
        rg.unroll(CELLS["plain"], params, xs[:, 0], backend="cudnn")
    with jax.default_matmul_precision("bfloat16"), pytest.raises(ValueError, match="'bfloat16'"):
        rg.unroll(CELLS["plain"], params, xs, backend="cudnn")


def test_it_needs_a_gpu():
    params, xs, *_ = case(CELLS["plain"])
    with pytest.raises(ValueError, match="it needs an NVIDIA GPU"):
        rg.unroll(CELLS["plain"], params, xs, backend="cudnn")


def test_what_cudnn_reads_and_writes_has_its_order_in_memory_and_is_an_array_of_its_own(
    gpu, monkeypatch
):
    # A GPU's cuDNN computes something else from a transposed array that XLA hands over as it lies,
    # and adds to what is in the memory of the gradients: that needs a GPU to be seen.
    calls = {"cudnn_forward": lstm_fwd, "cudnn_backward": lstm_bwd}
    for name, function in calls.items():

        def call(*arguments, function=function, name=name):
            at = [n for n, a in enumerate(arguments) if not isinstance(a, jax.Array | tuple)]

            def run(*arguments):
                return function(*arguments)

            run.__name__ = name
            return jax.jit(run, static_argnums=at)(*arguments)

        monkeypatch.setattr(rnn, function.__name__, call)
    whole = jax.make_jaxpr(functools.partial(step, rg.LSTM(FEATURES), backend="cudnn"))
    found = dict.fromkeys(calls, 0)
    for program in programs(whole(*case(rg.LSTM(FEATURES))).jaxpr):
        made = {v: e for e in program.eqns for v in e.outvars}
        for equation in program.eqns:
            if equation.params.get("name") not in calls:
                continue
            found[equation.params["name"]] += 1
            read = [made[v] for v in equation.invars]
            assert {e.primitive.name for e in read} == {"optimization_barrier"}
            ordered = [made[v] for e in read for v in e.invars]
            users = [e for e in program.eqns if set(e.invars) & set(equation.outvars)]
            assert {e.primitive.name for e in (*ordered, *users)} == {"layout_constraint"}
            for e in (*ordered, *users):
                (variable,) = e.invars
                assert e.params["layout"].major_to_minor == tuple(range(variable.aval.ndim))
            after = {v for e in users for v in e.outvars}
            barriers = [e for e in program.eqns if set(e.invars) & after]
            assert {e.primitive.name for e in barriers} == {"optimization_barrier"}
    assert all(found.values())
