"""The page that a figure is drawn on; matplotlib is imported when there is one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from experiments.records.storage import reason
from experiments.settings.errors import UserError

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#5f6b6d")
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 10,
    "legend.frameon": False,
}


def available(say: Callable[[str], None]) -> bool:
    """Whether figures can be drawn; if not, that is said."""
    if importlib.util.find_spec("matplotlib") is None:
        say("matplotlib is not installed: no figure is drawn.")
        return False
    return True


@contextmanager
def page(
    path: Path,
    width: float,
    height: float,
    title: str,
    *,
    layout: Literal["constrained"] | None = "constrained",
    of_a_run: bool = False,
    source: str = "",
) -> Iterator[Any]:
    """A matplotlib figure to draw on; it is saved when all is drawn.

    Args:
      path: of the PNG; its directory is made if need be.
      width, height: in inches.
      title: above everything.
      layout: matplotlib's layout engine; None: the drawer places the axes.
      of_a_run: whether a run leaves it behind, which goes on without.
      source: what the PNG says of its source, in its metadata.

    Raises:
      OSError: if it cannot be written, of a run.
      UserError: if it cannot be written, where it is what the user asked for.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout=layout)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        yield figure
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=160, metadata={"Source": source} if source else None)
        except (OSError, ValueError) as error:  # a place, or a name such as x.foo
            if of_a_run:
                raise
            raise UserError(f"the figure {path} cannot be written: {reason(error)}.") from None
