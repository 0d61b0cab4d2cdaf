"""The fused backend against the scan: every value and every gradient, over all pairs of options.

A greedy covering array holds every pair of levels of the factors below: a default run has the first
rows, which hold four fifths of the pairs, and `--long` has the others. With `--full` every cell
family meets every gate, every carry function and every condition.
"""

import dataclasses
import functools
import itertools
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import recurrent_gates as rg
from recurrent_gates.backends import fused
from recurrent_gates.backends.shared import products, two_layer
from recurrent_gates.cells import Exploding, HiddenState
from recurrent_gates.scan import Loop, Settings
from tests.support import (
    TWINS,
    array,
    assert_close,
    parameters,
    quick_jit,
    state,
    thinned,
)
from tests.test_carry import Scale
from tests.test_gato import Count, StoreAtCount

STEPS, BATCH, INPUTS, FEATURES = 7, 2, 3, 4
CHUNK = 3  # does not divide the 7 steps

GATED = ("lstm", "gru_after", "gru_before", "gru_no_reset", "janet")
BIASED = ("lstm", "gru_after")
PLAIN = ("lstm_lecture", "gru_d", "rnn", "exploding", "gato1", "gato2")

FACTORS = {
    "family": GATED + PLAIN,
    "gate": tuple(gate for gate in rg.GATES if gate not in TWINS),
    "biases": (1, 2),  # vectors
    "carry": ("none", "detach", "detach_own_other", "damp", "zoneout", "zoneout_mean"),
    "mask": ("none", "lengths", "valid"),
    "resets": (False, True),
    "reverse": (False, True),
    "chunk": (None, CHUNK, "replayed", "kept"),
    "products": ("apart", "merged"),
    "around": ("nothing", "vmap", "checkpoint"),
    "carries": ("last", "all"),
}
CONDITIONS = (
    {},
    *(
        {name: level}
        for name in ("biases", "mask", "resets", "reverse", "chunk", "products", "around")
        for level in FACTORS[name][1:]
    ),
)


def possible(row):
    """Whether there are cells with these levels: plain ones have no gate to choose, and two vectors
    of biases are those of the two families in ``BIASED``."""
    family = row.get("family")
    if family not in (None, *GATED) and row.get("gate", "standard") != "standard":
        return False
    return family in (None, *BIASED) or row.get("biases", 1) == 1


def covering_array():
    """Rows that hold every possible pair of levels, greedily; the same in each run."""
    names = list(FACTORS)
    wanted = {
        pair
        for a, b in itertools.combinations(names, 2)
        for pair in itertools.product(
            [(a, level) for level in FACTORS[a]], [(b, level) for level in FACTORS[b]]
        )
        if possible(dict(pair))
    }
    rows, draw = [], np.random.default_rng(0)

    def covers(row):
        return {pair for pair in itertools.combinations(row.items(), 2) if pair in wanted}

    while wanted:
        best, best_covered = None, set()
        for first in sorted(wanted, key=repr)[:: max(1, len(wanted) // 8)]:
            row = dict(first)
            for name in names:
                if name not in row:
                    levels = list(FACTORS[name])
                    if name in ("family", "gate"):
                        draw.shuffle(
                            levels
                        )  # of equals elsewhere the first level, the plainest, is taken
                    levels = [level for level in levels if possible({**row, name: level})]
                    trial = [
                        {
                            key: {**row, name: level}[key]
                            for key in names
                            if key in row or key == name
                        }
                        for level in levels
                    ]
                    row = max(trial, key=lambda candidate: len(covers(candidate)))
            row = {name: row[name] for name in names}
            if len(covers(row)) > len(best_covered):
                best, best_covered = row, covers(row)
        rows.append(best)
        wanted -= best_covered
    return rows


def most_pairs(rows):
    """Whether a row is one of the first that hold four fifths of all pairs together: greedy rows
    hold the fewer new ones the later they come."""
    seen = list(
        itertools.accumulate(
            (set(itertools.combinations(row.items(), 2)) for row in rows), set.union
        )
    )
    few = sum(len(pairs) < 0.8 * len(seen[-1]) for pairs in seen)
    return lambda row: row in rows[: few + 1]


def full_product():
    first = {name: levels[0] for name, levels in FACTORS.items()}
    for family, gate, carry in itertools.product(FACTORS["family"], rg.GATES, FACTORS["carry"]):
        for condition in CONDITIONS:
            row = {**first, "family": family, "gate": gate, "carry": carry, **condition}
            if possible(row):
                yield row


def name_of(row):
    return "-".join(
        f"{level}" if isinstance(level, str) else f"{name}:{level}" for name, level in row.items()
    )


def pytest_generate_tests(metafunc):
    if "row" in metafunc.fixturenames:
        rows = list(full_product()) if metafunc.config.getoption("full") else covering_array()
        cases = thinned([(row,) for row in rows], most_pairs(rows), pytest.mark.long)
        metafunc.parametrize("row", cases, ids=map(name_of, rows))


pytestmark = pytest.mark.usefixtures("x64")


def build(family, gate="standard", biases=1):
    spec = rg.GATES[gate]
    if spec.master:
        spec = dataclasses.replace(spec, downsize=2)
    settings = dict(param_dtype=jnp.float64)
    sigmoid = dict(activation=jax.nn.sigmoid, output_activation=jax.nn.sigmoid)
    return {
        "lstm": lambda: rg.LSTM(FEATURES, gate=spec, bias_vectors=biases, **settings),
        "gru_after": lambda: rg.GRU(FEATURES, gate=spec, bias_vectors=biases, **settings),
        "gru_before": lambda: rg.GRU(FEATURES, gate=spec, reset="before", **settings),
        "gru_no_reset": lambda: rg.GRU(FEATURES, gate=spec, reset=False, **settings),
        "janet": lambda: rg.JANET(FEATURES, gate=spec, **settings),
        "lstm_lecture": lambda: rg.LSTM(FEATURES, forget_gate=False, **sigmoid, **settings),
        "gru_d": lambda: rg.GRUD(FEATURES, bias_vectors=2, **settings),
        "rnn": lambda: rg.Elman(FEATURES, **settings),
        "exploding": lambda: Exploding(FEATURES, **settings),
        "gato1": lambda: rg.CELLS["gato1"](FEATURES, bias_vectors=2, **settings),
        "gato2": lambda: rg.CELLS["gato2"](FEATURES, hidden=3, **settings),
    }[family]()


def carry_functions(kind, cell):
    """The functions; "other" is the field beside the one that feeds the products, where there is
    one."""
    fields = cell.initial(())._fields
    field, other = ("r", "s") if "r" in fields else ("h", fields[0])
    return {
        "none": (),
        "detach": (rg.Detach(p=0.5, field=field),),
        "detach_own_other": (
            rg.Detach(p=0.5, field=other, per_example=True),
            rg.Detach(p=0.3, field=field),
        ),
        "damp": (rg.Damp(p=0.4, field=field), rg.Damp(p=0.3, field=other)),
        "zoneout": (
            rg.Zoneout(p=0.5, field=other),
            rg.Zoneout(p=0.3, field=field),
            rg.Detach(p=0.5, field=field),
        ),
        "zoneout_mean": (rg.Zoneout(p=0.5, field=other), rg.Zoneout(p=0.3, field=field)),
    }[kind]


def draw(fn, width, rng):
    """A noise for one carry function: zoneout's as masks, whose keys would compile for long."""
    if isinstance(fn, rg.Damp):
        return None
    shape = (
        (STEPS, BATCH, width)
        if isinstance(fn, rg.Zoneout)
        else (STEPS, BATCH)
        if fn.per_example
        else (STEPS,)
    )
    return jnp.asarray(rng.random(shape) < 0.5)


def options(row, cell, rng):
    """The keyword arguments of unroll that a row stands for."""
    functions = carry_functions(row["carry"], cell)
    how = dict(
        carry_fns=functions,
        reverse=row["reverse"],
        remat=row["chunk"] if row["chunk"] == CHUNK else None,
        return_carries=row["carries"],
    )
    if row["carry"] == "zoneout_mean":
        how["deterministic"] = True
    else:
        how["noise"] = tuple(draw(fn, cell.initial(())[0].shape[-1], rng) for fn in functions)
    if row["mask"] == "lengths":
        how["lengths"] = jnp.asarray(rng.permutation([STEPS - 2, rng.integers(0, STEPS)]))
    if row["mask"] == "valid":
        how["valid"] = jnp.asarray(rng.random((STEPS, BATCH)) < 0.7)
    if row["resets"]:
        how["resets"] = jnp.asarray(rng.random((STEPS, BATCH)) < 0.3)
    return how


def results(cell, how, backend, around="nothing"):
    """Values, and gradients of params, inputs, carry and reset_carry, for cotangents on ys, on the
    carry and on both."""
    lanes = (2,) if around == "vmap" else ()
    params, xs = parameters(cell, INPUTS), array(8, *lanes, STEPS, BATCH, INPUTS)
    carry, reset_carry = (state(cell, (*lanes, BATCH), seed) for seed in (0, 50))

    def forward(params, xs, carry, reset_carry):
        return rg.unroll(cell, params, xs, carry, reset_carry=reset_carry, backend=backend, **how)

    run = jax.vmap(forward, (None, 0, 0, 0)) if around == "vmap" else forward
    run = jax.checkpoint(run) if around == "checkpoint" else run

    @quick_jit
    def pull(of_carry, of_ys, *operands):
        out, pullback = jax.vjp(run, *operands)
        carry, ys = jax.tree.map(lambda leaf: array(31, *leaf.shape), out)
        return out, pullback((jax.tree.map(lambda leaf: of_carry * leaf, carry), of_ys * ys))

    pairs = ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0))
    return [pull(*pair, params, xs, carry, reset_carry) for pair in pairs]


def compare(cell, how, around="nothing"):
    """Fused against the scan, the latter of all steps in one piece and plainly differentiated."""
    in_sequence = {**how, "remat": None}
    plain = "nothing" if around == "checkpoint" else around
    assert_close(results(cell, how, "fused", around), results(cell, in_sequence, "scan", plain))


@functools.cache
def scanned(cell, reverse):
    return results(cell, dict(reverse=reverse), "scan")


def compare_in_chunks(cell, reverse, remat=None):
    assert_close(results(cell, dict(reverse=reverse, remat=remat), "fused"), scanned(cell, reverse))


def outgrow_the_cache(monkeypatch, chunk):
    """Makes fused split the time by itself, and form products again or keep them all."""
    if chunk in ("replayed", "kept"):
        monkeypatch.setattr(fused, "_REUSED_BYTES", 0)
        monkeypatch.setattr(fused, "_FEW_CHUNKS", 0)
        monkeypatch.setattr(fused, "_CACHE_BYTES", 1)
        monkeypatch.setattr(fused, "_REPLAYED", FEATURES if chunk == "replayed" else 0)


def test_fused_is_the_scan(row, monkeypatch):
    outgrow_the_cache(monkeypatch, row["chunk"])
    monkeypatch.setattr(products, "merges", lambda loop, **_: row["products"] == "merged")
    if row["products"] == "merged":  # as on a GPU
        monkeypatch.setattr(fused, "_skips", lambda: False)
    cell = build(row["family"], row["gate"], row["biases"])
    compare(
        cell,
        options(row, cell, np.random.default_rng(zlib.crc32(name_of(row).encode()))),
        row["around"],
    )


def test_the_covering_array_covers():
    rows = covering_array()
    for a, b in itertools.combinations(FACTORS, 2):
        seen = {(row[a], row[b]) for row in rows}
        levels = set(itertools.product(FACTORS[a], FACTORS[b]))
        levels = {pair for pair in levels if possible(dict(zip((a, b), pair, strict=True)))}
        assert seen == levels


@pytest.mark.parametrize(
    "settings",
    [dict(s_update="accumulate", gamma=jnp.sin), dict(emit_s_only=True), dict(wrap=None)],
    ids="-".join,
)
def test_gato_settings(settings):
    compare(rg.CELLS["gato2"](FEATURES, hidden=3, param_dtype=jnp.float64, **settings), {})


@pytest.mark.parametrize(
    ("s_update", "inputs"), [("zero", "few"), ("replace", "few"), ("replace", "many")]
)
@pytest.mark.long
def test_gato_ablations(s_update, inputs, monkeypatch):
    """With increments of either form, where there are any, in chunks."""
    outgrow_the_cache(monkeypatch, "replayed")
    monkeypatch.setattr(two_layer, "on_one_cpu", lambda: inputs == "few")
    settings = dict(s_update=s_update, wrap=0.5, param_dtype=jnp.float64)
    cell = rg.CELLS["gato2"](FEATURES, hidden=3, **settings)
    how = dict(
        carry_fns=(rg.Zoneout(p=0.5, field="s"), rg.Damp(p=0.4, field="r")),
        noise=(array(10, STEPS, BATCH, FEATURES // 2) > 0, None),
        resets=array(9, STEPS, BATCH) > 0.5,
    )
    compare(cell, how)
    compare(cell, dict(reverse=True, remat=5))


@pytest.mark.parametrize(
    ("chunk", "reverse"),
    thinned(
        itertools.product([None, 1, 5, STEPS, 100], [False, True]),
        lambda chunk, reverse: reverse or chunk == 5,
    ),
)
@pytest.mark.long
def test_gato_in_any_chunks(chunk, reverse):
    compare_in_chunks(build("gato2"), reverse, chunk)


@pytest.mark.parametrize(
    ("family", "chunk", "reverse"),
    thinned(
        itertools.product(["lstm", "gru_before", "gato2"], ["replayed", "kept"], [False, True]),
        lambda family, chunk, reverse: family == "gru_before" or reverse == (chunk == "kept"),
        long=lambda family, chunk, reverse: (family, chunk) == ("gato2", "kept"),
    ),
)
def test_chunks_that_fused_takes_by_itself(monkeypatch, family, chunk, reverse):
    outgrow_the_cache(monkeypatch, chunk)
    compare_in_chunks(build(family), reverse)


class Sine(rg.LSTM):
    def emit(self, params, carry, z):
        return jnp.sin(carry.h)


def gradient_program(cell):
    def loss(params, xs):
        return rg.unroll(cell, params, xs, backend="fused")[1].sum()

    inputs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    return jax.jit(jax.grad(loss, (0, 1))).lower(*inputs).as_text()


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("lstm", [{"f", "i", "u", "o"}]),
        ("gru_after", [{"reset", "f", "u"}]),
        ("gru_before", [{"reset", "f"}]),
        ("gato1", []),
        ("rnn", []),
    ],
)
def test_products_of_one_vector_are_one(family, groups, monkeypatch):
    monkeypatch.setattr(products, "merges", lambda loop, **_: True)
    cell = build(family)
    params = parameters(cell, INPUTS)
    xs, start = array(8, 1, INPUTS), cell.initial(())
    loop = Loop(Settings(cell, batch_dims=0), params, xs, start, start)
    loop = products.product_loop(loop, cell.project(params, xs))
    merged = products.merged_products(loop, jnp.float64)
    assert [set(group.slots) for group in merged] == groups


@pytest.mark.parametrize(("merges", "wanted"), [(False, 4 * (2 + 3)), (True, 4 * 2 + 2 + 4)])
def test_merged_products_are_one_in_each_direction(merges, wanted, monkeypatch):
    """Four slots; products of x and their gradients; of h, forward, backward and the weights'."""
    monkeypatch.setattr(products, "merges", lambda loop, **_: merges)
    assert gradient_program(build("lstm")).count("dot_general") == wanted + 4


class Halves(rg.SlotCell):
    """A leaky unit, whose candidate is gated by what the input alone says, in a slot twice as
    wide as its recurrent product."""

    @property
    def slots(self):
        return {"f": self.features, "u": self.features}

    @property
    def input_slots(self):
        return {"f": self.features, "u": 2 * self.features}

    @property
    def separate(self):
        return ("u",)

    def initial(self, batch_shape):
        return HiddenState(self.zeros(batch_shape))

    def update(self, carry, inputs, product):
        f = jax.nn.sigmoid(product("f", carry.h))
        a, b = jnp.split(inputs["u_input"], 2, axis=-1)
        return HiddenState(
            f * carry.h + (1 - f) * jnp.tanh(a + jax.nn.sigmoid(b) * product("u", carry.h))
        )


def test_slots_that_are_read_apart_are_projections(monkeypatch):
    monkeypatch.setattr(products, "merges", lambda loop, **_: True)
    compare(Halves(FEATURES, param_dtype=jnp.float64), {})


@pytest.mark.parametrize("make", [rg.LSTM, Sine])
def test_where_products_are_kept_none_is_computed_twice(make, monkeypatch):
    """Whatever y is: its derivative may need the carries."""
    outgrow_the_cache(monkeypatch, "kept")
    monkeypatch.setattr(products, "merges", lambda loop, **_: False)
    program = gradient_program(make(FEATURES, param_dtype=jnp.float64))
    # Chunks and a rest; four slots; products of x and of h, each with two for its gradients.
    assert program.count("dot_general") == 2 * 4 * (2 + 4)


def test_where_carries_are_kept_their_loop_runs_once(monkeypatch):
    """Increments read them in the backward pass."""
    outgrow_the_cache(monkeypatch, "replayed")
    program = gradient_program(build("gato1"))
    # Chunks and a rest; r's tanh, once in each direction.
    assert program.count("stablehlo.tanh") == 2 * 2


@pytest.mark.parametrize(("family", "batch"), [("lstm", (BATCH,)), ("gato2", ())])
@pytest.mark.long
def test_zoneout_from_keys(family, batch):
    """A key for each step and example, or for each step."""
    cell = build(family)
    functions = carry_functions("zoneout", cell)
    noise = rg.draw_noise(functions, jax.random.key(1), STEPS, batch)
    compare(cell, dict(carry_fns=functions, noise=noise, remat=CHUNK))


def both(cell, params, xs):
    """The values and gradients of the two backends are close."""

    def run(backend):
        def loss(params, xs):
            return jnp.sum(rg.unroll(cell, params, xs, backend=backend)[1] ** 2)

        return quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, xs)

    assert_close(run("fused"), run("scan"))


@dataclasses.dataclass(frozen=True)
class Mean(rg.GATOMap):
    """A map of one's own whose projection has no axis of units, or one beside it."""

    wide: bool = False

    def project(self, params, x, dtype):
        mean = jnp.mean(x, axis=-1)
        return jnp.broadcast_to(mean[..., None, None], (*mean.shape, 2, 3)) if self.wide else mean

    def __call__(self, params, r, z):
        return r + (jnp.sum(z, axis=-1) if self.wide else z[..., None])


@pytest.mark.parametrize("wide", [False, True])
def test_projections_of_any_shape(wide):
    cell = rg.GATO(4, g=Mean(wide), param_dtype=jnp.float64)
    both(cell, parameters(cell, INPUTS), array(3, STEPS, BATCH, INPUTS))


class Pair(rg.LSTM):
    """Reads a tree of inputs of different ranks."""

    def project(self, params, x):
        flat = x["image"].reshape(*x["image"].shape[:-2], -1)
        return super().project(params, jnp.concatenate([x["features"], flat], axis=-1))


def test_a_tree_of_inputs():
    cell = Pair(FEATURES, param_dtype=jnp.float64)
    xs = {"features": array(4, STEPS, BATCH, 2), "image": array(5, STEPS, BATCH, 3, 2)}
    both(cell, parameters(cell, 8), xs)


def test_no_inputs_at_all():
    cell = rg.GATO(4, param_dtype=jnp.float64)
    params = parameters(cell, 1)
    for own in params.values():  # init_params asks for inputs; the equations do not
        own["kernel"] = jax.tree.map(lambda kernel: kernel[:0], own["kernel"])
    both(cell, params, jnp.zeros((STEPS, BATCH, 0)))


def test_a_carry_function_of_ones_own():
    compare(build("lstm"), dict(carry_fns=(Scale(p=0.5, added=0.1),), noise=(None,)))


@struct.dataclass
class Leak(rg.CarryFn):
    """h reads c, after it was detached."""

    def before(self, noise_t, carry):
        return carry._replace(h=carry.h + self.p * carry.c)


def test_what_makes_a_detached_field_anew_has_its_gradient():
    functions = (rg.Detach(p=0.5), Leak(p=0.25))
    compare(build("lstm"), dict(carry_fns=functions, noise=(array(3, STEPS) > -0.5, None)))


@struct.dataclass
class Everywhere(rg.CarryFn):
    """Acts on every field, whichever it names."""

    def after(self, noise_t, prev, new):
        return jax.tree.map(lambda leaf: self.p * leaf, new)


@pytest.mark.parametrize("family", ["lstm", "gato2"])
def test_p_has_the_same_gradient_everywhere(family):
    """p is a leaf: the mean form of zoneout is differentiable in it, on both backends or on
    neither."""
    cell = build(family)
    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    field = "r" if family == "gato2" else "h"

    def slope(backend):
        def loss(p):
            fns = (rg.Zoneout(p=p, field=field),)
            return rg.unroll(cell, params, xs, carry_fns=fns, deterministic=True, backend=backend)[
                1
            ].sum()

        return quick_jit(jax.grad(loss))(0.3)

    assert_close(slope("fused"), slope("scan"))


@pytest.mark.parametrize(
    ("make", "fns"),
    [
        (lambda: rg.FlaxCell(nn.LSTMCell(FEATURES)), ()),
        (lambda: rg.GATO(FEATURES, f=Count(), g=StoreAtCount()), ()),
        (lambda: rg.CELLS["gato1"](FEATURES), (rg.Damp(p=0.5, field=0),)),
        (lambda: rg.CELLS["gato1"](FEATURES), (Everywhere(p=0.5, field="r"),)),
    ],
    ids=["foreign", "maps of one's own", "field by index", "a function of sums as well"],
)
def test_what_fused_does_not_serve_is_refused_in_one_sentence(make, fns, x32):
    cell = make()
    params, xs = cell.init_params(jax.random.key(0), 1), jnp.ones((3, BATCH, 1))
    with pytest.raises(ValueError, match="fused") as error:
        rg.unroll(cell, params, xs, carry_fns=fns, backend="fused")
    assert "\n" not in str(error.value)
    by_itself = rg.unroll(
        cell, params, xs, carry_fns=fns, backend="auto"
    )  # and auto takes the scan
    assert_close(
        by_itself, rg.unroll(cell, params, xs, carry_fns=fns, backend="scan"), tolerance=1e-6
    )
