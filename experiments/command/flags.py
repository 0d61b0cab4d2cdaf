"""Flags made from settings, and what ``--help`` says of them.

Nothing here imports JAX: ``--help`` is quick, and the number of XLA devices can still be set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from absl.flags import FlagValues

from experiments.records.storage import DEFAULTS, Storage
from experiments.settings.derived import Depends, Epochs, OnlySeed
from experiments.settings.errors import UserError
from experiments.settings.fields import Setting, shown_value
from experiments.settings.resolver import Experiment

Define = Callable[[FlagValues], None]

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NONE = "none"  # an empty tuple, or no value
EXPLICIT = ("coordinator_address", "num_processes", "process_id")
OF_PROCESSES = (*EXPLICIT, "distributed")


def whole(text: str) -> int:
    """A whole number in plain decimal digits.

    Raises:
      ValueError: with a sentence, if it is none.
    """
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"it must be a whole number in plain digits, got {text!r}")
    return int(text)


def decimal(text: str) -> float:
    """A number such as 0.004 or 4e-3; for the errors see ``whole``."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"it must be a number such as 0.004 or 4e-3, got {text!r}")
    return float(text)


_READ: Mapping[type, Callable[[str], Any]] = {int: whole, float: decimal, str: str}


class _Parser(flags.ArgumentParser):
    """Reads the text of a flag: one value, or several with commas."""

    def __init__(self, kind: type, several: bool, choices: Sequence[str]) -> None:
        self._read, self._several, self._choices = _READ[kind], several, choices

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str) or not argument:  # without a value it is refused later
            return argument
        if self._choices and argument not in self._choices:
            raise ValueError(f"it must be one of {', '.join(self._choices)}")
        if not self._several:
            return self._read(argument)
        entries = [] if argument == _NONE else argument.split(",")
        return tuple(self._read(entry) for entry in entries)


class _BooleanParser(flags.BooleanParser):
    """absl's, with a sentence for what is neither."""

    def parse(self, argument: Any) -> bool:
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError("it must be true or false") from None


def add(
    values: FlagValues,
    name: str,
    meaning: str,
    kind: type = str,
    *,
    several: bool = False,
    choices: Sequence[str] = (),
) -> None:
    """Defines a flag.

    Args:
      values: where.
      name: without dashes.
      meaning: help text.
      kind: ``int``, ``float``, ``bool`` or ``str``.
      several: entries with commas.
      choices: the allowed texts; none: any.
    """
    if kind is bool:
        flags.DEFINE_boolean(name, None, meaning, flag_values=values)
        values[name].parser = _BooleanParser()
        return
    parser = _Parser(kind, several, choices)
    flags.DEFINE(parser, name, None, meaning, values, None)


def add_setting(values: FlagValues, setting: Setting) -> None:
    """Defines the flag of a setting."""
    add(
        values,
        setting.flag,
        setting.meaning,
        setting.kind,
        several=setting.several,
        choices=setting.choices,
    )


def define_experiment(experiment: Experiment, values: FlagValues) -> None:
    """Defines a flag for every setting, and those of a run. One that is not given leaves the
    protocol's value."""
    for name, setting in experiment.declarations().items():
        add_setting(values, setting)
        if setting.singular:
            add(values, setting.singular, f"one of --{name}", setting.kind)
    protocols = tuple(experiment.protocols)
    add(values, "protocol", "a paper's settings; default: small", choices=protocols)
    define_run(values, "PROTOCOL-HASH" if experiment.study else "CELL-PROTOCOL-HASH")


def one_process(values: FlagValues) -> None:
    """Takes back the flags of several processes, for a binary that reads its own runs again."""
    values.remove_flag_values(list(OF_PROCESSES))


def define_run(values: FlagValues, folder: str) -> None:
    """Defines the flags that say where and how a run is made, and change nothing of it.

    Args:
      values: where.
      folder: what the default workdir of a task is called.
    """
    add(values, "workdir", f"where results go; default: runs/TASK/{folder}")
    add(values, "describe", "print settings and parameter counts as JSON, train nothing", bool)
    add(values, "compile_for", "compile the training step for a TPU such as v5e:4x4, train nothing")
    add(values, "profile", "trace so many steps into WORKDIR/profile", int)
    add(values, "keep_checkpoints", f"how many stay; default: {DEFAULTS.keep_checkpoints}", int)
    meaning = "what a full disk means: stop (default: exit code 1), or wait until there is room"
    add(values, "on_full_disk", meaning, choices=("stop", "wait"))
    add(values, "coordinator_address", "HOST:PORT of the first of several processes")
    add(values, "num_processes", "how many processes train together", int)
    add(values, "process_id", "which of them this is, from 0", int)
    meaning = "whether the processes that a TPU pod, SLURM or GKE starts join; default: auto"
    add(values, "distributed", meaning, choices=("auto", "off"))


class Request(NamedTuple):
    """What a command line asks for: settings beside a protocol, what to do and where."""

    protocol: str
    settings: dict[str, Any]
    describe: bool
    compile_for: str | None
    workdir: str | None
    profile: int
    storage: Storage


def request(experiment: Experiment, flag_values: Mapping[str, Any]) -> Request:
    """What flags express.

    Args:
      experiment: whose flags they are.
      flag_values: by name, as ``parse`` returns them; others than the experiment's are passed on.

    Raises:
      UserError: if two of them exclude each other.
    """
    settings = {name: value for name, value in flag_values.items() if name not in OF_PROCESSES}
    protocol, describe = settings.pop("protocol", "small"), settings.pop("describe", False)
    exclude(flag_values, "compile_for", "describe")
    compile_for = settings.pop("compile_for", None)
    workdir, profile = settings.pop("workdir", None), settings.pop("profile", 0)
    if not 0 <= profile < 2**31:
        raise UserError(f"--profile must be at least 0 and below {2**31}, got {profile}.")
    storage = _storage(settings)
    for name, setting in experiment.declarations().items():
        if setting.singular and setting.singular in settings:
            exclude(settings, setting.singular, setting.flag)
            settings[name] = (settings.pop(setting.singular),)
        if setting.flag in settings and setting.flag != name:
            settings[name] = settings.pop(setting.flag)
    return Request(protocol, settings, describe, compile_for, workdir, profile, storage)


def _storage(settings: dict[str, Any]) -> Storage:
    """What is asked of storage; it is taken from the flags."""
    count = settings.pop("keep_checkpoints", DEFAULTS.keep_checkpoints)
    if not 1 <= count < 2**31:
        raise UserError(f"--keep_checkpoints must be at least 1 and below {2**31}, got {count}.")
    return Storage(count, waits=settings.pop("on_full_disk", "stop") == "wait")


def exclude(flag_values: Iterable[str], one: str, other: str) -> None:
    """Raises ``UserError`` if both flags are given."""
    if one in flag_values and other in flag_values:
        raise UserError(f"--{one} and --{other} exclude each other: give one of them.")


def distinct(name: str, entries: Sequence[Any]) -> None:
    """Raises ``UserError`` if a list names nothing, or something twice."""
    if not entries:
        raise UserError(f"--{name} must name at least one value.")
    if len(set(entries)) < len(entries):
        raise UserError(f"--{name} must name each value once.")


def parse(argv: Sequence[str], define: Define) -> dict[str, Any]:
    """The flags that were given, by name.

    Args:
      argv: the command line, program first.
      define: defines the binary's flags.

    Raises:
      absl.flags.Error: on a flag that cannot be, with one sentence.
    """
    flag_values, arguments = parse_with_arguments(argv, define)
    if arguments:
        raise flags.Error(f"There is no argument {arguments[0]!r}; flags look like --cell=gato.")
    return flag_values


def parse_with_arguments(argv: Sequence[str], define: Define) -> tuple[dict[str, Any], list[str]]:
    """The same, and what stood on the command line beside flags."""
    values = defined(define)
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise flags.Error("The command line has bytes that are not UTF-8.") from None
    try:
        arguments = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        matches = difflib.get_close_matches(error.flagname, values, n=3)
        hint = f"did you mean {' or '.join(f'--{flag}' for flag in matches)}?"
        raise flags.Error(
            f"There is no flag --{error.flagname}; {hint if matches else 'see --help.'}"
        ) from None
    for name in values:
        if values[name].present > 1:
            raise flags.Error(f"--{name} is given {values[name].present} times.")
        if values[name].present and values[name].value == "":
            raise flags.Error(f"--{name}= has no value; leave the flag out for its default.")
    flag_values = {name: values[name].value for name in values}
    return {name: value for name, value in flag_values.items() if value is not None}, arguments


def defined(define: Define) -> FlagValues:
    """New flags."""
    values = FlagValues()
    define(values)
    return values


def help_text(usage: str, define: Define, experiment: Experiment | None = None) -> str:
    """What ``--help`` prints: two lines for each flag, and its default in each protocol."""
    values = defined(define)
    lines = [f"usage: {usage}", ""]
    sources = {} if experiment is None else experiment.declarations()
    by_flag = {setting.flag: setting for setting in sources.values()}
    for name in values:
        flag = values[name]
        choices = getattr(flag.parser, "_choices", ())
        value = f"={'|'.join(choices) if choices else name.upper()}"
        lines.append(f"  --[no]{name}" if flag.boolean else f"  --{name}{value}")
        lines.append(f"      {flag.help}")
        if experiment is not None and name in by_flag:
            lines.append(f"      {_limits_and_defaults(experiment, by_flag[name])}")
    return "\n".join(lines)


def _limits_and_defaults(experiment: Experiment, setting: Setting) -> str:
    limited = not setting.choices and setting.kind in (int, float)
    limits = f"{setting.usual}; " if limited else ""
    return f"{limits}default: {defaults_text(experiment, setting)}"


def defaults_text(experiment: Experiment, setting: Setting) -> str:
    """The default of a setting, and whose it is where protocols differ."""
    by_value: dict[str, list[str]] = {}
    for protocol in experiment.protocols:
        values = experiment.values(protocol)
        if setting.name in values:
            text = _default_text(values[setting.name].value)
            by_value.setdefault(text, []).append(protocol)
    if not by_value:
        return "by the cell"
    if len(by_value) == 1:
        return next(iter(by_value))
    return "; ".join(f"{value} ({', '.join(protocols)})" for value, protocols in by_value.items())


def _default_text(value: Any) -> str:
    if isinstance(value, Depends):
        return f"by --{value.setting}"
    if isinstance(value, OnlySeed):
        return "--seed"
    if isinstance(value, Epochs):
        return "--epochs" if value.passes == "epochs" else f"{value.passes:g} epochs"
    return shown_value(value)
