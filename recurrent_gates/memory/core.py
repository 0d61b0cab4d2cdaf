"""What the memory cells share: their settings, and linear maps of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from recurrent_gates import checks
from recurrent_gates.base import Cell
from recurrent_gates.cells import LSTM
from recurrent_gates.declared import Params, matrix_product, state_dtype
from recurrent_gates.gates import GATES, Gate
from recurrent_gates.initializers import Initializer, orthogonal
from recurrent_gates.shapes import lead

_LECUN = nn.initializers.lecun_normal()
_ZEROS = nn.initializers.zeros


class MemoryCell(Cell):
    """Base of the cells with a memory.

    Attributes:
      features: F, the hidden size.
      gate: how f and i are made.
      bias_vectors: of the gates' linear maps: 1, or 2 (one with each map).
      kernel_init: start of the kernels on inputs, and of all that are on no recurrent product.
      recurrent_kernel_init: start of the gates' recurrent kernels.
      bias_init: start of the biases, before the gate's own constant is added.
      dtype: dtype of projections and products; None: that of inputs and parameters.
      param_dtype: dtype of the parameters. Carries are float32 at least, whatever it is.
    """

    features: int
    gate: Gate = GATES["standard"]
    bias_vectors: int = 1
    kernel_init: Initializer = _LECUN
    recurrent_kernel_init: Initializer = orthogonal
    bias_init: Initializer = _ZEROS
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        checks.cell_settings(self)
        checks.instance(f"{type(self).__name__} gate", self.gate, Gate, "GATES['ur']")
        self._check()
        super().__post_init__()  # from here on Flax lets no field be set

    @nn.nowrap
    def _check(self) -> None:
        """Raises ValueError for settings of the cell's own that do not fit; sizes become ints."""

    @property
    def _remats_steps(self) -> bool:
        # A step is dozens of small operations. A CPU does them again in less time than it takes to
        # write and read what each of them leaves.
        return True

    @property
    def emitted_features(self) -> int:
        """The width of what it emits."""
        return self.features

    @nn.nowrap
    def _check_sizes(self, *names: str) -> None:
        for name in names:
            subject = f"{type(self).__name__} {name} is a whole number"
            setattr(self, name, checks.whole_number(subject, getattr(self, name)))

    @nn.nowrap
    def zeros(self, batch_shape: Sequence[int], *shape: int) -> jax.Array:
        """A field of the initial carry, ``[*batch_shape, *shape]``, float32 at least."""
        lead_shape = checks.shape("batch_shape", batch_shape)
        return jnp.zeros((*lead_shape, *shape), state_dtype(self.param_dtype))

    @nn.nowrap
    def controller(self, features: int) -> LSTM:
        """An LSTM of these settings."""
        return LSTM(
            features,
            gate=self.gate,
            bias_vectors=self.bias_vectors,
            kernel_init=self.kernel_init,
            recurrent_kernel_init=self.recurrent_kernel_init,
            bias_init=self.bias_init,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            parent=None,
        )

    @nn.nowrap
    def init_linear(self, key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
        """Parameters of a linear map, ``{"kernel": [inputs, outputs], "bias": [outputs]}``."""
        kernel, bias = jax.random.split(key)
        return {
            "kernel": self.kernel_init(kernel, (inputs, outputs), self.param_dtype),
            "bias": self.bias_init(bias, (outputs,), self.param_dtype),
        }


def linear(params: Params, x: jax.Array, dtype: Any) -> jax.Array:
    """x ``[..., inputs]`` -> ``[..., outputs]``, multiplied in ``dtype``, float32 at least."""
    out = rows_product(x, params["kernel"], dtype)
    return out + lead(params["bias"].astype(out.dtype), out)


def rows_product(x: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """``matrix_product`` of all rows of x ``[..., rows, inputs]`` as rows of one matrix."""
    # Of a product with several axes a CPU forms the kernel's gradient transposed, by a slow loop.
    out = matrix_product(x.reshape(-1, x.shape[-1]), kernel, dtype)
    return out.reshape(*x.shape[:-1], kernel.shape[-1])


def flat(rows: jax.Array) -> jax.Array:
    """``[..., R, W]`` -> ``[..., R * W]``."""
    return rows.reshape(*rows.shape[:-2], rows.shape[-2] * rows.shape[-1])
