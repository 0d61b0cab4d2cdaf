"""Thousands of command lines, most of them strange: each is a config or one sentence."""

import collections
import functools
import json
import random
import signal

import jax
import pytest
from absl.flags import Error

import recurrent_gates as rg
from experiments import catalog
from experiments.adding.settings import ADDING
from experiments.command import flags, runs
from experiments.copy.settings import COPY
from experiments.forgetting.settings import FORGETTING
from experiments.pixels.settings import PIXELS
from experiments.settings.errors import UserError
from experiments.settings.resolver import resolve
from experiments.transfer_copy.settings import TRANSFER_COPY
from tests.support import run_as_main

EXPERIMENTS = {one.name: one for one in (COPY, ADDING, PIXELS, FORGETTING, TRANSFER_COPY)}
DESCRIBED = 100  # every hundredth valid one: a description traces the model

TEXTS = {
    "cell": [*sorted(rg.CELLS), "flax.linen:GRUCell"],
    "detach_state": ["h", "c", "r", "s", "feedback", "0", "1"],
    "data_dir": ["nowhere", "/"],
    "weights": ["nowhere", "/"],
    "mesh": ["auto", "data:1", "lanes:1,data:1", "vocab:1", "vocab:2"],
}
UNBOUNDED = {"forget_bias", "gate_bias"}  # any number is a place to start
NO_NUMBERS = ["x", "1e", "0x10", "nan", "inf", "1 2", "--1", "\N{SUPERSCRIPT TWO}"]


def valid(one, draw):
    """The text of a value within the limits, as small as tests need it."""
    if one.choices or one.name in TEXTS:
        return draw.choice(one.choices or TEXTS[one.name])
    entries = [_number(one, draw) for _ in range(draw.randint(1, 3) if one.several else 1)]
    return ",".join(dict.fromkeys(entries))


def _number(one, draw):
    least = one.least if one.least is not None else -3
    if one.kind is int:
        value = int(least) + draw.choice([0, 1, 2, 4, 6, 30])
        return str(value if one.most is None else min(value, int(one.most)))
    most = one.most if one.most is not None else one.below if one.below is not None else least + 10
    value = least + (most - least) * draw.choice([0, 1e-3, 0.1, 0.5, 0.999])
    return f"{value:g}"


def impossible(one):
    """Texts of values that cannot be."""
    if one.choices or one.kind is bool:
        return ["impossible"]
    if one.name in TEXTS:
        return [] if one.name in ("data_dir", "weights") else ["impossible"]
    bounds = [f"{one.least - 1:g}"] if one.least is not None else []
    bounds += [str(int(one.most) + 1)] if one.most is not None else []
    bounds += [f"{one.below:.0f}"] if one.below is not None else []
    return bounds + NO_NUMBERS + (["1.5"] if one.kind is int else ["1e-60", "1e60"])


def command_line(known, protocols, draw):
    """Some flags, a few of them impossible, now and then one twice or one that nobody knows."""
    argv = [f"--protocol={draw.choice(protocols)}"]
    for name in draw.sample(sorted(known), draw.randint(0, 5)):
        one = known[name]
        bad = impossible(one)
        if bad and draw.random() < 0.05:
            argv.append(f"--{one.flag}={draw.choice(bad)}")
        elif one.kind is bool:
            argv.append(draw.choice([f"--{one.flag}", f"--no{one.flag}", f"--{one.flag}=true"]))
        else:
            flag = one.singular if one.singular and draw.random() < 0.5 else one.flag
            value = valid(one, draw)
            argv.append(f"--{flag}={value.partition(',')[0] if flag == one.singular else value}")
    strange = draw.random()
    if strange < 0.02:
        argv.append(draw.choice(["--unknown=3", "stray", "--cell", "--steps=", "--", "-"]))
    elif strange < 0.04:
        argv.append(argv[-1])
    return argv


@functools.cache
def definition(name):
    """Defines an experiment's flags, which are made once: that takes longer than to read them."""
    made = flags.defined(functools.partial(flags.define_experiment, EXPERIMENTS[name]))

    def define(values):
        for flag in made:
            made[flag].unparse()
        values.append_flag_values(made)

    return define


def config_of(experiment, argv):
    """The config that a command line says."""
    given = flags.parse(["", *argv], definition(experiment.name))
    request = flags.request(experiment, given)
    return resolve(experiment, request.protocol, request.settings)


def assert_is_a_sentence(error, argv):
    text = str(error)
    assert "\n" not in text, argv
    assert any(word in text for word in ("--", "flag", "There is no ")), (argv, text)
    assert "()" not in text, (argv, text)
    assert "None" not in text, (argv, text)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.long
def test_every_command_line_is_a_config_or_a_sentence(name, request):
    count = 2000 if request.config.getoption("full") else 1000
    experiment, draw = EXPERIMENTS[name], random.Random(f"{name} 1")
    known, protocols = experiment.declarations(), list(experiment.protocols)
    valid_ones = described = 0
    for _ in range(count):
        argv = command_line(known, protocols, draw)
        try:
            config = config_of(experiment, argv)
            valid_ones += 1
            json.dumps(config.resolved(), allow_nan=False)
            if valid_ones % DESCRIBED == 0:
                described += 1
                text = json.dumps(runs.description(experiment, config), allow_nan=False)
                assert json.loads(text)["recurrent_parameters"] > 0, argv
        except (UserError, Error) as error:
            assert_is_a_sentence(error, argv)
        except Exception as error:
            raise AssertionError(f"{argv}: {error!r}") from error
    assert count / 4 < valid_ones < count * 3 / 4  # both of what is tested
    assert described > 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_setting_says_what_it_is_and_refuses_what_it_is_not(name):
    experiment = EXPERIMENTS[name]
    for one in experiment.declarations().values():
        assert len(one.meaning) > 5, one.name
        assert not one.meaning.endswith("."), one.name
        limited = any(bound is not None for bound in (one.least, one.most, one.below))
        numbers = one.kind in (int, float)
        assert limited == (numbers and one.name not in UNBOUNDED), one.name
        texts = one.kind is str
        assert bool(one.choices) == (texts and one.name not in TEXTS), one.name
        for value in impossible(one):
            argv = [f"--{one.flag}={value}"]
            argv += ["--damp_prob=0.5"] if one.name == "detach_state" else []
            with pytest.raises((UserError, Error)) as caught:
                config_of(experiment, argv)
            assert_is_a_sentence(caught.value, argv)
            assert one.flag in str(caught.value), (argv, str(caught.value))


# What a binary has beside its settings; a process that joins others is none of these.
OF_A_RUN = ["--workdir=nowhere", "--profile=-1", "--profile=3", "--keep_checkpoints=0"]
OF_A_RUN += ["--keep_checkpoints=5", "--keep_checkpoints=x", "--on_full_disk=wait"]
OF_A_RUN += ["--on_full_disk=go", "--num_processes=2", "--process_id=0", "--nodescribe"]
OF_A_BINARY = {
    "captioning": ["--show=2", "--show=-1", "--show=x"],
    "execute": ["--show=2", "--show=-1", "--show=x"],
    "forgetting": ["--cells=gru,lstm", "--cells=gru,gru", "--cells=none", "--cells=nothing"],
    "language_model": ["--sample=3", "--sample=-1", "--temperature=0.5", "--temperature=-1"],
    "match": ["--render=film.gif", "--render=film.avi", "--render="],
    "transfer_copy": ["--delays=8,9", "--delays=0", "--detach_probs=0,1", "--detach_probs=2"],
}


@pytest.mark.full
def test_ten_thousand_command_lines_are_described_or_refused(monkeypatch, capsys):
    """Over all binaries, as a user's: JSON, or one sentence and exit code 2."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    draw, codes = random.Random(7), collections.Counter()
    wrong = []
    for number in range(10_000):
        experiment = draw.choice(catalog.EXPERIMENTS)
        argv = command_line(experiment.declarations(), list(experiment.protocols), draw)
        for others in (OF_A_RUN, OF_A_BINARY.get(experiment.name, [])):
            argv += [draw.choice(others)] if others and draw.random() < 0.1 else []
        argv.append("--describe")
        code, printed, said = ended(f"experiments.{experiment.name}", argv, capsys)
        codes[experiment.name, code] += 1
        if not described_or_refused(experiment.name, code, printed, said):
            wrong.append((experiment.name, argv, code, printed[-200:], said[-2000:]))
        if number % 200 == 199:
            jax.clear_caches()
    print(dict(codes))
    assert not wrong, f"{len(wrong)}: " + "\n".join(map(repr, wrong[:20]))
    assert all(codes[one.name, code] for one in catalog.EXPERIMENTS for code in (0, 2))


def ended(module, argv, capsys):
    """Exit code, standard output and standard error of a binary, in this process; an error that
    nobody caught is its own code."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            run_as_main(patch, module, argv)
            code = 0
        except SystemExit as end:
            code = end.code or 0
        except Exception as error:
            code = repr(error)
    return (code, *capsys.readouterr())


def described_or_refused(name, code, printed, said):
    """Whether a binary did one or the other."""
    if code == 0:
        return said == "" and json.loads(printed)["recurrent_parameters"] > 0
    sentence = said.startswith(f"experiments.{name}: ") and said.count("\n") == 1
    return code == 2 and sentence and printed == ""
