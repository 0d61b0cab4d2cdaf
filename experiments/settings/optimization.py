"""The settings of the optimiser, of its lanes and of how long it works."""

from __future__ import annotations

import dataclasses

from experiments.settings.fields import TINY, Sourced, setting

_WARM = ("warmup", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The optimiser and its lanes: every seed with every learning rate."""

    seed: int = setting("the first seed", Sourced(0, "ours: the first seed is arbitrary"), least=0)
    seeds: int = setting(
        "how many seeds, counted up from --seed; they train together",
        Sourced(1, "ours: the papers run three and more, one is quicker; see --seeds"),
        least=1,
        most=4096,
    )
    learning_rates: tuple[float, ...] = setting(
        "learning rates, with commas; they train together", least=TINY, singular="learning_rate"
    )
    steps: int = setting("updates; raising it goes on with a finished run", least=1)
    batch_size: int = setting("examples per update", least=1)
    optimizer: str = setting(
        "the optimiser; adam's weight decay is torch's, added to the gradient, adamw's is not",
        Sourced("adam", "GATO B.3, UR D.1, h-detach 3.1"),
        choices=("adam", "adamw", "sgd", "rmsprop"),
    )
    momentum: float = setting(
        "of sgd and rmsprop",
        Sourced(0.0, "ours: off; no paper here has it"),
        least=0,
        below=1,
        needs=("optimizer", ("sgd", "rmsprop")),
    )
    schedule: str = setting(
        "the learning rate over time: constant, warmup (linear, then constant) or cosine (to 0)",
        Sourced("constant", "no schedule in the papers but GATO's halving rule"),
        choices=("constant", "warmup", "cosine"),
    )
    warmup_steps: int = setting(
        "steps in which the rate rises from 0, of warmup and cosine",
        Sourced(0, "ours: off"),
        least=0,
        needs=("schedule", _WARM),
    )
    clip_norm: float = setting("largest global norm of the gradient; 0: no clipping", least=0)
    clip_value: float = setting(
        "largest absolute value of a gradient's entries; 0: no clipping",
        Sourced(0.0, "none in any of the papers' synthetic tasks"),
        least=0,
    )
    weight_decay: float = setting(
        "decay of the parameters, as the optimiser has it; 0: none",
        Sourced(0.0, "GATO B.6: none in experiment 1; none in UR and h-detach"),
        least=0,
    )
    halve_every: int = setting(
        "halve the rate at the first step past each so many examples if the training loss got "
        "worse; 0: never",
        Sourced(0, "GATO B.3: a rule of experiment 2 alone"),
        least=0,
    )
    eval_every: int = setting("steps between evaluations", least=1)
    patience: int = setting(
        "a seed stops after this many evaluations without a better one; 0: never",
        Sourced(0, "ours: every paper trains for a given time"),
        least=0,
    )
    keep_best: bool = setting(
        "report the parameters that scored best, not the last",
        Sourced(False, "ours: the curves show the last parameters, so does the result"),
    )
    on_divergence: str = setting(
        "what a step does whose loss or gradient is not finite, or whose loss is above 1e10: mark "
        "(its seed is marked by the loss and stops no other), stop (the run ends) or skip (its "
        "update is left out)",
        Sourced("mark", "ours: one seed of several should not end the others"),
        choices=("mark", "stop", "skip"),
    )
    ties: str = setting(
        "which of equally good parameters are the best: those that came first, or last",
        Sourced("first", "h-detach's pixelmnist.py asks for better ones; ours: UR does not say"),
        choices=("first", "last"),
    )
    mesh: str = setting(
        "devices along each axis: data splits the batch, lanes the seeds and rates, vocab the "
        "tables of a softmax over words; such as data:8 or lanes:4,data:2; auto: data, as many as "
        "divide the batch",
        Sourced("auto", "ours: all devices serve one batch"),
    )

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passes:
    """How long a run is, in passes; ``steps`` is made from it."""

    epochs: int = setting("passes over the training set, instead of --steps", least=1)
