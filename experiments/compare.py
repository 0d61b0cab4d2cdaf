"""Overlay the learning curves of runs: ``python -m experiments.compare DIR [DIR ...]``.

Draws one figure and prints one Markdown table. Runs that still train are shown as far as
they are.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, logging
from absl import flags as absl_flags

from experiments import flags

_USAGE = "usage: python -m experiments.compare [--flag=value ...] DIR [DIR ...]"


@dataclasses.dataclass(frozen=True)
class Wish:
    """What the command line asks for."""

    workdirs: tuple[Path, ...]
    style: str
    figure: Path
    metric: str | None


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    style = "the line and band over seeds: mean and range, or median and quartiles"
    absl_flags.DEFINE_enum("style", "mean", ["mean", "median"], style, flag_values=values)
    metric = "one of the task's metrics, or train_loss; default: the task's headline"
    absl_flags.DEFINE_string("metric", None, metric, flag_values=values)
    figure = "where the figure goes; default: runs/comparison.png"
    absl_flags.DEFINE_string("figure", "runs/comparison.png", figure, flag_values=values)
    return values


def parse(argv: Sequence[str]) -> Wish:
    """The wish of a command line, program first.

    Raises:
      absl.flags.Error: if it cannot be, with one sentence.
    """
    values = _define()
    workdirs = values(list(argv))[1:]
    flags.check_given({name: values[name].value for name in values})
    if not workdirs:
        raise absl_flags.Error("Name at least one workdir, such as runs/adding/gato-small-*.")
    style, figure = str(values["style"].value), Path(str(values["figure"].value))
    return Wish(tuple(map(Path, workdirs)), style, figure, values["metric"].value)


def main() -> None:
    """The main function: exits with 2 and one sentence where a wish cannot be met."""

    def flags_parser(argv: Sequence[str]) -> Wish:
        absl_flags.FLAGS(argv[:1])
        if flags.HELP & set(argv[1:]):
            print("\n".join([_USAGE, "", *flags.help_lines(_define())]))
            sys.exit(0)
        try:
            return parse(argv)
        except absl_flags.Error as error:
            flags.fail("compare", str(error))

    def body(wish: Wish) -> None:
        logging.set_verbosity(logging.WARNING)
        from experiments import comparison
        from experiments.config import UserError

        try:
            comparison.run(wish.workdirs, wish.style, wish.figure, wish.metric)
        except UserError as error:
            flags.fail("compare", str(error))

    app.run(body, flags_parser=flags_parser)


if __name__ == "__main__":
    main()
