"""Flax layers over the driver: they plug in where ``nn.RNN`` does, and do more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from recurrent_gates import checks, pickling
from recurrent_gates.base import Carry, Cell
from recurrent_gates.carry import CarryFn, Noise, draw_noise
from recurrent_gates.scan import Backend, unroll


class RNN(nn.Module):
    """A cell over a sequence; ``nn.RNN``'s interface and parameter tree, and more.

    Differences from ``nn.RNN``: outputs at padding are zeros, a zero-length row returns its
    initial carry, any number of batch dims works with ``seq_lengths``, and there are masks,
    resets, carry functions, rematerialisation and backends.

    Carry functions that draw take their key from the rng collection ``"carry"``.

    Attributes:
      cell: a ``Cell``; wrap a foreign Flax cell in ``FlaxCell``.
      time_major: inputs are ``[T, *batch, D]`` instead of ``[*batch, T, D]``.
      return_carry: return (carry, ys) instead of ys.
      reverse: run from the end; the output comes in the order of processing, with padding
        left at the end, unless ``keep_order``.
      keep_order: with ``reverse``, give the output in the order of the input.
      unroll: steps per iteration of the loop; default: 8 on a GPU, 1 elsewhere.
      carry_fns: what happens to the carry around each step, left to right.
      remat: chunk length for rematerialisation, or None.
      backend: ``"auto"`` or a form of the recurrence; see ``Backend``.
      variable_axes, variable_broadcast, variable_carry, split_rngs: accepted for the sake of
        ``nn.RNN``'s signature; a cell here has parameters only, so other values than the
        defaults are an error.

    Raises:
      TypeError: if ``cell`` is not a ``Cell``.
      ValueError: for another value of the last four than their defaults.
    """

    cell: Cell
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    unroll: int | None = None
    variable_axes: Mapping[str, Any] | None = None
    variable_broadcast: Any = "params"
    variable_carry: Any = False
    split_rngs: Mapping[str, bool] | None = None
    carry_fns: Sequence[CarryFn] = ()
    remat: int | None = None
    backend: str | Backend = "auto"

    def __post_init__(self) -> None:
        lifted = (
            self.variable_axes or None,
            self.variable_broadcast,
            self.variable_carry,
            dict(self.split_rngs or {"params": False}),
        )
        if lifted != (None, "params", False, {"params": False}):
            raise ValueError(
                "Cells here have parameters and no other variables: leave variable_axes, "
                "variable_broadcast, variable_carry and split_rngs at their defaults."
            )
        checks.cell("RNN", self.cell, Cell)
        super().__post_init__()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickling.reduced(self)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Carry | None = None,
        init_key: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
        carry_fns: Sequence[CarryFn] | None = None,
        noise: Sequence[Noise] | None = None,
        deterministic: bool = False,
    ) -> Any:
        """Applies the cell over time; arguments named like attributes override them.

        Args:
          inputs: ``[*batch, T, D]``, or ``[T, *batch, D]`` if time-major.
          initial_carry: the carry before the first step; default zeros.
          init_key: as in ``nn.RNN``; cells here start without drawing, so it is not used.
          seq_lengths: int ``[*batch]``.
          return_carry, time_major, reverse, keep_order, carry_fns: see the attributes.
          valid: bool mask laid out as the inputs without features; excludes ``seq_lengths``.
          resets: bool mask laid out likewise: those steps start from the fresh carry.
          noise: draws of the carry functions, leading axis T, instead of the ``"carry"`` rng.
          deterministic: draw nothing; zoneout takes its mean.

        Returns:
          ys, laid out as the inputs with F features, or (carry, ys).

        Raises:
          ValueError: as ``unroll`` does, and if the parameters are not those of the cell.
        """
        del init_key
        return_carry, time_major, reverse, keep_order = _flags(
            self, return_carry, time_major, reverse, keep_order
        )
        deterministic = checks.flag("deterministic", deterministic)
        carry_fns = checks.carry_fns(self.carry_fns if carry_fns is None else carry_fns, CarryFn)
        inputs = _sequence(inputs)
        if seq_lengths is not None:
            seq_lengths = jnp.asarray(seq_lengths)
        valid = checks.laid_out("valid", valid, inputs.shape[:-1])
        resets = checks.laid_out("resets", resets, inputs.shape[:-1])
        params = self.cell.weights(inputs.shape[-1])
        if not time_major:
            time = inputs.ndim - 2
            inputs = jnp.moveaxis(inputs, time, 0)
            valid = None if valid is None else jnp.moveaxis(valid, time, 0)
            resets = None if resets is None else jnp.moveaxis(resets, time, 0)
        if noise is None and not deterministic:
            drawn = any(fn.draws for fn in carry_fns) and self.has_rng("carry")
            key = self.make_rng("carry") if drawn else None
            noise = draw_noise(carry_fns, key, inputs.shape[0], inputs.shape[1:-1])
        carry, ys = unroll(
            self.cell.copy(parent=None, name=None),
            params,
            inputs,
            initial_carry,
            lengths=seq_lengths,
            valid=valid,
            resets=resets,
            reverse=reverse,
            carry_fns=carry_fns,
            noise=noise,
            deterministic=deterministic,
            unroll=self.unroll,
            remat=self.remat,
            backend=self.backend,
        )
        if reverse and not keep_order:
            ys = _flip(ys, seq_lengths)
        if not time_major:
            ys = jnp.moveaxis(ys, 0, -2)
        return (carry, ys) if return_carry else ys


def _flags(layer: RNN | Stack, *given: bool | None) -> tuple[bool, ...]:
    """The options of a call, those of the layer in the place of None."""
    names = ("return_carry", "time_major", "reverse", "keep_order")
    return tuple(
        checks.flag(name, getattr(layer, name) if value is None else value)
        for name, value in zip(names, given, strict=True)
    )


def _sequence(inputs: Any) -> jax.Array:
    checks.one_array(inputs)
    inputs = jnp.asarray(inputs)
    if inputs.ndim < 2:
        raise ValueError(f"Inputs must have time and feature axes, got {inputs.shape}.")
    return inputs


def _flip(ys: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """ys in reverse order of time, padding left at the end."""
    if lengths is None:
        return jnp.flip(ys, axis=0)
    steps = ys.shape[0]
    time = jnp.arange(steps, dtype=lengths.dtype).reshape(steps, *(1,) * lengths.ndim)
    index = (lengths[None] - 1 - time) % steps  # [T, *batch]
    return jnp.take_along_axis(ys, index[..., None], axis=0)


class Stack(nn.Module):
    """Layers of cells, with torch's dropout between them.

    Works where ``RNN`` does; the carry is a tuple with one entry per layer.

    Attributes:
      cells: the cells, first layer first.
      dropout: probability of zeroing an output of every layer but the last; rng collection
        ``"dropout"``.
      carry_fns: carry functions of every layer, or one sequence of them per layer.
      shared_noise: layers with the same carry functions share one draw; by default each
        layer has its own (the key folded with the layer's index).
      time_major, return_carry, reverse, keep_order, unroll, remat, backend: as in ``RNN``.

    Raises:
      ValueError: without cells, or for a dropout outside [0, 1].
    """

    cells: Sequence[Cell]
    dropout: float = 0.0
    carry_fns: Sequence[Any] = ()
    shared_noise: bool = False
    time_major: bool = False
    return_carry: bool = False
    reverse: bool = False
    keep_order: bool = False
    unroll: int | None = None
    remat: int | None = None
    backend: str | Backend = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.cells, Sequence) or isinstance(self.cells, str):
            got = checks.described(self.cells)
            raise ValueError(f"Stack needs a sequence of cells, got {got}.")
        if not self.cells:
            raise ValueError("Stack needs at least one cell.")
        for cell in self.cells:
            checks.cell("Stack", cell, Cell)
        checks.number("Stack dropout", self.dropout)
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"Stack dropout must be in [0, 1], got {self.dropout}.")
        super().__post_init__()

    def __reduce__(self) -> tuple[Any, ...]:
        return pickling.reduced(self)

    def setup(self) -> None:
        self.layers = [
            RNN(cell, unroll=self.unroll, remat=self.remat, backend=self.backend)
            for cell in self.cells
        ]
        self.drop = nn.Dropout(self.dropout)

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Sequence[Carry] | None = None,
        init_key: jax.Array | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        valid: jax.Array | None = None,
        resets: jax.Array | None = None,
        carry_fns: Sequence[Any] | None = None,
        noise: Sequence[Sequence[Noise]] | None = None,
        masks: Sequence[jax.Array] | None = None,
        deterministic: bool = False,
    ) -> Any:
        """Applies the layers; arguments as in ``RNN``, carry and noise one entry per layer.

        Args:
          masks: factors on the outputs of every layer but the last, each laid out as these,
            instead of draws from the ``"dropout"`` rng.
        """
        count = len(self.cells)
        return_carry, time_major, reverse, keep_order = _flags(
            self, return_carry, time_major, reverse, keep_order
        )
        deterministic = checks.flag("deterministic", deterministic)
        if seq_lengths is not None:
            seq_lengths = jnp.asarray(seq_lengths)
        per_layer = _per_layer(self.carry_fns if carry_fns is None else carry_fns, count)
        for name, value in (("initial_carry", initial_carry), ("noise", noise)):
            if value is not None and (checks.is_array(value) or len(value) != count):
                got = checks.described(value) if checks.is_array(value) else len(value)
                raise ValueError(f"{name} needs one entry per layer: {count}, got {got}.")

        if masks is not None and len(masks) != count - 1:
            raise ValueError(
                f"masks needs one entry per layer but the last: {count - 1}, got {len(masks)}."
            )

        y = _sequence(inputs)
        if noise is None and not deterministic:
            steps, batch = (
                (y.shape[0], y.shape[1:-1]) if time_major else (y.shape[-2], y.shape[:-2])
            )
            noise = self._draw(per_layer, steps, batch)
        carries = []
        for index, layer in enumerate(self.layers):
            if index and masks is not None:
                y = y * masks[index - 1]
            elif index:
                y = self.drop(y, deterministic=deterministic)
            carry, y = layer(
                y,
                initial_carry=None if initial_carry is None else initial_carry[index],
                init_key=init_key,
                seq_lengths=seq_lengths,
                return_carry=True,
                time_major=time_major,
                reverse=reverse,
                keep_order=True,
                valid=valid,
                resets=resets,
                carry_fns=per_layer[index],
                noise=None if noise is None else noise[index],
                deterministic=deterministic,
            )
            carries.append(carry)
        if reverse and not keep_order:
            y = y if time_major else jnp.moveaxis(y, -2, 0)
            y = _flip(y, seq_lengths)
            y = y if time_major else jnp.moveaxis(y, 0, -2)
        return (tuple(carries), y) if return_carry else y

    def _draw(
        self, per_layer: Sequence[tuple[CarryFn, ...]], steps: int, batch: tuple[int, ...]
    ) -> list[tuple[Noise, ...]]:
        drawn = any(fn.draws for fns in per_layer for fn in fns) and self.has_rng("carry")
        key = self.make_rng("carry") if drawn else None

        def own(index: int) -> jax.Array | None:
            if key is None or self.shared_noise:
                return key
            return jax.random.fold_in(key, index)

        return [draw_noise(fns, own(i), steps, batch) for i, fns in enumerate(per_layer)]


def _per_layer(carry_fns: Sequence[Any], count: int) -> list[tuple[CarryFn, ...]]:
    """The carry functions of each layer, from one list for all or a list of lists."""
    listed = isinstance(carry_fns, Sequence) and not isinstance(carry_fns, str)
    if not listed or not carry_fns or not all(isinstance(e, (list, tuple)) for e in carry_fns):
        return [checks.carry_fns(carry_fns, CarryFn)] * count
    if len(carry_fns) != count:
        raise ValueError(
            f"carry_fns has {len(carry_fns)} lists of carry functions for {count} layers."
        )
    return [checks.carry_fns(fns, CarryFn) for fns in carry_fns]
