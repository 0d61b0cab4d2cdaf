"""The flags that every binary has, and the way from a command line to a run.

Nothing here imports JAX before the command line is read: ``--help`` is quick, and the number
of XLA devices can still be set.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from absl import app, flags, logging
from absl.flags import FlagValues

Define = Callable[[FlagValues], None]
Start = Callable[[str, dict[str, Any]], None]

HELP = {"--help", "-help", "-h", "-?", "--helpshort", "--helpfull"}


def define_shared(values: FlagValues) -> None:
    """Defines the shared flags. One that is not given leaves the protocol's setting."""

    def add(define: Callable[..., Any], name: str, text: str, default: Any = None) -> None:
        define(name, default, text, flag_values=values)

    string, number = flags.DEFINE_string, flags.DEFINE_float
    integer, boolean = flags.DEFINE_integer, flags.DEFINE_boolean
    add(string, "cell", "the recurrent cell, a name in recurrent_gates.CELLS")
    add(string, "protocol", "gato, ur, ur_zoneout, hdetach: a paper's settings; or small", "small")
    add(integer, "hidden_size", "units of the cell; for GATO 2J")
    add(integer, "seed", "the first seed")
    add(integer, "seeds", "how many seeds, counted up from --seed; they train together")
    add(integer, "steps", "updates; raising it goes on with a finished run")
    add(integer, "batch_size", "examples per update")
    add(number, "learning_rate", "of Adam")
    add(flags.DEFINE_list, "learning_rates", "several with commas; they train together")
    add(number, "clip_norm", "largest global norm of the gradient; 0: no clipping")
    add(number, "detach_prob", "probability of detaching the state at a step (h-detach)")
    add(string, "detach_state", "field of the state that is detached or damped: h, c, r, ...")
    add(boolean, "detach_per_example", "detach by example, not the whole batch together")
    add(integer, "detach_off_steps", "no detaching in this many last steps")
    add(number, "damp_prob", "multiply the gradient through the state by one minus this")
    add(number, "zoneout_c", "probability that a unit of c keeps its old value")
    add(number, "zoneout_h", "probability that a unit of h keeps its old value")
    add(integer, "downsize", "units per master gate (om, um, cm cells)")
    add(number, "tmax", "chrono initialisation's longest dependency (c, cr, cm cells)")
    enum(values, "s_update", ["accumulate", "zero", "replace"], "GATO's ablations")
    add(number, "lambda", "GATO's decay rate")
    add(integer, "length", "the task's length in steps; in copy the blanks or the delay")
    enum(values, "dtype", ["float32", "bfloat16"], "of the computation; the state is float32")
    add(string, "backend", "of the recurrence: auto, scan, fused, newton, pallas, cudnn")
    add(string, "data_dir", "directory with the raw published files of a data set")
    add(string, "workdir", "where results go; default: runs/TASK/CELL-PROTOCOL-HASH")
    add(boolean, "describe", "print settings and parameter counts as JSON, train nothing", False)


def enum(values: FlagValues, name: str, choices: Sequence[str], text: str) -> None:
    """Defines a flag that takes one of some names."""
    flags.DEFINE_enum(name, None, choices, text, flag_values=values)


def parse(argv: Sequence[str], define: Define) -> dict[str, Any]:
    """The flags that were given, by name; those that have a default always.

    Args:
      argv: the command line, program first.
      define: defines the binary's own flags.

    Raises:
      absl.flags.Error: on a flag that cannot be, with one sentence.
    """
    values = _defined(define)
    rest = values(list(argv))[1:]
    if rest:
        raise flags.Error(f"There is no argument {rest[0]!r}; flags look like --cell=gato.")
    given = {name: values[name].value for name in values}
    check_given(given)
    return {name: value for name, value in given.items() if value is not None}


def check_given(given: Mapping[str, Any]) -> None:
    """Raises ``absl.flags.Error`` on a flag without a value, such as that of an unset variable."""
    for name, value in given.items():
        if value in ("", []):
            raise flags.Error(f"--{name}= has no value; leave the flag out for its default.")


def _defined(define: Define) -> FlagValues:
    values = FlagValues()
    define_shared(values)
    define(values)
    return values


def help_text(task: str, define: Define) -> str:
    """What ``--help`` prints."""
    usage = f"usage: python -m experiments.{task} [--flag=value ...]"
    return "\n".join([usage, "", *help_lines(_defined(define))])


def help_lines(values: FlagValues) -> list[str]:
    """What ``--help`` prints about flags, two lines for each."""
    lines = []
    for name in values:
        flag = values[name]
        choices = getattr(flag.parser, "enum_values", None)
        value = "" if flag.boolean else f"={'|'.join(choices) if choices else name.upper()}"
        text = flag.help.removeprefix(f"<{value[1:]}>: ")  # absl says the choices, too
        lines += [f"  --{name}{value}", f"      {text}"]
    return lines


def main(task: str, define: Define = lambda values: None, begin: Start | None = None) -> None:
    """The main function of a binary: parses the command line, then describes or trains.

    Exits with 2 and one sentence on standard error where a wish cannot be met.

    Args:
      task: the binary's name.
      define: defines the flags that only this binary has.
      begin: what the binary does with its flags; None: ``start``.
    """

    def flags_parser(argv: Sequence[str]) -> dict[str, Any]:
        flags.FLAGS(argv[:1])  # absl's own stay at their defaults
        if HELP & set(argv[1:]):
            print(help_text(task, define))
            sys.exit(0)
        try:
            return parse(argv, define)
        except flags.UnrecognizedFlagError as error:
            near = difflib.get_close_matches(error.flagname, _defined(define), n=3)
            hint = f"did you mean {' or '.join(f'--{name}' for name in near)}?"
            fail(task, f"There is no flag --{error.flagname}; {hint if near else 'see --help.'}")
        except flags.Error as error:
            fail(task, str(error))

    def body(given: dict[str, Any]) -> None:
        logging.set_verbosity(logging.WARNING)
        use_all_cores()
        keep_compilations()
        from experiments.config import UserError

        try:
            (begin or start)(task, given)
        except UserError as error:
            fail(task, str(error))
        except KeyboardInterrupt:
            fail(task, "interrupted; the same command goes on from the last checkpoint.", 130)

    app.run(body, flags_parser=flags_parser)


def fail(task: str, sentence: str, code: int = 2) -> NoReturn:
    """Ends a binary with a sentence on standard error."""
    print(f"experiments.{task}: {sentence}", file=sys.stderr)
    sys.exit(code)


def use_all_cores() -> None:
    """Makes XLA see as many CPU devices as there are cores, before JAX starts."""
    option = "--xla_force_host_platform_device_count"
    given = os.environ.get("XLA_FLAGS", "")
    if option not in given:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        os.environ["XLA_FLAGS"] = f"{given} {option}={cores}".strip()


def keep_compilations() -> None:
    """Makes JAX keep compiled programs on disk, where a user keeps caches, before JAX starts.

    JAX_COMPILATION_CACHE_DIR names another place; JAX_ENABLE_COMPILATION_CACHE=false keeps none.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{caches}/recurrent_gates/xla")


class Wish(NamedTuple):
    """What a command line asks for: settings beside a protocol, what to do and where."""

    protocol: str
    settings: dict[str, Any]
    describe: bool
    workdir: str | None


def read(given: dict[str, Any]) -> Wish:
    """The wish that flags express.

    Args:
      given: flags by name, as ``parse`` returns them.

    Raises:
      UserError: if a list is not one of numbers.
    """
    from experiments.config import UserError

    settings = dict(given)
    protocol, describe = settings.pop("protocol"), settings.pop("describe")
    workdir = settings.pop("workdir", None)
    if "learning_rate" in settings:
        settings.setdefault("learning_rates", [settings["learning_rate"]])
        del settings["learning_rate"]
    if "learning_rates" in settings:
        try:
            settings["learning_rates"] = tuple(float(rate) for rate in settings["learning_rates"])
        except ValueError:
            rates = ",".join(settings["learning_rates"])
            raise UserError(f"--learning_rates is a list of numbers, got {rates!r}.") from None
    if "lambda" in settings:
        settings["lambda_"] = settings.pop("lambda")
    return Wish(protocol, settings, describe, workdir)


def start(task: str, given: dict[str, Any]) -> None:
    """Describes or trains.

    Args:
      task: a binary's name.
      given: flags by name, as ``parse`` returns them.

    Raises:
      UserError: if a wish cannot be met.
    """
    from experiments import protocols, train

    wish = read(given)
    config = protocols.resolve(task, wish.protocol, wish.settings)
    if wish.describe:
        print(json.dumps(train.describe(config), indent=2))
        return
    default = os.path.join("runs", task, f"{config.model.cell}-{wish.protocol}-{config.hash()}")
    train.run(config, wish.workdir or default)
