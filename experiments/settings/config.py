"""The frozen settings of a run, and which of them make a run another run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from experiments.settings.axes import check_shares
from experiments.settings.errors import UserError
from experiments.settings.fields import check_all, declared
from experiments.settings.model import CarrySettings, ModelSettings
from experiments.settings.optimization import TrainingSettings

_NO_MATHEMATICS = ("model.backend", "task.data_dir", "training.mesh")
# Settings that are newer than runs whose directories and results should be found again.
_NEWER = (
    "training.ties",
    "training.on_divergence",
    "model.memory_slots",
    "model.heads",
    "model.word_size",
    "model.read_heads",
    "model.rows_read",
)
_SEEDS = 2**31  # a seed is an int32


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of a run; plain numbers, strings and tuples, so that it is JSON.

    Attributes:
      protocol: whose settings these are, before overrides.
      overrides: the settings that were given beside the protocol, by name.
      task: a ``training.task.Task``, a frozen dataclass of the task's own settings.
      model, carry, training: the shared ones.
    """

    protocol: str
    overrides: dict[str, Any]
    task: Any
    model: ModelSettings
    carry: CarrySettings
    training: TrainingSettings

    @property
    def schedule_needs_length(self) -> bool:
        """Whether what happens at a step depends on how many there are."""
        detaching_ends = self.carry.detach_prob > 0 and self.carry.detach_off_steps > 0
        return detaching_ends or self.training.schedule == "cosine"

    @property
    def parts(self) -> dict[str, Any]:
        """The dataclasses of settings by the name of their part."""
        return {
            "task": self.task,
            "model": self.model,
            "carry": self.carry,
            "training": self.training,
        }

    def resolved(self) -> dict[str, Any]:
        """The settings in effect, as JSON types."""
        parts = {name: dataclasses.asdict(part) for name, part in self.parts.items()}
        parts["task"] = {"name": self.task.name, **parts["task"]}
        return json.loads(json.dumps(parts))

    def identity(self) -> dict[str, Any]:
        """The settings that change the mathematics, ``{"part.name": value}``.

        Where the data are the user's own, their ``content``, a digest, is one of them. A longer run
        continues a shorter one, unless its schedule depends on the length; the evaluation at the
        end of the shorter one stays and counts, for ``--patience``, too.

        Raises:
          UserError: if the user's data cannot be read.
        """
        identity = self.identity_without_data()
        content = self.task.content if hasattr(type(self.task), "content") else None
        return identity if content is None else {**identity, "task.content": content}

    def identity_without_data(self) -> dict[str, Any]:
        """The identity but for the digest of the user's data, which are not read."""
        flat = {
            f"{part}.{name}": value
            for part, settings in self.resolved().items()
            for name, value in settings.items()
        }
        if ":" in self.model.cell:
            from experiments.settings.cells import source_digest

            flat["model.cell_source"] = source_digest(self.model.cell)
        if "task.weights" in flat:
            flat["task.weights"] = None  # a file, which its content tells
        excluded_names = {*_NO_MATHEMATICS}
        if not self.schedule_needs_length:
            excluded_names.add("training.steps")
        return {name: value for name, value in flat.items() if name not in excluded_names}

    def hash(self) -> str:
        """8 hexadecimal digits of the identity: its ``digest``."""
        return digest(self.identity(), self.task)

    def check(self) -> None:
        """Raises ``UserError`` on the first setting that cannot be."""
        for part in self.parts.values():
            check_all(part)
        training, carry, model = self.training, self.carry, self.model
        words = hasattr(self.task, "word_axes")
        check_shares(training.mesh, training.batch_size, len(training.lanes), words=words)
        if training.seed + training.seeds > _SEEDS:
            raise UserError(f"--seed and --seeds together must stay below {_SEEDS}.")
        if carry.detach_prob and carry.detach_off_steps >= training.steps:
            raise UserError(
                f"--detach_off_steps={carry.detach_off_steps} leaves no step of "
                f"{training.steps} to detach in; --detach_off_steps=0 detaches in all of them."
            )
        if training.schedule == "warmup" and not training.warmup_steps:
            raise UserError("--schedule=warmup needs --warmup_steps.")
        if training.schedule == "cosine" and training.warmup_steps >= training.steps:
            raise UserError(
                f"--warmup_steps={training.warmup_steps} leaves no step of {training.steps} for "
                "the cosine."
            )
        if math.lcm(training.batch_size, training.halve_every) >= _SEEDS:
            raise UserError(
                f"--halve_every={training.halve_every} and --batch_size={training.batch_size} meet "
                f"only after {math.lcm(training.batch_size, training.halve_every)} examples, more "
                "than an int32 holds; choose a multiple of the batch."
            )
        if model.dropout and not model.decoder:
            raise UserError(
                "--dropout acts on the decoder's hidden layers, and there are none: "
                "give --dropout=0, or widths with --decoder."
            )
        if getattr(self.task, "inputs", None) == "embed" and model.embedding < 1:
            raise UserError(
                "--inputs=embed: this protocol has no width for an embedding; give --embedding, "
                "or --inputs=one_hot or scalar."
            )
        self.task.check()
        if hasattr(self.task, "check_beside"):
            self.task.check_beside(model, carry)
        self._check_cell()

    def _check_cell(self) -> None:
        from experiments.settings.cells import (
            build_cell,
            field_of,
            memory_is_scaled,
            reads_missing,
            state_fields,
        )

        carry, cell = self.carry, build_cell(self.model)
        if reads_missing(cell) and not getattr(self.task, "has_missing_values", False):
            raise UserError(
                f"--cell={self.model.cell} needs values that are missing at times, and the time of "
                f"each: {self.task.name} has none, experiments.stay has."
            )
        if reads_missing(cell) and self.model.layers > 1:
            raise UserError(
                f"--cell={self.model.cell} reads what was measured: it has no layer above it, so "
                "--layers must be 1."
            )
        fields = state_fields(cell)
        if cell.linear and (carry.detach_prob or carry.damp_prob):
            flag = "detach_prob" if carry.detach_prob else "damp_prob"
            raise UserError(
                f"--{flag}: h-detach has nothing to detach in {self.model.cell}, whose gates read "
                f"the input alone; give --{flag}=0."
            )
        cuts = carry.detach_prob or carry.damp_prob
        cut_field = field_of(carry.detach_state)
        if isinstance(cut_field, int) and -len(fields) <= cut_field < len(fields):
            cut_field = fields[cut_field]
        cuts_memory = cuts and cut_field in ("c", "n", "m")
        if memory_is_scaled(cell) and (carry.zoneout_c or cuts_memory):
            flag = "zoneout_c" if carry.zoneout_c else f"detach_state={carry.detach_state}"
            raise UserError(
                f"--{flag}: c and n of {self.model.cell} are in units of exp(m), so that it would "
                "depend on the stabiliser; take h."
            )
        field_flags = [("detach_state", carry.detach_state)]
        field_flags += [("zoneout_c", "c")] if carry.zoneout_c else []
        field_flags += [("zoneout_h", "h")] if carry.zoneout_h else []
        for flag, field in field_flags:
            key = field_of(field)
            if field not in fields and not (isinstance(key, int) and 0 <= key < len(fields)):
                raise UserError(
                    f"--{flag}: the state of {self.model.cell} has no field {field!r}, "
                    f"it has {' and '.join(fields)}."
                )


def digest(identity: Mapping[str, Any], task: Any) -> str:
    """8 hexadecimal digits: the same as before a newer setting existed, where that has its default.

    Args:
      identity: ``{"part.name": value}``.
      task: the task's settings or their class.
    """
    defaults = identity_defaults(task)
    older_settings = {
        name: value
        for name, value in identity.items()
        if name not in _NEWER or value != defaults.get(name)
    }
    text = json.dumps(older_settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def identity_defaults(task: Any) -> dict[str, Any]:
    """``{"part.name": default}`` of the settings that have one: what a config of an earlier
    version, which did not know them yet, meant.

    Args:
      task: the task's settings or their class.
    """
    parts = {
        "task": task if isinstance(task, type) else type(task),
        "model": ModelSettings,
        "carry": CarrySettings,
        "training": TrainingSettings,
    }
    return {
        f"{part}.{name}": setting.default.value
        for part, cls in parts.items()
        for name, setting in declared(cls).items()
        if setting.default is not None
    }


def as_tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them, with tuples in the place of lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
