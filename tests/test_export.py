"""Programs that leave the process: ``jax.export``, with sizes that are known and that are not."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

import recurrent_gates as rg
from tests.support import TWINS, assert_close, assert_identical, parameters, quick_jit, thinned
from tests.test_scan import FEATURES, setting

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("name", ["lstm", "gru", "gato"])
def test_a_jitted_step_survives_export(name):
    """Serialized, read back and called: the same bits; the states keep their types."""
    cell, params, xs, start = setting(name)

    def train(params, carry, xs):
        def loss(params):
            new, ys = rg.unroll(cell, params, xs, carry)
            return jnp.sum(ys**2), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        return new, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    jitted = jax.jit(train)
    blob = jax.export.export(jitted)(params, start, xs).serialize()
    restored = jax.export.deserialize(blob).call(params, start, xs)
    expected = jitted(params, start, xs)
    assert type(restored[0]) is type(start)
    assert_identical(restored, expected)


MEMORIES = ("rmc", "dnc", "rma")  # these export in tests/memory


# Of gated cells "auto" takes fused: kernels have sizes that are known.
@pytest.mark.parametrize(
    ("backend", "family"),
    thinned(
        [("fused", "others"), *(("auto", family) for family in ("lstm", "gru", "janet", "others"))],
        lambda backend, family: family != "janet",
    ),
)
@pytest.mark.long
def test_every_cell_exports_with_symbolic_sizes(backend, family, x32, request):
    """One program for any time and batch: its values are those of the sizes that it is called
    with. C, CR and CM, which are U, UR and UM with other values, and JANET, which is a GRU with
    less, are left out but in a full run."""
    built = {n: make(8) for n, make in rg.CELLS.items() if not n.endswith(MEMORIES)}
    served = [name for name, cell in built.items() if backend == "auto" or not cell.linear]
    gated = [name for name in served if name.endswith((f"_{family}", family))]
    others = [name for name in served if not name.endswith(("lstm", "gru", "janet"))]
    if not request.config.getoption("full"):
        gated = [name for name in gated if name.split("_")[0] not in TWINS]
    cells = {name: built[name] for name in (others if family == "others" else gated)}
    params = {name: parameters(cell, 3) for name, cell in cells.items()}

    @quick_jit
    def run(params, xs):
        return {
            name: rg.unroll(cell, params[name], xs, backend=backend) for name, cell in cells.items()
        }

    time, batch = jax.export.symbolic_shape("time, batch")
    shape = jax.ShapeDtypeStruct((time, batch, 3), jnp.float32)
    exported = jax.export.export(run)(params, shape)
    assert len(cells) >= 5
    xs = jax.random.normal(jax.random.key(1), (5, 3, 3))
    whole = run(params, xs)
    assert_close(exported.call(params, xs), whole, 1e-6)
    # The first step of a row alone hands out what it does in the whole.
    for name, (_, ys) in exported.call(params, xs[:1, :1]).items():
        assert_close(ys, whole[name][1][:1, :1], 1e-6)


@pytest.mark.parametrize("backend", ["auto", "scan"])
def test_chunks_of_symbolic_time_are_one_sentence(backend, x32):
    cell = rg.CELLS["lstm"](FEATURES)
    params = cell.init_params(jax.random.key(0), 2)
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("time, batch, 2"), jnp.float32)
    with pytest.raises(ValueError, match="remat=2 cuts time into chunks, and T is symbolic"):
        jax.export.export(jax.jit(lambda x: rg.unroll(cell, params, x, remat=2, backend=backend)))(
            shape
        )


@pytest.mark.parametrize("backend", ["newton", "pallas"])
def test_backends_that_need_sizes_refuse_symbolic_ones(backend, x32):
    cell = rg.CELLS["gato1"](FEATURES)
    params = cell.init_params(jax.random.key(0), 2)
    for sizes in ("time, 3, 2", "5, batch, 2"):
        shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape(sizes), jnp.float32)
        with pytest.raises(ValueError, match="symbolic") as error:
            jax.export.export(jax.jit(lambda x: rg.unroll(cell, params, x, backend=backend)))(shape)
        assert "\n" not in str(error.value)
