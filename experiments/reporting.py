"""What a run tells the user while it trains: a progress bar or plain lines, and TensorBoard."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.config import Config
from experiments.workdir import Row


def say(text: str) -> None:
    """A line on standard output, at once, above the progress bar if there is one."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


class Progress:
    """A bar with time left and the current metric on a terminal, a line per evaluation in a log."""

    def __init__(self, config: Config, step: int) -> None:
        self._metric = config.task.metrics[0]
        self._steps = config.training.steps
        self._start, self._step = time.monotonic(), step
        self._first = step
        self._bar = tqdm(
            total=self._steps,
            initial=step,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} "
            "[{elapsed}<{remaining}{postfix}]",
        )

    def advance(self, step: int) -> None:
        """Some steps are done."""
        self._bar.update(step - self._step)
        self._step = step

    def evaluated(self, row: Row, watched: str) -> None:
        """A row of metrics is there."""
        text = f"{self._metric.name} {_summary(row[watched][self._metric.name])}"
        if not self._bar.disable:
            self._bar.set_postfix_str(text)
            return
        done, seconds = self._step - self._first, time.monotonic() - self._start
        left = f", {(self._steps - self._step) * seconds / done:.0f} s left" if done else ""
        loss = f"loss {_summary(row['train_loss'])}, " if self._step else ""
        of = watched.replace("_", "-")
        say(f"step {row['step']}/{self._steps}: {loss}{of} {text}{left}")

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def number(value: float) -> str:
    """Four decimals, or two digits where these would be little but zeros."""
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _summary(values: list[float | None]) -> str:
    """One value, or the mean of several with their range; diverged lanes are an asterisk."""
    alive = [value for value in values if value is not None]
    star = "*" if len(alive) < len(values) else ""
    if not alive:
        return star
    if len(alive) == 1:
        return f"{number(alive[0])}{star}"
    mean = sum(alive) / len(alive)
    return f"{number(mean)} [{number(min(alive))}, {number(max(alive))}]{star}"


class TensorBoard:
    """Event files for TensorBoard, if tensorboardX is there."""

    def __init__(self, directory: Path, config: Config, step: int) -> None:
        lanes = config.training.lanes
        self._names = [f"seed_{seed}_rate_{rate}" for seed, rate in lanes]
        self._writer: Any = None
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            say("tensorboardX is not installed: no TensorBoard events are written.")
            return
        self._writer = SummaryWriter(str(directory), purge_step=step + 1)

    def write(self, row: Row, watched: str) -> None:
        """A row of metrics."""
        if self._writer is None:
            return
        curves = {"train/loss": row["train_loss"]}
        curves |= {f"{watched}/{name}": values for name, values in row[watched].items()}
        for curve, values in curves.items():
            for name, value in zip(self._names, values, strict=True):
                if value is not None:
                    self._writer.add_scalar(f"{curve}/{name}", value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        if self._writer is not None:
            self._writer.close()
