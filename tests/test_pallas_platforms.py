"""The program that users get of the Pallas kernels, which has those of every platform.

Values and gradients are in `test_pallas.py`, of one platform's kernels at a time.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import recurrent_gates as rg
from tests.support import array, parameters, thinned
from tests.test_pallas import BATCH, CELLS, F64, FEATURES, INPUTS, STEPS

pytestmark = pytest.mark.usefixtures("x64")

TRACED = {
    "um_lstm": rg.CELLS["um_lstm"](FEATURES, downsize=2, **F64),
    "ur_gru": rg.CELLS["ur_gru"](FEATURES, **F64),
    "o_janet": rg.CELLS["o_janet"](FEATURES, **F64),
}


@pytest.mark.parametrize("name", [*CELLS, *TRACED])
def test_every_platform_is_traced_with_the_others(name):
    """Each has as many kernels, forward and backward; what one of them does not serve would be an
    error on a CPU, too."""
    cell = (CELLS | TRACED)[name]

    def loss(params, xs):
        return rg.unroll(cell, params, xs, backend="pallas")[1].sum()

    params, xs = parameters(cell, INPUTS), array(8, STEPS, BATCH, INPUTS)
    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, xs))
    assert program.count("pallas_call[") % 3 == 0
    assert program.count("pallas_call[") >= 6


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")  # jax 0.12
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    ("name", "steps"),  # of which a TPU takes 32 at a time
    thinned(
        itertools.product(
            ("lstm", "or_gru", "gato2", "heads", "gru mapped", "gato2 mapped"), (9, 33)
        ),
        lambda name, steps: steps == 33 or name in ("lstm", "gato2"),
    ),
)
@pytest.mark.long
def test_kernels_lower(platform, name, steps, x32):
    """To Triton and to Mosaic: a training step with h-detach, in the widths that they take; in a
    shard_map, too."""
    name, *mapped = name.split()
    heads = dict(heads=8, dtype=jnp.bfloat16)
    cell = rg.LSTM(1024, **heads) if name == "heads" else rg.CELLS[name](128)
    field = "r" if name == "gato2" else "h"
    params = jax.eval_shape(lambda key: cell.init_params(key, 4), jax.random.key(0))

    def outputs(params, xs, draws):
        fns = (rg.Detach(0.5, field=field),)
        return rg.unroll(cell, params, xs, carry_fns=fns, noise=(draws,), backend="pallas")[1]

    def loss(params, xs, draws):
        rows = P(None, "batch")
        of = (
            jax.shard_map(outputs, in_specs=(P(), rows, P()), out_specs=rows) if mapped else outputs
        )
        return of(params, xs, draws).sum()

    xs = jax.ShapeDtypeStruct((steps, 16, 4), cell.dtype or jnp.float32)
    shapes = xs, jax.ShapeDtypeStruct((steps,), bool)
    gpu = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    axes = ((1,), ("batch",), (AxisType.Auto,)) if mapped else ((), ())
    where = AbstractMesh(*axes, abstract_device=gpu if platform == "cuda" else None)
    with use_abstract_mesh(where):
        traced = jax.jit(jax.grad(loss)).trace(params, *shapes)
        program = traced.lower(lowering_platforms=(platform,)).as_text()
    call = {"cuda": "@__gpu$xla.gpu.triton", "tpu": "@tpu_custom_call"}[platform]
    assert program.count(call) == (6 if name == "gato2" else 2)
