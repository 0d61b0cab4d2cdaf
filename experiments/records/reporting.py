"""What a run tells the user while it trains: a progress bar or plain lines, and TensorBoard."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.records.storage import Patience, cannot_write, tolerated
from experiments.records.workdir import Row, Workdir, append_row
from experiments.settings.config import Config

_FLUSH_SECONDS = 10.0  # TensorBoard looks for news less often


def say(text: str) -> None:
    """A line on standard output, at once, above the progress bar if there is one.

    Raises:
      StorageError: if that is a file on a full disk.
      BrokenPipeError: if nobody reads it.
    """
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise cannot_write(Path("the standard output"), error) from None


def note(text: str) -> None:
    """A line on standard error, beside what a program is asked to print."""
    tqdm.write(text, file=sys.stderr)


class Report:
    """What is told and kept of each evaluation: timing, TensorBoard, the progress.

    The run does not need what is kept here: it goes on without what cannot be written, unless
    the disk is full.

    Args:
      config: of the run.
      work: its files.
      watched: the name of the set that is evaluated.
      step: the first one.
      patience: writes what fits on the disk.
    """

    def __init__(
        self, config: Config, work: Workdir, watched: str, step: int, patience: Patience
    ) -> None:
        self._patience = patience
        self._timing, self._events = work.timing, work.path / "tensorboard"
        self._watched = watched
        self._failed: set[Path] = set()
        self._progress = Progress(config, step)
        self._board = TensorBoard(self._events, config)
        self._keep(self._events, lambda: self._board.open(step))

    def advance(self, step: int) -> None:
        """Some steps are done."""
        self._progress.advance(step)

    def evaluated(self, row: Row, clock: Row) -> None:
        """A row of metrics is there, with the clock's values.

        Raises:
          StorageError: if there is no room for them.
        """
        self._patience(lambda: self._progress.evaluated(row, self._watched))
        self._keep(self._timing, lambda: append_row(self._timing, {"step": row["step"], **clock}))
        self._keep(self._events, lambda: self._board.write(row, self._watched))

    def illustrated(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts that show what the model does at a step."""
        if texts:
            self._keep(self._events, lambda: self._board.write_texts(step, texts))

    def close(self) -> None:
        """Leaves the bar as it is and ends the event file."""
        self._progress.close()
        with contextlib.suppress(OSError):  # a full disk is said by what the run needs
            self._board.close()

    def _keep(self, path: Path, write: Callable[[], None]) -> None:
        """Writes, unless it has failed once."""
        if path in self._failed:
            return
        self._failed.add(path)

        def attempt() -> None:
            with tolerated(path, say):
                write()
                self._failed.remove(path)

        self._patience(attempt)


class Progress:
    """A bar with time left and the current metric on a terminal, a line per evaluation in a log.

    The time left is told from what steps and evaluations take; the first evaluation is left
    out, which compiles.
    """

    def __init__(self, config: Config, step: int) -> None:
        self._metric = config.task.metrics[0]
        self._steps = config.training.steps
        self._start = self._last = time.monotonic()
        self._first = self._step = step
        self._compiled = False
        self._bar = tqdm(
            total=self._steps,
            initial=step,
            unit="step",
            disable=not sys.stderr.isatty(),
            **_terminal_size(),
            bar_format="{percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} "
            "[{elapsed}<{remaining}{postfix}]",
        )

    def advance(self, step: int) -> None:
        """Some steps are done."""
        self._bar.update(step - self._step)
        self._step, self._last = step, time.monotonic()

    def evaluated(self, row: Row, watched: str) -> None:
        """A row of metrics is there."""
        now = time.monotonic()
        if not self._compiled:
            self._start += now - self._last
            self._bar.unpause()
            self._compiled = True
        text = f"{self._metric.name} {_summary(row[watched][self._metric.name])}"
        if not self._bar.disable:
            self._bar.set_postfix_str(text)
            return
        step_count, seconds = self._step - self._first, now - self._start
        time_left = (
            f", {(self._steps - self._step) * seconds / step_count:.0f} s left"
            if step_count
            else ""
        )
        loss = f"loss {_summary(row['train_loss'])}, " if self._step else ""
        set_name = watched.replace("_", "-")
        say(f"step {row['step']}/{self._steps}: {loss}{set_name} {text}{time_left}")

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


def number(value: float) -> str:
    """Four decimals, or two digits where these would be little but zeros."""
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _summary(values: list[float | None]) -> str:
    """One value, or the mean of several with their range; diverged lanes are an asterisk."""
    alive_values = [value for value in values if value is not None]
    asterisk = "*" if len(alive_values) < len(values) else ""
    if not alive_values:
        return asterisk
    if len(alive_values) == 1:
        return f"{number(alive_values[0])}{asterisk}"
    mean = sum(alive_values) / len(alive_values)
    return f"{number(mean)} [{number(min(alive_values))}, {number(max(alive_values))}]{asterisk}"


def _terminal_size() -> dict[str, Any]:
    """What tqdm is told of the terminal: to follow its size, or 80 columns if it has none."""
    try:
        has_size = min(os.get_terminal_size(sys.stderr.fileno())) > 0
    except (OSError, ValueError):
        has_size = False
    return {"dynamic_ncols": True} if has_size else {"ncols": 80, "nrows": 24}


class TensorBoard:
    """Event files for TensorBoard, if tensorboardX is there.

    They are written without tensorboardX's thread, which would keep an error to itself.
    """

    def __init__(self, directory: Path, config: Config) -> None:
        self._directory = directory
        self._names = [f"seed_{seed}_rate_{rate}" for seed, rate in config.training.lanes]
        self._writer: Any = None
        self._flushed = time.monotonic()

    def open(self, step: int) -> None:
        """Begins a file that replaces what earlier ones have of later steps."""
        try:
            from tensorboardX import record_writer
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        except ImportError:
            say("tensorboardX is not installed: no TensorBoard events are written.")
            return
        self._directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.from_{step}"
        self._writer = record_writer.RecordWriter(str(self._directory / name))
        self._write(Event(file_version="brain.Event:2"))
        self._write(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._writer.flush()

    def write(self, row: Row, watched: str) -> None:
        """A row of metrics."""
        if self._writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        training_values = {
            name: values for name, values in row.items() if name.startswith("train_")
        }
        curves = {
            f"train/{name.removeprefix('train_')}": lane_values
            for name, lane_values in training_values.items()
        }
        curves |= {f"{watched}/{name}": values for name, values in row[watched].items()}
        for curve, values in curves.items():
            for name, value in zip(self._names, values, strict=True):
                if value is not None:
                    self._write(Event(step=row["step"], summary=scalar(f"{curve}/{name}", value)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Texts by name, as they are: an indented block is code to TensorBoard's Markdown."""
        if self._writer is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import text

        for name, content in texts.items():
            indented = "".join(f"    {line}\n" for line in content.split("\n"))
            self._write(Event(step=step, summary=text(name, indented)))

    def close(self) -> None:
        """Ends the event file."""
        if self._writer is not None:
            try:
                self._writer.flush()
            finally:
                self._writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())
