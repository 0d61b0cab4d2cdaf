"""GRU-D: a GRU for variables that are measured now and then (Che et al., 2018).

"Recurrent neural networks for multivariate time series with missing values", Scientific Reports 8.
Between two measurements of a variable its last value decays towards the mean, and before each step
the hidden state decays, too, both at trained rates.

Letters: T time, V variables, F features; D = 3V inputs. The paper's x, m and delta are the last
value, whether it was measured now, and the time since the measurement before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from recurrent_gates import checks
from recurrent_gates.base import HiddenState, SlotCell, dense, linear_project
from recurrent_gates.declared import Params, Product, Slots
from recurrent_gates.initializers import Initializer
from recurrent_gates.shapes import lead

_RATES = nn.initializers.uniform(1e-3)


def gru_d_inputs(values: jax.Array, times: jax.Array, resets: jax.Array | None = None) -> jax.Array:
    """What GRU-D reads, from values that were measured at irregular times (Che et al., Methods).

    Args:
      values: differences from the mean of each variable, ``[T, *batch, V]``, floating point; NaN
        where there was no measurement.
      times: of the steps, rising, ``[T, *batch]``, in any unit (rates are per unit and
        start near 0); NaN in the padding, which counts as no step. Differences are taken in their
        own dtype, of 32 bits at least. From NumPy's times, where JAX has fewer bits, each
        sequence's least is subtracted before.
      resets: True where a sequence of its own begins, ``[T, *batch]``.

    Returns:
      ``[T, *batch, 3V]`` in the dtype of values: the last value, 0 (the mean) before the first;
      1 where it was measured now, else 0; the time since the measurement before, or since the
      first step where there is none. Zeros in the padding.

    Raises:
      ValueError: if the shapes do not fit, or values are not floating point.
    """
    is_cut = isinstance(times, np.ndarray) and times.dtype != jnp.result_type(times)
    if is_cut and times.size:  # JAX's dtype has fewer digits than NumPy's
        times = times - np.fmin.reduce(times, axis=0)
        times = times if np.nanmax(times, initial=0) < 2**31 else times.astype(float)
    values, times = jnp.asarray(values), jnp.asarray(times)
    if times.dtype.itemsize < 4:
        is_integer = jnp.issubdtype(times.dtype, jnp.integer)
        times = times.astype(jnp.int32 if is_integer else jnp.float32)
    if values.ndim < 2 or not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(
            f"values must be a floating array [T, *batch, V], got {checks.described(values)}."
        )
    if times.shape != values.shape[:-1]:
        raise ValueError(f"times must have shape {values.shape[:-1]}, got {times.shape}.")
    starts = checks.mask("resets", resets, times.shape[0], times.shape[1:])
    checks.rising("times", times, resets)
    starts = jnp.zeros(times.shape, bool) if starts is None else starts

    def step(state: tuple[jax.Array, jax.Array, jax.Array], moment: Any) -> tuple[Any, jax.Array]:
        value, time, start = moment
        last, last_time, has_begun = state  # last_time: that of the last measurement
        last = jnp.where(start, 0, last)
        has_begun = has_begun & ~start
        last_time = jnp.where(has_begun, last_time, time)
        padding = jnp.isnan(time)
        measured = ~jnp.isnan(value) & ~padding
        last = jnp.where(measured, value, last)
        elapsed = (time - last_time).astype(value.dtype)  # rounded after the difference is taken
        inputs = jnp.concatenate([last, measured.astype(value.dtype), elapsed], axis=-1)
        state = last, jnp.where(measured, time, last_time), has_begun | ~padding
        return state, jnp.where(padding, 0, inputs)

    zeros = jnp.zeros_like(values, shape=values.shape[1:])
    no_flags = jnp.zeros((*times.shape[1:], 1), bool)
    state = zeros, jnp.zeros_like(zeros, times.dtype), no_flags
    return jax.lax.scan(step, state, (values, times[..., None], starts[..., None]))[1]


def gru_d_project(params: Params, x: jax.Array, *, dtype: Any = None) -> dict[str, jax.Array]:
    """The input's part of a step: all of it but the state's decay.

    Args:
      params: ``GRUD(F).init_params(key, 3 * V)``.
      x: ``[..., 3V]``, as ``gru_d_inputs`` makes them.
      dtype: dtype of the computation; default: that of x and the kernel together.

    Returns:
      By slot ``[..., F]``, and ``"decay"``: the state's rate of decay times the time, at least 0.

    Raises:
      ValueError: if x is not floating point or its width is not three times that of the decay.
    """
    checks.kernels(params)
    checks.kernels(params.get("decay"))
    checks.one_array(x)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"Inputs must be floating point, got {x.dtype}.")
    kernel, bias = params["decay"]["kernel"], params["decay"]["bias"]
    variables = kernel["input"].shape[0]
    if x.ndim < 1 or x.shape[-1] != 3 * variables:
        raise ValueError(
            f"Inputs of shape {x.shape} do not fit a decay of {variables} variables: gru_d_inputs "
            "makes three features of each."
        )
    dtype = dtype or jnp.result_type(x, kernel["state"])
    last, measured, elapsed = jnp.split(x, 3, axis=-1)
    rate = jax.nn.relu(lead(kernel["input"], elapsed) * elapsed + lead(bias["input"], elapsed))
    decayed = jnp.exp(-rate) * last  # decay of the input towards the mean, which is 0
    imputed = measured * last + (1 - measured) * decayed
    features = jnp.concatenate([imputed, measured.astype(imputed.dtype)], axis=-1)
    z = linear_project(params, features, dtype=dtype)
    rate = elapsed.astype(dtype) @ kernel["state"].astype(dtype)
    return {**z, "decay": jax.nn.relu(rate + lead(bias["state"].astype(dtype), rate))}


def _decayed(h_tm1: jax.Array, rate: jax.Array) -> jax.Array:
    return jnp.exp(-rate.astype(h_tm1.dtype)) * h_tm1  # decay of the hidden state


def _gates(h: jax.Array, product: Product) -> dict[str, jax.Array]:
    """The gates and the candidate from the decayed state."""
    f = jax.nn.sigmoid(product("f", h))  # the paper's 1 - z
    r = jax.nn.sigmoid(product("reset", h))
    u = jnp.tanh(product("u", r * h))
    return {"f": f, "i": 1 - f, "reset": r, "u": u}


def _update(carry: HiddenState, rate: jax.Array, product: Product) -> HiddenState:
    h = _decayed(carry.h, rate)
    gates = _gates(h, product)
    return HiddenState(gates["f"] * h + gates["i"] * gates["u"])


def gru_d_step(params: Params, carry: HiddenState, z_t: Slots) -> HiddenState:
    """One GRU-D step: the state decays, h^ = exp(-rate) h_tm1; h_t = f h^ + (1 - f) u.

    Args:
      params: ``GRUD(F).init_params(key, 3 * V)``.
      carry: h ``[*batch, F]``.
      z_t: ``gru_d_project(params, x_t)``.

    Returns:
      The next h, float32 at least.

    Raises:
      ValueError: if ``params`` are another cell's, or ``z_t`` is no projection.

    Note:
      f multiplies the old state, as in ``gru_step``. The paper prints the gate of the new content,
      z = 1 - f.
    """
    return _update(carry, z_t["decay"], dense(params, z_t))


class GRUD(SlotCell):
    """GRU-D, a GRU of what was measured and when (Che et al., 2018). Emits h ``[..., F]``.

    Its inputs are those of ``gru_d_inputs``, three features of each of V variables. Slots: f, reset
    and u (candidate); they read the imputed values and what was measured. Beside a ``SlotCell``'s
    parameters there is ``"decay": {"kernel": {"input": [V], "state": [V, F]}, "bias": {"input":
    [V], "state": [F]}}``.

    Attributes:
      decay_init: start of the rates of decay; their biases start at 0, whatever ``bias_init`` is.

    Raises:
      ValueError: for a size below 1, inputs whose width is no multiple of 3, or a number of bias
        vectors other than 1 and 2.

    Note:
      The paper does not say how rates start. Ours: at nearly 0, so that nothing is forgotten until
      training says so, but above it: at 0 and below a rate has no gradient. A drawn bias would
      start half of them there.
    """

    decay_init: Initializer = _RATES

    def __post_init__(self) -> None:
        checks.function("GRUD decay_init", self.decay_init, "nn.initializers.uniform(1e-3)")
        super().__post_init__()

    @nn.nowrap
    def initial(self, batch_shape: Sequence[int]) -> HiddenState:
        return HiddenState(self.zeros(batch_shape))

    @property
    def slots(self) -> dict[str, int]:
        return dict.fromkeys(("f", "reset", "u"), self.features)

    @nn.nowrap
    def init_params(self, key: jax.Array, in_features: int) -> dict[str, Any]:
        checks.key("key", key)
        in_features = checks.in_features(in_features)
        if in_features % 3:
            raise ValueError(
                "GRUD reads three features of each variable, as gru_d_inputs makes them: "
                f"in_features must be a multiple of 3, got {in_features}."
            )
        variables, dtype = in_features // 3, self.param_dtype
        # Two keys are left over: biases were drawn once, and other draws stay what they were.
        key, _, _, state_key, input_key = jax.random.split(key, 5)
        keys = {"input": input_key, "state": state_key}
        shapes = {"input": (variables,), "state": (variables, self.features)}
        decay = {
            "kernel": {
                name: self.decay_init(keys[name], shape, dtype) for name, shape in shapes.items()
            },
            "bias": {name: jnp.zeros(shape[-1:], dtype) for name, shape in shapes.items()},
        }
        return {**super().init_params(key, 2 * variables), "decay": decay}

    @nn.nowrap
    def project(self, params: Params, x: jax.Array) -> dict[str, jax.Array]:
        return gru_d_project(params, x, dtype=self.dtype)

    @nn.nowrap
    def gates(self, params: Params, carry_tm1: HiddenState, z: Slots) -> dict[str, jax.Array]:
        h = _decayed(carry_tm1.h, z["decay"])
        return {**_gates(h, dense(params, z)), "decay": jnp.exp(-z["decay"])}

    @nn.nowrap
    def update(self, carry: HiddenState, inputs: Slots, product: Product) -> HiddenState:
        return _update(carry, inputs["decay"], product)
