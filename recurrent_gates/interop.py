"""Weights from and to ``torch.nn.LSTM`` and ``torch.nn.GRU`` state dicts; torch is not needed.

A state dict is a mapping of names to NumPy arrays: ``{k: v.numpy() for k, v in
module.state_dict().items()}``. torch stacks the gates' rows in one ``[G * F, in]`` matrix; here
every slot has its own ``[in, F]`` kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

# torch's order of row blocks, as slots of LSTM and of GRU(reset="after").
_ROWS = {4: ("i", "f", "u", "o"), 3: ("reset", "f", "u")}
_ROLES = {
    "kernel": "weight_ih",
    "recurrent_kernel": "weight_hh",
    "bias": "bias_ih",
    "recurrent_bias": "bias_hh",
}
_NAME = re.compile(r"(weight|bias)_(ih|hh)_l(\d+)(_reverse)?")

Layer = dict[str, dict[str, Any]]


def from_torch(state_dict: Mapping[str, Any]) -> list[Layer]:
    """Parameters of our cells from a torch LSTM or GRU.

    Args:
      state_dict: names to arrays; any number of layers, one or two directions, with biases.

    Returns:
      One dict per layer, ``{"forward": params}`` and, if bidirectional, ``"backward"``:
      params of ``LSTM(F, bias_vectors=2)`` or ``GRU(F, bias_vectors=2)``, in the dtype given.

    Raises:
      ValueError: if a name is unknown (projections, for one), missing, or of a wrong shape.
    """
    unknown = [name for name in state_dict if not _NAME.fullmatch(name)]
    if unknown:
        raise ValueError(f"Not a torch LSTM or GRU parameter: {', '.join(sorted(unknown))}.")
    if "weight_hh_l0" not in state_dict:
        raise ValueError("The state dict has no weight_hh_l0, so it is no torch LSTM or GRU.")
    layers = 1 + max(int(_NAME.fullmatch(name)[3]) for name in state_dict)  # type: ignore[index]
    both = "weight_hh_l0_reverse" in state_dict
    directions = {"forward": "", "backward": "_reverse"} if both else {"forward": ""}
    return [
        {name: _params(state_dict, f"_l{layer}{suffix}") for name, suffix in directions.items()}
        for layer in range(layers)
    ]


def _params(state_dict: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    arrays = {}
    for role, name in _ROLES.items():
        if name + suffix not in state_dict:
            raise ValueError(f"The state dict lacks {name + suffix}.")
        arrays[role] = np.asarray(state_dict[name + suffix])
    rows, features = arrays["recurrent_kernel"].shape
    slots = _ROWS.get(rows // features if features and rows % features == 0 else 0)
    if slots is None:
        raise ValueError(
            f"weight_hh{suffix} must be [4F, F] (LSTM) or [3F, F] (GRU), got {rows, features}."
        )
    params: dict[str, Any] = {}
    for role, array in arrays.items():
        if array.shape[0] != rows:
            raise ValueError(f"{_ROLES[role] + suffix} must have {rows} rows, got {array.shape}.")
        blocks = np.split(array, len(slots))
        params[role] = {s: jnp.asarray(block.T) for s, block in zip(slots, blocks, strict=True)}
    return params


def to_torch(layers: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, np.ndarray]:
    """The state dict of a torch LSTM or GRU from our parameters; inverse of ``from_torch``.

    Args:
      layers: one mapping per layer, ``{"forward": params[, "backward": params]}``. With one
        bias vector torch's second is zeros (a GRU's own candidate bias keeps its place).

    Returns:
      torch's names to NumPy arrays.

    Raises:
      ValueError: if the slots are not those of LSTM or GRU(reset="after") with plain gates.
    """
    state_dict = {}
    for layer, directions in enumerate(layers):
        for direction, params in directions.items():
            suffix = f"_l{layer}" + {"forward": "", "backward": "_reverse"}[direction]
            slots = next((s for s in _ROWS.values() if set(s) == set(params["kernel"])), None)
            if slots is None or "gate" in params:
                raise ValueError(
                    "torch has the plain LSTM and GRU only; these parameters have slots "
                    f"{', '.join(params['kernel'])}."
                )
            recurrent = params.get("recurrent_bias", {})
            filled = {
                **params,
                "recurrent_bias": {
                    s: recurrent.get(s, np.zeros_like(params["bias"][s])) for s in slots
                },
            }
            for role, name in _ROLES.items():
                blocks = [np.asarray(filled[role][s]).T for s in slots]
                state_dict[name + suffix] = np.concatenate(blocks)
    return state_dict
