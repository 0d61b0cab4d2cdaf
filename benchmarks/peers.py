"""The peers: other frameworks' cells with our weights, as their users run them.

Each is a function (contender, size, dtype) -> ``Side``. Times are taken in the peer's own memory
layout; the numbers are put into ours for the comparison of values.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

import recurrent_gates as rg
from benchmarks import memory_peers
from benchmarks.ours import Side, compiled_side
from benchmarks.work import Arrays, Contender, Gradients, Size, make


class Peer(NamedTuple):
    """A framework to compare with.

    Attributes:
      package: must be installed.
      cells: those of our cells that it has.
      build: (contender, size, dtype) -> its side.
      gpu_only: whether it needs an NVIDIA GPU.
      dtypes: that it can compute in.
      forms: by cell its name in ``FORMS``, where its equations are not those of ours.
    """

    package: str
    cells: tuple[str, ...]
    build: Callable[[Contender, Size, str], Side]
    gpu_only: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    forms: Mapping[str, str] = MappingProxyType({})

    def contender(self, text: str) -> Contender:
        """What its side is a form of: a contender of ours, with its own equations."""
        contender = Contender.parse(text)
        return dataclasses.replace(contender, form=self.forms.get(contender.cell, ""))

    def missing(self, platform: str, dtype: str) -> str | None:
        """Why it cannot be run here, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.gpu_only and platform != "gpu":
            return "it needs an NVIDIA GPU"
        if dtype not in self.dtypes:
            return f"it has no {dtype}"
        return None


def _to_torch(arrays: Arrays) -> dict[str, np.ndarray]:
    return rg.to_torch([{"forward": arrays.params}])


def _from_torch(state_dict: Mapping[str, Any]) -> Any:
    """Gradients by torch's names -> gradients of our parameters."""
    return rg.from_torch(state_dict)[0]["forward"]


# torch


def torch_side(contender: Contender, size: Size, dtype: str) -> Side:
    """``torch.nn.LSTM`` or ``torch.nn.GRU``, time-major; cuDNN's on a GPU. Memory cells by hand."""
    if contender.cell in memory_peers.CELLS:
        return memory_peers.torch_side(contender, size, dtype)
    import torch

    device = torch.device("cuda" if jax.default_backend() == "gpu" else "cpu")
    if device.type == "cuda":
        config: Any = jax.config
        tf32 = config.jax_default_matmul_precision != "highest"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    arrays = make(contender, size, dtype)

    def tensor(array: Any) -> Any:
        array = torch.from_numpy(np.array(array, np.float32))
        return array.to(device, getattr(torch, dtype)).requires_grad_()

    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[contender.cell]
    module = layer(size.inputs, size.features)
    module.load_state_dict({k: torch.from_numpy(v) for k, v in _to_torch(arrays).items()})
    module = module.to(device, getattr(torch, dtype))
    xs, cotangent = tensor(arrays.xs), tensor(arrays.cotangent).detach()
    state = {name: tensor(leaf)[None].detach() for name, leaf in arrays.carry._asdict().items()}
    order = ("h", "c")[: len(state)]
    leaves = [state[name].requires_grad_() for name in order]
    names = [name for name, _ in module.named_parameters()]
    inputs = [*module.parameters(), xs, *leaves]

    def finish(result: Any) -> Any:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return result

    def apply() -> Any:
        return module(xs, tuple(leaves) if len(leaves) > 1 else leaves[0])[0]

    def forward() -> Any:
        with torch.no_grad():
            return finish(apply())

    def train() -> tuple[Any, Any]:
        ys = apply()
        return finish((ys, torch.autograd.grad(ys, inputs, cotangent)))

    def array(value: Any) -> np.ndarray:
        return value.detach().float().cpu().numpy()

    def gradients(results: Any) -> Gradients:
        params = {n: array(g) for n, g in zip(names, results, strict=False)}
        d_xs, *d_state = results[len(names) :]
        d_carry = dict(zip(order, (array(d)[0] for d in d_state), strict=True))
        return Gradients(_from_torch(params), array(d_xs), type(arrays.carry)(**d_carry))

    facts = {"kind": f"torch.nn.{layer.__name__}", "threads": torch.get_num_threads()}
    return Side(forward, train, array, gradients, facts)


# Peers in JAX


def _in_jax(
    contender: Contender,
    size: Size,
    dtype: str,
    pack: Callable[[Any], Any],
    run: Callable[..., jax.Array],
    kind: str,
) -> Side:
    """A side on one device, as such code is written.

    Args:
      contender, size, dtype: of the side.
      pack: our parameters -> the peer's own, which its users hold: this is not timed.
      run: (the peer's parameters, xs, carry) -> ys.
      kind: said in the facts.
    """
    arrays = make(contender, size, dtype)
    weights, unpack = jax.vjp(pack, arrays.params)
    side = compiled_side(
        lambda weights, xs, carry, _: run(weights, xs, carry),
        arrays._replace(params=weights),
        kind=kind,
    )

    def gradients(values: Gradients) -> Gradients:
        return values._replace(params=unpack(values.params)[0])

    return side._replace(gradients=gradients)


def _packed(params: Any, slots: Sequence[str], role: str) -> jax.Array:
    return jnp.concatenate([params[role][slot] for slot in slots], axis=-1)


def flax_side(contender: Contender, size: Size, dtype: str) -> Side:
    """``flax.linen.RNN`` of ``OptimizedLSTMCell`` or ``GRUCell``, time-major.

    The two bias vectors are added before they are handed over, outside the time loop.
    """
    from flax import linen as nn

    layer = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[contender.cell]
    module = nn.RNN(layer(size.features, dtype=jnp.dtype(dtype)), time_major=True)
    ours = ("i", "f", "u", "o") if contender.cell == "lstm" else ("reset", "f", "u")
    theirs = "ifgo" if contender.cell == "lstm" else "rzn"

    def pack(params: Any) -> dict[str, dict[str, jax.Array]]:
        weights: dict[str, dict[str, jax.Array]] = {}
        for slot, name in zip(ours, theirs, strict=True):
            bias, second = params["bias"][slot], params["recurrent_bias"][slot]
            weights["i" + name] = {"kernel": params["kernel"][slot]}
            weights["h" + name] = {"kernel": params["recurrent_kernel"][slot]}
            if contender.cell == "lstm":
                weights["h" + name]["bias"] = bias + second
            elif name == "n":  # inside the reset gate's product
                weights["in"]["bias"], weights["hn"]["bias"] = bias, second
            else:
                weights["i" + name]["bias"] = bias + second
        return weights

    def run(weights: Any, xs: jax.Array, carry: Any) -> jax.Array:
        state = tuple(carry) if contender.cell == "lstm" else carry.h
        ys: Any = module.apply({"params": {"cell": weights}}, xs, initial_carry=state)
        return ys

    return _in_jax(contender, size, dtype, pack, run, f"flax.linen.RNN({layer.__name__})")


def haiku_side(contender: Contender, size: Size, dtype: str) -> Side:
    """``haiku.dynamic_unroll`` of ``haiku.LSTM`` or ``haiku.GRU``.

    The LSTM's forget gate adds 1 by itself; the GRU resets before the product, and its z is 1 - f.
    """
    import haiku as hk

    layer = {"lstm": hk.LSTM, "gru": hk.GRU}[contender.cell]

    def unroll(xs: jax.Array, state: Any) -> jax.Array:
        return hk.dynamic_unroll(layer(size.features), xs, state)[0]

    apply = hk.without_apply_rng(hk.transform(unroll)).apply

    def pack(params: Any) -> dict[str, dict[str, jax.Array]]:
        slots: tuple[str, ...] = ("f", "reset", "u")
        if contender.cell == "gru":
            gates = _other_gate(params)
            names = (("w_i", "kernel"), ("w_h", "recurrent_kernel"), ("b", "bias"))
            return {"gru": {name: _packed(gates, slots, role) for name, role in names}}
        slots = ("i", "u", "f", "o")
        kernels = [_packed(params, slots, role) for role in ("kernel", "recurrent_kernel")]
        bias = _packed(params, slots, "bias") + _packed(params, slots, "recurrent_bias")
        bias = bias.at[2 * size.features : 3 * size.features].add(-1.0)
        return {"lstm/linear": {"w": jnp.concatenate(kernels), "b": bias}}

    def run(weights: Any, xs: jax.Array, carry: Any) -> jax.Array:
        state = carry.h if contender.cell == "gru" else hk.LSTMState(carry.h, carry.c)
        return apply(weights, xs, state)

    return _in_jax(
        contender, size, dtype, pack, run, f"haiku.dynamic_unroll(haiku.{layer.__name__})"
    )


def _other_gate(params: Any) -> Any:
    """A GRU's parameters with one bias, and for the gate of the new content, 1 - f."""
    roles = {
        "kernel": params["kernel"],
        "recurrent_kernel": params["recurrent_kernel"],
        "bias": jax.tree.map(jnp.add, params["bias"], params["recurrent_bias"]),
    }
    return {role: {**slots, "f": -slots["f"]} for role, slots in roles.items()}


# Equinox, and memax, which is made of it


def _scanned(cell: Any, state: Any, xs: jax.Array) -> jax.Array:
    """h of all steps, of a cell that is one example's: the scan over time of a vmap."""

    def body(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        state = jax.vmap(cell)(x, state)
        return state, state[0] if isinstance(state, tuple) else state

    return jax.lax.scan(body, state, xs)[1]


_EQUINOX = {"lstm": ("i", "f", "u", "o"), "gru": ("reset", "f", "u")}  # its order of slots


def equinox_side(contender: Contender, size: Size, dtype: str) -> Side:
    """``equinox.nn.LSTMCell`` or ``equinox.nn.GRUCell`` as its guide has it: vmap in a scan."""
    import equinox as eqx

    layer = {"lstm": eqx.nn.LSTMCell, "gru": eqx.nn.GRUCell}[contender.cell]
    template = layer(size.inputs, size.features, key=jax.random.key(0))

    def pack(params: Any) -> list[jax.Array]:
        roles, slots = ("kernel", "recurrent_kernel"), _EQUINOX[contender.cell]
        if contender.cell == "lstm":
            bias = _packed(params, slots, "bias") + _packed(params, slots, "recurrent_bias")
            return [*(_packed(params, slots, role).T for role in roles), bias]
        second = params["recurrent_bias"]
        # The candidate's second bias is inside of the reset gate's product.
        outer_bias = {**second, "u": jnp.zeros_like(second["u"])}
        bias = _packed(params, slots, "bias") + _packed({"b": outer_bias}, slots, "b")
        return [*(_packed(params, slots, role).T for role in roles), bias, second["u"]]

    names = ("weight_ih", "weight_hh", "bias", "bias_n")[: 3 if contender.cell == "lstm" else 4]

    def run(weights: list[jax.Array], xs: jax.Array, carry: Any) -> jax.Array:
        cell = eqx.tree_at(lambda c: [getattr(c, name) for name in names], template, weights)
        return _scanned(cell, tuple(carry)[::-1] if contender.cell == "lstm" else carry.h, xs)

    return _in_jax(contender, size, dtype, pack, run, f"equinox.nn.{layer.__name__}")


def memax_side(contender: Contender, size: Size, dtype: str) -> Side:
    """memax's LSTM, GRU or LRU by its own scan, vmapped over examples.

    Its cells read as many inputs as they have units; their input maps are given ours.
    """
    if contender.cell == "lru":
        return _memax_lru(contender, size, dtype)
    import equinox as eqx
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)  # it would hold D to be F
    from memax.equinox.scans import set_action_scan
    from memax.equinox.set_actions.gru import GRUMagma
    from memax.equinox.set_actions.lstm import LSTMMagma

    lstm = contender.cell == "lstm"
    template = (LSTMMagma if lstm else GRUMagma)(size.features, jax.random.key(0))
    names = {"f": "f", "i": "i", "o": "o", "u": "c"} if lstm else {"f": "z", "reset": "r", "u": "h"}

    def pack(params: Any) -> dict[str, list[jax.Array]]:
        bias = jax.tree.map(jnp.add, params["bias"], params["recurrent_bias"])
        gates = {**params, "bias": bias} if lstm else _other_gate(params)
        return {
            name: [
                *(gates[role][slot].T for role in ("kernel", "recurrent_kernel")),
                gates["bias"][slot],
            ]
            for slot, name in names.items()
        }

    def run(weights: Any, xs: jax.Array, carry: Any) -> jax.Array:
        cell: Any = template
        for name, arrays in weights.items():
            cell = eqx.tree_at(
                lambda c, n=name: [
                    getattr(c, f"W_{n}").weight,
                    getattr(c, f"U_{n}").weight,
                    getattr(c, f"W_{n}").bias,
                ],
                cell,
                arrays,
            )

        def scan_example(state: Any, xs: jax.Array) -> jax.Array:
            if lstm:  # its inputs have the state's structure
                return set_action_scan(cell, state, (xs, xs))[1]
            return set_action_scan(cell, state, xs)

        state = tuple(carry) if lstm else carry.h
        ys: jax.Array = jax.vmap(scan_example, in_axes=(0, 1), out_axes=1)(state, xs)
        return ys

    return _in_jax(contender, size, dtype, pack, run, f"memax.{type(template).__name__}")


def _memax_lru(contender: Contender, size: Size, dtype: str) -> Side:
    import equinox as eqx
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    from memax.equinox.semigroups.lru import LRU

    class FullSkip(LRU):
        """Its D is a vector, ours a matrix."""

        def backward_map(self, h: Any, x: Any, key: Any = None) -> jax.Array:
            (_, state), (inputs, _) = h[0], x
            return (jax.lax.complex(self.C_re, self.C_im) @ state).real + self.D @ inputs

    with jax.numpy_dtype_promotion("standard"):
        template = FullSkip(size.features, size.inputs, jax.random.key(0))
    names = ("nu_log", "theta_log", "gamma_log", "B_re", "B_im", "C_re", "C_im", "D")

    def pack(params: Any) -> list[jax.Array]:
        vectors = [params[name] for name in ("nu", "theta", "gamma")]
        maps = [
            params[role][part] for role in ("kernel", "out_kernel") for part in ("real", "imag")
        ]
        return [*vectors, *(matrix.T for matrix in (*maps, params["skip"]))]

    def run(weights: list[jax.Array], xs: jax.Array, carry: Any) -> jax.Array:
        cell = eqx.tree_at(lambda c: [getattr(c, name) for name in names], template, weights)

        def scan_example(state: jax.Array, xs: jax.Array) -> jax.Array:
            start = (jnp.ones_like(state), state), jnp.zeros((), bool)
            with jax.numpy_dtype_promotion("standard"):
                ys: jax.Array = cell(start, (xs, jnp.zeros(len(xs), bool)))[1]
            return ys

        state = jax.lax.complex(carry.real, carry.imag)
        ys: jax.Array = jax.vmap(scan_example, in_axes=(0, 1), out_axes=1)(state, xs)
        return ys

    return _in_jax(contender, size, dtype, pack, run, "memax.LRU")


def jax_side(contender: Contender, size: Size, dtype: str) -> Side:
    """``jax.experimental.rnn.lstm``: cuDNN's LSTM, batch-major."""
    from jax.experimental import rnn

    def pack(params: Any) -> jax.Array:
        slots = ("i", "f", "u", "o")
        roles = ("kernel", "recurrent_kernel", "bias", "recurrent_bias")
        return jnp.concatenate([_packed(params, slots, role).T.ravel() for role in roles])

    def run(weights: jax.Array, xs: jax.Array, carry: Any) -> jax.Array:
        lengths = jnp.full((size.batch,), size.steps, jnp.int32)
        ys, _, _ = rnn.lstm(
            _in_order(jnp.swapaxes(xs, 0, 1)),
            _in_order(carry.h[None]),
            _in_order(carry.c[None]),
            weights,
            lengths,
            size.inputs,
            size.features,
            1,
            0.0,
            False,
        )
        return jnp.swapaxes(_in_order(ys), 0, 1)

    return _in_jax(contender, size, dtype, pack, run, "jax.experimental.rnn.lstm")


@jax.custom_vjp
def _in_order(x: jax.Array) -> jax.Array:
    """x, and its cotangent, with the last axis next to each other in memory, as cuDNN reads them.

    ``jax.experimental.rnn`` does not say so, and XLA would hand over a transposed array as it lies.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _in_order_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _in_order(x), None


def _in_order_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_in_order(cotangent),)


_in_order.defvjp(_in_order_forward, _in_order_backward)


# FlashRNN


def flashrnn_side(contender: Contender, size: Size, dtype: str) -> Side:
    """``flashrnn`` on one head, batch-major, after torch's product with the input.

    Its kernels hold gates in torch's order, R as [gate, head, new, previous] and the states
    (h, c) as [state, batch, 1, head, feature].
    """
    import torch
    from flashrnn import flashrnn

    arrays = make(contender, size, dtype)
    options = {"device": "cuda", "dtype": getattr(torch, dtype)}

    def tensor(array: Any) -> Any:
        return torch.from_numpy(np.array(array, np.float32)).to(**options).requires_grad_()

    weights = {name: tensor(value) for name, value in _to_torch(arrays).items()}
    xs = tensor(np.swapaxes(arrays.xs, 0, 1))
    cotangent = tensor(np.swapaxes(arrays.cotangent, 0, 1)).detach()
    state = tensor(np.stack([arrays.carry.h, arrays.carry.c])[:, :, None, None])
    inputs = [*weights.values(), xs, state]

    def apply() -> Any:
        kernel, recurrent, bias, second = (
            weights[f"{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        gates = torch.nn.functional.linear(xs, kernel)
        gates = gates.reshape(size.batch, size.steps, 4, 1, size.features)
        states, _ = flashrnn(
            gates,
            recurrent.reshape(4, 1, size.features, size.features),
            (bias + second).reshape(4, 1, size.features),
            states=state,
            function="lstm",
            backend="cuda_fused",
        )
        return states[0][:, :, 0]

    def finish(result: Any) -> Any:
        torch.cuda.synchronize()
        return result

    def forward() -> Any:
        with torch.no_grad():
            return finish(apply())

    def train() -> tuple[Any, Any]:
        ys = apply()
        return finish((ys, torch.autograd.grad(ys, inputs, cotangent)))

    def array(value: Any) -> np.ndarray:
        return value.detach().float().cpu().numpy()

    def gradients(results: Any) -> Gradients:
        *d_weights, d_xs, d_state = (array(value) for value in results)
        d_h, d_c = d_state[:, :, 0, 0]
        return Gradients(
            _from_torch(dict(zip(weights, d_weights, strict=True))),
            np.swapaxes(d_xs, 0, 1),
            rg.LSTM(size.features).initial(())._replace(c=d_c, h=d_h),
        )

    return Side(
        forward,
        train,
        lambda ys: np.swapaxes(array(ys), 0, 1),
        gradients,
        {"kind": "flashrnn cuda_fused"},
    )


PEERS = {
    "torch": Peer("torch", ("lstm", "gru", *memory_peers.CELLS), torch_side),
    "flax": Peer("flax", ("lstm", "gru"), flax_side),
    "haiku": Peer("haiku", ("lstm", "gru"), haiku_side, forms={"gru": "reset before"}),
    "equinox": Peer("equinox", ("lstm", "gru"), equinox_side, dtypes=("float32",)),
    "memax": Peer(
        "memax",
        ("lstm", "gru", "lru"),
        memax_side,
        dtypes=("float32",),
        forms={"lstm": "plain output", "gru": "reset before"},
    ),
    "jax": Peer("jax", ("lstm",), jax_side, gpu_only=True, dtypes=("float32",)),
    "flashrnn": Peer("flashrnn", ("lstm",), flashrnn_side, gpu_only=True, dtypes=("bfloat16",)),
}
