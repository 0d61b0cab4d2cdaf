"""The command line: flags, exit codes, one sentence for each wish that cannot be met."""

import json
import os

import pytest
from absl.flags import Error

from experiments import copy, flags, learner
from experiments.config import UserError
from tests.experiments import support
from tests.experiments.support import binary

SHARED = [
    "cell",
    "protocol",
    "hidden_size",
    "seed",
    "seeds",
    "steps",
    "batch_size",
    "learning_rate",
    "learning_rates",
    "clip_norm",
    "detach_prob",
    "detach_state",
    "detach_per_example",
    "detach_off_steps",
    "zoneout_c",
    "zoneout_h",
    "downsize",
    "tmax",
    "s_update",
    "length",
    "lambda",
    "damp_prob",
    "dtype",
    "backend",
    "data_dir",
    "workdir",
    "describe",
]


@pytest.fixture
def complaint(monkeypatch):
    """Flags -> the sentence that refuses them; fails if anything is compiled or written."""

    def never(*_):
        raise AssertionError("must be refused before compiling and before the workdir")

    monkeypatch.setattr(learner.Learner, "prepare", never)
    monkeypatch.setattr("experiments.workdir.Workdir.claim", never)

    def complain(*argv):
        try:
            flags.start("copy", flags.parse(["copy", *argv], copy.define))
        except (Error, UserError) as error:
            return str(error)
        raise AssertionError("not refused")

    return complain


BAD = {
    "--cell=xx_lstm": "no cell named 'xx_lstm'; did you mean",
    "--cell=gatoo": "did you mean gato",
    "--cell=gato --hidden_size=7": "must be even; got 7",
    "--cell=om_lstm --downsize=3": "multiple of the downsize factor C = 3",
    "--cell=om_lstm --downsize=0": "downsize must be at least 1",
    "--cell=ur_lstm --hidden_size=2": "at least 3, got 2",
    "--cell=c_lstm --tmax=1": "tmax must be above 2",
    "--hidden_size=0": "--hidden_size must be at least 1, got 0",
    "--hidden_size=-4": "--hidden_size must be at least 1, got -4",
    "--steps=0": "--steps must be at least 1",
    "--steps=2147483648": "below 2147483648",
    "--steps=many": "--steps=many",
    "--batch_size=0": "--batch_size must be at least 1",
    "--length=0": "--length must be at least 1",
    "--seed=-1": "--seed must be at least 0, got -1",
    "--seed=2147483648": "below 2147483648",
    "--seeds=0": "--seeds must be at least 1",
    "--learning_rate=0": "positive number, got 0",
    "--learning_rate=-1e-3": "positive number, got -0.001",
    "--learning_rate=nan": "positive number, got nan",
    "--learning_rates=1e-3,inf": "positive number, got inf",
    "--learning_rates=1e-3,fast": "list of numbers, got '1e-3,fast'",
    "--learning_rate=1e-60": "positive number, got 1e-60 (float32 holds 1.2e-38 to 3.4e+38)",
    "--learning_rate=1e39": "positive number, got 1e+39",
    "--learning_rates=": "--learning_rates= has no value",
    "--workdir=": "--workdir= has no value",
    "--learning_rates=1e-3,1e-3": "must name each rate once",
    "--protocol=hdetach --inputs=embed": "has no width for an embedding; --inputs is one_hot or",
    "--clip_norm=-1": "--clip_norm must be at least 0",
    "--clip_norm=1e-60": "--clip_norm must be at least 0, got 1e-60 (float32 holds",
    "--cell=c_lstm --tmax=inf": "tmax must be above 2 and finite",
    "--detach_prob=1.5": "--detach_prob is a probability in [0, 1], got 1.5",
    "--detach_prob=-0.1": "--detach_prob is a probability",
    "--damp_prob=2": "--damp_prob is a probability",
    "--cell=lstm --zoneout_c=1.1": "--zoneout_c is a probability",
    "--cell=lstm --zoneout_h=nan": "--zoneout_h is a probability",
    "--cell=gru --detach_state=c": "the state of gru has no field 'c', it has h",
    "--cell=gato --zoneout_c=0.5": "the state of gato has no field 'c', it has r and s",
    "--cell=lstm --s_update=zero": "--s_update is not for lstm",
    "--cell=lstm --lambda=0.5": "--lambda is not for lstm",
    "--cell=gato --tmax=9": "--tmax is not for gato",
    "--cell=lstm --downsize=2": "--downsize is not for lstm",
    "--lambda=1": "--lambda must be in [0, 1), got 1",
    "--detach_prob=0.5 --detach_off_steps=3000": "leaves no step of 3000",
    "--detach_off_steps=-1": "--detach_off_steps must be at least 0",
    "--protocol=paper": "no protocol 'paper'",
    "--backend=cuda": "--backend is one of auto, scan, fused, newton, pallas, cudnn, got cuda",
    "--dtype=float16": "--dtype=float16",
    "--loss_on=none": "--loss_on=none",
    "--data_dir=x": "--data_dir is not for copy",
    "gato": "no argument 'gato'",
}


@pytest.mark.parametrize("argv", BAD)
def test_bad_input_is_refused_before_compiling(complaint, argv):
    sentence = complaint(*argv.split())
    assert BAD[argv] in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--stpes=3"], "There is no flag --stpes; did you mean --steps"),
        (["--steps=0"], "--steps must be at least 1, got 0."),
        (["--cell=lstmm"], "There is no cell named 'lstmm'; did you mean lstm"),
        (["--workdir=/dev/null/x"], "cannot write to the workdir /dev/null/x: Not a directory."),
    ],
)
def test_exit_code_2_and_one_sentence(argv, sentence):
    done = binary(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"experiments.copy: {sentence}")
    assert done.stderr.count("\n") == 1


def test_help_lists_the_flags_and_exits_0():
    done = binary("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for flag in [*SHARED, "loss_on", "inputs"]:
        assert f"\n  --{flag}" in done.stdout, flag
    assert "  --dtype=float32|bfloat16\n      of the computation; the state" in done.stdout


def test_describe_prints_one_json_object():
    done = binary("--describe", "--protocol=gato", "--cell=gru", "--seed=3", "--inputs=one_hot")
    assert (done.returncode, done.stderr) == (0, "")
    described = json.loads(done.stdout)
    assert described["recurrent_parameters"] == 3 * 1024 * (11 + 1024 + 2)
    assert described["protocol"] == "gato"
    assert described["overrides"] == {"cell": "gru", "seed": 3, "inputs": "one_hot"}
    assert described["config"]["training"]["seed"] == 3


def started(monkeypatch, *argv):
    """The config and workdir that a command line trains."""
    calls = []
    monkeypatch.setattr("experiments.train.run", lambda *arguments: calls.append(arguments))
    flags.start("copy", flags.parse(["copy", *argv], copy.define))
    return calls[0]


def test_flags_reach_the_config(monkeypatch):
    config, _ = started(
        monkeypatch,
        *("--cell=gato", "--lambda=0.5", "--s_update=zero", "--length=9", "--loss_on=all"),
        *("--detach_prob=0.3", "--detach_state=s", "--detach_per_example", "--damp_prob=0.1"),
        *("--learning_rates=1e-3,2e-3", "--learning_rate=5", "--seeds=2", "--dtype=bfloat16"),
    )
    assert (config.model.lambda_, config.model.s_update, config.model.dtype) == (
        *(0.5, "zero", "bfloat16"),
    )
    assert (config.task.length, config.task.loss_on) == (9, "all")
    carry = config.carry
    assert (carry.detach_prob, carry.detach_state, carry.detach_per_example) == (0.3, "s", True)
    assert carry.damp_prob == 0.1
    assert config.training.lanes == [(0, 1e-3), (1, 1e-3), (0, 2e-3), (1, 2e-3)]


def test_default_workdir_names_the_run(monkeypatch):
    config, workdir = started(monkeypatch, "--cell=gru", "--protocol=ur", "--steps=7")
    assert workdir == f"runs/copy/gru-ur-{config.hash()}"
    assert started(monkeypatch, "--cell=gru", "--protocol=ur", "--steps=9")[1] == workdir
    assert started(monkeypatch, "--cell=gru", "--protocol=ur", "--seed=1")[1] != workdir
    assert started(monkeypatch, "--workdir=here")[1] == "here"


def test_compiled_programs_are_kept_where_the_user_says_and_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    where = tmp_path / "cache"
    monkeypatch.setattr(support, "COMPILED", str(where))
    rows, kept = [], []
    for run in ("first", "second"):
        sizes = ("--cell=gru", "--hidden_size=6", "--length=4", "--steps=2", "--batch_size=8")
        done = binary(*sizes, f"--workdir={tmp_path / run}")
        assert done.returncode == 0, done.stderr
        rows.append((tmp_path / run / "metrics.jsonl").read_bytes())
        kept.append({file.name for file in where.glob("*-cache")})
    assert any("_advance" in name for name in kept[0])
    assert kept[0] == kept[1]
    assert rows[0] == rows[1]


def test_the_cache_is_in_the_users_cache_directory_unless_it_is_named(monkeypatch):
    def place(**environment):
        for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        flags.keep_compilations()
        return os.environ["JAX_COMPILATION_CACHE_DIR"]

    assert place(HOME="/h") == "/h/.cache/recurrent_gates/xla"
    assert place(HOME="/h", XDG_CACHE_HOME="/x") == "/x/recurrent_gates/xla"
    assert place(HOME="/h", JAX_COMPILATION_CACHE_DIR="/c") == "/c"
