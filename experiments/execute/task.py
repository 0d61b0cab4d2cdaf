"""What a program evaluates to: a core reads the program and tells the answer's characters.

Letters: T steps, S characters of the longest answer, B batch, K levels of a curriculum, V
characters.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.execute import curriculum
from experiments.execute.grammars import Grammar
from experiments.execute.model import CharacterEncoder, ProgramModel, free_answers, logits_of
from experiments.execute.programs import (
    AXES,
    CLIMBING,
    Programs,
    Source,
    Window,
    at_level,
    held_out_rows,
    share,
    window_steps,
)
from experiments.execute.santoro import Santoro
from experiments.execute.settings import ExecuteSettings
from experiments.execute.zaremba import Zaremba
from experiments.machine.mesh import Rows
from experiments.settings.errors import UserError
from experiments.settings.metrics import Metric
from experiments.settings.model import ModelSettings
from experiments.training.models import Decoder, TokenEncoder, wide
from experiments.training.task import Apply, BaseTask, Fresh, HeldOut, Outcome
from recurrent_gates import RNN, Stack

_FEWEST = 5000  # programs of the full length and nesting: a tenth of them are a held-out set


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecuteTask(ExecuteSettings, BaseTask):
    """The answer of a program.

    The core reads the program; then it goes on from that state, with blank inputs, and its
    outputs tell the answer's characters, the first digit first (Santoro et al.'s code; as one
    sequence here, which is the same). In Zaremba's programs it reads the answer's characters so
    far, beginning with the program's last one: the right ones in training and in the scores named
    plainly, its own in those named ``free``. Each program begins with a fresh state (ours;
    Zaremba's code cuts a stream of programs into windows).

    The loss is the mean over the characters of answers; Santoro et al.'s code divides by all
    positions, padding included, which is another unit of the same loss.

    Fresh programs are made for every step, by number; a tenth of all programs, by the hash of
    their text, is for validation, and a tenth for the test.
    """

    name = "execute"
    axes = AXES
    stream_axes = None

    @property
    def programs(self) -> Grammar:
        """The grammar of the full length and nesting."""
        if self.grammar == "zaremba":
            return Zaremba(self.length, self.nesting)
        return Santoro(self.length, self.nesting, self.category)

    @property
    def source(self) -> Source:
        """The programs by number."""
        return Source(self.programs, self.curriculum)

    @property
    def room(self) -> int:
        """Steps that there are for a program."""
        return self.program_steps or self.programs.program_characters

    @property
    def metrics(self) -> tuple[Metric, ...]:
        accuracy, exact, loss = _commonest(self.source, self.held_out_programs)
        baseline_name = "commonest characters"
        metrics = [
            Metric("accuracy", True, accuracy, baseline_name),
            Metric("exact", True, exact, baseline_name),
        ]
        if self.programs.forced:
            metrics.append(Metric("free_accuracy", True, accuracy, baseline_name))
            metrics.append(Metric("free_exact", True, exact, baseline_name))
        return (*metrics, Metric("loss", False, loss, baseline_name))

    def check(self) -> None:
        programs = self.programs
        longest = programs.program_characters
        if 0 < self.program_steps < longest:
            raise UserError(
                f"--program_steps={self.program_steps}: with --length={self.length} and "
                f"--nesting={self.nesting} a program has up to {longest} characters, which are "
                "more than the encoder reads."
            )
        if programs.count < _FEWEST:
            raise UserError(
                f"--length={self.length} and --nesting={self.nesting}: there are "
                f"{programs.count} such programs, too few to train on some and to hold out "
                f"others; {_FEWEST} are the least."
            )
        if self.held_out_programs > share(programs.count):
            raise UserError(
                f"--held_out_programs={self.held_out_programs}: of the {programs.count} programs "
                f"of --length={self.length} and --nesting={self.nesting} only "
                f"{share(programs.count)} are for a held-out set."
            )

    def module(self, recurrent: RNN | Stack, model: ModelSettings) -> nn.Module:
        characters = 1 + len(self.programs.characters)
        return ProgramModel(
            encoder=CharacterEncoder(TokenEncoder(self.inputs, characters, model.embedding)),
            recurrent=recurrent,
            decoder=Decoder((*model.decoder, characters)),
        )

    def example(self) -> tuple[jax.Array, jax.Array, int]:
        return jnp.zeros((1, 1), jnp.uint8), jnp.zeros(1, jnp.int32), 1

    def data(self) -> Programs:
        return Programs(self.source, self.room, self.held_out_programs)

    def shapes(self, rows: int) -> Window:
        levels = len(self.source.levels("train"))
        steps, characters = window_steps(self.programs, self.room)

        def leaf(dtype: Any, *lead: int) -> Any:
            return jax.ShapeDtypeStruct((*lead, rows, levels), dtype)

        tokens, answers = leaf(jnp.uint8, steps), leaf(jnp.uint8, characters)
        return Window(tokens, answers, leaf(jnp.int32), leaf(jnp.int32))

    def start(self, fresh: Fresh, data: Any, key: jax.Array, rows: Rows) -> Any:
        """Where the curriculum is, if it climbs."""
        del fresh, data, key, rows
        return curriculum.begin() if self.curriculum in CLIMBING else ()

    def draw(
        self, act: Apply, data: Window, stream: Any, key: jax.Array, step: jax.Array, rows: Rows
    ) -> tuple[Window, Any]:
        del act, key, step, rows
        return at_level(data, stream.level if stream else 0), stream

    def adapt(self, stream: Any, loss: jax.Array, weight: Any) -> Any:
        """The curriculum goes by the training loss (ours; the published code leaves it open)."""
        del weight
        if not stream:
            return stream
        last = len(self.programs.levels()) - 1
        return curriculum.after(stream, loss, self.level_steps, self.level_threshold, last)

    def loss(self, apply: Apply, params: Any, window: Window, stream: Any, train: bool) -> Outcome:
        logits = wide(logits_of(apply, params, window))
        answers = window.answers.astype(jnp.int32)
        places = jnp.arange(len(answers), dtype=jnp.int32)[:, None]
        counts = places < window.size[None]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), answers[..., None], axis=-1)
        characters = counts.sum(dtype=jnp.float32)
        total = (jnp.where(counts, -log_p[..., 0], 0).sum(), characters)
        if train:
            return Outcome(total, {}, stream)

        def scores(guesses: jax.Array) -> list[Any]:
            matches = guesses == answers
            exact = (matches | ~counts).all(axis=0) & (window.size > 0)
            programs = (window.size > 0).sum(dtype=jnp.float32)
            hits = (matches & counts).sum(dtype=jnp.float32)
            return [(hits, characters), (exact.sum(dtype=jnp.float32), programs)]

        sums = dict(zip(("accuracy", "exact"), scores(jnp.argmax(logits, axis=-1)), strict=True))
        if self.programs.forced:
            free_scores = scores(free_answers(apply, params, window).astype(jnp.int32))
            sums |= dict(zip(("free_accuracy", "free_exact"), free_scores, strict=True))
        return Outcome(total, {**sums, "loss": total}, stream)

    def told(self, apply: Apply, params: Any, window: Window) -> jax.Array:
        """The answers that the model gives on its own, ``[S, B]``."""
        if self.programs.forced:
            return free_answers(apply, params, window)
        return jnp.argmax(logits_of(apply, params, window), axis=-1)

    def held_out(self, data: Any, devices: int) -> dict[str, HeldOut]:
        del data, devices
        rows = held_out_rows(self.held_out_programs)
        windows = -(-self.held_out_programs // rows)
        return {name: _Part(windows, rows) for name in ("validation", "test")}


class _Part:
    """A held-out set."""

    def __init__(self, windows: int, rows: int) -> None:
        self.windows, self.rows = windows, rows

    def start(self, fresh: Fresh, data: Any, rows: Rows) -> tuple[()]:
        del fresh, data, rows
        return ()

    def draw(
        self, act: Apply, data: Window, stream: Any, index: jax.Array, rows: Rows
    ) -> tuple[Window, Any]:
        del act, index, rows
        return at_level(data, 0), stream


@functools.lru_cache(maxsize=4)
def _commonest(source: Source, count: int) -> tuple[float, float, float]:
    """The scores on the test set of whoever knows how common each character is at each place of
    its answers, and no program: accuracy per character, of whole answers, and loss."""
    (level,) = source.levels("test")
    answers = [source.program("test", 0, number, level).answer for number in range(count)]
    places = [
        np.array([ord(answer[index]) for answer in answers if index < len(answer)])
        for index in range(max(map(len, answers)))
    ]
    hits, entropy, guess = 0, 0.0, ""
    for characters in places:
        kinds, counts = np.unique(characters, return_counts=True)
        hits += int(counts.max())
        entropy -= float(np.sum(counts * np.log(counts / counts.sum())))
        guess += chr(int(kinds[counts.argmax()]))
    total = sum(map(len, answers))
    exact = sum(answer == guess[: len(answer)] for answer in answers)
    return hits / total, exact / count, entropy / total
