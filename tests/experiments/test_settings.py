"""Every protocol's settings and parameter counts, and what makes a run another run."""

import hashlib
import importlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import catalog
from experiments.catalog import EXPERIMENTS
from experiments.copy.settings import COPY
from experiments.settings.cells import OWN_SOURCES, build_cell
from experiments.settings.config import identity_defaults
from experiments.settings.errors import UserError
from experiments.settings.resolver import explain, resolve
from experiments.settings.sources import TORCH_CELLS
from experiments.training import loop
from experiments.transfer_copy.settings import TRANSFER_COPY
from tests.experiments.support import ROOT, tiny

SIZES = {"gato": (1024, 5), "ur": (256, 10), "hdetach": (128, 1), "small": (128, 5)}
CONSTANT = {  # embedding and decoder, by hand
    "gato": 11 * 5 + (1024 + 1) * 256 + (256 + 1) * 11,
    "ur": (256 + 1) * 10,
    "hdetach": (128 + 1) * 9,
    "small": 11 * 5 + (128 + 1) * 256 + (256 + 1) * 11,
}


def recurrent_parameters(protocol, cell):
    """The counts by hand: maps times (inputs + units + biases), and what gates add."""
    h, d = SIZES[protocol]
    biases = 1 if protocol == "ur" else 2
    one_map = h * (d + h + biases)
    masters = 2 * (h // 16) * (d + h + biases)
    if cell == "gato":  # J pairs: f has two maps, g one of 32 units and one on top
        return h // 2 * (2 * (d + 1 + 1) + 32 * (d + 1 + 1) + 32 + 1)
    if cell == "gato1":
        return h // 2 * 3 * (d + 1 + 1)
    return {
        "lstm": 4 * one_map,
        "gru": 3 * one_map,
        "janet": 2 * one_map,
        "rnn": one_map,
        "ur_lstm": 4 * one_map + h,
        "r_lstm": 4 * one_map,
        "c_lstm": 4 * one_map + h,
        "o_gru": 3 * one_map,
        "ur_gru": 4 * one_map + h,
        "om_lstm": 4 * one_map + masters,
        "cm_lstm": 4 * one_map + masters + h // 16,
    }[cell]


CELLS = [
    *("gato", "gato1", "gru", "janet", "rnn", "ur_lstm", "r_lstm", "c_lstm"),
    *("o_gru", "ur_gru", "om_lstm", "cm_lstm"),
]


PAIRS = [
    *[(protocol, "lstm") for protocol in SIZES],
    *[(("gato", "ur")[place % 2], cell) for place, cell in enumerate(CELLS)],
]


@pytest.mark.parametrize(("protocol", "cell"), PAIRS)
def test_parameter_counts(protocol, cell):
    described = loop.describe(resolve(COPY, protocol, {"cell": cell}))
    expected = recurrent_parameters(protocol, cell)
    assert described["recurrent_parameters"] == expected
    assert described["total_parameters"] == expected + CONSTANT[protocol]


def test_the_counts_by_hand_are_those_of_the_gato_paper():
    counts = {"gato": 138_752, "gru": 3_167_232, "lstm": 4_222_976}
    assert {cell: recurrent_parameters("gato", cell) for cell in counts} == counts


def test_every_layer_has_its_own_parameters():
    h, d = 6, 3
    described = loop.describe(tiny(cell="gru", layers=3))
    expected = 3 * h * ((d + h + 2) + 2 * (h + h + 2))
    assert described["recurrent_parameters"] == expected


EXPECTED = {
    "gato": {
        "task": {"layout": "aba", "symbols": 10, "tokens": 20, "length": 100, "sequences": 0}
        | {"loss_on": "copied", "inputs": "embed", "held_out_sequences": 1000},
        "model": {"cell": "gato", "hidden_size": 1024, "embedding": 5, "decoder": [256]}
        | {"lambda_": 0.7, "bias_vectors": 1, "init": "library"},
        "training": {"batch_size": 32, "learning_rates": [4e-3], "steps": 31_250, "clip_norm": 0},
        "carry": {"detach_prob": 0},
    },
    "ur": {
        "task": {"layout": "cue", "symbols": 8, "tokens": 10, "length": 500, "sequences": 0}
        | {"loss_on": "copied", "inputs": "one_hot"},
        "model": {"cell": "ur_lstm", "hidden_size": 256, "decoder": []},
        "training": {"learning_rates": [1e-3], "clip_norm": 1},
        "carry": {"detach_prob": 0},
    },
    "hdetach": {
        "task": {"layout": "delimiter", "symbols": 8, "tokens": 10, "length": 100}
        | {"loss_on": "all", "inputs": "scalar", "sequences": 100_000}
        | {"held_out_sequences": 5000, "headline": "accuracy"},
        "model": {"cell": "lstm", "hidden_size": 128, "decoder": [], "bias_vectors": 2}
        | {"init": "torch", "forget_bias": 0},
        "training": {"batch_size": 100, "learning_rates": [1e-3], "steps": 600_000}
        | {"clip_norm": 1, "eval_every": 1000, "keep_best": True, "ties": "last"},
        "carry": {"detach_prob": 0.25, "detach_state": "h", "detach_per_example": False},
    },
}


@pytest.mark.parametrize("protocol", EXPECTED)
def test_settings_are_the_papers(protocol):
    resolved = resolve(COPY, protocol, {}).resolved()
    for part, settings in EXPECTED[protocol].items():
        assert {name: resolved[part][name] for name in settings} == settings


@pytest.mark.parametrize(
    ("protocol", "cell", "expected"),
    [
        ("gato", "lstm", {"init": "torch", "bias_vectors": 2, "forget_bias": 0, "reset": None}),
        (
            "gato",
            "gru",
            {"init": "torch", "bias_vectors": 2, "forget_bias": 0, "reset": "after"},
        ),
        ("ur", "gru", {"bias_vectors": 1, "reset": "before", "tmax": None}),
        ("ur", "ur_gru", {"reset": "before", "forget_bias": None}),
        ("gato", "ur_gru", {"reset": "before", "bias_vectors": 2, "init": "torch"}),
        ("hdetach", "r_lstm", {"forget_bias": 1, "bias_vectors": 2}),
        ("gato", "r_gru", {"forget_bias": 1}),
        ("ur", "c_lstm", {"tmax": 256, "downsize": None}),
        ("ur", "cm_gru", {"tmax": 256, "downsize": 16}),
        ("ur", "um_lstm", {"tmax": None, "downsize": 16, "lambda_": None}),
        ("hdetach", "gato", {"lambda_": 0.7, "s_update": "accumulate", "forget_bias": None}),
    ],
)
def test_a_cell_gets_the_settings_that_it_has(protocol, cell, expected):
    model = resolve(COPY, protocol, {"cell": cell}).resolved()["model"]
    assert {name: model[name] for name in expected} == expected


def started(**settings):
    """The parameters that a cell of two inputs starts with."""
    model = resolve(COPY, "ur", {"hidden_size": 16} | settings).model
    return build_cell(model).init_params(jax.random.key(0), 2)


@pytest.mark.parametrize("cell", ["lstm", "r_lstm", "r_gru", "r_janet", "janet"])
def test_the_forget_bias_is_where_the_bias_starts(cell):
    """And no other bias moves."""
    one, other = (started(cell=cell, forget_bias=value)["bias"] for value in (3.0, -1.0))
    slots = [name for name in one if not np.array_equal(one[name], other[name])]
    assert slots == ["f"]
    np.testing.assert_allclose(one[slots[0]] - other[slots[0]], np.full(16, 4.0), rtol=1e-6)


def test_refine_gates_start_at_minus_b_or_at_zero():
    """With the bias alone, r = sigmoid(-b) as Listing 2 prints, or 1/2."""
    for refine_bias, sign in (("negative", -1.0), ("zero", 0.0)):
        model = resolve(COPY, "ur", {"hidden_size": 16, "refine_bias": refine_bias}).model
        gate = build_cell(model).gate
        b = jnp.linspace(-2.0, 2.0, 16)
        zeros = dict.fromkeys(("f", "r"), jnp.zeros(16))
        f, r = jax.nn.sigmoid(b), jax.nn.sigmoid(sign * b)
        np.testing.assert_allclose(
            gate({"b": b}, zeros)[0], 2 * r * f + (1 - 2 * r) * f**2, rtol=1e-6
        )


def test_init_is_torchs_or_the_librarys():
    """Torch draws every parameter from U(±1/sqrt(F)), biases too; here F = 16."""
    torch, own = (started(cell="lstm", init=name, forget_bias=0.0) for name in ("torch", "library"))
    for leaf in jax.tree.leaves(torch):
        assert 0.2 < np.abs(leaf).max() <= 0.25
    assert not np.any(jax.tree.leaves(own["bias"]))


def test_torchs_inputs_are_of_the_weights_on_x_alone():
    """U(±1/sqrt(2)) for two inputs; the rest as the cell has it, here U(±0.1)."""
    weights = started(cell="gato", init="torch_inputs")["f"]
    for name, most in (("kernel", 0.5**0.5), ("recurrent_kernel", 0.1), ("bias", 0.1)):
        for leaf in jax.tree.leaves(weights[name]):
            assert most / 2 < np.abs(leaf).max() <= most


def test_chrono_biases_start_below_the_timescale_that_is_asked_for():
    """exp(b) is uniform between 1 and one less than it."""
    longest = [np.exp(started(cell="c_lstm", tmax=tmax)["gate"]["b"]).max() for tmax in (9, 400)]
    assert 4 < longest[0] <= 8 * (1 + 1e-6)
    assert 200 < longest[1] <= 399 * (1 + 1e-6)


def test_lambda_is_the_rate_of_gatos_decay():
    model = resolve(COPY, "ur", {"cell": "ur_gato", "hidden_size": 16, "lambda_": 0.4}).model
    assert build_cell(model).f.rate == 0.4


@pytest.mark.parametrize(
    ("argument", "cells"),
    [
        (
            {"forget_bias": 2.0},
            ["ur_lstm", "c_lstm", "or_lstm", "om_lstm", "gato", "rnn"],
        ),
        ({"refine_bias": "zero"}, ["lstm", "r_lstm", "u_lstm", "or_lstm", "um_lstm", "gato"]),
    ],
)
def test_a_start_that_a_cell_has_not_is_refused(argument, cells):
    for cell in cells:
        with pytest.raises(UserError, match=rf"^--{next(iter(argument))} is not for {cell}: "):
            resolve(COPY, "ur", {"cell": cell} | argument)


def test_where_the_starts_come_from():
    """Each has a source in --describe, whether a protocol, the cell or the user chose it."""
    for cell in ("lstm", "r_lstm", "ur_lstm", "gato"):
        config = resolve(COPY, "gato", {"cell": cell, "halve_every": 640})
        settings = explain(COPY, config)
        assert settings["halve_every"]["source"] == "the command line"
        has = {"init"}
        has |= {"forget_bias"} if cell in ("lstm", "r_lstm") else set()
        has |= {"refine_bias"} if cell == "ur_lstm" else set()
        assert has == {"init", "forget_bias", "refine_bias"} & set(settings)
        assert all(len(settings[name]["source"]) > 5 for name in has)


@pytest.mark.parametrize(("cell", "field"), [("lstm", "h"), ("gru", "h"), ("gato", "r")])
def test_what_feeds_back_is_detached(cell, field):
    config = resolve(COPY, "small", {"cell": cell})
    assert config.carry.detach_state == field


def test_of_a_flax_lstm_one_says_what_feeds_back():
    """Its carry is (c, h), without names: the memory would be cut in place of h."""
    settings = {"cell": "flax.linen:LSTMCell", "damp_prob": 0.5}
    with pytest.raises(UserError, match=r"^--damp_prob: .* such as --detach_state=1"):
        resolve(COPY, "small", settings)
    config = resolve(COPY, "small", {**settings, "detach_state": "1"})
    assert config.carry.detach_state == "1"
    gru = resolve(COPY, "small", {**settings, "cell": "flax.linen:GRUCell"})  # h alone
    assert gru.carry.detach_state == "0"


ALL = {experiment.name: experiment for experiment in (*EXPERIMENTS, TRANSFER_COPY)}


@pytest.mark.parametrize("name", ALL)
def test_every_setting_has_a_source(name):
    sources = {
        (setting, sourced.source)
        for protocol in ALL[name].protocols.values()
        for group in (protocol.settings, *protocol.cells.values())
        for setting, sourced in group.items()
    }
    sources |= {
        (setting, declared.default.source)
        for setting, declared in ALL[name].declarations().items()
        if declared.default is not None
    }
    for setting, source in sources:
        assert len(source) > 5, setting
        ours = source.removeprefix("ours")
        assert ours == source or ours.startswith(": "), setting


@pytest.mark.parametrize(
    ("name", "protocol", "settings"),
    [
        ("copy", "gato", "decoder loss_on eval_every"),
        ("copy", "ur", "length inputs batch_size steps clip_norm decoder held_out_sequences"),
        ("adding", "gato", "decoder"),
        ("adding", "ur", "batch_size steps clip_norm decoder"),
        ("forgetting", "ur", "batch_size clip_norm decoder"),
        ("pixels", "ur", "embedding clip_norm decoder validation_share"),
        ("pixels", "ur_zoneout", "zoneout_c zoneout_h learning_rates"),
        ("pixels", "hdetach", "ties"),
    ],
)
def test_what_a_paper_does_not_say_is_ours(name, protocol, settings):
    """Read in the papers: a size or a rule that is not there is not put into their mouths."""
    values = ALL[name].values(protocol)
    for setting in settings.split():
        assert "ours: " in values[setting].source, (setting, values[setting].source)


def test_what_a_paper_says_is_not_ours():
    ur, gato = ALL["adding"].values("ur"), ALL["copy"].values("gato")
    for settings, names in ((ur, "length hidden_size learning_rates"), (gato, "tokens embedding")):
        for name in names.split():
            assert "ours" not in settings[name].source


@pytest.mark.parametrize("name", ALL)
def test_a_protocol_says_what_has_no_default(name):
    """Beside what is the cell's: a setting is never left open."""
    of_the_cell = {n for group in TORCH_CELLS.values() for n in group}
    of_the_cell |= {"refine_bias", "memory_slots", "heads", "word_size", "read_heads", "rows_read"}
    for protocol in ALL[name].protocols:
        values = ALL[name].values(protocol)
        known = ALL[name].declarations()
        without_effect = set(values) - set(known)  # such as an embedding of numbers: none
        assert without_effect <= {"embedding", "embedding_dropout"}
        assert not any(values[setting].value for setting in without_effect)
        assert set(known) - set(values) <= of_the_cell | {"epochs"}


def test_the_source_of_a_setting_is_whose_value_is_in_effect():
    config = resolve(COPY, "hdetach", {"cell": "r_lstm", "seed": 3})
    settings = explain(COPY, config)
    assert settings["forget_bias"]["value"] == 1  # of the plain gate it is 0
    assert {flag: settings[flag]["source"] for flag in ("forget_bias", "bias_vectors", "seed")} == {
        "forget_bias": OWN_SOURCES["forget_bias"],
        "bias_vectors": "h-detach code: a bias with each linear map",
        "seed": "the command line",
    }
    assert OWN_SOURCES["forget_bias"].startswith("ours: ")
    refined = explain(COPY, resolve(COPY, "ur", {"cell": "ur_gru"}))
    for name in ("refine_bias", "reset"):
        assert refined[name]["source"] == OWN_SOURCES[name]
    plain = explain(COPY, resolve(COPY, "hdetach", {"cell": "lstm"}))
    assert plain["forget_bias"]["source"] == "h-detach code: none"
    assert plain["seed"]["source"].startswith("ours: ")


def test_every_one_of_several_values_is_checked():
    for rates in ((0.0, 0.1), (0.1, 0.0), (0.1, float("nan"))):
        with pytest.raises(UserError, match=r"^--learning_rates must be a (positive|finite) num"):
            tiny(learning_rates=rates)


def test_overrides_win_and_are_kept():
    config = resolve(COPY, "ur", {"hidden_size": 32, "length": 7})
    assert (config.model.hidden_size, config.task.length) == (32, 7)
    assert config.overrides == {"hidden_size": 32, "length": 7}
    assert config.protocol == "ur"


def test_identity_ignores_length_and_backend():
    config = tiny()
    assert config.hash() == tiny(steps=9, backend="scan").hash()
    assert len(config.hash()) == 8
    int(config.hash(), 16)
    for other in ({"seed": 1}, {"hidden_size": 8}, {"length": 5}, {"detach_prob": 0.1}):
        assert tiny(**other).hash() != config.hash(), other


def test_a_newer_setting_leaves_default_directories():
    """The hash is that of the identity before ``ties`` existed, and an RMC's settings, unless they
    act."""
    config = tiny(keep_best=True)
    newer = {"training.ties", "training.on_divergence", "model.memory_slots", "model.heads"}
    newer |= {"model.word_size", "model.read_heads", "model.rows_read"}
    before = {name: value for name, value in config.identity().items() if name not in newer}
    digest = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()
    assert config.hash() == tiny(keep_best=True, ties="first").hash() == digest[:8]
    assert tiny(keep_best=True, ties="last").hash() != config.hash()
    assert tiny(keep_best=True, ties="last").identity()["training.ties"] == "last"


def test_a_memory_has_the_sizes_that_are_asked_for():
    """Where they are left out it has its own, and its directory is that from before them."""
    asked = {"word_size": 6, "read_heads": 2, "rows_read": 3}
    rma = build_cell(tiny(cell="rma", hidden_size=8, memory_slots=5, **asked).model)
    assert (rma.memory_slots, rma.word_size, rma.read_heads, rma.top_k) == (5, 6, 2, 3)
    own = build_cell(tiny(cell="ur_dnc", hidden_size=8).model)
    assert (own.memory_slots, own.word_size, own.read_heads) == (16, 16, 4)
    assert own.clone(word_size=6) == build_cell(
        tiny(cell="ur_dnc", hidden_size=8, word_size=6).model
    )
    with pytest.raises(UserError, match=r"^--rows_read is not for dnc"):
        tiny(cell="dnc", hidden_size=8, rows_read=3)
    with pytest.raises(UserError, match=r"^--cell=rma: .* rows_read = 50 .* only 40\.$"):
        tiny(cell="rma", hidden_size=8, memory_slots=40)


@pytest.mark.parametrize("cell", ["lstm", "ur_gru", "janet"])
def test_recurrent_weights_in_blocks_are_asked_for(cell):
    plain, blocks = (tiny(cell=cell, hidden_size=12, **heads) for heads in ({}, {"heads": 3}))
    assert plain.model.heads is None and plain.hash() == tiny(cell=cell, hidden_size=12).hash()
    assert blocks.hash() != plain.hash()
    assert (build_cell(plain.model).heads, build_cell(blocks.model).heads) == (1, 3)
    one = tiny(cell=cell, hidden_size=12, heads=1)
    assert one.hash() == plain.hash() and build_cell(one.model) == build_cell(plain.model)
    with pytest.raises(UserError, match="must divide the 12 units") as refusal:
        build_cell(tiny(cell=cell, hidden_size=12, heads=5).model)
    assert "\n" not in str(refusal.value)


def test_one_head_is_asked_for_where_a_cell_has_others(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_heads.py").write_text(
        "import recurrent_gates as rg\nblocks = rg.LSTM(12, heads=3)\nwhole = rg.LSTM(12)\n"
    )
    for cell, heads, is_same in (
        ("rmc", 2, False),
        ("own_heads:blocks", 3, False),
        ("own_heads:whole", 1, True),
    ):
        settings = {"cell": cell, "hidden_size": 12}
        settings |= {"memory_slots": 2} if cell == "rmc" else {}
        plain, one = tiny(**settings), tiny(**settings, heads=1)
        assert (build_cell(plain.model).heads, build_cell(one.model).heads) == (heads, 1)
        assert (plain.hash() == one.hash()) == is_same
    sys.modules.pop("own_heads")


def test_a_memory_in_changing_units_is_not_zoned_out():
    assert build_cell(tiny(cell="slstm", zoneout_h=0.1, heads=2).model).heads == 2
    for flag, settings in {
        "zoneout_c": {"zoneout_c": 0.1},
        "detach_state=n": {"detach_prob": 0.25, "detach_state": "n"},
        "detach_state=0": {"detach_prob": 0.25, "detach_state": "0"},  # c by its number
        "detach_state=-1": {"damp_prob": 0.25, "detach_state": "-1"},  # m
        "detach_state=c": {"damp_prob": 0.25, "detach_state": "c"},
    }.items():
        with pytest.raises(UserError, match=f"--{flag}: c and n of slstm are in units of exp"):
            tiny(cell="slstm", **settings)
    assert tiny(cell="slstm", detach_prob=0.25)


def test_only_h_detachs_copy_keeps_the_last_of_equals():
    """``copying.py`` asks for >=, ``pixelmnist.py`` for >; nobody else says."""
    kept = {
        (experiment.name, protocol)
        for experiment in ALL.values()
        for protocol in experiment.protocols
        if experiment.values(protocol)["ties"].value == "last"
    }
    assert kept == {("copy", "hdetach"), ("transfer_copy", "hdetach"), ("transfer_copy", "small")}


def test_a_schedule_that_needs_the_length_is_part_of_the_identity():
    off = {"detach_prob": 0.5, "detach_off_steps": 2}
    assert tiny(**off, steps=6).hash() != tiny(**off, steps=4).hash()
    assert tiny(**off | {"detach_off_steps": 0}, steps=6).hash() == (
        tiny(**off | {"detach_off_steps": 0}, steps=4).hash()
    )
    assert tiny(schedule="cosine", steps=6).hash() != tiny(schedule="cosine", steps=4).hash()
    warm = {"schedule": "warmup", "warmup_steps": 3}
    assert tiny(**warm, steps=6).hash() == tiny(**warm, steps=4).hash()


OWN = """import recurrent_gates as rg


class Leaky(rg.JANET):
    decay: float = {decay}
"""


def test_a_cell_of_one_s_own_is_known_by_its_program(tmp_path, monkeypatch):
    """An edited cell is another configuration; comments and blank lines are none."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # which goes by seconds
    path = tmp_path / "own_program.py"

    def digest(text):
        path.write_text(text)
        sys.modules.pop("own_program", None)
        importlib.invalidate_caches()
        return tiny(cell="own_program:Leaky").hash()

    first = digest(OWN.format(decay=0.9))
    assert digest("# Mine.\n\n" + OWN.format(decay=0.9)) == first
    assert digest(OWN.format(decay=0.1)) != first
    assert "model.cell_source" not in tiny().identity()


SIZED = """from flax import linen as nn

import recurrent_gates as rg

instance = rg.LSTM(7)
foreign = nn.GRUCell(7)


def returned(features):
    return rg.GATO(8)
"""


def test_a_cell_of_a_fixed_size_needs_that_hidden_size(tmp_path, monkeypatch):
    """The starts of its parameters would be those of another size, and the record, too."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_sizes.py").write_text(SIZED)
    for name, size in {"instance": 7, "foreign": 7, "returned": 8}.items():
        with pytest.raises(UserError) as refusal:
            tiny(cell=f"own_sizes:{name}", hidden_size=6)
        assert str(refusal.value) == (
            f"--cell=own_sizes:{name} has {size} units and --hidden_size is 6; give "
            f"--hidden_size={size}."
        )
        build_cell(tiny(cell=f"own_sizes:{name}", hidden_size=size).model)
    sys.modules.pop("own_sizes")


def test_a_setting_that_is_new_changes_no_older_run():
    """An identity that an earlier version wrote, without it, is that of its default."""
    identity, defaults = tiny().identity(), identity_defaults(tiny().task)
    new = ("training.optimizer", "training.schedule", "training.momentum", "model.layers")
    assert {name: defaults[name] for name in new} == {name: identity[name] for name in new}
    assert set(defaults) <= set(identity) | set(_OUTSIDE)


def test_resolved_config_is_json():
    resolved = tiny().resolved()
    assert json.loads(json.dumps(resolved)) == resolved


_OUTSIDE = ("model.backend", "training.mesh", "training.steps")


def test_unknown_protocol_names_the_known():
    with pytest.raises(UserError, match="'paper'; known: gato, ur, hdetach, small"):
        resolve(COPY, "paper", {})


def test_the_page_of_settings_is_what_the_catalog_prints():
    assert (ROOT / "docs" / "SETTINGS.md").read_text() == catalog.page()
