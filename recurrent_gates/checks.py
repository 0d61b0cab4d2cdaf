"""What an argument must be: each function returns, or raises one sentence on what it is instead.

Sizes, types and settings are known before anything is computed. The values of an array are looked
at where it holds any: under ``jit`` there is nothing to look at, and they are not checked.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import export

Tree = Any


def described(value: Any) -> str:
    """A value in a few words, for the end of a sentence."""
    if value is None or isinstance(value, (bool, int, float, complex, np.generic)):
        return repr(value)
    if isinstance(value, str):
        return f"the string {value!r}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value))
        return f"a mapping of {names}" if names else "an empty mapping"
    if hasattr(value, "_fields"):
        return f"{type(value).__name__}({', '.join(value._fields)})"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if inspect.isroutine(value):
        return f"the function {getattr(value, '__name__', value)}"
    return f"an object of the class {type(value).__name__}"


def is_array(value: Any) -> bool:
    """Whether a value has a shape and a dtype: an array, a tracer or a shape of one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _concrete(array: Any) -> np.ndarray | None:
    """The values of an array, or None where they are not known, or not all here."""
    if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return None
    return np.asarray(array)


# ---------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------


def whole_number(subject: str, value: Any, minimum: int = 1) -> int:
    """An int from a whole number of at least ``minimum``, NumPy's included."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, (bool, np.bool_)) or number < minimum:
        raise ValueError(f"{subject}, at least {minimum}, got {described(value)}.")
    return number


def flag(name: str, value: Any) -> bool:
    """A bool that decides what is traced."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {described(value)}.")
    return bool(value)


def floating(name: str, dtype: Any) -> None:
    """A floating dtype, as a dtype, a scalar type or a name."""
    try:
        fits = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        fits = False
    if not fits or dtype is None:
        text = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", dtype)
        raise ValueError(f"{name} must be a floating dtype such as jnp.float32, got {text!r}.")


def function(name: str, value: Any, such_as: str) -> None:
    """A function, by itself and not by name."""
    if not callable(value):
        raise ValueError(f"{name} must be a function such as {such_as}, got {described(value)}.")


def numbers(owner: Any, *names: str) -> None:
    """Settings that are finite numbers; they become floats, since NumPy's would widen a loop."""
    for name in names:
        value = getattr(owner, name)
        if not _is_number(value) or not math.isfinite(value):
            subject = f"{type(owner).__name__} {name}"
            raise ValueError(f"{subject} must be a finite number, got {described(value)}.")
        object.__setattr__(owner, name, float(value))


def period(name: str, value: Any) -> Any:
    """A float above 0 from any number, None or ``"auto"``."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if not _is_number(value) or not 0 < value < math.inf:
        text = described(value)
        raise ValueError(f"{name} must be a period above 0, None or 'auto', got {text}.")
    return float(value)


def _is_number(value: Any) -> bool:
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool)


def instance(name: str, value: Any, of: type, such_as: str) -> None:
    """An object of one of our classes."""
    if not isinstance(value, of):
        raise ValueError(
            f"{name} must be a {of.__name__} such as {such_as}, got {described(value)}."
        )


def cell_settings(cell: Any) -> None:
    """The settings of cells with recurrent products; ``features`` and ``heads`` become ints."""
    name = type(cell).__name__
    features_and_dtypes(cell)
    if hasattr(cell, "heads"):
        cell.heads = whole_number(f"{name} needs a positive integer number of heads", cell.heads)
    vectors = cell.bias_vectors
    if isinstance(vectors, bool) or vectors not in (1, 2) or not hasattr(vectors, "__index__"):
        raise ValueError(f"{name} has 1 or 2 bias vectors, got {described(vectors)}.")
    for role in ("kernel_init", "recurrent_kernel_init", "bias_init"):
        function(f"{name} {role}", getattr(cell, role), "nn.initializers.zeros")


def heads(cell: Any) -> None:
    """Heads that divide every recurrent product of a cell."""
    for slot, width in cell.slots.items():
        if width % cell.heads:
            raise ValueError(
                f"The heads of {type(cell).__name__} must divide the {width} units of its "
                f"{slot!r}, got {cell.heads}."
            )


def input_gated_settings(cell: Any) -> None:
    """The settings of a cell whose gates read the input alone; ``features`` becomes an int."""
    features_and_dtypes(cell)
    for role in ("kernel_init", "bias_init"):
        function(f"{type(cell).__name__} {role}", getattr(cell, role), "nn.initializers.zeros")


def features_and_dtypes(cell: Any) -> None:
    """The settings that every cell of ours has; ``features`` becomes an int."""
    name = type(cell).__name__
    cell.features = whole_number(
        f"{name} needs a positive integer number of features", cell.features
    )
    if cell.dtype is not None:
        floating(f"{name} dtype", cell.dtype)
    floating(f"{name} param_dtype", cell.param_dtype)


# ---------------------------------------------------------------------------------------
# Cells and their parameters
# ---------------------------------------------------------------------------------------


def cell(name: str, value: Any, base: type) -> None:
    """An unbound cell of ours.

    Raises:
      TypeError: if it is something else.
    """
    if isinstance(value, base):
        return
    if isinstance(value, str):
        hint = f"write CELLS[{value!r}](features)"
    elif isinstance(value, type) and issubclass(value, nn.Module):
        hint = f"write {value.__name__}(...) with its settings"
    elif isinstance(value, nn.RNNCellBase):
        hint = f"wrap {type(value).__name__} in FlaxCell"
    elif isinstance(value, nn.Module):
        hint = "a layer has an apply of its own"
    elif isinstance(value, functools.partial):
        raise TypeError(f"{name} needs a cell, got the factory of one: call it, CELLS['lstm'](32).")
    else:
        hint = "LSTM(32), say"
    raise TypeError(f"{name} needs a recurrent_gates cell, got {described(value)}: {hint}.")


def unbound(name: str, value: Any, base: type) -> Any:
    """A cell without variables, as it can be hashed: Flax binds one that is part of a module."""
    cell(name, value, base)
    return value if value.scope is None else value.copy(parent=None)


def key(name: str, value: Any) -> None:
    """One PRNG key, of the new type or the old."""
    single = is_array(value) and (
        jnp.ndim(value) == 0
        if _is_key(value)
        else value.dtype == jnp.uint32 and jnp.ndim(value) == 1
    )
    if not single:
        raise ValueError(f"{name} must be one PRNG key, jax.random.key(0), got {described(value)}.")


def shape(name: str, value: Any) -> tuple[int, ...]:
    """Sizes, as a tuple."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(
            f"{name} must be a tuple of sizes such as (8,) or (), got {described(value)}."
        )
    for size in value:
        if not hasattr(size, "__index__") and not export.is_symbolic_dim(size):
            raise ValueError(f"{name} must hold whole numbers, got {described(size)}.")
    return tuple(value)


def in_features(value: Any) -> int:
    """D, the number of input features."""
    if is_array(value) and jnp.ndim(value):
        raise ValueError(
            f"in_features is the number D of input features, xs.shape[-1], got {described(value)}."
        )
    return whole_number("in_features is a whole number D of input features", value)


@functools.lru_cache(maxsize=256)
def _shapes_of(cell: Any, width: int | None) -> Any:
    """The shapes of the parameters for inputs of a width, or of the initial carry of no batch."""
    if width is None:
        return jax.eval_shape(lambda: cell.initial(()))
    return jax.eval_shape(lambda: nn.unbox(cell.init_params(jax.random.key(0), width)))


def _expected(cell: Any, width: int | None) -> Any:
    try:
        return _shapes_of(cell, width)
    except TypeError:  # bound inside a module, a cell has no hash
        return _shapes_of.__wrapped__(cell, width)


def _name(cell: Any) -> str:
    features = getattr(cell, "features", None)
    return type(cell).__name__ if features is None else f"{type(cell).__name__}({features})"


def ours(cell: Any) -> bool:
    """Whether a cell has parameters as this library's cells do, and so reads one array."""
    return getattr(type(cell).init_params, "__module__", "").startswith("recurrent_gates.")


def params(cell: Any, tree: Any, width: int | None) -> None:
    """Parameters that fit the cell and inputs ``[..., width]``.

    Of a cell of ours every entry is held to ``init_params``, but that the second bias vector may
    be there or not. Of a user's cell only that it is a dict.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(
            f"params must be the dict that {type(cell).__name__}.init_params(key, D) gives, got "
            f"{described(tree)}."
        )
    if not ours(cell) or width is None or not width:
        return
    _params("", _expected(cell, width), tree, cell, width)


def _params(path: str, spec: Any, tree: Any, cell: Any, width: int) -> None:
    place = f"params{path}"
    if isinstance(spec, Mapping):
        missing, extra = _names(spec, tree)
        if missing or extra:
            hint = nested(tree) if not path else ""
            names = f"must have {', '.join(spec)}" if spec else "must be empty"
            raise ValueError(f"{place} of {_name(cell)} {names}, got {described(tree)}{hint}.")
        for name, value in spec.items():
            if name in tree:
                _params(f"{path}[{name!r}]", value, tree[name], cell, width)
        return
    if not is_array(tree) or not jnp.issubdtype(tree.dtype, jnp.floating):
        raise ValueError(f"{place} must be a floating array, got {described(tree)}.")
    if tree.shape != spec.shape:
        raise ValueError(
            f"{place} of {_name(cell)} must be {list(spec.shape)} for inputs of {width} features, "
            f"got {list(tree.shape)}: it is of another size, or of inputs of another width."
        )


_EITHER = {"recurrent_bias"}  # one bias vector or two compute the same with their sum


def _names(spec: Mapping[str, Any], tree: Any) -> tuple[set[str], set[str]]:
    if not isinstance(tree, Mapping):
        return set(spec), set()
    return set(spec) - set(tree) - _EITHER, set(tree) - set(spec) - _EITHER


def nested(tree: Any) -> str:
    """Where in a layer's variables a cell's parameters are."""
    path, inner = "", tree
    for name in ("params", "cell"):
        if isinstance(inner, Mapping) and name in inner:
            path, inner = f"{path}[{name!r}]", inner[name]
    layers = isinstance(inner, Mapping) and any(str(name).startswith("cells_") for name in inner)
    if layers:
        return f": pass {path}['cells_0'] of it for the first layer"
    return f": pass {path} of it" if path else ""


def kernels(tree: Any, role: str = "kernel") -> None:
    """Parameters of linear maps by slot."""
    if isinstance(tree, Mapping) and isinstance(tree.get(role), Mapping):
        return
    raise ValueError(
        f"params must be a cell's own, with {role!r}, got {described(tree)}{nested(tree)}."
    )


def projections(z: Any) -> None:
    """What ``project`` makes, ``{slot: array}``; not the input."""
    if not isinstance(z, Mapping):
        raise ValueError(
            f"z_t must be what cell.project(params, x_t) makes, a dict by slot, got {described(z)}."
        )


# ---------------------------------------------------------------------------------------
# Carries
# ---------------------------------------------------------------------------------------


def _shapes(tree: Tree) -> str:
    return ", ".join(str(list(jnp.shape(leaf))) for leaf in jax.tree.leaves(tree))


def _fields(carry: Any) -> tuple[str, ...]:
    return getattr(carry, "_fields", ())


def arranged(name: str, carry: Any, initial: Any) -> Any:
    """A carry in the structure of the initial one: a tuple for a NamedTuple becomes one.

    Raises:
      ValueError: if it has other fields.
    """
    if isinstance(carry, Mapping) and set(carry) == set(_fields(initial)):
        carry = type(initial)(**carry)
    expected: Any = jax.tree.structure(initial)
    structure: Any = jax.tree.structure(carry)
    if structure == expected:
        return carry
    names_differ = _fields(carry) and _fields(initial) and _fields(carry) != _fields(initial)
    if names_differ or structure.num_leaves != expected.num_leaves or isinstance(carry, Mapping):
        raise ValueError(f"{name} must be {described(initial)}, got {described(carry)}.")
    return jax.tree.unflatten(expected, jax.tree.leaves(carry))


def carry(name: str, value: Any, initial: Any) -> Any:
    """A carry in the structure, the shapes and the dtypes of the initial one.

    PRNG keys stay as they are.
    """
    value = arranged(name, value, initial)
    leaves = jax.tree.leaves(value)
    for leaf, like in zip(leaves, jax.tree.leaves(initial), strict=True):
        if _is_key(like) and (not _is_key(leaf) or leaf.dtype != like.dtype):
            raise ValueError(f"{name} must hold PRNG keys {like.dtype}, got {described(leaf)}.")
        if not _is_key(like) and not _numeric(leaf):
            raise ValueError(f"{name} must hold arrays of numbers, got {described(leaf)} in it.")
    shapes = [jnp.shape(leaf) for leaf in leaves]
    expected_shapes = [leaf.shape for leaf in jax.tree.leaves(initial)]
    if shapes != expected_shapes:
        raise ValueError(f"{name} has shapes {shapes}; this cell and batch need {expected_shapes}.")
    return jax.tree.map(lambda a, b: a if _is_key(b) else jnp.asarray(a, b.dtype), value, initial)


def _is_key(leaf: Any) -> bool:
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _numeric(leaf: Any) -> bool:
    if not is_array(leaf):
        return isinstance(leaf, (bool, int, float, complex))
    return bool(jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool)


def step(cell: Any, carry: Any, z_t: Any) -> None:
    """The arguments of a step of a cell of ours: a carry of its kind and projections."""
    initial = _expected(cell, None)
    if _fields(carry) != _fields(initial):
        hint = "; the order is step(params, carry, z_t)" if isinstance(carry, Mapping) else ""
        raise ValueError(
            f"The carry of {_name(cell)} must be {described(initial)}, got "
            f"{described(carry)}{hint}."
        )
    projections(z_t)


def one_time(carry: Any, z_t: Mapping[str, Any]) -> None:
    """A carry and projections by slot of one time, with the same batch dims."""
    state, inputs = jax.tree.leaves(carry)[:1], jax.tree.leaves(z_t)[:1]
    if state and inputs and jnp.ndim(state[0]) != jnp.ndim(inputs[0]):
        raise ValueError(
            f"A step takes the carry and z_t of one time, got {_shapes(state)} and "
            f"{_shapes(inputs)}."
        )


def call(cell: Any, carry: Any, inputs: Any) -> None:
    """The arguments of ``cell(carry, x)``."""
    if _fields(inputs) or isinstance(inputs, str) or inputs is None:
        raise ValueError(
            f"A cell is called as cell(carry, x) with x [*batch, D], got {described(inputs)} for x."
        )
    if not is_array(inputs):
        return
    if not jnp.ndim(inputs):
        raise ValueError("A cell is called as cell(carry, x) with x [*batch, D], got a number.")
    initial = jax.eval_shape(lambda: cell.initial(jnp.shape(inputs)[:-1]))
    expected: Any = jax.tree.structure(initial)
    if jax.tree.structure(carry) != expected:
        raise ValueError(
            f"The carry of {_name(cell)} must be {described(initial)}, got {described(carry)}: "
            "cell.initial(batch_shape) makes one."
        )
    if ours(cell) and _shapes(carry) != _shapes(initial):  # others may read x of several axes
        raise ValueError(
            f"The carry of {_name(cell)} has shapes {_shapes(carry)}; inputs "
            f"{list(jnp.shape(inputs))} need {_shapes(initial)}."
        )


# ---------------------------------------------------------------------------------------
# Sequences
# ---------------------------------------------------------------------------------------


def sequence(xs: Any) -> None:
    """Inputs with time first."""
    leaves = jax.tree.leaves(xs)
    if not leaves or not all(is_array(leaf) and jnp.ndim(leaf) >= 2 for leaf in leaves):
        kinds = ", ".join(described(leaf) for leaf in leaves[:3])
        raise ValueError(
            f"xs must be an array [T, *batch, D] with time first, got {kinds or described(xs)}."
        )


def rising(name: str, times: jax.Array, resets: Any) -> None:
    """Times that do not go back within a sequence, where their values are known.

    NaN says nothing; where resets are not known, nor does a time that goes back.
    """
    values = _concrete(times)
    starts = np.zeros(times.shape, bool) if resets is None else _concrete(resets)
    if values is None or starts is None or not values.size:
        return
    if not starts.any():
        back = values[1:] < np.fmax.accumulate(values)[:-1]
        steps = [int(step) + 1 for step in np.flatnonzero(back.reshape(len(back), -1).any(axis=1))]
    else:
        latest, steps = values[0], []
        for step in range(1, len(values)):
            latest = np.where(starts[step], np.nan, latest)
            steps += [step] if (values[step] < latest).any() else []
            latest = np.fmax(latest, values[step])
    if len(steps):
        raise ValueError(
            f"{name} must not go back, but step {steps[0]} is before an earlier one; the time of "
            "padding is NaN."
        )


def one_array(x: Any) -> None:
    """Inputs of one array, numbers in lists included, and not a list of arrays."""
    listed = isinstance(x, (list, tuple)) and any(is_array(leaf) for leaf in x)
    if listed or isinstance(x, (Mapping, str)) or x is None:
        raise ValueError(f"Inputs must be one array [..., D], got {described(x)}: jnp.stack them.")


def inputs(x: Any, in_features: int) -> jax.Array:
    """Floating-point inputs ``[..., D]`` of so many features."""
    one_array(x)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"Inputs must be floating point, got {x.dtype}; embed or cast them.")
    if x.ndim < 1 or x.shape[-1] != in_features:
        raise ValueError(
            f"Inputs of shape {x.shape} do not fit a kernel for {in_features} input features."
        )
    return x


def chunk_length(remat: Any, steps: int) -> int:
    """The steps of a chunk of time that is rematerialised."""
    remat = whole_number("remat is a chunk length in steps", remat)
    if export.is_symbolic_dim(steps):
        raise ValueError(f"remat={remat} cuts time into chunks, and T is symbolic: drop remat.")
    return remat


def lengths(value: Any, steps: int, batch_shape: tuple[int, ...]) -> jax.Array:
    """Lengths int32 ``[*batch]``, from 0 to T where their values are known."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != batch_shape:
        raise ValueError(
            f"lengths must be integers of shape {batch_shape}, "
            f"got {value.dtype} of shape {value.shape}."
        )
    values = None if export.is_symbolic_dim(steps) else _concrete(value)
    if values is not None and values.size and not 0 <= values.min() <= values.max() <= steps:
        outlier = values[(values < 0) | (values > steps)][0]
        raise ValueError(f"lengths must be from 0 to T = {steps}, got {outlier}.")
    value = jnp.asarray(value)
    if value.dtype.itemsize >= 4:  # which holds T; under jit what is beyond it counts as T
        value = jnp.clip(value, 0, jnp.asarray(steps).astype(value.dtype))
    return value.astype(jnp.int32)  # in a narrower dtype the numbers of steps would wrap around


def mask(name: str, value: Any, steps: int, batch_shape: tuple[int, ...]) -> jax.Array | None:
    """A bool mask ``[T, *batch]``, or integers in the place of one; None stays None."""
    if value is None:
        return None
    value = jnp.asarray(value)
    if value.shape != (steps, *batch_shape):
        raise ValueError(f"{name} must have shape {(steps, *batch_shape)}, got {value.shape}.")
    if value.dtype != bool and not jnp.issubdtype(value.dtype, jnp.integer):
        raise ValueError(
            f"{name} must be a bool mask, got {value.dtype}: compare it, {name} > 0.5."
        )
    return value.astype(bool)


def laid_out(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """A mask that is laid out as a layer's inputs; None stays None."""
    if value is None:
        return None
    value = jnp.asarray(value)
    if value.shape != shape:
        raise ValueError(
            f"{name} must be laid out as the inputs without features, {shape}, got {value.shape}."
        )
    return value


def carry_fns(value: Any, base: type) -> tuple[Any, ...]:
    """Carry functions as a tuple."""
    if isinstance(value, base):
        kind = type(value).__name__
        raise ValueError(f"carry_fns must be a sequence, got one {kind}: write [{kind}(...)].")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(
            f"carry_fns must be a sequence of carry functions such as [Detach(0.25)], got "
            f"{described(value)}."
        )
    for fn in value:
        if not isinstance(fn, base):
            raise ValueError(
                f"carry_fns must hold carry functions such as Detach(0.25), got {described(fn)}."
            )
        if jax.tree_util.all_leaves([fn]):
            raise ValueError(f"{type(fn).__name__} needs the decorator @flax.struct.dataclass.")
    return tuple(value)


def no_noise(value: Any, count: int) -> tuple[None, ...]:
    """No entry for each of so many carry functions."""
    if any(entry is not None for entry in jax.tree.leaves(value)):
        raise ValueError("noise has no effect with deterministic=True, which draws nothing.")
    return (None,) * count


def noise(value: Any, count: int, steps: int) -> tuple[Any, ...]:
    """One entry per carry function, with leading axis T."""
    if is_array(value) or not isinstance(value, Sequence):
        raise ValueError(
            f"noise must be a sequence with one entry per carry function, got {described(value)}."
        )
    value = tuple(value)
    if len(value) != count:
        raise ValueError(f"noise needs one entry per carry function: {count}, got {len(value)}.")
    for entry in jax.tree.leaves(value):
        if not is_array(entry) or jnp.ndim(entry) < 1 or entry.shape[0] != steps:
            text = f"shape {entry.shape}" if is_array(entry) else described(entry)
            raise ValueError(f"noise must have leading axis T = {steps}, got {text}.")
    return value
