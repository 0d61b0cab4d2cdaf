"""The frozen settings of a run: what they may be, which of them make a run another run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

import recurrent_gates as rg
from experiments.tasks import Task
from recurrent_gates import initializers

_SMALLEST, _LARGEST = map(float, (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
_RANGE = f"float32 holds {_SMALLEST:.2g} to {_LARGEST:.2g}"


class UserError(Exception):
    """A wish that cannot be met; its text is one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The cell and the constant parts around it. None where the cell has no such setting.

    Attributes:
      cell: a name in ``recurrent_gates.CELLS``.
      hidden_size: F, for GATO 2J.
      init: start of the cell's parameters: ``"torch"`` (U(±1/sqrt(F)) for every leaf) or
        ``"library"`` (the cell's own).
      bias_vectors: 1, or 2 as torch counts.
      forget_bias: where the bias of a plain forget gate starts; None where the task says that.
      reset: a GRU's reset gate: ``"after"`` or ``"before"`` the recurrent product.
      downsize: C, units per master gate.
      tmax: chrono initialisation's longest dependency, in steps.
      s_update: GATO's ablations: ``"accumulate"``, ``"zero"`` or ``"replace"``.
      lambda_: GATO's decay rate.
      embedding: width of the token embedding; only with ``inputs="embed"``.
      decoder: widths of the decoder's ReLU layers.
      dropout: probability of dropping a unit of these layers in training.
      dtype: ``"float32"`` or ``"bfloat16"``: of the computation; parameters and state are
        float32 in both.
      backend: how the recurrence is computed; the mathematics are the same.
    """

    cell: str
    hidden_size: int
    init: str
    bias_vectors: int | None
    forget_bias: float | None
    reset: str | None
    downsize: int | None
    tmax: float | None
    s_update: str | None
    lambda_: float | None
    embedding: int
    decoder: tuple[int, ...]
    dropout: float
    dtype: str
    backend: str


@dataclasses.dataclass(frozen=True)
class CarryConfig:
    """What happens to the carry around a step in training.

    Attributes:
      detach_prob: probability of detaching ``detach_state`` at a step.
      detach_state: the field of the carry that is detached or damped.
      detach_per_example: one draw for each example instead of one for the whole batch.
      detach_off_steps: no detaching in this many last steps.
      damp_prob: the gradient through ``detach_state`` is multiplied by one minus this.
      zoneout_c: probability that a unit of c keeps its old value.
      zoneout_h: the same for h.
    """

    detach_prob: float
    detach_state: str
    detach_per_example: bool
    detach_off_steps: int
    damp_prob: float
    zoneout_c: float
    zoneout_h: float


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """The optimiser and its lanes: every seed with every learning rate.

    Attributes:
      seed: the first seed.
      seeds: how many, counted up from ``seed``.
      learning_rates: of Adam; one lane for each of them and each seed.
      steps: updates.
      batch_size: examples per update.
      clip_norm: largest global norm of the gradient; 0: no clipping.
      clip_value: largest absolute value of a gradient's entries; 0: no clipping.
      weight_decay: added to the gradient, times the parameter, as torch does; 0: none.
      halve_every: at the first step past each so many examples the rate is halved if the
        training loss got worse (GATO, B.3); 0: never.
      eval_every: steps between evaluations.
      patience: a lane stops after this many evaluations without a better one; 0: never.
      keep_best: report the parameters that scored best, not the last.
    """

    seed: int
    seeds: int
    learning_rates: tuple[float, ...]
    steps: int
    batch_size: int
    clip_norm: float
    clip_value: float
    weight_decay: float
    halve_every: int
    eval_every: int
    patience: int
    keep_best: bool

    @property
    def reports_best(self) -> bool:
        """Whether the result is of the best parameters; early stopping goes back to them, too."""
        return self.keep_best or self.patience > 0

    @property
    def lanes(self) -> list[tuple[int, float]]:
        """(seed, learning rate) of every lane."""
        seeds = range(self.seed, self.seed + self.seeds)
        return [(seed, rate) for rate in self.learning_rates for seed in seeds]

    @property
    def lanes_by_rate(self) -> dict[float, slice]:
        """Which lanes have each learning rate."""
        n = self.seeds
        return {rate: slice(n * i, n * i + n) for i, rate in enumerate(self.learning_rates)}


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run; plain numbers, strings and tuples, so that it is JSON.

    Attributes:
      protocol: whose settings these are, before overrides.
      overrides: the settings that were given beside the protocol, by name.
      task: the task's own settings.
    """

    protocol: str
    overrides: dict[str, Any]
    task: Task
    model: ModelConfig
    carry: CarryConfig
    training: TrainingConfig

    @property
    def schedule_needs_length(self) -> bool:
        """Whether what happens at a step depends on how many there are."""
        return self.carry.detach_prob > 0 and self.carry.detach_off_steps > 0

    def resolved(self) -> dict[str, Any]:
        """The settings in effect, as JSON types."""
        parts = {
            "task": {"name": self.task.name, **dataclasses.asdict(self.task)},  # type: ignore[call-overload]
            "model": dataclasses.asdict(self.model),
            "carry": dataclasses.asdict(self.carry),
            "training": dataclasses.asdict(self.training),
        }
        return json.loads(json.dumps(parts))

    def identity(self) -> dict[str, Any]:
        """The settings that change the mathematics, ``{"part.name": value}``.

        A longer run continues a shorter one, unless its schedule depends on the length.
        """
        flat = {
            f"{part}.{name}": value
            for part, settings in self.resolved().items()
            for name, value in settings.items()
        }
        del flat["model.backend"]
        flat.pop("task.data_dir", None)
        if not self.schedule_needs_length:
            del flat["training.steps"]
        return flat

    def hash(self) -> str:
        """8 hexadecimal digits of the identity."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def check(self) -> None:
        """Raises ``UserError`` on the first setting that cannot be."""
        training, carry = self.training, self.carry
        for name, value, least in (
            ("hidden_size", self.model.hidden_size, 1),
            ("seed", training.seed, 0),
            ("seeds", training.seeds, 1),
            ("steps", training.steps, 1),
            ("batch_size", training.batch_size, 1),
            ("detach_off_steps", carry.detach_off_steps, 0),
        ):
            if value < least:
                raise UserError(f"--{name} must be at least {least}, got {value}.")
        if training.seed + training.seeds > 2**31 or training.steps >= 2**31:
            raise UserError("--seed and --seeds together, and --steps, must stay below 2147483648.")
        for rate in training.learning_rates:
            if not _SMALLEST <= rate <= _LARGEST:
                raise UserError(
                    f"A learning rate must be a positive number, got {rate:g} ({_RANGE})."
                )
        if not training.learning_rates:
            raise UserError("--learning_rates must name at least one rate.")
        if len(set(training.learning_rates)) < len(training.learning_rates):
            raise UserError("--learning_rates must name each rate once.")
        clip = training.clip_norm
        if clip and not _SMALLEST <= clip <= _LARGEST:
            raise UserError(f"--clip_norm must be at least 0, got {clip:g} ({_RANGE}).")
        for name in ("detach_prob", "damp_prob", "zoneout_c", "zoneout_h"):
            value = getattr(carry, name)
            if not 0 <= value <= 1:
                raise UserError(f"--{name} is a probability in [0, 1], got {value:g}.")
        if self.schedule_needs_length and carry.detach_off_steps >= training.steps:
            raise UserError(
                f"--detach_off_steps={carry.detach_off_steps} leaves no step of "
                f"{training.steps} to detach in; --detach_off_steps=0 detaches in all of them."
            )
        if not 0 <= self.model.dropout < 1:
            raise UserError(f"--dropout is a probability below 1, got {self.model.dropout:g}.")
        if self.model.dropout and not self.model.decoder:
            raise UserError(
                "--dropout acts on the decoder's hidden layers, of which this protocol has none."
            )
        if getattr(self.task, "inputs", None) == "embed" and self.model.embedding < 1:
            raise UserError(
                "--inputs=embed: this protocol has no width for an embedding; "
                "--inputs is one_hot or scalar with it."
            )
        backends = [backend.value for backend in rg.Backend]
        if self.model.backend not in backends:
            raise UserError(f"--backend is one of {', '.join(backends)}, got {self.model.backend}.")
        if self.model.lambda_ is not None and not 0 <= self.model.lambda_ < 1:
            raise UserError(f"--lambda must be in [0, 1), got {self.model.lambda_:g}.")
        self.task.check()
        fields = build_cell(self.model).initial(())._fields
        wanted = [("detach_state", carry.detach_state)]
        wanted += [("zoneout_c", "c")] if carry.zoneout_c else []
        wanted += [("zoneout_h", "h")] if carry.zoneout_h else []
        for flag, field in wanted:
            if field not in fields:
                raise UserError(
                    f"--{flag}: the state of {self.model.cell} has no field {field!r}, "
                    f"it has {' and '.join(fields)}."
                )


def bare_cell(name: str, hidden_size: int) -> rg.Cell:
    """The library's cell of that name and size.

    Raises:
      UserError: if there is no such cell, or it cannot have that size.
    """
    if hidden_size < 1:
        raise UserError(f"--hidden_size must be at least 1, got {hidden_size}.")
    try:
        return rg.CELLS[name](hidden_size)
    except (rg.UnknownCellError, ValueError) as error:
        raise UserError(str(error)) from None


def build_cell(model: ModelConfig) -> rg.Cell:
    """The cell that the settings describe.

    Raises:
      UserError: if they do not fit together.
    """
    fields: dict[str, Any] = {
        "bias_vectors": model.bias_vectors,
        "forget_bias": model.forget_bias,
        "reset": model.reset,
        "downsize": model.downsize,
        "tmax": model.tmax,
        "s_update": model.s_update,
        "rate": model.lambda_,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if model.dtype == "bfloat16":
        fields["dtype"] = "bfloat16"
    if model.init == "torch":
        uniform = initializers.torch_recurrent(model.hidden_size)
        fields |= dict.fromkeys(("kernel_init", "recurrent_kernel_init", "bias_init"), uniform)
    try:
        return rg.CELLS[model.cell](model.hidden_size, **fields)
    except (rg.UnknownCellError, ValueError) as error:
        raise UserError(str(error)) from None
