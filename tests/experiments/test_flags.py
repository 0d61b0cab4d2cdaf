"""The command line: flags, exit codes, one sentence for each wish that cannot be met."""

import functools
import json
import os
import subprocess
import sys

import pytest
from absl.flags import Error

from experiments.command import flags, main
from experiments.copy.settings import COPY
from experiments.pixels.settings import PIXELS
from experiments.settings.errors import StorageError, UserError
from experiments.training import learner
from tests.experiments import support
from tests.experiments.support import ROOT, run_binary

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
    "workdir",
    "describe",
]


DEFINE = functools.partial(flags.define_experiment, COPY)


@pytest.fixture
def complaint(monkeypatch):
    """Flags -> the sentence that refuses them; fails if anything is compiled or written."""

    def never(*_):
        raise AssertionError("must be refused before compiling and before the workdir")

    monkeypatch.setattr(learner.Learner, "prepare", never)
    monkeypatch.setattr("experiments.records.workdir.Workdir.claim", never)

    def complain(*argv):
        try:
            given = flags.parse(["copy", *argv], DEFINE)
            main.join_processes("copy", given)
            main.train_one(COPY, given)
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
    "--cell=c_lstm --tmax=1": "--tmax must be at least 2, got 1",
    "--cell=c_lstm --tmax=2": "--tmax must be above 2, got 2; unless given, it is --hidden_size.",
    "--hidden_size=0": "--hidden_size must be at least 1 and below 2147483648, got 0.",
    "--hidden_size=-4": "--hidden_size must be at least 1 and below 2147483648, got -4.",
    "--steps=0": "--steps must be at least 1",
    "--steps=2147483648": "below 2147483648",
    "--steps=many": "--steps=many: it must be a whole number in plain digits",
    "--steps=1_000": "--steps=1_000: it must be a whole number in plain digits",
    "--steps=3 --steps=4": "--steps is given 2 times",
    "--batch_size=0": "--batch_size must be at least 1",
    "--length=0": "--length must be at least 1",
    "--seed=-1": "--seed must be at least 0 and below 2147483648, got -1",
    "--seed=2147483647 --seeds=2": "--seed and --seeds together must stay below 2147483648",
    "--seed=2147483648": "below 2147483648",
    "--seeds=4097": "--seeds must be at least 1 and at most 4096, got 4097.",
    "--cell=flax.linen:LSTMCell --detach_prob=0.5": "has the fields 0 and 1, and none is named h: ",
    "--seeds=0": "--seeds must be at least 1",
    "--learning_rate=0": "positive number, got 0",
    "--learning_rate=-1e-3": "positive number, got -0.001",
    "--learning_rate=nan": "it must be a number such as 0.004 or 4e-3, got 'nan'",
    "--learning_rates=1e-3,inf": "it must be a number such as 0.004 or 4e-3, got 'inf'",
    "--learning_rates=1e-3,fast": "it must be a number such as 0.004 or 4e-3, got 'fast'",
    "--learning_rate=1e-60": "positive number, got 1e-60",
    "--learning_rate=1e39": "1e+39 is outside of what float32 holds (1.2e-38 to 3.4e+38)",
    "--learning_rates=": "--learning_rates= has no value",
    "--workdir=": "--workdir= has no value",
    "--workdir": "Missing value for flag --workdir",
    "--learning_rates=1e-3,1e-3": "--learning_rates must name each value once",
    "--learning_rates=none": "--learning_rates must name at least one value",
    "--learning_rate=1e-3 --learning_rates=1e-3": "--learning_rates exclude each other",
    "--protocol=hdetach --inputs=embed": "has no width for an embedding; give --embedding, or",
    "--embedding=0": "has no width for an embedding; give --embedding, or",
    "--clip_norm=-1": "--clip_norm must be at least 0",
    "--clip_norm=1e-60": "--clip_norm=1e-60 is outside of what float32 holds",
    "--cell=c_lstm --tmax=inf": "--tmax=inf: it must be a number such as 0.004 or 4e-3",
    "--detach_prob=1.5": "--detach_prob is a probability in [0, 1], got 1.5",
    "--detach_prob=-0.1": "--detach_prob is a probability",
    "--damp_prob=2": "--damp_prob is a probability",
    "--cell=lstm --zoneout_c=1.1": "--zoneout_c is a probability",
    "--cell=lstm --zoneout_h=nan": "--zoneout_h=nan: it must be a number",
    "--cell=gru --detach_prob=1 --detach_state=c": "the state of gru has no field 'c', it has h",
    "--cell=lstm --damp_prob=1 --detach_state=-1": "the state of lstm has no field '-1', it has c",
    "--cell=lstm --damp_prob=1 --detach_state=--1": "the state of lstm has no field '--1', it has",
    "--detach_state=h": "--detach_state has no effect without --detach_prob or --damp_prob",
    "--cell=gato --zoneout_c=0.5": "the state of gato has no field 'c', it has r and s",
    "--cell=lstm --s_update=zero": "--s_update is not for lstm",
    "--cell=lstm --lambda=0.5": "--lambda is not for lstm",
    "--cell=gato --tmax=9": "--tmax is not for gato",
    "--cell=lstm --downsize=2": "--downsize is not for lstm",
    "--lambda=1": "--lambda must be at least 0 and below 1, got 1",
    "--detach_prob=0.5 --detach_off_steps=3000": "leaves no step of 3000",
    "--detach_off_steps=-1": "--detach_off_steps must be at least 0",
    "--protocol=paper": "--protocol=paper: it must be one of gato, ur, hdetach, small",
    "--backend=cuda": "it must be one of auto, scan, native, fused, parallel, newton, pallas",
    "--dtype=float16": "--dtype=float16",
    "--loss_on=none": "--loss_on=none",
    "--symbols=2147483647": "--symbols must be at least 2 and below 2147483646",
    "--patience=2 --keep_best=false": "--keep_best=false contradicts --patience",
    "--epochs=3": "There is no flag --epochs; see --help.",
    "--data_dir=x": "There is no flag --data_dir; see --help.",
    "--optimizer=lion": "--optimizer=lion: it must be one of adam, adamw, sgd, rmsprop",
    "--momentum=0.9": "--momentum has no effect with --optimizer=adam: it needs --optimizer=sgd or",
    "--optimizer=sgd --momentum=1": "--momentum must be at least 0 and below 1, got 1",
    "--schedule=warmup": "--schedule=warmup needs --warmup_steps",
    "--warmup_steps=5": "it needs --schedule=warmup or cosine.",
    "--schedule=cosine --warmup_steps=3000": "leaves no step of 3000 for the cosine",
    "--weight_decay=-1": "--weight_decay must be at least 0, got -1",
    "--clip_value=-1": "--clip_value must be at least 0, got -1",
    "--patience=-1": "--patience must be at least 0",
    "--ties=last": "--ties has no effect without --keep_best or --patience.",
    "--keep_best --ties=none": "--ties=none: it must be one of first, last",
    "--keep_best=maybe": "--keep_best=maybe: it must be true or false",
    "--layers=65": "--layers must be at least 1 and at most 64, got 65",
    "--layer_dropout=0.5": "has no effect with --layers=1: it needs --layers of at least 2.",
    "--layers=2 --layer_dropout=1": "--layer_dropout must be at least 0 and below 1, got 1",
    "--decoder=none --dropout=0.5": "has no effect with --decoder=none: it needs --decoder.",
    "--decoder=": "--decoder= has no value",
    "--decoder=4,a": "--decoder=4,a: it must be a whole number in plain digits, got 'a'",
    "--detach_per_example": "has no effect with --detach_prob=0: it needs --detach_prob.",
    "--detach_off_steps=5": "has no effect with --detach_prob=0: it needs --detach_prob.",
    "--inputs=one_hot --embedding=3": "has no effect with --inputs=one_hot: it needs --inputs=emb",
    "--cell=ur_lstm --forget_bias=3": "--forget_bias is not for ur_lstm",
    "--cell=nowhere:X": "--cell=nowhere:X: module nowhere cannot be imported: ModuleNotFoundError",
    "--cell=json:X": "--cell=json:X: module json has no 'X'.",
    "--cell=json:dumps": "--cell=json:dumps cannot be built: TypeError",
    "--cell=collections:OrderedDict": "is neither a recurrent_gates.Cell nor a Flax cell, but Or",
    "--profile=-1": "--profile must be at least 0 and below 2147483648, got -1",
    "--num_processes=2": "need --coordinator_address and --process_id, too.",
    "--num_processes=2 --process_id=2 --coordinator_address=x:1": "got 2 of 2",
    "--num_processes=2 --distributed=off": "--distributed=off contradicts --num_processes.",
    "--num_processes=2 --compile_for=v5e:4x4": "--compile_for and --num_processes exclude each oth",
    "--mesh=rows:2": "--mesh=rows:2: there is no axis rows, there are lanes, data and vocab.",
    "--mesh=8": "must be auto, or axes with their numbers of devices such as data:8 or lanes:4,d",
    "--mesh=data:2,data:2": "--mesh=data:2,data:2 names the axis data twice.",
    "--mesh=data:3 --batch_size=8": "--mesh=data:3: --batch_size=8 is not a multiple of 3.",
    "--mesh=lanes:2 --seeds=3": "--mesh=lanes:2: the number of seeds times learning rates, 3, is",
    "--mesh=vocab:2": "vocab splits the tables of a softmax over words, and only those of langua",
    "--mesh=data:4096 --batch_size=4096": "--mesh=data:4096 needs 4096 devices, and there are ",
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
        ("--stpes=3", "There is no flag --stpes; did you mean --steps"),
        ("--xyzzy=3", "There is no flag --xyzzy; see --help."),
        ("--steps=0", "--steps must be at least 1 and below 2147483648, got 0."),
        ("--cell=lstmm", "There is no cell named 'lstmm'; did you mean lstm"),
        (
            "--cell=rnn --workdir=/dev/null/x",
            "cannot write to the workdir /dev/null/x: Not a directory.",
        ),
    ],
)
def test_exit_code_2_and_one_sentence(program, argv, sentence, monkeypatch):
    monkeypatch.setattr(learner.Learner, "check", lambda self: None)  # it takes long
    code, out, err = program("experiments.copy", *argv.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"experiments.copy: {sentence}")
    assert err.count("\n") == 1


def test_exit_code_1_where_the_machine_fails(program, monkeypatch):
    def full(*_):
        raise StorageError("the disk is full.")

    monkeypatch.setattr(main, "train_one", full)
    assert program("experiments.copy") == (1, "", "experiments.copy: the disk is full.\n")


def test_a_process_ends_with_the_code_and_nothing_else():
    """Without a word of JAX, absl or Python; everything else is tested in one process."""
    done = run_binary("--cell=lstmm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("experiments.copy: There is no cell named 'lstmm'")
    assert done.stderr.count("\n") == 1


def test_help_lists_the_flags_and_imports_no_jax():
    """As a process: this one has imported it."""
    done = run_binary("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for flag in [*SHARED, "loss_on", "inputs", "optimizer", "profile", "process_id"]:
        assert f"\n  --{flag}" in done.stdout or f"\n  --[no]{flag}" in done.stdout, flag
    assert "\n  --dtype=float32|bfloat16|float64\n      of the computation; par" in done.stdout
    rates = "0.004 (gato, small); 0.001 (ur, hdetach)"
    assert f"\n      a positive number; default: {rates}\n" in done.stdout
    source = "import experiments.copy.__main__, sys; sys.exit('jax' in sys.modules)"
    assert support.run_source(source).returncode == 0


def test_help_that_is_read_in_part_is_no_error():
    reader = "import sys; sys.stdin.readline()"
    command = f"{sys.executable} -m experiments.copy --help | {sys.executable} -c '{reader}'"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_of_one_flag():
    """Meaning, limits and default, where that is by a protocol, by the cell or by a setting."""
    text = flags.help_text("use", functools.partial(flags.define_experiment, PIXELS), PIXELS)
    lines = text.splitlines()

    def of(flag):
        starts = (f"  --{flag}", f"  --[no]{flag}")
        place = next(i for i, line in enumerate(lines) if line.startswith(starts))
        return [line.strip() for line in lines[place : place + 3]]

    assert of("forget_bias") == [
        "--forget_bias=FORGET_BIAS",
        "where the bias of a sigmoid forget gate starts, of a plain or a refined one (R)",
        "a finite number; default: by the cell",
    ]
    assert of("eval_every")[2] == "at least 1; default: 1 epochs"
    assert of("steps=")[2] == "at least 1; default: --epochs"
    assert (
        of("dropout")[2]
        == "at least 0 and below 1; default: 0 (ur, hdetach); 0.5 (ur_zoneout, small)"
    )
    assert of("decoder")[2].endswith("default: 256 (ur, ur_zoneout, small); none (hdetach)")
    assert of("keep_best")[:1] == ["--[no]keep_best"]
    assert of("permutation=")[0] == "--permutation=scanline|bit_reversal|random"


def test_describe_prints_one_json_object(program):
    code, out, err = program(
        "experiments.copy",
        "--describe",
        "--protocol=gato",
        "--cell=gru",
        "--seed=3",
        "--inputs=one_hot",
    )
    assert (code, err) == (0, "")
    described = json.loads(out)
    assert described["recurrent_parameters"] == 3 * 1024 * (11 + 1024 + 2)
    assert described["protocol"] == "gato"
    assert described["overrides"] == {"cell": "gru", "seed": 3, "inputs": "one_hot"}
    assert described["config"]["training"]["seed"] == 3


def started(monkeypatch, *argv):
    """The config and workdir that a command line trains."""
    calls = []
    monkeypatch.setattr("experiments.training.loop.run", lambda *given: calls.append(given))
    main.train_one(COPY, flags.parse(["copy", *argv], DEFINE))
    config, workdir, *_ = calls[0]
    return config, str(workdir)


def test_flags_reach_the_config(monkeypatch):
    config, _ = started(
        monkeypatch,
        *("--cell=gato", "--lambda=0.5", "--s_update=zero", "--length=9", "--loss_on=all"),
        *("--detach_prob=0.3", "--detach_state=s", "--detach_per_example", "--damp_prob=0.1"),
        *("--learning_rates=1e-3,2e-3", "--seeds=2", "--dtype=bfloat16", "--decoder=7,5"),
        *("--optimizer=rmsprop", "--momentum=0.5", "--layers=3", "--nokeep_best"),
    )
    assert (config.model.lambda_, config.model.s_update, config.model.dtype) == (
        *(0.5, "zero", "bfloat16"),
    )
    assert (config.task.length, config.task.loss_on) == (9, "all")
    carry = config.carry
    assert (carry.detach_prob, carry.detach_state, carry.detach_per_example) == (0.3, "s", True)
    assert carry.damp_prob == 0.1
    assert (config.model.decoder, config.model.layers) == ((7, 5), 3)
    training = config.training
    assert (training.optimizer, training.momentum, training.keep_best) == ("rmsprop", 0.5, False)
    assert training.lanes == [(0, 1e-3), (1, 1e-3), (0, 2e-3), (1, 2e-3)]


def test_one_rate_and_no_decoder(monkeypatch):
    config, _ = started(monkeypatch, "--learning_rate=5", "--decoder=none")
    assert (config.training.learning_rates, config.model.decoder) == ((5.0,), ())
    assert config.overrides == {"learning_rates": (5.0,), "decoder": ()}


def test_default_workdir_names_the_run(monkeypatch):
    config, workdir = started(monkeypatch, "--cell=gru", "--protocol=ur", "--steps=7")
    assert workdir == f"runs/copy/gru-ur-{config.hash()}"
    assert started(monkeypatch, "--cell=gru", "--protocol=ur", "--steps=9")[1] == workdir
    assert started(monkeypatch, "--cell=gru", "--protocol=ur", "--seed=1")[1] != workdir
    assert started(monkeypatch, "--workdir=here")[1] == "here"


def test_the_cache_is_in_the_users_cache_directory_unless_it_is_named(monkeypatch):
    def place(**environment):
        for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        main.keep_compilations()
        return os.environ["JAX_COMPILATION_CACHE_DIR"]

    assert place(HOME="/h") == "/h/.cache/recurrent_gates/xla"
    assert place(HOME="/h", XDG_CACHE_HOME="/x") == "/x/recurrent_gates/xla"
    assert place(HOME="/h", JAX_COMPILATION_CACHE_DIR="/c") == "/c"
