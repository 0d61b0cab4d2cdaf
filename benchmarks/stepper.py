"""One step of an LSTM at a time beside ``torch.nn.LSTMCell``: ``python -m benchmarks.stepper``.

Each side has a process of its own, as a server has, in turn: idle threads of torch stay awake and
would take a core from XLA. A ratio is torch's time over ours (above 1 we are faster), the median
over rounds.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import recurrent_gates as rg
from benchmarks import process
from benchmarks.command import fail, markdown, parse, save, say
from benchmarks.pair import summary
from benchmarks.speed_report import ratio

SIZES = ((1, 64, 512), (32, 32, 128), (1, 16, 128))
"""B, D, F."""
_STEPS = 3000  # of which a time is the median
_COMPARED = 5  # steps after which the outputs must agree


def stepper(size: Sequence[int]) -> dict[str, Any]:
    """Ours: the median seconds of a step, and the outputs after some."""
    params, x = _params(size), _inputs(size)
    step = rg.stepper(_cell(size), params, size[0])
    carry = step.initial()

    def once() -> Any:
        nonlocal carry
        carry, y = step(carry, x)
        return y.block_until_ready()

    return _timed(once)


def torch_cell(size: Sequence[int], threads: int) -> dict[str, Any]:
    """As ``stepper``, of ``torch.nn.LSTMCell`` with so many threads."""
    import torch

    torch.set_num_threads(threads)
    batch, inputs, features = size
    cell = torch.nn.LSTMCell(inputs, features)
    state = rg.to_torch([{"forward": _params(size)}])
    cell.load_state_dict(
        {name.removesuffix("_l0"): torch.tensor(np.asarray(a)) for name, a in state.items()}
    )
    x = torch.tensor(np.asarray(_inputs(size)))
    hidden = (torch.zeros(batch, features),) * 2

    def once() -> Any:
        nonlocal hidden
        hidden = cell(x, hidden)
        return hidden[0]

    with torch.inference_mode():
        return _timed(once)


def _cell(size: Sequence[int]) -> rg.LSTM:
    return rg.LSTM(size[2], bias_vectors=2)


def _params(size: Sequence[int]) -> Any:
    return _cell(size).init_params(jax.random.key(0), size[1])


def _inputs(size: Sequence[int]) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (size[0], size[1]))


def _timed(once: Callable[[], Any]) -> dict[str, Any]:
    outputs = [np.asarray(once()).tolist() for _ in range(_COMPARED)][-1]
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times), "outputs": outputs}


def measure(size: Sequence[int], repeats: int) -> dict[str, Any]:
    """A row: both sides in turn, torch with all cores and with one.

    Args:
      size: B, D, F.
      repeats: rounds.

    Returns:
      By side, and the ratios of torch's to ours by side: medians and quartiles over rounds.

    Raises:
      AssertionError: if the outputs of two sides differ.
      ProcessError: if a process fails.
    """
    sides = {"ours": ("stepper", {}), "one": ("torch_cell", {"threads": 1})}
    sides["all"] = ("torch_cell", {"threads": process.cores()})
    rounds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repeats):
        outputs = {}
        for side, (function, arguments) in sides.items():
            result = process.call(f"benchmarks.stepper.{function}", {"size": size, **arguments}, 1)
            rounds[side].append(result["seconds"])
            outputs[side] = result["outputs"]
        for side in ("one", "all"):
            np.testing.assert_allclose(outputs[side], outputs["ours"], atol=1e-5)
    times = {side: np.array(seconds) for side, seconds in rounds.items()}
    ratios = {f"ratio_{side}": summary(times[side] / times["ours"]) for side in ("one", "all")}
    return {**{side: summary(seconds) for side, seconds in times.items()}, **ratios}


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status."""
    options = parse("stepper", lambda values: None, argv, devices=False)
    if importlib.util.find_spec("torch") is None:
        fail("stepper", "torch is not installed, and there is nothing to compare with.")
    # As a server runs them; what the caller has set stays.
    os.environ.setdefault("OMP_WAIT_POLICY", "active")
    os.environ.setdefault("KMP_BLOCKTIME", "200")
    rows = []
    for size in SIZES:
        say(f"{size}, {options['repeats']} rounds")
        rows.append({"size": size, **measure(size, options["repeats"])})
    table = markdown(
        ("B, D, F", "stepper us", "LSTMCell us, one thread", "all", "ratio, one thread", "all"),
        [
            (
                ", ".join(map(str, row["size"])),
                *(f"{1e6 * row[side]['median']:.0f}" for side in ("ours", "one", "all")),
                *(ratio({"ratio": row[f"ratio_{side}"]}) for side in ("one", "all")),
            )
            for row in rows
        ],
    )
    print(table)
    save(options["out"], "stepper", {"rows": rows}, table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
