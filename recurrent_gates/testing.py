"""The conformance suite: what a cell must satisfy to run under everything here.

It is two calls, ``recurrent_gates.testing.check_cell(MyCell(features=8))`` and ``check_replay`` of
the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.test_util import check_grads

from recurrent_gates.base import Cell, feed_back
from recurrent_gates.checks import described, is_array
from recurrent_gates.declared import Carry, Params, Sums, outdated, state_dtype, summed_fields
from recurrent_gates.layers import RNN
from recurrent_gates.scan import select, unroll

__all__ = [
    "check_cell",
    "check_replay",
]

_STEPS, _BATCH = 5, 3

Replay = Callable[[Params, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""(params, xs ``[T, B, D]``, dones ``[T, B]``) -> (the last carry, ys ``[T, B, F]``)."""


def check_cell(
    cell: Cell, in_features: int = 3, *, tolerance: float = 2e-5, stops_gradients: bool = False
) -> None:
    """Checks that a cell keeps its contract; raises on the first breach.

    Checked: settings hash and compare; ``init_params`` and ``cell.init`` give the same tree;
    a step keeps the carry's structure, shapes and dtypes, floats of at least float32;
    summed fields feed nothing back; units do not interact in a ``diagonal`` cell, nor in a
    ``linear`` one, whose step is affine in the carry;
    ``project`` and ``emit`` are pointwise in time; a sequence equals a loop of single steps;
    vmap equals a batch; masks hold the carry, resets restart it; gradients match finite
    differences and are finite at large inputs; the cell runs in ``nn.RNN`` and equals ``RNN``;
    a second call does not compile again.

    Args:
      cell: an unbound cell.
      in_features: D of the inputs that it is tried on.
      tolerance: allowed difference, relative to the largest entry, in float32.
      stops_gradients: the cell cuts a gradient on purpose, which finite differences do not know
        of: they are left out, and gradients need only be finite.

    Raises:
      AssertionError: with one sentence that says what does not hold; an error of another kind
        that the cell raises is its cause.
    """
    name = _name_of(cell)
    key, x_key = jax.random.split(jax.random.key(0))
    _require(
        _settings_compare(cell),
        f"{name} needs hashable settings that compare equal when they are; keep arrays out.",
    )
    with _as_assertion(name, "init_params(key, in_features)"):
        params = cell.init_params(key, in_features)
        xs = _inputs(x_key, (_STEPS, _BATCH, in_features), params)
    with _as_assertion(name, "initial(batch_shape)"):
        carry = cell.initial((_BATCH,))
        _require(
            all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(carry)),
            f"{name}.initial must return arrays, got {described(carry)}.",
        )
    with _as_assertion(name, "a step as a Flax module"):
        _check_flax_init(cell, params, carry, xs)
    with _as_assertion(name, "step(params, carry, z_t)"):
        _check_step(cell, params, carry, xs)
    with _as_assertion(name, "a step of one example, without a batch"):
        _check_promises(cell, params, xs[:, 0], tolerance)
    with _as_assertion(name, "a sequence"):
        _check_time(cell, params, xs, tolerance)
    with _as_assertion(name, "a sequence with masks"):
        _check_masks(cell, params, xs, tolerance)
    with _as_assertion(name, "the gradient of a sequence"):
        _check_gradients(cell, params, xs, differences=not stops_gradients)
    with _as_assertion(name, "RNN and nn.RNN"):
        _check_layers(cell, xs, tolerance)
    with _as_assertion(name, "a second call"):
        _check_compiles_once(cell, params, xs)


def check_replay(
    cell: Cell, in_features: int = 3, *, replay: Replay | None = None, tolerance: float = 1e-6
) -> None:
    """Checks that a replayed sequence is what an agent saw while it acted.

    Acting goes step by step: an example whose episode is done after step t starts step t + 1
    from ``cell.initial``. Replaying is one call over all steps, so its ``resets`` are the dones
    one step later.

    Args:
      cell: an unbound cell.
      in_features: D of the inputs that it is tried on.
      replay: a replay of one's own, (params, xs ``[T, B, D]``, dones ``[T, B]``) -> (the carry
        after the last step, ys ``[T, B, F]``), where dones is True at the last step of an
        episode. Default: ``unroll`` with the dones one step later as ``resets``.
      tolerance: allowed difference, relative to the largest entry.

    Raises:
      AssertionError: with one sentence that says from which step they differ.
    """
    name = _name_of(cell)
    steps, batch = 12, 4
    key, x_key = jax.random.split(jax.random.key(0))
    # Episodes of several lengths: of one step, over the end, side by side, and none that ends.
    dones = jnp.zeros((steps, batch), bool)
    for row, ends in enumerate([(2, 6), (0, 1, 11), (4,)]):
        dones = dones.at[jnp.array(ends), row].set(True)
    with _as_assertion(name, "acting step by step"):
        params = cell.init_params(key, in_features)
        xs = _inputs(x_key, (steps, batch, in_features), params)
        trace = _act(cell, params, xs, dones)
    with _as_assertion(name, "the replay"):
        carry, ys = (replay or _replayed_by(cell))(params, xs, dones)
    _require(
        _describe(ys) == _describe(trace[1]),
        f"{name}: the replay's outputs are {described(ys)}, those of acting {described(trace[1])}.",
    )
    scale = jnp.maximum(jnp.max(jnp.abs(trace[1])), 1e-3)
    distances = jnp.max(jnp.abs(ys - trace[1]).reshape(steps, -1), axis=1) / scale
    misses = [t for t in range(steps) if not distances[t] <= tolerance]
    _require(
        not misses,
        f"{name}: the replay differs from acting from step {min(misses, default=0)} on (relative "
        f"difference {float(jnp.max(distances)):.1e}): a reset acts before the step after a done.",
    )
    _require_close(
        carry, trace[0], tolerance, f"{name}: the replay's last carry differs from that of acting"
    )


def _inputs(key: jax.Array, shape: tuple[int, ...], params: Params) -> jax.Array:
    """Draws as wide as the widest parameters, and float32 at least, whatever JAX's own width is."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(params) if is_array(leaf)]
    floats = [state_dtype(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    dtype = max(floats, key=lambda dtype: dtype.itemsize, default=jnp.float32)
    return jax.random.normal(key, shape, dtype)


def _act(cell: Cell, params: Params, xs: jax.Array, dones: jax.Array) -> tuple[Carry, jax.Array]:
    """The carry after the last step, and the outputs, of one step at a time."""
    step = _stepper(cell, params)
    start = cell.initial(xs.shape[1:-1])
    carry, next_carry, ys = start, start, []
    for x, done in zip(xs, dones, strict=True):
        next_carry, y = step(carry, x)
        ys.append(y)
        carry = select(done, start, next_carry)
    return next_carry, jnp.stack(ys)


def _replayed_by(cell: Cell) -> Replay:
    def replay(params: Params, xs: jax.Array, dones: jax.Array) -> tuple[Carry, jax.Array]:
        resets = jnp.concatenate([jnp.zeros_like(dones[:1]), dones[:-1]])
        return unroll(cell, params, xs, resets=resets)

    return replay


def _name_of(cell: Any) -> str:
    name = type(cell).__name__
    _require(
        isinstance(cell, Cell),
        f"{described(cell)[0].upper()}{described(cell)[1:]} must derive from recurrent_gates.Cell."
        if not isinstance(cell, type)
        else f"This needs a cell, {cell.__name__}(...), and not its class.",
    )
    return name


@contextlib.contextmanager
def _as_assertion(name: str, subject: str) -> Iterator[None]:
    """An error of any kind as an AssertionError of one sentence."""
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:  # a cell of the user's own may fail in any way
        line = (str(error).strip().splitlines() or [""])[0]
        raise AssertionError(f"{name}: {subject} raised {type(error).__name__}: {line}") from error


def _settings_compare(cell: Cell) -> bool:
    twin = cell.clone()
    try:
        return hash(cell) == hash(twin) and bool(cell == twin)
    except (TypeError, ValueError):  # an array has no hash and no single truth value
        return False


def _require(condition: Any, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


def _require_close(result: Any, expected: Any, tolerance: float, sentence: str) -> None:
    is_same = _structure(result) == _structure(expected)
    _require(is_same, f"{sentence} (structures {_structure(result)} and {_structure(expected)})")
    for a, b in zip(*map(_numbers, (result, expected)), strict=True):
        _require(a.shape == b.shape, f"{sentence} (shapes {a.shape} and {b.shape})")
        if a.size:
            worst = np.max(np.abs(a - b)) / np.maximum(np.max(np.abs(b)), 1e-3)
            _require(worst <= tolerance, f"{sentence} (relative difference {worst:.1e})")


def _numbers(tree: Any) -> list[np.ndarray[Any, Any]]:
    """The leaves in double precision, counters and masks too: NumPy has nothing to compile."""
    arrays = map(np.asarray, jax.tree.leaves(tree))
    return [a.astype(np.promote_types(a.dtype, np.float64)) for a in arrays]


def _describe(tree: Any) -> Any:
    return jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree)


def _structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def _check_flax_init(cell: Cell, params: Any, carry: Any, xs: jax.Array) -> None:
    name = type(cell).__name__
    _require(isinstance(params, dict), f"{name}.init_params must return a dict.")
    created = jax.eval_shape(cell.init, jax.random.key(1), carry, xs[0]).get("params", {})
    _require(
        _describe(created) == _describe(params),
        f"{name}.init and init_params must give the same tree of parameters.",
    )


def _check_step(cell: Cell, params: Any, carry: Any, xs: jax.Array) -> None:
    name = type(cell).__name__
    new = jax.eval_shape(
        lambda params, x: cell.step(params, carry, cell.project(params, x)), params, xs[0]
    )
    _require(
        _structure(new) == _structure(carry) and _describe(new) == _describe(carry),
        f"{name}.step must keep the carry's structure, shapes and dtypes: "
        f"{_describe(carry)} became {_describe(new)}.",
    )
    for leaf in jax.tree.leaves(carry):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            _require(
                leaf.dtype.itemsize >= 4, f"{name}'s carry must be float32 at least, not less."
            )


def _check_promises(cell: Cell, params: Any, xs: jax.Array, tolerance: float) -> None:
    """What ``sums``, ``diagonal`` and ``linear`` say, of the step after xs ``[T, D]``."""
    name, fields = type(cell).__name__, summed_fields(cell)
    sums = cell.sums if fields else None
    carry, _ = _loop(cell, params, cell.initial(()), xs[:-1])
    z = jax.jit(cell.project)(params, xs[-1])

    if cell.linear and not outdated(cell, "linear"):
        _check_linear(name, lambda carry: cell.step(params, carry, z), carry)

    def fed_back(carry: Any) -> Any:
        new = feed_back(cell, params, carry, z) if sums else cell.step(params, carry, z)
        return new._replace(**dict.fromkeys(fields)) if fields else new

    if sums is not None:
        increment = sums.increment
        summed_values = {field: getattr(carry, field) for field in fields}
        slopes = _jacobian(
            lambda summed_values: (
                fed_back(carry._replace(**summed_values)),
                increment(params, carry._replace(**summed_values), z),
            ),
            summed_values,
        )
        _require(
            not any(np.any(leaf) for leaf in jax.tree.leaves(slopes)),
            f"{name}: neither recur nor increment of its sums may read the fields {fields}.",
        )
        _check_sums(cell, params, carry, z, tolerance)
        _check_bound(name, sums, carry, increment(params, carry, z))
        carry = carry._replace(**dict.fromkeys(fields))
    if not cell.diagonal or outdated(cell, "diagonal"):
        return
    leaves, slopes = jax.tree.leaves(carry), jax.tree.leaves(_jacobian(fed_back, carry))
    for index, block in enumerate(slopes):
        row, column = divmod(index, len(leaves))
        slope = block.reshape(leaves[row].size, leaves[column].size)
        if row == column:
            slope = slope - np.diag(np.diag(slope))
        _require(
            not np.any(slope),
            f"{name} says that it is diagonal, but its units interact.",
        )


def _jacobian(function: Callable[[Any], Any], point: Any) -> Any:
    """In NumPy; compiled, as each of its operations would be by itself."""
    return jax.device_get(jax.jit(jax.jacobian(function))(point))


def _check_linear(name: str, step: Callable[[Carry], Carry], carry: Carry) -> None:
    """That a step is affine in the carry, unit by unit."""
    other_carry = jax.tree.map(lambda c: 2 * np.asarray(c) + 1, carry)
    slopes, other_slopes = (_jacobian(step, point) for point in (carry, other_carry))
    sentence = f"{name} says that it is linear, but a slope of its step depends on the carry"
    _require_close(other_slopes, slopes, 1e-5, sentence)
    for block in jax.tree.leaves(slopes):
        width = block.shape[-1]
        _require(
            block.shape == (width, width) and not np.any(block - np.diag(np.diag(block))),
            f"{name} says that it is linear, but its units interact.",
        )


def _check_sums(cell: Cell, params: Any, carry: Any, z: Any, tolerance: float) -> None:
    """That recur and increment together are the step."""
    sums = cell.sums
    assert sums is not None
    increments = sums.increment(params, carry, z)
    new = sums.add(feed_back(cell, params, carry, z), increments)
    expected = cell.step(params, carry, z)
    sentence = f"{type(cell).__name__}: recur and increment of its sums must be its step."
    for field in expected._fields:
        value, expected_value = getattr(new, field), getattr(expected, field)
        if sums.bound is None or field not in sums.fields:
            _require_close(value, expected_value, tolerance, sentence)
        else:  # a rounding may decide on which side of a period a value lies
            is_close = jnp.isclose(value, expected_value, rtol=1e-4, atol=1e-4)
            _require(jnp.mean(is_close) > 0.7, sentence)


def _check_bound(name: str, sums: Sums, carry: Any, increments: Any) -> None:
    """That sums may be bounded at any time: bound(bound(a) + b) is bound(a + b)."""
    if sums.bound is None:
        return
    for field in sums.fields:
        a, b = getattr(carry, field) - 40, increments[field]
        once, twice = sums.bound(field, a + b), sums.bound(field, sums.bound(field, a) + b)
        # Not all: a rounding may decide on which side of a period a value lies.
        _require(
            jnp.mean(jnp.isclose(once, twice, rtol=1e-4, atol=1e-4)) > 0.7,
            f"{name}: bound of {field!r} must give bound(bound(a) + b) = bound(a + b).",
        )


def _stepper(cell: Cell, params: Params) -> Callable[[Carry, jax.Array], tuple[Carry, Any]]:
    """(carry, x) -> (the next carry, y), compiled."""

    @jax.jit
    def step(carry: Carry, x: jax.Array) -> tuple[Carry, Any]:
        z = cell.project(params, x)
        carry = cell.step(params, carry, z)
        return carry, cell.emit(params, carry, z)

    return step


def _loop(cell: Cell, params: Any, carry: Any, xs: jax.Array) -> tuple[Any, Any]:
    step, ys = _stepper(cell, params), []
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, jax.tree.map(lambda *leaves: np.stack(leaves), *ys)


def _check_time(cell: Cell, params: Any, xs: jax.Array, tolerance: float) -> None:
    name = type(cell).__name__
    expected = _loop(cell, params, cell.initial((_BATCH,)), xs)
    _require_close(
        jax.jit(lambda xs: unroll(cell, params, xs, backend="scan"))(xs),
        expected,
        tolerance,
        f"{name}: a sequence must equal a loop of steps; is project pointwise in time?",
    )
    _require_close(
        jax.jit(lambda xs: unroll(cell, params, xs))(xs),
        expected,
        tolerance,
        f"{name}: the backend chosen for it must equal a loop of steps",
    )
    _require_close(
        jax.jit(jax.vmap(lambda x: unroll(cell, params, x, backend="scan"), 1, (0, 1)))(xs),
        expected,
        tolerance,
        f"{name}: vmap over examples must equal a batch",
    )


def _check_masks(cell: Cell, params: Any, xs: jax.Array, tolerance: float) -> None:
    name = type(cell).__name__
    run = jax.jit(lambda xs, **masks: unroll(cell, params, xs, **masks))
    lengths = jnp.array([0, 2, _STEPS])
    padded = np.array(xs)
    padded[2:, 1] = np.nan
    carry, ys = run(padded, lengths=lengths)
    full_carry, _ = run(xs[:, 2:])
    short_carry, expected = run(xs[:2, 1:2])
    rows = [cell.initial((1,)), short_carry, full_carry]
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
    _require_close(
        carry, joined, tolerance, f"{name}: padding must hold the carry, NaN in it included"
    )
    ys = jax.device_get(ys)
    prefix = jax.tree.map(lambda y: y[:2, 1:2], ys)
    _require_close(
        prefix, expected, tolerance, f"{name}: outputs before padding must not depend on it"
    )
    padding = (np.any(y[2:, 1]) for y in jax.tree.leaves(ys))
    _require(not any(padding), f"{name}: outputs at padding must be zeros.")
    resets = np.arange(_STEPS)[:, None].repeat(_BATCH, axis=1) == 2
    _require_close(
        run(xs, resets=resets)[0],
        run(xs[2:])[0],
        tolerance,
        f"{name}: a reset must equal starting anew",
    )


def _check_gradients(cell: Cell, params: Any, xs: jax.Array, *, differences: bool) -> None:
    name = type(cell).__name__

    @jax.jit
    def run(params: Any, xs: jax.Array) -> jax.Array:
        carry, ys = unroll(cell, params, xs)
        waves = [jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves((carry, ys))]
        return sum(waves[1:], waves[0])

    try:
        if differences:
            check_grads(run, (params, xs), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
    except AssertionError as error:
        raise AssertionError(
            f"{name}: gradients do not match finite differences: {error}"
        ) from error
    large = jax.grad(run, argnums=(0, 1))(params, 1e4 * xs)
    finite = all(np.isfinite(leaf).all() for leaf in jax.device_get(jax.tree.leaves(large)))
    _require(finite, f"{name}: gradients must stay finite at inputs of 1e4.")


def _check_layers(cell: Cell, xs: jax.Array, tolerance: float) -> None:
    name = type(cell).__name__
    xs = jnp.moveaxis(xs, 0, 1)
    theirs, ours = nn.RNN(cell), RNN(cell)
    variables = jax.jit(theirs.init)(jax.random.key(2), xs)
    created = jax.eval_shape(ours.init, jax.random.key(2), xs)
    _require(
        _describe(created) == _describe(variables),
        f"{name}: RNN and nn.RNN must have the same parameters.",
    )
    _require_close(
        jax.jit(ours.apply)(variables, xs),
        jax.jit(theirs.apply)(variables, xs),
        tolerance,
        f"{name}: RNN must equal nn.RNN",
    )


def _check_compiles_once(cell: Cell, params: Any, xs: jax.Array) -> None:
    traces: list[None] = []

    @jax.jit
    def run(params: Any, xs: jax.Array) -> Any:
        traces.append(None)
        return unroll(cell, params, xs)

    jax.block_until_ready((run(params, xs), run(params, xs + 1)))
    _require(len(traces) == 1, f"{type(cell).__name__} compiled again on a second call.")
