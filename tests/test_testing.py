"""The conformance suite: it passes every cell here and a short one of the user's, and catches
broken ones."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
from recurrent_gates.testing import check_cell, check_replay
from tests.support import thinned


class Leaky(rg.Cell):
    """A user's own cell: three methods."""

    features: int = 4

    def init_params(self, key, in_features):
        return {"w": 0.5 * jax.random.normal(key, (in_features, self.features))}

    def initial(self, batch_shape):
        return jnp.zeros((*batch_shape, self.features))

    def step(self, params, carry, z_t):
        return 0.9 * carry + 0.1 * jnp.tanh(z_t @ params["w"])


@pytest.mark.parametrize(
    "name",
    thinned([("lstm",), ("ur_gru",), ("rnn",), ("gato2",)], "lstm".__eq__, pytest.mark.long),
)
def test_every_kind_of_cell_conforms(name):
    check_cell(rg.CELLS[name](4))


def test_a_users_own_cell_conforms():
    check_cell(Leaky())


def test_a_foreign_cell_conforms():
    check_cell(rg.FlaxCell(nn.GRUCell(4)))


def variant(**methods):
    """A broken Leaky: some of its members replaced."""
    return type("Broken", (Leaky,), {"__annotations__": {}, **methods})


@jax.custom_vjp
def wrong_tanh(x):
    return jnp.tanh(x)


wrong_tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, d: (2.0 * d,))


def forgets_the_type(self, params, carry, z_t):
    return Leaky.step(self, params, carry, z_t).astype(jnp.bfloat16)


def half_initial(self, batch_shape):
    return jnp.zeros((*batch_shape, self.features), jnp.bfloat16)


def looks_around(self, params, x):
    return x - x.mean(axis=0, keepdims=True)  # over time, when there is time


def mixes_the_batch(self, params, carry, z_t):
    return Leaky.step(self, params, carry, z_t) + carry.mean(axis=0, keepdims=True)


def wrong_slope(self, params, carry, z_t):
    return 0.9 * carry + 0.1 * wrong_tanh(z_t @ params["w"])


def overflows(self, params, carry, z_t):
    inner = z_t @ params["w"]
    return 0.9 * carry + 0.1 * inner / jnp.sqrt(1 + jnp.exp(inner**2))


def one_array(self, key, in_features):
    return jax.random.normal(key, (in_features, self.features))


def changes_its_carry(self, params, carry, z_t):
    return (Leaky.step(self, params, carry, z_t),)


BROKEN = {
    "its carry changes its type": (dict(step=forgets_the_type), "carry"),
    "its carry changes its structure": (dict(step=changes_its_carry), "carry"),
    "its carry is half precision": (
        dict(
            initial=half_initial,
            step=lambda self, p, c, z: Leaky.step(self, p, c.astype(jnp.float32), z).astype(
                c.dtype
            ),
        ),
        "float32",
    ),
    "its projection looks around in time": (dict(project=looks_around), "project|time|step"),
    "its step mixes examples": (dict(step=mixes_the_batch), "vmap|batch|padding|loop"),
    "its gradient is wrong": (dict(step=wrong_slope), "gradient"),
    "its gradient overflows": (dict(step=overflows), "finite"),
    "its parameters are no dict": (dict(init_params=one_array), "dict"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_cell_is_told_in_one_sentence(fault):
    members, words = BROKEN[fault]
    with pytest.raises(AssertionError, match=words) as error:
        check_cell(variant(**members)())
    assert "Broken" in str(error.value)


def promising(**changes):
    """A GATO whose sums are declared otherwise: functions of the cell's own ones, and more."""
    declared = {name: value for name, value in changes.items() if name != "diagonal"}

    def sums(self):
        own = rg.GATO.sums.fget(self)
        return dataclasses.replace(own, **{name: how(own) for name, how in declared.items()})

    members = {"sums": property(sums), "products": None}  # so that recur is what runs
    if "diagonal" in changes:
        members["diagonal"] = changes["diagonal"]
    return type("Broken", (rg.GATO,), {"__annotations__": {}, **members})(4)


def reads_s(own):
    return lambda params, carry, z_t: own.recur(
        params, carry._replace(r=carry.r + 0.01 * carry.s), z_t
    )


def adds_s(own):
    return lambda params, carry, z: {
        "s": own.increment(params, carry, z)["s"] + 0.01 * carry.s,
    }


def mixes_units(own):
    return lambda params, carry, z_t: own.recur(
        params, carry._replace(r=carry.r + 0.01 * jnp.roll(carry.r, 1, axis=-1)), z_t
    )


def halves(own):
    return lambda field, total: total / 2


class Doubling(rg.Cell):
    """A step that adds twice what its sums add."""

    features: int = 4

    def init_params(self, key, in_features):
        return {"W": jax.random.normal(key, (in_features, self.features))}

    def initial(self, batch_shape):
        zeros = jnp.zeros((*batch_shape, self.features))
        return rg.GATOState(zeros, zeros)

    def step(self, params, carry, z_t):
        s = carry.s + 2 * jnp.tanh(carry.r)
        return rg.GATOState(0.5 * carry.r + jnp.tanh(z_t @ params["W"]), s)

    def emit(self, params, carry, z):
        return jnp.cos(carry.s)

    @property
    def sums(self):
        def recur(params, carry, z_t):
            return carry._replace(r=0.5 * carry.r + jnp.tanh(z_t @ params["W"]))

        return rg.Sums(("s",), lambda params, carry, z: {"s": jnp.tanh(carry.r)}, recur)


def test_sums_that_are_not_the_step_are_told_in_one_sentence():
    words = "Doubling: recur and increment of its sums must be its step"
    with pytest.raises(AssertionError, match=words):
        check_cell(Doubling())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(recur=reads_s), "sums may read"),
        (dict(increment=adds_s), "sums may read"),
        (dict(recur=mixes_units), "diagonal.*interact"),
        (dict(bound=halves), "bound of 's'"),
    ],
    ids=["recur reads s", "increment reads s", "units interact", "s is halved"],
)
def test_broken_promises_are_told_in_one_sentence(changes, words):
    with pytest.raises(AssertionError, match=f"Broken.*{words}"):
        check_cell(promising(**changes))


def test_a_rule_of_sums_is_one_of_three():
    with pytest.raises(ValueError, match="add, replace, zero, not 'mean'"):
        dataclasses.replace(rg.GATO(4).sums, rule="mean")


@pytest.mark.parametrize("s_update", ["zero", "replace"])
@pytest.mark.long
def test_the_ablations_of_gato_conform(s_update):
    check_cell(rg.CELLS["gato1"](4, s_update=s_update))


@pytest.mark.long
def test_units_that_mix_are_no_breach_where_nothing_is_promised():
    check_cell(promising(recur=mixes_units, diagonal=False))


def test_settings_must_hash():
    class Holding(Leaky):
        values: object = None

    with pytest.raises(AssertionError, match="hash"):
        check_cell(Holding(values=jnp.ones(3)))


def test_only_cells_are_checked():
    with pytest.raises(AssertionError, match="Cell"):
        check_cell(nn.GRUCell(4))


def raises_key_error(self, params, carry, z_t):
    return carry + z_t @ params["v"]


def no_arrays(self, batch_shape):
    return ["c", "h"]


def more_each_time(self, params, carry, z_t):
    return jnp.concatenate([carry, carry], axis=-1)


def wrong_product(self, params, carry, z_t):
    return carry + z_t @ params["w"].T @ params["w"].T


def emits_a_field_that_is_not_there(self, params, carry, z):
    return carry.c


ERRORS = {
    "a parameter that is not there": (dict(step=raises_key_error), "KeyError: 'v'"),
    "no init_params": (dict(init_params=rg.Cell.init_params), "must define init_params"),
    "no initial": (dict(initial=rg.Cell.initial), "must define initial"),
    "no step": (dict(step=rg.Cell.step), "must define step"),
    "a carry of strings": (dict(initial=no_arrays), "arrays"),
    "a carry that grows": (dict(step=more_each_time), "carry"),
    "a product that does not fit": (dict(step=wrong_product), "TypeError"),
    "an output that is not there": (dict(emit=emits_a_field_that_is_not_there), "AttributeError"),
    "parameters of a number": (dict(init_params=lambda self, key, n: {"w": 1.0}), "Broken"),
}


@pytest.mark.parametrize("fault", ERRORS)
def test_an_error_of_a_cell_is_told_in_one_sentence(fault):
    members, words = ERRORS[fault]
    with pytest.raises(AssertionError, match=words) as error:
        check_cell(variant(**members)())
    assert "Broken" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("cell", [Leaky, "lstm", None, jnp.tanh])
def test_what_is_no_cell_is_told_in_one_sentence(cell):
    for check in (check_cell, check_replay):
        with pytest.raises(AssertionError, match=r"Cell|cell") as error:
            check(cell)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("cell", [*(rg.CELLS[n](8) for n in ("lstm", "ur_gru", "gato2")), Leaky()])
def test_acting_and_replaying_agree(cell):
    check_replay(cell)


def earlier(dones):
    return dones


def later(dones):
    none = jnp.zeros_like(dones[:1])
    return jnp.concatenate([none, none, dones[:-2]])


def never(dones):
    return jnp.zeros_like(dones)


@pytest.mark.parametrize(("resets", "step"), [(earlier, 2), (later, 1), (never, 1)])
@pytest.mark.parametrize("name", ["lstm", "gru", "gato1"])
def test_a_replay_that_resets_at_another_step_is_caught(name, resets, step):
    """Episodes end at steps 0, 1 and 2, so steps 1, 2 and 3 start anew; of resets a step early the
    first, at the start, changes nothing."""
    cell = rg.CELLS[name](8)

    def replay(params, xs, dones):
        return rg.unroll(cell, params, xs, resets=resets(dones))

    with pytest.raises(AssertionError, match=f"differs from acting from step {step} on") as error:
        check_replay(cell, replay=replay)
    assert "\n" not in str(error.value)


def test_a_replay_with_another_last_carry_is_caught():
    cell = rg.CELLS["lstm"](8)

    def replay(params, xs, dones):
        begins = jnp.concatenate([jnp.zeros_like(dones[:1]), dones[:-1]])
        _, ys = rg.unroll(cell, params, xs, resets=begins)
        return cell.initial(xs.shape[1:-1]), ys

    with pytest.raises(AssertionError, match="last carry"):
        check_replay(cell, replay=replay)
