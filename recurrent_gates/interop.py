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

from recurrent_gates.checks import described

__all__ = [
    "from_torch",
    "to_torch",
]

# torch's order of row blocks, as slots of LSTM and of GRU(reset="after").
_ROWS = {4: ("i", "f", "u", "o"), 3: ("reset", "f", "u")}
_ROLES = {
    "kernel": "weight_ih",
    "recurrent_kernel": "weight_hh",
    "bias": "bias_ih",
    "recurrent_bias": "bias_hh",
}
_BIASES = ("bias", "recurrent_bias")
_NAME = re.compile(r"(.*\.)?((?:weight|bias)_(?:ih|hh)_l(\d+)(?:_reverse)?)")
_SUFFIXES = {"forward": "", "backward": "_reverse"}

Layer = dict[str, dict[str, Any]]


def from_torch(state_dict: Mapping[str, Any]) -> list[Layer]:
    """Parameters of our cells from a torch LSTM or GRU.

    Args:
      state_dict: names to arrays; any number of layers, one or two directions. All names may
        start with one prefix, as in the state dict of a larger module. Without any bias
        (torch's ``bias=False``) the biases are zeros.

    Returns:
      One dict per layer, ``{"forward": params}`` and, if bidirectional, ``"backward"``:
      params of ``LSTM(F, bias_vectors=2)`` or ``GRU(F, bias_vectors=2)``, in the dtype given.

    Raises:
      ValueError: if it is no mapping to arrays, or if a name is unknown (projections, for one),
        missing, or of a wrong shape.
    """
    arrays = _without_prefix(state_dict)
    if "weight_hh_l0" not in arrays:
        raise ValueError("The state dict has no weight_hh_l0, so it is no torch LSTM or GRU.")
    layers = 1 + max(int(_NAME.fullmatch(name)[3]) for name in arrays)  # type: ignore[index]
    is_bidirectional = any(name.endswith("_reverse") for name in arrays)
    directions = _SUFFIXES if is_bidirectional else {"forward": ""}
    return [
        {name: _params(arrays, f"_l{layer}{suffix}") for name, suffix in directions.items()}
        for layer in range(layers)
    ]


def _without_prefix(state_dict: Any) -> dict[str, np.ndarray]:
    """Names without their common prefix, to arrays."""
    if not isinstance(state_dict, Mapping):
        hint = " pass its state_dict()." if hasattr(state_dict, "state_dict") else ""
        raise ValueError(
            "from_torch needs a state dict, a mapping of names to arrays, got "
            f"{described(state_dict)}{':' if hint else '.'}{hint}"
        )
    matches = {name: _NAME.fullmatch(name) for name in state_dict if isinstance(name, str)}
    unknown = [str(name) for name in state_dict if not matches.get(name)]
    if unknown:
        raise ValueError(f"Not a torch LSTM or GRU parameter: {', '.join(sorted(unknown))}.")
    prefixes = {match[1] or "" for match in matches.values() if match}
    if len(prefixes) > 1:
        raise ValueError(
            "The state dict must hold one LSTM or GRU, got names that start with "
            f"{', '.join(repr(prefix) for prefix in sorted(prefixes))}."
        )
    return {match[2]: _array(name, state_dict[name]) for name, match in matches.items() if match}


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError) as error:  # a tensor on a GPU, or with a gradient
        raise ValueError(f"{name} is no NumPy array, and becomes none: {error}.") from None
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be an array of floats, got {described(value)}.")
    return array


def _params(state_dict: Mapping[str, np.ndarray], suffix: str) -> dict[str, Any]:
    with_bias = any(name.startswith("bias") for name in state_dict)
    arrays: dict[str, np.ndarray] = {}
    for role, name in _ROLES.items():
        if role in _BIASES and not with_bias:
            weight = arrays["recurrent_kernel"]
            arrays[role] = np.zeros(weight.shape[:1], weight.dtype)
        elif name + suffix not in state_dict:
            raise ValueError(f"The state dict lacks {name + suffix}.")
        else:
            arrays[role] = state_dict[name + suffix]
        rank = 1 if role in _BIASES else 2
        if arrays[role].ndim != rank:
            raise ValueError(
                f"{name + suffix} must have {rank} axes, got shape {arrays[role].shape}."
            )
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
        bias vector torch's second is zeros (a GRU's own candidate bias keeps its place). What
        parameters do not show is not seen: cumax gates, or GRU(reset="before") with two bias
        vectors, compute something else in torch.

    Returns:
      torch's names to NumPy arrays.

    Raises:
      ValueError: if that is not what is given, if the slots are not those of LSTM or
        GRU(reset="after") with plain gates, or if there are heads.
    """
    _check_layers(layers)
    _check_matrices(layers)
    state_dict = {}
    for layer, directions in enumerate(layers):
        for direction, params in directions.items():
            suffix = f"_l{layer}{_SUFFIXES[direction]}"
            slots = next((s for s in _ROWS.values() if set(s) == set(params["kernel"])), None)
            if slots is None or "gate" in params:
                raise ValueError(
                    "torch has the plain LSTM and GRU only; these parameters have slots "
                    f"{', '.join(params['kernel'])}{' and a gate' if 'gate' in params else ''}."
                )
            recurrent = params.get("recurrent_bias", {})
            if extra := set(params) - set(_ROLES):
                raise ValueError(f"torch's LSTM and GRU have no {', '.join(sorted(extra))}.")
            if "reset" in slots and "u" not in recurrent:
                raise ValueError(
                    'torch has GRU(reset="after"), whose candidate has a recurrent bias; these '
                    "parameters have none."
                )
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


def _check_matrices(layers: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    for directions in layers:
        for params in directions.values():
            for slot, kernel in params["recurrent_kernel"].items():
                if np.ndim(kernel) == 3:
                    raise ValueError(
                        "torch has no heads: a recurrent kernel is a matrix there, and that of "
                        f"{slot!r} is blocks of shape {np.shape(kernel)}."
                    )


def _check_layers(layers: Any) -> None:
    expected = "to_torch needs a sequence with one {'forward': params} per layer"
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise ValueError(f"{expected}, got {described(layers)}.")
    for directions in layers:
        if not isinstance(directions, Mapping) or set(directions) not in (
            {"forward"},
            {"forward", "backward"},
        ):
            raise ValueError(f"{expected}, got {described(directions)} in it.")
        if set(directions) != set(layers[0]):
            raise ValueError(f"{expected}, all in one direction or all in two.")
        for params in directions.values():
            roles = ("kernel", "recurrent_kernel", "bias")
            maps = [params.get(role) if isinstance(params, Mapping) else None for role in roles]
            slots = [set(map_) if isinstance(map_, Mapping) else None for map_ in maps]
            if None in slots or slots != slots[:1] * len(roles):
                raise ValueError(
                    f"to_torch needs the params of LSTM or GRU, with {', '.join(roles)} by slot, "
                    f"which torch has; got {described(params)}."
                )
