"""Cells: each step against the paper's equations in NumPy, gradients, starts, counts, types,
names, errors."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.test_util import check_grads
from scipy import stats

import recurrent_gates as rg
from recurrent_gates import initializers
from tests import reference
from tests.support import (
    TWINS,
    array,
    assert_close,
    assert_identical,
    count_traces,
    parameters,
    quick_jit,
    state,
    to_numpy,
)

pytestmark = pytest.mark.usefixtures("x64")

FEATURES, INPUTS = 8, 3
GATES = tuple(name for name in rg.GATES if name != "standard")
UNGATED = (
    *("lstm", "gru", "gru_d", "rnn", "janet", "exploding"),
    *("gato1", "gato2", "gato", "on_lstm"),
)
GATED = tuple(f"{gate}_{family}" for gate in GATES for family in ("lstm", "gru", "janet"))
NAMES = UNGATED + GATED
GATO = ("gato1", "gato2", "gato")
# GATO is the two-layer one, the ON-LSTM has OM's gate.
DISTINCT = [
    name for name in NAMES if name.split("_")[0] not in TWINS and name not in ("gato", "on_lstm")
]


def distinct(test):
    """A test of all cells that do not equal another one by construction."""
    test.distinct = True
    return test


def pytest_generate_tests(metafunc):
    if getattr(metafunc.function, "distinct", False):
        metafunc.parametrize("name", NAMES if metafunc.config.getoption("full") else DISTINCT)


def build(name, **settings):
    settings = dict(param_dtype=jnp.float64) | settings
    if name in GATO:
        settings = dict(wrap=None) | settings
    return rg.CELLS[name](FEATURES, **settings)


def paper(name, **how):
    """The paper's step for a registered name."""
    if name == "gru_d":
        return reference.gru_d
    gate, _, family = name.rpartition("_")
    gate = {"": "standard", "on": "om"}.get(gate, gate)
    if name in GATO:
        return lambda params, carry, x: reference.gato(params, carry, x, **how)
    if name == "exploding":
        return exploding
    if name == "rnn":
        return lambda params, carry, x: reference.elman(params, carry, x, **how)
    step = getattr(reference, family)
    if family == "gru" and gate != "standard":
        how = dict(reset="before") | how
    return lambda params, carry, x: step(params, carry, x, gate, **how)


def exploding(params, carry, x):
    """GATO eq. 2; the second map reads only the state."""
    (h,) = carry
    z = np.tanh(reference.affine(params, "z", x, h))
    inner = h @ params["recurrent_kernel"]["u"] + params.get("recurrent_bias", {}).get("u", 0.0)
    return (z * h + (1 - z) * np.tanh(inner),)


def emitted(name, carry):
    if name in GATO:
        r, s = carry
        return np.concatenate([np.cos(s), r], axis=-1)
    return carry[-1]


def check_step(name, cell, step, batch=(3,)):
    params, carry, x = parameters(cell, INPUTS), state(cell, batch), array(8, *batch, INPUTS)
    new, y = cell.apply({"params": params}, carry, x)
    expected = step(to_numpy(params), to_numpy(tuple(carry)), np.asarray(x))
    assert_close(tuple(new), expected)
    assert_close(y, emitted(name, expected))
    return new


def test_the_registry_holds_the_papers_cells():
    memories = {"rmc": rg.RMC, "dnc": rg.DNC, "rma": rg.RMA}
    gated = {f"{gate}_{family}" for gate in GATES for family in memories}
    linear = {name for name in rg.CELLS if rg.CELLS[name](FEATURES).linear}  # tests/test_linear.py
    assert set(rg.CELLS) == {*NAMES, *memories, *gated, *linear, "ur_gato", "or_gato", "slstm"}
    for family, cell in memories.items():
        assert rg.CELLS[family](FEATURES) == cell(FEATURES)
        for gate in GATES:
            assert rg.CELLS[f"{gate}_{family}"](FEATURES) == cell(FEATURES, gate=rg.GATES[gate])
    for name in GATED:
        gate, family = name.split("_")
        cell = {"lstm": rg.LSTM, "gru": rg.GRU, "janet": rg.JANET}[family]
        reset = {"reset": "before"} if family == "gru" else {}
        assert rg.CELLS[name](FEATURES) == cell(FEATURES, gate=rg.GATES[gate], **reset)
    assert rg.CELLS["gato"](FEATURES) == rg.CELLS["gato2"](FEATURES)
    assert rg.CELLS["on_lstm"](FEATURES) == rg.CELLS["om_lstm"](FEATURES)


@pytest.mark.parametrize(("gate", "twin"), TWINS.items())
def test_gates_that_start_apart_are_alike_from_there(gate, twin):
    """Their slots, parameters and values are equal, so that one of the two stands for both."""
    first, second = (build(f"{name}_lstm", bias_vectors=2) for name in (gate, twin))
    params = parameters(first, INPUTS)
    assert_identical(parameters(second, INPUTS), params)
    carry, x = state(first, (2,)), array(8, 2, INPUTS)
    step, other = (cell.apply({"params": params}, carry, x) for cell in (first, second))
    assert_identical(step, other)


@pytest.mark.parametrize("bias_vectors", [1, 2])
@distinct
def test_one_step_is_the_papers(name, bias_vectors):
    cell = build(name, bias_vectors=bias_vectors)
    check_step(name, cell, paper(name))


@pytest.mark.parametrize("downsize", [2, 4])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.split("_")[0] in ("om", "um", "cm", "on")]
)
def test_shared_master_gates_are_the_papers(name, downsize):
    check_step(name, build(name, downsize=downsize), paper(name, downsize=downsize))


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("name", ["ur_lstm", "gru", "om_janet", "rnn", "gato1", "gato2"])
def test_any_number_of_batch_dimensions(name, batch):
    new = check_step(name, build(name), paper(name), batch)
    assert {leaf.shape[:-1] for leaf in jax.tree.leaves(new)} == {batch}


@pytest.mark.parametrize("reset", ["after", "before", False])
@pytest.mark.parametrize("bias_vectors", [1, 2])
@pytest.mark.parametrize("gate", ["standard", "ur", "om"])
def test_where_the_gru_resets(gate, reset, bias_vectors):
    cell = rg.GRU(
        FEATURES,
        gate=rg.GATES[gate],
        reset=reset,
        bias_vectors=bias_vectors,
        param_dtype=jnp.float64,
    )
    check_step("gru", cell, lambda *args: reference.gru(*args, gate, reset=reset))
    params = parameters(cell, INPUTS)
    assert ("reset" in params["kernel"]) == bool(reset)


def test_a_reset_after_gru_with_one_bias_vector_keeps_the_candidates_own():
    params = parameters(rg.GRU(FEATURES), INPUTS)
    assert {slot: bias.shape for slot, bias in params["recurrent_bias"].items()} == {
        "u": (FEATURES,)
    }
    assert "recurrent_bias" not in parameters(rg.GRU(FEATURES, reset="before"), INPUTS)


def test_the_lectures_lstm():
    """Sigmoid candidate and output activation; without the forget gate s = s + i * s~."""
    for forget_gate in (True, False):
        cell = rg.LSTM(
            FEATURES,
            activation=jax.nn.sigmoid,
            output_activation=jax.nn.sigmoid,
            forget_gate=forget_gate,
            param_dtype=jnp.float64,
        )
        how = dict(
            activation=reference.sigmoid,
            output_activation=reference.sigmoid,
            forget_gate=forget_gate,
        )
        check_step("lstm", cell, lambda *args, how=how: reference.lstm(*args, **how))
        assert ("f" in parameters(cell, INPUTS)["kernel"]) == forget_gate


def test_the_elman_networks_activation_is_an_argument():
    cell = build("rnn", activation=jax.nn.relu)
    check_step(
        "rnn", cell, lambda *args: reference.elman(*args, activation=lambda x: np.maximum(x, 0))
    )


def test_the_exploding_state_explodes():
    """GATO 2.2: with |h| > 1 the state of eq. 2 grows without bound; the GRU's never leaves [-1,
    1]."""
    cell, gru, steps = build("exploding"), build("gru"), 200
    params = jax.tree.map(jnp.zeros_like, parameters(cell, 1))
    params["kernel"]["z"] -= 4.0  # z = tanh(-4), so 1 - z is nearly 2
    params["recurrent_kernel"]["u"] -= 3.0 * jnp.eye(FEATURES)
    run = jax.jit(rg.unroll, static_argnums=0, static_argnames="backend")
    xs, start = jnp.ones((steps, 1)), jnp.full((FEATURES,), 1.5)
    size = np.abs(run(cell, params, xs, rg.HiddenState(start), backend="scan")[1]).max(axis=1)
    assert (np.diff(size) > 0).all() and size[-1] > 300
    bounded = run(
        gru, parameters(gru, 1, scale=5.0), xs, rg.HiddenState(start / 2), backend="scan"
    )[1]
    assert np.abs(bounded).max() <= 1.0


@distinct
def test_gradients_of_one_step(name):
    cell = build(name)
    params, carry, x = parameters(cell, INPUTS), state(cell, (2,)), array(8, 2, INPUTS)
    apply = jax.jit(lambda params, carry, x: cell.apply({"params": params}, carry, x))
    check_grads(
        apply, (params, carry, x), order=1, modes=("fwd", "rev"), eps=1e-6, atol=1e-7, rtol=1e-6
    )


@distinct
def test_methods_and_flax_cell_are_one(name):
    cell = build(name)
    params, carry, x = parameters(cell, INPUTS), state(cell, (2,)), array(8, 2, INPUTS)
    z = cell.project(params, x)
    new = cell.step(params, carry, z)
    assert_identical(cell.apply({"params": params}, carry, x), (new, cell.emit(params, new, z)))
    for before, after in zip(
        jax.tree.leaves(cell.initial((2,))), jax.tree.leaves(new), strict=True
    ):
        assert (before.shape, before.dtype) == (after.shape, after.dtype) and not np.any(before)


@pytest.mark.parametrize("gate", rg.GATES)
def test_public_functions_and_methods_are_one(gate):
    spec, x = rg.GATES[gate], array(8, 2, INPUTS)
    lstm = rg.LSTM(FEATURES, gate=spec, bias_vectors=2, param_dtype=jnp.float64)
    params, carry = parameters(lstm, INPUTS), state(lstm, (2,))
    z = rg.linear_project(params, x, gate=spec)
    assert_identical(z, lstm.project(params, x))
    assert_identical(rg.lstm_step(params, carry, z, gate=spec), lstm.step(params, carry, z))
    for reset in ("after", "before", False):
        gru = rg.GRU(FEATURES, gate=spec, reset=reset, bias_vectors=2, param_dtype=jnp.float64)
        params, carry = parameters(gru, INPUTS), state(gru, (2,))
        separate = ("u",) if reset == "after" else ()
        z = rg.linear_project(params, x, gate=spec.tie(), separate=separate)
        assert_identical(z, gru.project(params, x))
        assert_identical(
            rg.gru_step(params, carry, z, gate=spec, reset=reset), gru.step(params, carry, z)
        )


@pytest.mark.parametrize("name", ["rnn", "gato1", "gato2"])
def test_public_functions_without_a_gate(name):
    cell = build(name)
    params, carry, x = parameters(cell, INPUTS), state(cell, (2,)), array(8, 2, INPUTS)
    z = cell.project(params, x)
    if name == "rnn":
        assert_identical(rg.linear_project(params, x), z)
        assert_identical(rg.elman_step(params, carry, z), cell.step(params, carry, z))
    else:
        settings = dict(f=cell.f, g=cell.g, period=None)
        assert_identical(rg.gato_step(params, carry, z, **settings), cell.step(params, carry, z))


@distinct
def test_gates_report_what_the_step_used(name):
    """The reported gates rebuild the next carry by the paper's last line."""
    cell = build(name)
    params, carry, x = parameters(cell, INPUTS), state(cell, (2,)), array(8, 2, INPUTS)
    z = cell.project(params, x)
    gates, new = cell.gates(params, carry, z), cell.step(params, carry, z)
    if name.endswith("lstm"):
        assert_close(gates["f"] * carry.c + gates["i"] * gates["u"], new.c)
        assert_close(gates["o"] * jnp.tanh(new.c), new.h)
    elif name.endswith(("gru", "janet")):
        assert_close(gates["f"] * carry.h + gates["i"] * gates["u"], new.h)
        assert ("reset" in gates) == name.endswith("gru")
    elif name == "exploding":
        assert_close(
            gates["z"],
            np.tanh(reference.affine(to_numpy(params), "z", np.asarray(x), np.asarray(carry.h))),
        )
    elif name == "rnn":
        assert gates == {}


@distinct
def test_saturated_cells_stay_finite(name):
    cell = build(name)
    params, carry, x = (
        parameters(cell, INPUTS, scale=1e3),
        state(cell, (2,)),
        array(8, 2, INPUTS, scale=1e3),
    )

    @quick_jit
    def run(params, carry, x):
        return jax.value_and_grad(
            lambda *args: cell.apply({"params": args[0]}, *args[1:])[1].sum(), (0, 1, 2)
        )(params, carry, x)

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run(params, carry, x)))


# How they start.


def laws_agree(a, b):
    """Two draws of one law: equal constants, else a two-sample Kolmogorov-Smirnov test at fixed
    keys."""
    a, b = np.ravel(np.asarray(a, np.float64)), np.ravel(np.asarray(b, np.float64))
    if np.unique(a).size == 1 or np.unique(b).size == 1:
        return np.unique(a).tolist() == np.unique(b).tolist()
    return stats.ks_2samp(a, b).pvalue > 1e-4


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gato", "on_lstm")])
def test_both_ways_to_start_are_one_law(name):
    cell = rg.CELLS[name](64)
    pure = cell.init_params(jax.random.key(0), 33)
    flax = cell.init(jax.random.key(0), cell.initial((1,)), jnp.zeros((1, 33), jnp.float32))[
        "params"
    ]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), pure) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), flax
    )
    assert all(jax.tree.leaves(jax.tree.map(laws_agree, pure, flax)))
    other = cell.init_params(jax.random.key(1), 33)
    drawn = [leaf for leaf in jax.tree.leaves(pure) if np.unique(leaf).size > 1]
    again = [leaf for leaf in jax.tree.leaves(other) if np.unique(leaf).size > 1]
    assert drawn and all((a != b).any() for a, b in zip(drawn, again, strict=True))
    distinct = {np.asarray(leaf).tobytes() for leaf in drawn}
    assert len(distinct) == len(drawn), "two leaves were drawn with one key"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("ur_mingru", "minlstm", "rg_lru", "lru", "slstm", "ur_gato")),
        ("ur_rmc", {"blocks": 2, "mlp_layers": 2}),
        ("ur_dnc", {"memory_slots": 6, "word_size": 5, "read_heads": 2}),
        ("ur_rma", {"memory_slots": 6, "word_size": 8, "read_heads": 2, "top_k": 3}),
    ],
)
def test_no_two_leaves_are_drawn_with_one_key(name, settings):
    """A key's draws of other shapes and scales begin alike, too."""
    params = rg.CELLS[name](16, **settings).init_params(jax.random.key(0), 16)
    params.pop("gamma", None)  # the LRU's is made from nu
    drawn = [np.ravel(leaf) for leaf in jax.tree.leaves(params) if np.unique(leaf).size > 1]
    for at, one in enumerate(drawn):
        for other in drawn[:at]:
            shared = min(one.size, other.size)
            assert abs(np.corrcoef(one[:shared], other[:shared])[0, 1]) < 0.9


@pytest.mark.parametrize("name", ["lstm", "ur_lstm", "gru", "janet", "rnn", "om_lstm"])
def test_dense_cells_start_as_said(name):
    """Orthogonal recurrent kernels, LeCun normal input kernels, zero biases but f's constant."""
    params = to_numpy(rg.CELLS[name](32).init_params(jax.random.key(0), 200))
    for slot, kernel in params["recurrent_kernel"].items():
        gram = kernel.T @ kernel if kernel.shape[1] <= kernel.shape[0] else kernel @ kernel.T
        np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-5, err_msg=slot)
    for kernel in params["kernel"].values():
        assert abs(kernel.std() * np.sqrt(200) - 1) < 0.05 and abs(kernel.mean()) < 0.005
    for slot, bias in params["bias"].items():
        assert np.unique(bias).tolist() == [
            1.0 if slot == "f" and name in ("lstm", "janet") else 0.0
        ]
    if name == "ur_lstm":
        u = reference.sigmoid(params["gate"]["b"].astype(np.float64))
        assert u.min() >= 1 / 32 - 1e-6 and u.max() <= 1 - 1 / 32 + 1e-6 and np.unique(u).size == 32


@pytest.mark.parametrize("name", GATO)
def test_gato_starts_uniform(name):
    """GATO B.2: every parameter from U[-0.1, 0.1]."""
    for leaf in jax.tree.leaves(rg.CELLS[name](512).init_params(jax.random.key(0), 20)):
        assert (
            stats.kstest(
                np.ravel(np.asarray(leaf, np.float64)), stats.uniform(-0.1, 0.2).cdf
            ).pvalue
            > 1e-3
        )


@pytest.mark.parametrize("name", ["ur_lstm", "c_gru", "um_janet"])
def test_frozen_gate_biases_are_masked_for_the_optimizer(name):
    cell = rg.CELLS[name](FEATURES, bias_mode="frozen")
    params = parameters(cell, INPUTS)
    mask = rg.trainable_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    assert set(jax.tree.leaves(mask["gate"])) == {False}
    assert set(jax.tree.leaves({k: v for k, v in mask.items() if k != "gate"})) == {True}
    learning = rg.trainable_mask(parameters(rg.CELLS[name](FEATURES), INPUTS))
    assert set(jax.tree.leaves(learning)) == {True}
    nested = rg.trainable_mask({"layers_0": {"cell": params}})
    assert nested == {"layers_0": {"cell": mask}}


# What they count.


def count(cell, inputs):
    return rg.count_parameters(
        jax.eval_shape(lambda key: cell.init_params(key, inputs), jax.random.key(0))
    )


@pytest.mark.parametrize(
    ("hidden", "inputs", "gato", "settings", "counts"),
    [
        (1024, 5, "gato2", {}, (138_752, 3_167_232, 4_222_976)),
        (512, 2, "gato2", {}, (43_264, 792_576, 1_056_768)),
        (512, 25, "gato1", {}, (20_736, 827_904, 1_103_872)),
        (1300, 650, "gato1", {"bias_vectors": 2}, (1_273_350, 7_612_800, 10_150_400)),
    ],
    ids=["copy", "adding", "icu", "ptb"],
)
def test_counts_are_the_papers(hidden, inputs, gato, settings, counts):
    cells = [rg.CELLS[gato](hidden, **settings)] + [
        rg.CELLS[n](hidden, bias_vectors=2) for n in ("gru", "lstm")
    ]
    assert tuple(count(cell, inputs) for cell in cells) == counts


@pytest.mark.parametrize("downsize", [1, 4, 16])
@pytest.mark.parametrize("bias_vectors", [1, 2])
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_keeps_the_lstms_count(gate, bias_vectors, downsize):
    """UR Table 1: but for the masters' share 1/(2C), and b where it is a vector of its own."""
    features, inputs = 32, 7
    settings = dict(bias_vectors=bias_vectors)
    plain = count(rg.LSTM(features, **settings), inputs)
    master, has_b = gate in ("om", "um", "cm"), gate in ("c", "u", "ur", "cr", "um", "cm")
    shared = dict(downsize=downsize) if master else {}
    cell = rg.CELLS[f"{gate}_lstm"](features, **shared, **settings)
    expected = plain + (plain // (2 * downsize) if master else 0)
    assert count(cell, inputs) == expected + has_b * (features // downsize if master else features)
    for mode, extra in (("folded", 0), ("frozen", features // downsize if master else features)):
        if not has_b:
            continue
        changed = dataclasses.replace(cell.gate, bias_mode=mode)
        assert count(rg.LSTM(features, gate=changed, **settings), inputs) == expected + extra


@pytest.mark.parametrize(("family", "maps"), [("gru", 3), ("janet", 2)])
@pytest.mark.parametrize("gate", GATES)
def test_counts_of_the_tied_cells(gate, family, maps):
    """A refine gate adds one map; masters untie f^ and i^ and add their own two."""
    features, inputs, downsize = 32, 7, 4
    one_map = features * (inputs + features + 1)
    maps += {"r": 1, "ur": 1, "cr": 1, "or": 1, "om": 1.5, "um": 1.5, "cm": 1.5}.get(gate, 0)
    own = {"um": 8, "cm": 8}.get(gate, features * (gate in ("c", "u", "ur", "cr")))
    shared = dict(downsize=downsize) if gate in ("om", "um", "cm") else {}
    cell = rg.CELLS[f"{gate}_{family}"](features, **shared)
    assert count(cell, inputs) == maps * one_map + own


# Values, types, names, errors.


@pytest.mark.parametrize("name", NAMES)
def test_equal_settings_give_equal_cells(name):
    first, second, other = build(name), build(name), build(name, param_dtype=jnp.float32)
    assert first == second and hash(first) == hash(second) and first != other


@pytest.mark.parametrize("name", ["ur_lstm", "gru", "om_janet", "rnn", "exploding", "gato2"])
def test_equal_cells_give_one_trace(name):
    function, traces = count_traces(
        lambda cell, params, carry, x: cell.apply({"params": params}, carry, x)
    )
    run = quick_jit(function, static_argnums=0)
    for cell in (build(name), build(name)):
        run(cell, parameters(cell, INPUTS), state(cell, (2,)), array(0, 2, INPUTS))
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["ur_lstm", "gru", "om_janet", "rnn", "gato1", "gato2"])
def test_bfloat16_computes_and_float32_carries(name):
    settings = {"wrap": None} if name in GATO else {}
    exact = rg.CELLS[name](FEATURES, **settings)
    coarse = rg.CELLS[name](FEATURES, dtype=jnp.bfloat16, **settings)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters(exact, INPUTS))
    carry = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state(exact, (4,)))
    x = array(8, 4, INPUTS).astype(jnp.float32)
    new, y = coarse.apply({"params": params}, carry, x)
    expected, _ = exact.apply({"params": params}, carry, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype(jnp.float32)}
    assert y.dtype == jnp.bfloat16
    assert_close(
        new, expected, tolerance=12 * 2.0**-8
    )  # a bfloat16 rounds at 2^-9; sums of 12 terms
    low = rg.CELLS[name](FEATURES, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, **settings)
    assert {leaf.dtype for leaf in jax.tree.leaves(low.initial((4,)))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("xx_lstm", "_lstm"), ("lsmt", "lstm"), ("xr_gato", "gato"), ("grru", "gru")],
)
def test_an_unknown_name_names_the_nearest(name, nearest):
    with pytest.raises(rg.UnknownCellError, match=name) as error:
        rg.CELLS[name]
    assert isinstance(error.value, KeyError)
    assert nearest in str(error.value).replace(name, "") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rg.CELLS["gato"](7), "even"),
        (lambda: rg.CELLS["gato1"](0), "0"),
        (lambda: rg.LSTM(0), "0"),
        (lambda: rg.GRU(-4), "-4"),
        (lambda: rg.LSTM(4, bias_vectors=3), "3"),
        (lambda: rg.GRU(4, reset="never"), "never"),
        (lambda: rg.CELLS["om_lstm"](8, downsize=3), "3"),
        (lambda: rg.CELLS["u_gru"](2), "2"),
        (lambda: rg.LSTM(4, gate=rg.GATES["ur"], forget_gate=False), "forget_gate"),
        (lambda: rg.CELLS["gato"](8, s_update="multiply"), "multiply"),
        (lambda: rg.CELLS["gato"](8, f=rg.GatedDecay(0.9), rate=0.5), "f or its rate, not both"),
        (lambda: rg.CELLS["gato"](8, g=rg.OneLayer(), hidden=64), "g or its hidden, not both"),
        (lambda: rg.CELLS["ur_gato"](8, f=rg.GatedDecay()), "f or its gate, not both"),
        (lambda: rg.CELLS["ur_gato"](8, forget_bias=1.0), "forget_bias"),
        (lambda: rg.JANET(8, reset="after"), "no reset gate, got reset='after'"),
    ],
)
def test_wrong_settings_are_one_sentence(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "x", [jnp.zeros((2, 4)), jnp.zeros((2, INPUTS), jnp.int32)], ids=["width", "integers"]
)
@pytest.mark.parametrize("name", ["lstm", "gru", "rnn", "gato1", "gato2"])
def test_wrong_inputs_are_one_sentence(name, x):
    cell = build(name)
    with pytest.raises(ValueError, match=r"[Ii]nputs") as error:
        cell.project(parameters(cell, INPUTS), x)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_cell_starts_in_half_precision(dtype):
    for name in NAMES:
        params = build(name, param_dtype=dtype).init_params(jax.random.key(0), INPUTS)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("name", NAMES)
def test_cells_pickle(name):
    uniform = initializers.torch_recurrent(FEATURES)
    for cell in (rg.CELLS[name](FEATURES), build(name, kernel_init=uniform, bias_vectors=2)):
        again = pickle.loads(pickle.dumps(cell))
        assert again == cell and hash(again) == hash(cell) and type(again) is type(cell)


def test_what_holds_cells_pickles(x32):
    foreign = nn.LSTMCell(FEATURES, carry_init=nn.initializers.ones, dtype=jnp.float32)
    for module in (
        rg.FlaxCell(nn.GRUCell(FEATURES)),
        rg.FlaxCell(foreign),
        rg.RNN(rg.CELLS["ur_lstm"](FEATURES), carry_fns=(rg.Detach(0.25),), reverse=True),
        rg.RNN(rg.FlaxCell(foreign), name="layer"),
        rg.Stack((rg.LSTM(FEATURES), rg.CELLS["gato1"](FEATURES)), dropout=0.5),
    ):
        again = pickle.loads(pickle.dumps(module))
        assert again == module and again is not module and hash(again) == hash(module)
    xs, layer = jnp.ones((2, 5, INPUTS)), rg.RNN(rg.FlaxCell(foreign))
    layer, xs = pickle.loads(pickle.dumps(layer)), xs.astype(jnp.float32)
    variables = rg.RNN(rg.FlaxCell(foreign)).init(jax.random.key(0), xs)
    assert_identical(layer.apply(variables, xs), rg.RNN(rg.FlaxCell(foreign)).apply(variables, xs))


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpys_integers_are_sizes(kind):
    for name in ("lstm", "om_gru", "gato2"):
        cell = rg.CELLS[name](kind(4))
        assert cell == rg.CELLS[name](4) and hash(cell) == hash(rg.CELLS[name](4))
        assert type(cell.features) is int
