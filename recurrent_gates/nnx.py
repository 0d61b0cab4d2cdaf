"""The cells and layers as NNX modules, with the parameters of the linen ones.

``Cell`` drops into Flax's ``nnx.RNN`` and ``nnx.Bidirectional``; ``RNN`` and ``Stack`` are the
layers of ``recurrent_gates.layers``, computed by these, with all their keywords. Parameters have
linen's names, so a tree of parameters serves both: ``to_linen`` and ``load_linen``.

Everything works under ``nnx.jit``, ``nnx.grad``, ``nnx.vmap`` and ``nnx.scan``, and is saved and
optimized as any NNX module is.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from recurrent_gates import base, layers
from recurrent_gates.carry import CarryFn

__all__ = ["RNN", "Cell", "Stack", "load_linen", "to_linen"]


class Cell(nnx.RNNCellBase):
    """A cell of this library with its parameters: an ``nnx.RNNCellBase``.

    The parameters are attributes under linen's names, each leaf an ``nnx.Param``: the forget
    gate's kernel of an LSTM is ``module.kernel["f"]``. Names that ``nn.with_partitioning`` gives to
    axes are its metadata, which ``nnx.get_partition_spec`` reads.

    Args:
      cell: an instance of a cell, such as ``rg.LSTM(32)``; it is ``module.cell`` afterwards.
      in_features: D, the width of the inputs.
      rngs: the parameters are drawn from the stream ``"params"``, once.

    Raises:
      TypeError: if ``cell`` is not an instance of a cell, or ``rngs`` not an ``nnx.Rngs``.
      ValueError: if ``in_features`` is not a positive integer, if ``rngs`` has no stream for
        parameters, or if a parameter has the name of an attribute of this class.
    """

    def __init__(self, cell: base.Cell, in_features: Any, *, rngs: nnx.Rngs | None = None) -> None:
        self.cell = _checked_cell(cell).copy(parent=None, name=None)
        widths, self._inputs = jax.tree.flatten(in_features)
        self._widths = tuple(_checked_width(width) for width in widths or [in_features])
        if rngs is None:
            raise TypeError(
                f"The parameters of {type(cell).__name__} are drawn from rngs: "
                "give rngs=nnx.Rngs(seed)."
            )
        stream = _stream(rngs, "params")
        if stream is None:
            raise ValueError(
                "rngs has no stream for parameters: give nnx.Rngs(seed) or nnx.Rngs(params=seed)."
            )
        params = self.cell.init_params(stream(), self.in_features)
        self._names = tuple(params)
        for name, tree in params.items():
            if hasattr(self, name):
                raise ValueError(
                    f"{type(cell).__name__} has a parameter {name!r}, which is the name of an "
                    "attribute of the NNX cell; rename the parameter."
                )
            setattr(self, name, nnx.data(jax.tree.map(_param, tree, is_leaf=_is_box)))

    @property
    def in_features(self) -> Any:
        """D, as it was given."""
        return jax.tree.unflatten(self._inputs, self._widths)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters as arrays, for pure functions such as ``unroll``."""

        def value(leaf: Any) -> Any:
            return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf

        return {
            name: jax.tree.map(
                value, getattr(self, name), is_leaf=lambda x: isinstance(x, nnx.Variable)
            )
            for name in self._names
        }

    def __call__(self, carry: base.Carry, inputs: Any) -> tuple[base.Carry, Any]:
        """(carry, x) -> (carry, y) for one step, x ``[*batch, D]``."""
        _check_inputs(self, inputs)
        params = self.params
        z = self.cell.project(params, inputs)
        carry = self.cell.step(params, carry, z)
        return carry, self.cell.emit(params, carry, z)

    def initialize_carry(
        self, input_shape: Sequence[int], rngs: Any = None, carry_init: Any = None
    ) -> base.Carry:
        """The carry before the first step; ``input_shape`` is ``(*batch, D)``.

        Cells start without drawing, so ``rngs`` is not used; ValueError for a ``carry_init``.
        """
        del rngs
        if carry_init is not None:
            raise ValueError(
                "A cell starts as its initial says, not as carry_init does: give another start "
                "as the layer's initial_carry."
            )
        return self.cell.initial(tuple(input_shape[:-1]))

    @property
    def num_feature_axes(self) -> int:
        """How many of the inputs' axes are features, counted from the last."""
        return self.cell.num_feature_axes


class _Layer(nnx.Module):
    """A linen layer, called with parameters and random streams that live here.

    The linen layer is static; its parameters are those of ``modules``, which a subclass keeps
    under linen's names.
    """

    def __init__(
        self,
        layer: nn.Module,
        modules: Mapping[str, Cell],
        streams: Iterable[str],
        rngs: nnx.Rngs | None,
        carry_fns: Sequence[Any],
        deterministic: bool,
    ) -> None:
        self._layer = layer
        self._names = tuple(modules)
        for name, module in modules.items():
            setattr(self, name, module)
        # As everywhere in NNX, arrays are data and numbers are static.
        carry_fns = _tuples(carry_fns)
        arrays = any(isinstance(p, (jax.Array, np.ndarray)) for p in jax.tree.leaves(carry_fns))
        self.carry_fns = nnx.data(carry_fns) if arrays else carry_fns
        self.deterministic = deterministic
        sources = {name: _stream(rngs, name) for name in streams}
        forks = {name: stream.fork() for name, stream in sources.items() if stream is not None}
        self.rngs = nnx.Rngs(forks) if forks else nnx.data(None)

    def set_view(self, deterministic: bool | None = None) -> None:
        """What ``nnx.view(model, deterministic=...)`` calls."""
        if deterministic is not None:
            self.deterministic = deterministic

    def __call__(
        self,
        inputs: Any,
        *,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        deterministic: bool | None = None,
        **keywords: Any,
    ) -> Any:
        """Applies the layer; inputs ``[*batch, T, D]``, or ``[T, *batch, D]`` if time-major.

        Args:
          inputs: the sequences.
          rngs: random streams in the place of the layer's own. ``nnx.Bidirectional`` gives its
            own to both directions: a stream of seed 0 unless it was made with ``rngs``.
          deterministic: draw nothing; default: what ``train()`` and ``eval()`` have set.
          **keywords: every other argument of the linen layer's call, as there.

        Returns:
          ys, or (carry, ys) with ``return_carry``, as the linen layer does.

        Raises:
          ValueError: as the linen layer does, if inputs are not as wide as the cell was made
            for, or if something is drawn and there is no stream to draw from.
        """
        modules = {name: getattr(self, name) for name in self._names}
        _check_inputs(modules[self._names[0]], inputs)
        if deterministic is None:
            deterministic = self.deterministic
        if keywords.get("carry_fns") is None:
            keywords["carry_fns"] = self.carry_fns
        source = self.rngs if rngs is None else rngs
        stream_names = () if deterministic else self._stream_names(keywords)
        return self._layer.apply(
            {"params": {name: module.params for name, module in modules.items()}},
            inputs,
            rngs={name: self._key(source, name) for name in stream_names},
            deterministic=deterministic,
            **keywords,
        )

    def _stream_names(self, keywords: Mapping[str, Any]) -> list[str]:
        """The streams that a call draws from."""
        functions = jax.tree.leaves(keywords["carry_fns"], is_leaf=lambda x: isinstance(x, CarryFn))
        draws = any(getattr(fn, "draws", False) for fn in functions)
        return ["carry"] if draws and keywords.get("noise") is None else []

    def _key(self, source: nnx.Rngs | nnx.RngStream | None, name: str) -> jax.Array:
        stream = source if isinstance(source, nnx.RngStream) else _stream(source, name)
        if stream is None:
            raise ValueError(
                f"{type(self).__name__} draws random numbers from the stream {name!r}: make it "
                f"with rngs=nnx.Rngs({name}=seed), give the call rngs, or draw nothing with "
                "deterministic=True."
            )
        return stream()


class RNN(_Layer):
    """A cell over a sequence: ``recurrent_gates.RNN`` as an NNX module.

    Carry functions draw from a stream of its own, forked from ``"carry"``. ``train()`` and
    ``eval()`` set whether anything is drawn.

    Args:
      cell: an instance of a cell, whose parameters are drawn here; or a ``Cell`` of this
        module, whose parameters are then shared with whoever else holds it.
      in_features: D, the width of the inputs; not needed for a ``Cell``.
      rngs: streams ``"params"`` and ``"carry"``; not needed for a ``Cell`` where nothing is
        drawn.
      carry_fns: what happens to the carry around each step, left to right.
      deterministic: draw nothing; zoneout takes its mean.
      **settings: every other attribute of ``recurrent_gates.RNN``, as there: ``time_major``,
        ``return_carry``, ``reverse``, ``keep_order``, ``unroll``, ``remat``, ``backend``.

    Raises:
      TypeError: as ``Cell`` does.
      ValueError: as ``Cell`` does, or if a ``Cell`` has other ``in_features``.
    """

    def __init__(
        self,
        cell: base.Cell | Cell,
        in_features: Any = None,
        *,
        rngs: nnx.Rngs | None = None,
        carry_fns: Sequence[CarryFn] = (),
        deterministic: bool = False,
        **settings: Any,
    ) -> None:
        module = _module(cell, in_features, rngs)
        layer = layers.RNN(module.cell, parent=None, **settings)
        super().__init__(layer, {"cell": module}, ["carry"], rngs, carry_fns, deterministic)


class Stack(_Layer):
    """Layers of cells with dropout between them: ``recurrent_gates.Stack`` as an NNX module.

    Carry functions and dropout draw from streams of its own, forked from ``"carry"`` and
    ``"dropout"``. ``train()`` and ``eval()`` set whether anything is drawn.

    Args:
      cells: the cells, first layer first, as in ``RNN``. Layers share parameters if they are
        the same ``Cell`` of this module; the same library cell twice is two layers.
      in_features: D, the width of the inputs of the first layer; that of the others is known.
      rngs: streams ``"params"``, ``"carry"`` and ``"dropout"``.
      carry_fns: carry functions of every layer, or one sequence of them per layer.
      deterministic: draw nothing; zoneout takes its mean, dropout is off.
      **settings: every other attribute of ``recurrent_gates.Stack``, as there: ``dropout``,
        ``shared_noise``, ``time_major``, ``return_carry``, ``reverse``, ``keep_order``,
        ``unroll``, ``remat``, ``backend``.

    Raises:
      TypeError: as ``Cell`` does.
      ValueError: as ``Cell`` and ``recurrent_gates.Stack`` do, or if a ``Cell`` does not read
        what the layer below emits.
    """

    def __init__(
        self,
        cells: Sequence[base.Cell | Cell],
        in_features: Any = None,
        *,
        rngs: nnx.Rngs | None = None,
        carry_fns: Sequence[Any] = (),
        deterministic: bool = False,
        **settings: Any,
    ) -> None:
        modules: dict[str, Cell] = {}
        for cell in cells:
            module = _module(cell, in_features, rngs)
            modules[f"cells_{len(modules)}"] = module
            in_features = _out_features(module)
        # One object for each layer: linen takes the same object twice for one layer's parameters.
        copies = tuple(module.cell.copy(parent=None) for module in modules.values())
        layer = layers.Stack(copies, parent=None, **settings)
        streams = ["carry", "dropout"]
        super().__init__(layer, modules, streams, rngs, carry_fns, deterministic)

    def _stream_names(self, keywords: Mapping[str, Any]) -> list[str]:
        drops = self._layer.dropout > 0 and len(self._names) > 1 and keywords.get("masks") is None
        return super()._stream_names(keywords) + ["dropout"] * drops


def to_linen(module: nnx.Module) -> dict[str, Any]:
    """The parameters of a module as linen has them.

    Args:
      module: a module of this file, or a model that holds some: its tree is that of the linen
        model whose submodules have the names of its attributes.

    Returns:
      A tree of dicts, linen's ``variables["params"]``.
    """
    return _with_lists(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def load_linen(module: nnx.Module, params: Mapping[str, Any]) -> None:
    """Puts the parameters of a linen model into a module, in place.

    Args:
      module: as in ``to_linen``.
      params: ``variables["params"]`` of the linen model, in boxes or not; arrays keep their dtypes.

    Raises:
      ValueError: if names or shapes are not those of the module; it is left as it was.
    """
    params = nn.unbox(params)
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    expected_shapes = {path: jnp.shape(leaf.get_value()) for path, leaf in state}
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    arrays = {tuple(_name(entry) for entry in path): leaf for path, leaf in flat}
    shapes = {path: jnp.shape(leaf) for path, leaf in arrays.items()}
    hint = " (give variables['params'])" if "params" in params else ""
    for path in [*expected_shapes, *shapes]:
        if expected_shapes.get(path) != shapes.get(path):
            expected, actual = (
                f"one of shape {tree[path]}" if path in tree else "none"
                for tree in (expected_shapes, shapes)
            )
            name = "/".join(map(str, path))
            raise ValueError(
                f"The module expects {expected} as parameter {name}, got {actual}{hint}."
            )
    loaded = [(path, leaf.replace(jnp.asarray(arrays[path]))) for path, leaf in state]
    nnx.update(module, nnx.from_flat_state(loaded))


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.meta.AxisMetadata)


def _param(leaf: Any) -> nnx.Param:
    """A parameter from an array or linen's box of one."""
    if not isinstance(leaf, nn.Partitioned):
        return nnx.Param(nn.unbox(leaf))
    # As in linen nothing is laid out yet, and there need be no mesh.
    return nnx.Param(nn.unbox(leaf), out_sharding=leaf.names, eager_sharding=False)


def _with_lists(tree: Any) -> Any:
    """The tree with lists where the keys of a dict count from 0, as NNX writes them."""
    if not isinstance(tree, Mapping):
        return tree
    entries = {name: _with_lists(value) for name, value in tree.items()}
    if entries and all(isinstance(name, int) for name in entries):
        return [entries[index] for index in sorted(entries)]
    return entries


def _name(entry: Any) -> Any:
    """The key or the index that an entry of a path stands for."""
    return entry.idx if isinstance(entry, jax.tree_util.SequenceKey) else entry.key


def _tuples(carry_fns: Any) -> Any:
    """Carry functions, or sequences of them, in tuples: attributes that are static need a hash."""
    if isinstance(carry_fns, Sequence):
        return tuple(_tuples(entry) for entry in carry_fns)
    return carry_fns


def _module(cell: Any, in_features: Any, rngs: nnx.Rngs | None) -> Cell:
    """A Cell as it is, if it reads ``in_features``; or one made of a library cell."""
    if not isinstance(cell, Cell):
        if in_features is None:
            _checked_cell(cell)
            raise ValueError("Give in_features, the width of the inputs, beside a cell.")
        return Cell(cell, in_features, rngs=rngs)
    if in_features is not None and in_features != cell.in_features:
        raise ValueError(
            f"This Cell was made for inputs of width {cell.in_features}, not {in_features}."
        )
    return cell


def _out_features(module: Cell) -> Any:
    """The width of what a cell emits."""

    def emit(params: base.Params, inputs: Any) -> Any:
        z = module.cell.project(params, inputs)
        return module.cell.emit(params, module.cell.initial(()), z)

    inputs = jax.tree.map(lambda width: jnp.zeros((width,), jnp.float32), module.in_features)
    with jax.numpy_dtype_promotion("standard"):  # only the shape counts
        y = jax.eval_shape(emit, module.params, inputs)
    return jax.tree.map(lambda leaf: leaf.shape[-1], y)


def _checked_cell(cell: Any) -> base.Cell:
    if isinstance(cell, base.Cell):
        return cell
    if inspect.isclass(cell):
        raise TypeError(
            f"An instance of a cell is needed, got the class {cell.__name__}: "
            f"write {cell.__name__}(features)."
        )
    if isinstance(cell, nn.RNNCellBase):
        raise TypeError(
            f"{type(cell).__name__} is not a cell of recurrent_gates: wrap it in FlaxCell."
        )
    raise TypeError(
        f"A cell of recurrent_gates is needed, such as LSTM(32), got {type(cell).__name__}."
    )


def _check_inputs(module: Cell, inputs: Any) -> None:
    """Raises ValueError if the last axes of inputs are not as wide as the cell was made for."""
    shapes = jax.tree.map(jnp.shape, inputs)
    widths = jax.tree.map(lambda x: jnp.shape(x)[-1:], inputs)
    expected_widths = jax.tree.map(lambda width: (width,), module.in_features)
    if widths != expected_widths:
        raise ValueError(
            f"This {type(module.cell).__name__} was made for inputs of width "
            f"{module.in_features}, got shape {shapes}."
        )


def _checked_width(width: Any) -> int:
    try:
        number = operator.index(width)
    except TypeError:
        number = 0
    if number < 1 or isinstance(width, bool):
        raise ValueError(f"in_features is the positive width of the inputs, got {width!r}.")
    return number


def _stream(rngs: Any, name: str) -> nnx.RngStream | None:
    """The stream of that name, the default one in its place, or None."""
    if rngs is None:
        return None
    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"rngs must be an nnx.Rngs, such as nnx.Rngs(0), got {type(rngs).__name__}."
        )
    try:
        return rngs[name]
    except KeyError:
        return None
