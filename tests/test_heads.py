"""Heads: block-diagonal recurrent weights against whole matrices with zeros beside the blocks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import block_diag

import recurrent_gates as rg
from recurrent_gates.backends.shared import products
from recurrent_gates.testing import check_cell
from tests import reference
from tests.support import (
    TWINS,
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

STEPS, BATCH, INPUTS, FEATURES, HEADS = 5, 3, 4, 12, 3
GATES = [name for name in rg.GATES if name not in TWINS]
SOME = "lstm standard", "lstm ur", "lstm om", "gru standard", "gru um", "janet o"


def build(family, gate, **settings):
    name = family if gate == "standard" else f"{gate}_{family}"
    if gate in ("om", "um"):
        settings["downsize"] = 2
    return rg.CELLS[name](FEATURES, **{"param_dtype": jnp.float64, "heads": HEADS, **settings})


def whole(params):
    """The same parameters with dense recurrent kernels."""
    kernels = {slot: block_diag(*kernel) for slot, kernel in params["recurrent_kernel"].items()}
    return {**params, "recurrent_kernel": kernels}


def blocks(kernel, heads=HEADS):
    """The blocks on the diagonal of a dense kernel."""
    rows, columns = (size // heads for size in kernel.shape)
    return np.stack([kernel[n * rows :, n * columns :][:rows, :columns] for n in range(heads)])


def results(cell, params, xs, carry, backend):
    """Carries and outputs, and the gradients of all that they are made of."""

    def run(params, xs, carry):
        return rg.unroll(cell, params, xs, carry, return_carries="all", backend=backend)

    out, pullback = jax.vjp(run, params, xs, carry)
    return out, pullback(jax.tree.map(lambda leaf: array(31, *leaf.shape), out))


@pytest.mark.parametrize(
    ("family", "gate"),
    thinned(
        itertools.product(("lstm", "gru", "janet"), GATES),
        lambda family, gate: f"{family} {gate}" in SOME,
        long=lambda family, gate: gate in ("ur", "um"),
    ),
)
def test_heads_are_a_block_diagonal_matrix(family, gate, monkeypatch):
    cell = build(family, gate)
    params, xs, carry = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS), state(cell, (3,))
    dense = to_numpy(whole(params))
    how = {"downsize": 2} if gate in ("om", "um") else {}
    if family == "gru" and gate != "standard":
        how["reset"] = "before"
    step = functools.partial(getattr(reference, family), name=gate, **how)

    @quick_jit
    def each(params, dense, xs, carry):
        of_blocks = {b: results(cell, params, xs, carry, b) for b in ("scan", "fused")}
        return *of_blocks.values(), results(cell.clone(heads=1), dense, xs, carry, "scan")[1]

    if family == "lstm":  # the default is tried with the others
        monkeypatch.setattr(products, "merges", lambda loop, **_: False)
    scan, fused, of_whole = each(params, dense, xs, carry)
    assert_close(fused, scan)
    expected, fields = [], to_numpy(tuple(carry))
    for x in np.asarray(xs):
        fields = step(dense, fields, x)
        expected.append(fields)
    assert_close(tuple(scan[0][0]), tuple(np.stack(field) for field in zip(*expected, strict=True)))

    kernels = {slot: blocks(kernel) for slot, kernel in of_whole[0]["recurrent_kernel"].items()}
    assert_close(scan[1], ({**of_whole[0], "recurrent_kernel": kernels}, *of_whole[1:]))


@pytest.mark.parametrize("make", [rg.LSTM, rg.GRU])
def test_one_head_is_the_cell_without(make):
    key = jax.random.key(3)
    params = make(FEATURES, heads=1).init_params(key, INPUTS)
    assert_identical(params, make(FEATURES).init_params(key, INPUTS))
    assert {k.shape for k in params["recurrent_kernel"].values()} == {(FEATURES, FEATURES)}


def test_each_head_starts_as_a_cell_of_its_size():
    kernels = build("lstm", "ur").init_params(jax.random.key(0), INPUTS)["recurrent_kernel"]
    for kernel in kernels.values():
        assert_close(kernel @ kernel.mT, np.stack([np.eye(4)] * HEADS), tolerance=1e-12)
        assert not np.allclose(kernel[0], kernel[1])


@pytest.mark.long
def test_a_cell_with_heads_conforms(x32):
    check_cell(rg.GRU(6, heads=2))


def test_a_stepper_with_heads_is_the_scan():
    cell = build("gru", "ur")
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    step, ys = rg.stepper(cell, params, BATCH), []
    carry = step.initial()
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    assert_close(jnp.stack(ys), rg.unroll(cell, params, xs)[1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.LSTM(8, heads=3), "must divide the 8 units"),
        (lambda: rg.GRU(8, heads=0), "positive integer number of heads"),
        (lambda: rg.JANET(8, heads=2.0), "positive integer number of heads"),
        (lambda: rg.CELLS["um_lstm"](12, downsize=3, heads=3), "the 4 units of its 'mf'"),
    ],
)
def test_heads_that_do_not_divide_are_one_sentence(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_what_has_no_heads_refuses_them(x32):
    cell = rg.LSTM(8, bias_vectors=2, heads=2)
    params = cell.init_params(jax.random.key(0), INPUTS)
    with pytest.raises(ValueError, match="torch has no heads"):
        rg.to_torch([{"forward": params}])
    for backend, words in (("cudnn", "has no heads"), ("newton", "newton"), ("parallel", "linear")):
        with pytest.raises(ValueError, match=words):
            rg.unroll(cell, params, jnp.ones((2, BATCH, INPUTS)), backend=backend)
    with pytest.raises(ValueError, match="2 heads"):
        rg.analysis.lecture_paths(cell, params, jnp.ones((2, INPUTS)))
    with pytest.raises(ValueError, match=r"Blocks of shape \(2, 4, 4\) multiply 8 features"):
        z = cell.project(params, jnp.ones((BATCH, INPUTS)))
        rg.lstm_step(params, rg.LSTM(6).initial((BATCH,)), z)


@pytest.mark.parametrize("make", [rg.LSTM, rg.GRU, rg.SLSTM])
def test_gradients_in_bfloat16_without_jit(make, x32):
    """XLA's CPU backend has no batched product of bfloat16 by itself."""
    cell, xs = make(8, heads=2, dtype=jnp.bfloat16), jnp.ones((3, 2, 3), jnp.bfloat16)
    params = cell.init_params(jax.random.key(0), 3)

    def loss(params):
        return rg.unroll(cell, params, xs)[1].astype(jnp.float32).sum()

    assert_close(jax.grad(loss)(params), jax.jit(jax.grad(loss))(params), 2e-2)
