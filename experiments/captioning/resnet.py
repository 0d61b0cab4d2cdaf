"""ResNet-152 (He et al., 2015), as torchvision has it, without its classifier.

Parameters carry torchvision's names, with a blank in the place of each dot before the last: a
weight ``layer1.0.conv1.weight`` is ``params["layer1 0 conv1"]["weight"]``. The statistics of batch
normalisation are those of its training on ImageNet: they are never updated, as is usual where such
an encoder is trained along.

Letters: B pictures, S pixels of a side, L = (S / 32) ** 2 regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.captioning.model import Seen
from experiments.settings.errors import UserError

BLOCKS = (3, 8, 36, 3)  # of ResNet-152
_WIDTHS = (64, 128, 256, 512)
_EXPANSION = 4  # of a block's output over its width
FEATURES = _WIDTHS[-1] * _EXPANSION
STATISTICS = ("running_mean", "running_var")

_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels
_EPSILON = 1e-5  # torch's


class _Convolution(nn.Module):
    """torch's nn.Conv2d without a bias, with its weight ``[out, in, height, width]``."""

    features: int
    size: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.features, x.shape[-1], self.size, self.size)
        he = nn.initializers.variance_scaling(2.0, "fan_out", "normal", in_axis=1, out_axis=0)
        weight = self.param("weight", he, shape)
        padding = self.size // 2
        return jax.lax.conv_general_dilated(
            x,
            weight.astype(x.dtype),
            (self.stride, self.stride),
            ((padding, padding),) * 2,
            dimension_numbers=("NHWC", "OIHW", "NHWC"),
        )


class _Normalization(nn.Module):
    """torch's nn.BatchNorm2d at evaluation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1],)
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        mean = jax.lax.stop_gradient(self.param("running_mean", zeros, shape))
        variance = jax.lax.stop_gradient(self.param("running_var", ones, shape))
        scale = self.param("weight", ones, shape) * jax.lax.rsqrt(variance + _EPSILON)
        shift = self.param("bias", zeros, shape) - mean * scale
        return x * scale.reshape(1, 1, 1, -1) + shift.reshape(1, 1, 1, -1)


class ResNet(nn.Module):
    """Pictures uint8 ``[B, S, S, 3]`` -> ``Seen``: the mean over regions and the regions.

    Attributes:
      blocks: of each of the four stages.
    """

    blocks: Sequence[int] = BLOCKS

    @nn.compact
    def __call__(self, pictures: jax.Array) -> Seen:
        mean, deviation = (jnp.asarray(values, jnp.float32) for values in (_MEAN, _DEVIATION))
        x = (pictures.astype(jnp.float32) / 255 - mean.reshape(1, 1, 1, 3)) / deviation.reshape(
            1, 1, 1, 3
        )
        x = _Convolution(64, 7, 2, name="conv1")(x)
        x = nn.relu(_Normalization(name="bn1")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage, (count, width) in enumerate(zip(self.blocks, _WIDTHS, strict=True), start=1):
            for block in range(count):
                stride = 2 if stage > 1 and block == 0 else 1
                x = self._block(f"layer{stage} {block}", x, width, stride)
        regions = x.reshape(len(x), -1, x.shape[-1])
        return Seen(regions.mean(axis=1), regions)

    def _block(self, name: str, x: jax.Array, width: int, stride: int) -> jax.Array:
        """A bottleneck, which takes its stride in the convolution of 3 x 3 (torchvision)."""
        y = x
        for number, (features, size, step) in enumerate(
            ((width, 1, 1), (width, 3, stride), (width * _EXPANSION, 1, 1)), start=1
        ):
            y = _Convolution(features, size, step, name=f"{name} conv{number}")(y)
            y = _Normalization(name=f"{name} bn{number}")(y)
            y = nn.relu(y) if number < 3 else y
        if x.shape != y.shape:
            x = _Convolution(y.shape[-1], 1, stride, name=f"{name} downsample 0")(x)
            x = _Normalization(name=f"{name} downsample 1")(x)
        return nn.relu(x + y)


def trainable(params: Any) -> Any:
    """A tree of bools: all but the statistics of batch normalisation."""
    return {name: {key: key not in STATISTICS for key in leaves} for name, leaves in params.items()}


def read_weights(path: str | Path, shapes: Any) -> dict[str, dict[str, np.ndarray]]:
    """The parameters in a safetensors file that has torchvision's names.

    Args:
      path: of the file; its classifier, ``fc``, and the counters of its batches are not read.
      shapes: of the parameters that are wanted.

    Raises:
      UserError: if safetensors is not installed, or the file is not there, is damaged or is of
        another network.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError:
        raise UserError("weights need safetensors: pip install safetensors.") from None
    try:
        weights = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(f"--weights={path} cannot be read: {reason}.") from None
    params: dict[str, dict[str, np.ndarray]] = {}
    for module, leaves in shapes.items():
        params[module] = {}
        for leaf, shape in leaves.items():
            name = f"{module.replace(' ', '.')}.{leaf}"
            if name not in weights or weights[name].shape != shape.shape:
                condition = f"in the shape {weights[name].shape}" if name in weights else "missing"
                raise UserError(
                    f"--weights={path} is not of ResNet-152: {name} {shape.shape} is {condition}."
                )
            params[module][leaf] = weights[name].astype(np.float32)
    return params


def parameter_shapes(size: int, blocks: Sequence[int] = BLOCKS) -> Any:
    """The shapes of the parameters, for pictures of so many pixels a side."""
    pictures = jnp.zeros((1, size, size, 3), jnp.uint8)
    return jax.eval_shape(lambda: ResNet(blocks).init(jax.random.key(0), pictures))["params"]
