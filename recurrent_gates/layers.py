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
from recurrent_gates.scan import Backend, batch_shape, unroll
from recurrent_gates.shapes import expand, in_features, leading_axes


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
        inputs: Any,
        *,
        initial_carry: Carry | None = None,
        reset_carry: Carry | None = None,
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
          inputs: ``[*batch, T, D]``, or ``[T, *batch, D]`` if time-major; or a tree of them.
          initial_carry: the carry before the first step; default ``cell.initial``.
          reset_carry: the carry that a reset takes; default ``cell.initial``.
          init_key: as in ``nn.RNN``; cells here start without drawing, so it is not used.
          seq_lengths: int ``[*batch]``.
          return_carry, time_major, reverse, keep_order, carry_fns: see the attributes.
          valid: bool mask laid out as the inputs without features; excludes ``seq_lengths``.
          resets: bool mask laid out likewise: those steps start from ``reset_carry``.
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
        inputs = _sequence(self.cell, inputs)
        steps, batch = _sequence_shape(self.cell, inputs, initial_carry, time_major)
        if seq_lengths is not None:
            seq_lengths = jnp.asarray(seq_lengths)
        valid, resets = _laid_out(valid, resets, steps, batch, time_major)
        params = self.cell.weights(in_features(inputs))
        if not time_major:
            inputs, valid, resets = jax.tree.map(
                lambda x: jnp.moveaxis(x, len(batch), 0), (inputs, valid, resets)
            )
        if noise is None and not deterministic:
            noise = draw_noise(carry_fns, _carry_key(self, carry_fns), steps, batch)
        carry, ys = unroll(
            self.cell.copy(parent=None, name=None),
            params,
            inputs,
            initial_carry,
            reset_carry=reset_carry,
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
        ys = _flip(ys, seq_lengths) if reverse and not keep_order else ys
        if not time_major:
            ys = jax.tree.map(lambda y: jnp.moveaxis(y, 0, len(batch)), ys)
        return (carry, ys) if return_carry else ys


def _flags(layer: RNN | Stack, *options: bool | None) -> tuple[bool, ...]:
    """The options of a call, those of the layer in the place of None."""
    names = ("return_carry", "time_major", "reverse", "keep_order")
    return tuple(
        checks.flag(name, getattr(layer, name) if value is None else value)
        for name, value in zip(names, options, strict=True)
    )


def _sequence(cell: Cell, inputs: Any) -> Any:
    """A tree of arrays; one array for a cell of ours, of numbers in lists too."""
    if checks.ours(cell):
        checks.one_array(inputs)
        return jnp.asarray(inputs)
    return jax.tree.map(jnp.asarray, inputs)


def _laid_out(
    valid: Any, resets: Any, steps: int, batch: tuple[int, ...], time_major: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """The masks of a call, laid out as its inputs."""
    shape = (steps, *batch) if time_major else (*batch, steps)
    return checks.laid_out("valid", valid, shape), checks.laid_out("resets", resets, shape)


def _carry_key(layer: nn.Module, carry_fns: Sequence[CarryFn]) -> jax.Array | None:
    """A key from the rng collection "carry", if a function draws; Flax takes one from "params"
    where that is the only collection, as in ``init(key, ...)``."""
    has_rng = layer.has_rng("carry") or layer.has_rng("params")
    return layer.make_rng("carry") if has_rng and any(fn.draws for fn in carry_fns) else None


def _sequence_shape(
    cell: Cell, inputs: Any, carry: Carry | None, time_major: bool
) -> tuple[int, tuple[int, ...]]:
    """(T, batch shape) of inputs as a layer takes them."""
    leaves = jax.tree.leaves(inputs)
    axes = leading_axes(inputs) if leaves else ()
    batch = None if carry is None else batch_shape(cell, carry)
    count = len(axes) - 1 if batch is None else len(batch)
    if not 0 <= count < len(axes):
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(f"Inputs must have time and feature axes, got shapes {shapes}.")
    time = 0 if time_major else count
    return axes[time], (*axes[:time], *axes[time + 1 : count + 1])


def _flip(ys: Any, lengths: jax.Array | None, axis: int = 0) -> Any:
    """ys in reverse order of time, which is an axis of theirs, padding left at the end."""
    if lengths is None:
        return jax.tree.map(lambda y: jnp.flip(y, axis), ys)
    steps = jax.tree.leaves(ys)[0].shape[axis]
    time = jnp.arange(steps, dtype=jnp.int32).reshape(steps, *(1,) * lengths.ndim)
    lengths = jnp.clip(lengths.astype(jnp.int32), 0, steps)  # as ``unroll`` takes them
    index = (lengths[None] - 1 - time) % steps  # [T, *batch]
    index = jnp.moveaxis(index, 0, axis)
    return jax.tree.map(lambda y: jnp.take_along_axis(y, expand(index, y), axis), ys)


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
            text = checks.described(self.cells)
            raise ValueError(f"Stack needs a sequence of cells, got {text}.")
        if not self.cells:
            raise ValueError("Stack needs at least one cell.")
        for cell in self.cells:
            checks.cell("Stack", cell, Cell)
        checks.numbers(self, "dropout")
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
        inputs: Any,
        *,
        initial_carry: Sequence[Carry] | None = None,
        reset_carry: Sequence[Carry] | None = None,
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
        masks: Sequence[Any] | None = None,
        deterministic: bool = False,
    ) -> Any:
        """Applies the layers; arguments as in ``RNN``, carries and noise one entry per layer.

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
        entries = dict(initial_carry=initial_carry, reset_carry=reset_carry, noise=noise)
        _check_entries(count, masks, **entries)
        y = _sequence(self.cells[0], inputs)
        first = None if initial_carry is None else initial_carry[0]
        steps, batch = _sequence_shape(self.cells[0], y, first, time_major)
        if noise is None and not deterministic:
            noise = self._draw(per_layer, steps, batch)
        carries = []
        for index, layer in enumerate(self.layers):
            if index and masks is not None:
                y = jax.tree.map(jnp.multiply, y, masks[index - 1])
            elif index:
                y = jax.tree.map(lambda y: self.drop(y, deterministic=deterministic), y)
            carry, y = layer(
                y,
                initial_carry=None if initial_carry is None else initial_carry[index],
                reset_carry=None if reset_carry is None else reset_carry[index],
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
            y = _flip(y, seq_lengths, 0 if time_major else len(batch))
        return (tuple(carries), y) if return_carry else y

    def _draw(
        self, per_layer: Sequence[tuple[CarryFn, ...]], steps: int, batch: tuple[int, ...]
    ) -> list[tuple[Noise, ...]]:
        key = _carry_key(self, [fn for fns in per_layer for fn in fns])

        def layer_key(index: int) -> jax.Array | None:
            if key is None or self.shared_noise:
                return key
            return jax.random.fold_in(key, index)

        return [draw_noise(fns, layer_key(i), steps, batch) for i, fns in enumerate(per_layer)]


def _check_entries(count: int, masks: Sequence[Any] | None, **entries: Sequence | None) -> None:
    """One sentence if what has an entry per layer has another number of them."""
    for name, value in entries.items():
        if value is not None and (checks.is_array(value) or len(value) != count):
            text = checks.described(value) if checks.is_array(value) else len(value)
            raise ValueError(f"{name} needs one entry per layer: {count}, got {text}.")
    if masks is not None and len(masks) != count - 1:
        raise ValueError(
            f"masks needs one entry per layer but the last: {count - 1}, got {len(masks)}."
        )


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
