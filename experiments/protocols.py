"""Every paper's settings as data, each with its source; ``resolve`` makes a config of them.

Sources: *GATO*, Goldstein, Han & Ranganath, "Gates Are Not the Only Option"; *UR*, Gu et al.,
"Improving the Gating Mechanism of Recurrent Neural Networks"; *h-detach*, Kanuparthi et al.,
"h-detach: Modifying the LSTM Gradient Towards Better Optimization", and its published code.
"ours" stands where the source gives nothing, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments.config import (
    CarryConfig,
    Config,
    ModelConfig,
    TrainingConfig,
    UserError,
    bare_cell,
)
from experiments.derived import Depends, Epochs, Same, in_steps, without_dependence
from experiments.tasks.adding import AddingTask
from experiments.tasks.copy import CopyTask
from experiments.tasks.forgetting import ForgettingTask
from experiments.tasks.pixels import PixelsTask
from recurrent_gates import GATO


class Sourced(NamedTuple):
    """A setting and where it comes from."""

    value: Any
    source: str


class Protocol(NamedTuple):
    """The settings of a task, and those of its cells by family (``"*"``: any other)."""

    settings: Mapping[str, Sourced]
    cells: Mapping[str, Mapping[str, Sourced]]


_TORCH_CELL = {
    "init": Sourced("torch", "GATO B.2: default PyTorch initializations for LSTM and GRU"),
    "bias_vectors": Sourced(2, "GATO 5.2: the counts are torch's, with two bias vectors"),
    "forget_bias": Sourced(0.0, "GATO B.2: torch's default adds none"),
    "reset": Sourced("after", "GATO 5.1: torch's nn.GRU"),
}
_GATO_CELL = {
    "init": Sourced("library", "GATO B.2: U[-0.1, 0.1] for all recurrent parameters"),
    "bias_vectors": Sourced(1, "GATO 5.2: the count of 138,752 has one bias for each map"),
    "lambda_": Sourced(0.7, "GATO 5.1"),
    "s_update": Sourced("accumulate", "GATO 4.1"),
}
_GATES = {
    "downsize": Sourced(16, "UR D: C = 16 for the synthetic tasks and the images"),
    "tmax": Sourced("hidden_size", "ours: UR B.3 says proportional to the hidden size"),
}
_LIBRARY_CELL = {
    "init": Sourced("library", "ours: UR does not state it; the library's own"),
    "bias_vectors": Sourced(1, "ours: UR prints one bias for each gate"),
    "forget_bias": Sourced(1.0, "UR Listing 1"),
    "reset": Sourced("before", "ours: the authors' later code resets before the product"),
}
_HDETACH_CELL = {
    "init": Sourced("torch", "h-detach code: every parameter U(±1/sqrt(H))"),
    "bias_vectors": Sourced(2, "h-detach code: a bias with each linear map"),
    "forget_bias": Sourced(0.0, "h-detach code: none"),
    "reset": Sourced("after", "ours: torch's, like the rest; the paper has no GRU"),
}

_ANY = {
    "seed": Sourced(0, "ours: the first seed is arbitrary"),
    "seeds": Sourced(1, "ours: the papers run three and more, one is quicker; see --seeds"),
    "clip_value": Sourced(0.0, "none in any of the papers' synthetic tasks"),
    "weight_decay": Sourced(0.0, "GATO B.6: none in experiment 1; none in UR and h-detach"),
    "halve_every": Sourced(0, "GATO B.3: a rule of experiment 2 alone"),
    "patience": Sourced(0, "ours: every paper trains for a given time"),
    "keep_best": Sourced(False, "ours: the curves show the last parameters, so does the result"),
    "detach_prob": Sourced(0.0, "h-detach only"),
    "detach_state": Sourced("feedback", "h-detach, Algorithm 1: h; ours for GATO: r feeds back"),
    "detach_per_example": Sourced(False, "h-detach code: one draw per step for the batch"),
    "detach_off_steps": Sourced(0, "h-detach: not in the paper; the later code has 39 epochs"),
    "damp_prob": Sourced(0.0, "ours: off; the expectation of h-detach, its Corollary 1"),
    "zoneout_c": Sourced(0.0, "none in any of the papers' synthetic tasks"),
    "zoneout_h": Sourced(0.0, "none in any of the papers' synthetic tasks"),
    "dropout": Sourced(0.0, "none but beside zoneout in UR D.2"),
    "dtype": Sourced("float32", "the papers' frameworks default to it"),
    "backend": Sourced("auto", "ours: the fastest form of the same mathematics"),
}

_GATO_COPY = {
    **_ANY,
    "cell": Sourced("gato", "GATO 5.2: two-layer GATO"),
    "layout": Sourced("aba", "GATO 5.2: ABA, no special token"),
    "symbols": Sourced(10, "GATO 5.2: {1, ..., 10}"),
    "tokens": Sourced(20, "GATO 5.2"),
    "length": Sourced(100, "GATO 5.2: 100 constant BLANK tokens"),
    "loss_on": Sourced("copied", "ours: only the second A can be predicted; see --loss_on"),
    "inputs": Sourced("embed", "GATO 5.2"),
    "sequences": Sourced(0, "GATO 5.2: new sequences for each step"),
    "held_out_sequences": Sourced(1000, "GATO 5.2"),
    "headline": Sourced("copied_token_probability", "GATO Figure 1"),
    "hidden_size": Sourced(1024, "GATO 5.2"),
    "embedding": Sourced(5, "GATO 5.2 prints 4; the parameter counts are those of 5"),
    "decoder": Sourced((256,), "GATO 5.2: one hidden layer of size 256"),
    "steps": Sourced(31_250, "GATO 5.2: 1 million training points, in batches of 32"),
    "batch_size": Sourced(32, "GATO B.5"),
    "learning_rates": Sourced((4e-3,), "GATO B.3"),
    "clip_norm": Sourced(0.0, "GATO B.8: no clipping"),
    "eval_every": Sourced(250, "ours: 125 points on the curve"),
}

COPY = {
    "gato": Protocol(
        settings=_GATO_COPY,
        cells={"gato": _GATO_CELL, "*": {**_TORCH_CELL, **_GATES}},
    ),
    "ur": Protocol(
        settings={
            **_ANY,
            "cell": Sourced("ur_lstm", "UR 3.1"),
            "layout": Sourced("cue", "UR 3.1: the last ten tokens are 9"),
            "symbols": Sourced(8, "UR 3.1: {1, ..., 8}"),
            "tokens": Sourced(10, "UR 3.1"),
            "length": Sourced(500, "UR 3.1, Figure 3: N = 500"),
            "loss_on": Sourced("copied", "UR D.1: only over the last 10 output tokens"),
            "inputs": Sourced("one_hot", "ours: as in the authors' later code"),
            "sequences": Sourced(0, "UR D.1: randomly generated for every minibatch"),
            "held_out_sequences": Sourced(1000, "ours: a standard error below half a percent"),
            "headline": Sourced("accuracy", "ours: UR plots the loss, which is kept too"),
            "hidden_size": Sourced(256, "UR D.1"),
            "embedding": Sourced(0, "one-hot inputs"),
            "decoder": Sourced((), "ours: UR names none for the synthetic tasks"),
            "steps": Sourced(50_000, "ours: not in the paper"),
            "batch_size": Sourced(64, "ours: not in the paper"),
            "learning_rates": Sourced((1e-3,), "UR D.1"),
            "clip_norm": Sourced(1.0, "UR D.1"),
            "eval_every": Sourced(500, "ours: 100 points on the curve"),
        },
        cells={"gato": _GATO_CELL, "*": {**_LIBRARY_CELL, **_GATES}},
    ),
    "hdetach": Protocol(
        settings={
            **_ANY,
            "cell": Sourced("lstm", "h-detach 3.1"),
            "layout": Sourced("delimiter", "h-detach App. A"),
            "symbols": Sourced(8, "h-detach App. A"),
            "tokens": Sourced(10, "h-detach App. A"),
            "length": Sourced(100, "h-detach 3.1: T = 100, or 300 with --length=300"),
            "loss_on": Sourced("all", "h-detach code: the mean over all T + 20 steps"),
            "inputs": Sourced("scalar", "h-detach code: the raw number"),
            "sequences": Sourced(100_000, "h-detach 3.1; the code draws with replacement"),
            "held_out_sequences": Sourced(5000, "h-detach 3.1"),
            "headline": Sourced("accuracy", "h-detach code: over the last ten steps"),
            "hidden_size": Sourced(128, "h-detach 3.1"),
            "embedding": Sourced(0, "scalar inputs"),
            "decoder": Sourced((), "h-detach code: one linear layer"),
            "steps": Sourced(600_000, "h-detach 3.1: 600 epochs; the code has 1000 steps in each"),
            "batch_size": Sourced(100, "h-detach 3.1"),
            "learning_rates": Sourced((1e-3,), "h-detach 3.1"),
            "clip_norm": Sourced(1.0, "h-detach 3.1"),
            "detach_prob": Sourced(0.25, "h-detach 3.1: 0.25 or 0.5"),
            "eval_every": Sourced(1000, "h-detach code: after each epoch"),
        },
        cells={"gato": _GATO_CELL, "*": {**_HDETACH_CELL, **_GATES}},
    ),
    "small": Protocol(
        settings={
            **_GATO_COPY,
            "tokens": Sourced(5, "ours: GATO's task at a size that two cores learn in minutes"),
            "length": Sourced(20, "ours: as tokens"),
            "hidden_size": Sourced(128, "ours: as tokens"),
            "steps": Sourced(3000, "ours: as tokens"),
            "eval_every": Sourced(100, "ours: 30 points on the curve"),
        },
        cells={"gato": _GATO_CELL, "*": {**_TORCH_CELL, **_GATES}},
    ),
}

TRANSFER_COPY = {
    "hdetach": COPY["hdetach"],
    "small": COPY["hdetach"]._replace(
        settings={
            **COPY["hdetach"].settings,
            "tokens": Sourced(5, "ours: h-detach's task at a size that two cores learn in minutes"),
            "length": Sourced(20, "ours: as tokens"),
            "inputs": Sourced("one_hot", "ours: learnt sooner than from the raw number"),
            "sequences": Sourced(0, "ours: as tokens"),
            "held_out_sequences": Sourced(1000, "ours: a standard error below half a percent"),
            "hidden_size": Sourced(64, "ours: as tokens"),
            "steps": Sourced(25_000, "ours: as tokens; the plain LSTM needs 20,000"),
            "batch_size": Sourced(50, "ours: as tokens"),
            "learning_rates": Sourced((3e-3,), "ours: as tokens"),
        }
    ),
}

_GATO_ADDING = {
    **_ANY,
    "cell": Sourced("gato", "GATO 5.3: two-layer GATO"),
    "length": Sourced(100, "GATO 5.3: T = 100, or 200, 400, 750 with --length"),
    "held_out_sequences": Sourced(1000, "GATO 5.3"),
    "hidden_size": Sourced(512, "GATO 5.3"),
    "embedding": Sourced(0, "GATO 5.3: no embeddings"),
    "decoder": Sourced((256,), "GATO 5.3: one hidden layer of size 256"),
    "steps": Sourced(3125, "GATO 5.3: 200,000 examples, in batches of 64"),
    "batch_size": Sourced(64, "GATO B.5"),
    "learning_rates": Sourced((4e-3,), "GATO B.3"),
    "clip_norm": Sourced(0.0, "GATO B.8: no clipping"),
    "halve_every": Sourced(10_000, "GATO B.3"),
    "eval_every": Sourced(125, "ours: 25 points on the curve"),
}
_UR_ADDING = {
    **_ANY,
    "cell": Sourced("ur_lstm", "UR 3.1"),
    "length": Sourced(2000, "UR Figure 3: N = 2000"),
    "held_out_sequences": Sourced(1000, "ours: as in GATO 5.3"),
    "hidden_size": Sourced(256, "UR D.1"),
    "embedding": Sourced(0, "ours: the inputs are numbers"),
    "decoder": Sourced((), "ours: UR names none for the synthetic tasks"),
    "steps": Sourced(20_000, "ours: not in the paper"),
    "batch_size": Sourced(64, "ours: not in the paper"),
    "learning_rates": Sourced((1e-3,), "UR D.1"),
    "clip_norm": Sourced(1.0, "UR D.1"),
    "eval_every": Sourced(250, "ours: 80 points on the curve"),
}

ADDING = {
    "gato": Protocol(
        settings=_GATO_ADDING,
        cells={"gato": _GATO_CELL, "*": {**_TORCH_CELL, **_GATES}},
    ),
    "ur": Protocol(
        settings=_UR_ADDING,
        cells={"gato": _GATO_CELL, "*": {**_LIBRARY_CELL, **_GATES}},
    ),
    "small": Protocol(
        settings={
            **_GATO_ADDING,
            "length": Sourced(50, "ours: a size that two cores learn in a minute"),
            "hidden_size": Sourced(128, "ours: as length"),
            "steps": Sourced(500, "ours: as length"),
            "eval_every": Sourced(20, "ours: 25 points on the curve"),
        },
        cells={"gato": _GATO_CELL, "*": {**_TORCH_CELL, **_GATES}},
    ),
}

_UR_FORGETTING = {
    **_UR_ADDING,
    "length": Sourced(500, "UR E.1"),
    "gate_bias": Sourced(6.0, "UR E.1: effective forget activation sigmoid(6)"),
    "hidden_size": Sourced(64, "UR E.1"),
    "steps": Sourced(10_000, "UR E.1: the LSTM is stuck after 1e4 iterations"),
    "learning_rates": Sourced((1e-4,), "UR E.1"),
    "eval_every": Sourced(200, "ours: 50 points on the curve"),
}

FORGETTING = {
    "ur": Protocol(
        settings=_UR_FORGETTING,
        cells={"gato": _GATO_CELL, "*": {**_LIBRARY_CELL, **_GATES}},
    ),
    "small": Protocol(
        settings={
            **_UR_FORGETTING,
            "length": Sourced(200, "ours: a size that two cores learn in minutes"),
            "steps": Sourced(1500, "ours: as length"),
            "batch_size": Sourced(32, "ours: as length"),
            "learning_rates": Sourced((1e-3,), "ours: as length"),
            "eval_every": Sourced(50, "ours: 30 points on the curve"),
        },
        cells={"gato": _GATO_CELL, "*": {**_LIBRARY_CELL, **_GATES}},
    ),
}

_UR_PIXELS = {
    **_ANY,
    "cell": Sourced("ur_lstm", "UR 3.2"),
    "dataset": Sourced("smnist", "UR 3.2: sMNIST, pMNIST and sCIFAR"),
    "permutation": Sourced(
        Depends("dataset", {"pmnist": "bit_reversal", "*": "scanline"}), "UR D.2 and D.5"
    ),
    "permutation_seed": Sourced(Same("seed"), "none: UR's order is not drawn"),
    "validation_share": Sourced(0.1, "ours: UR does not state it; as the authors' later code"),
    "validation_last": Sourced(False, "ours: drawn with seed 42, as the authors' later code"),
    "data_dir": Sourced(None, "ours: the data are the user's"),
    "hidden_size": Sourced(512, "UR D.2: Table 2; Table 3 has 1024 for MNIST, 2048 for CIFAR"),
    "embedding": Sourced(0, "UR D.2: the pixels themselves"),
    "decoder": Sourced((256,), "UR D.2: one ReLU layer of 256"),
    "epochs": Sourced(Depends("dataset", {"scifar10": 100, "*": 150}), "UR D.2"),
    "steps": Sourced(Epochs("epochs"), "UR D.2"),
    "batch_size": Sourced(50, "UR D.2"),
    "learning_rates": Sourced(
        Depends("cell", {"*gru": (2e-4, 5e-4), "*": (2e-4, 5e-4, 1e-3, 2e-3)}), "UR D.2: the sweep"
    ),
    "clip_norm": Sourced(1.0, "UR D.2"),
    "eval_every": Sourced(Epochs(1), "ours: after each epoch"),
    "keep_best": Sourced(True, "UR D.2: the highest validation score"),
}

_UR_ZONEOUT = {
    "zoneout_c": Sourced(Depends("cell", {"*lstm": 0.5, "*": 0.0}), "UR D.2"),
    "zoneout_h": Sourced(Depends("cell", {"*lstm": 0.05, "*gru": 0.1, "*": 0.0}), "UR D.2"),
}

PIXELS = {
    "ur": Protocol(
        settings=_UR_PIXELS,
        cells={"gato": _GATO_CELL, "*": {**_LIBRARY_CELL, **_GATES}},
    ),
    "ur_zoneout": Protocol(
        settings={
            **_UR_PIXELS,
            **_UR_ZONEOUT,
            "dropout": Sourced(0.5, "UR D.2: beside zoneout"),
        },
        cells={"gato": _GATO_CELL, "*": {**_LIBRARY_CELL, **_GATES}},
    ),
    "hdetach": Protocol(
        settings={
            **_UR_PIXELS,
            "cell": Sourced("lstm", "h-detach 3.3"),
            "permutation": Sourced(
                Depends("dataset", {"pmnist": "random", "*": "scanline"}), "h-detach 3.3"
            ),
            "permutation_seed": Sourced(Same("seed"), "h-detach code: the run's seed"),
            "validation_share": Sourced(1 / 6, "h-detach 3.3: 10,000 of 60,000"),
            "validation_last": Sourced(True, "h-detach code: images 50,000 to 59,999"),
            "hidden_size": Sourced(100, "h-detach 3.3"),
            "embedding": Sourced(0, "h-detach code: the raw pixel in [0, 1]"),
            "decoder": Sourced((), "h-detach code: one linear layer"),
            "epochs": Sourced(200, "h-detach 3.3"),
            "batch_size": Sourced(100, "h-detach 3.3"),
            "learning_rates": Sourced((1e-3, 5e-4, 1e-4), "h-detach 3.3"),
            "clip_norm": Sourced(1.0, "h-detach code"),
            "detach_prob": Sourced(0.25, "h-detach 3.3"),
            "detach_off_steps": Sourced(Epochs(39), "h-detach code: the last 39 epochs"),
            "keep_best": Sourced(True, "h-detach 3.3: the best validation score"),
        },
        cells={"gato": _GATO_CELL, "*": {**_HDETACH_CELL, **_GATES}},
    ),
    "small": Protocol(
        settings={
            **_UR_PIXELS,
            **_UR_ZONEOUT,
            "dataset": Sourced("digits", "ours: real images that need no file"),
            "hidden_size": Sourced(128, "ours: what two cores learn in minutes"),
            "epochs": Sourced(Depends("dataset", {"digits": 60, "*": 5}), "ours: as hidden_size"),
            "learning_rates": Sourced((4e-3,), "ours: as hidden_size"),
        },
        cells={"gato": _GATO_CELL, "*": {**_LIBRARY_CELL, **_GATES}},
    ),
}

_TASKS: dict[str, tuple[Any, Mapping[str, Protocol]]] = {
    "copy": (CopyTask, COPY),
    "transfer_copy": (CopyTask, TRANSFER_COPY),
    "adding": (AddingTask, ADDING),
    "forgetting": (ForgettingTask, FORGETTING),
    "pixels": (PixelsTask, PIXELS),
}


def task_class(name: str) -> Any:
    """The class of the task of that name."""
    return _TASKS[name][0]


def resolve(task: str, protocol: str, overrides: Mapping[str, Any]) -> Config:
    """The config of a protocol with some settings given beside it.

    Args:
      task: a binary's name.
      protocol: a paper's name, or ``"small"``.
      overrides: setting name -> value.

    Returns:
      The config, checked.

    Raises:
      UserError: if there is no such protocol, or the settings cannot be.
    """
    task_class, protocols = _TASKS[task]
    if protocol not in protocols:
        raise UserError(f"There is no protocol {protocol!r}; known: {', '.join(protocols)}.")
    chosen = protocols[protocol]
    for name in overrides:
        if name not in chosen.settings and name not in chosen.cells["*"] and name not in _GATO_CELL:
            raise UserError(f"--{name.rstrip('_')} is not for {task}: it has no such setting.")
    settings = {name: entry.value for name, entry in chosen.settings.items()} | dict(overrides)
    settings = without_dependence(settings)
    settings |= _cell_settings(chosen, settings, overrides)
    settings = in_steps(_fill(task_class, settings), settings, overrides)
    config = Config(
        protocol=protocol,
        overrides=dict(overrides),
        task=_fill(task_class, settings),
        model=_fill(ModelConfig, settings),
        carry=_fill(CarryConfig, settings),
        training=_fill(TrainingConfig, settings),
    )
    config.check()
    return config


def _cell_settings(
    protocol: Protocol, settings: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings that the cell has, each from the command line or from the protocol."""
    name = settings["cell"]
    cell = bare_cell(name, settings["hidden_size"])
    gate: Any = getattr(cell, "gate", None)
    gato = isinstance(cell, GATO)
    has = {
        "init": True,
        "bias_vectors": hasattr(cell, "bias_vectors"),
        "forget_bias": name in ("lstm", "janet"),
        "reset": name == "gru",  # every other gated GRU resets before the product
        "downsize": gate is not None and gate.master,
        "tmax": gate is not None and gate.bias == "chrono",
        "s_update": gato,
        "lambda_": gato,
    }
    family = protocol.cells["gato" if gato else "*"]
    found: dict[str, Any] = {}
    for setting, present in has.items():
        given = setting in overrides
        if given and not present:
            flag = setting.rstrip("_")
            raise UserError(f"--{flag} is not for {name}: it has no such setting.")
        default = family[setting].value if setting in family else None
        found[setting] = (overrides[setting] if given else default) if present else None
    if found["tmax"] == "hidden_size":
        found["tmax"] = settings["hidden_size"]
    if settings["detach_state"] == "feedback":
        found["detach_state"] = "r" if gato else "h"
    return found


def _fill(cls: Any, settings: Mapping[str, Any]) -> Any:
    return cls(**{field.name: settings[field.name] for field in dataclasses.fields(cls)})
