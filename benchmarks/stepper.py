"""One step of an LSTM at a time beside ``torch.nn.LSTMCell``: ``python -m benchmarks.stepper``.

Both sides run in turn, on the same sizes; outputs are compared first. A ratio is torch's time over
ours (above 1 we are faster), the median over pairs of neighbouring runs. Torch may use all cores.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import recurrent_gates as rg
from benchmarks.command import markdown, parse, save

SIZES = ((1, 64, 512), (32, 32, 128), (1, 16, 128))
"""B, D, F."""


def measure(size: Sequence[int], repeats: int) -> dict[str, float]:
    """Microseconds of a step of ours and of torch, and the ratio.

    Args:
      size: B, D, F.
      repeats: pairs of steps.

    Raises:
      AssertionError: if the outputs of the two differ after 5 steps.
    """
    import torch

    batch, inputs, features = size
    cell = rg.LSTM(features, bias_vectors=2)
    params = cell.init_params(jax.random.key(0), inputs)
    step = rg.stepper(cell, params, batch)
    whole = torch.nn.LSTM(inputs, features)
    state = rg.to_torch([{"forward": params}])
    whole.load_state_dict({name: torch.tensor(np.asarray(a)) for name, a in state.items()})
    theirs = torch.nn.LSTMCell(inputs, features)
    theirs.load_state_dict({name.removesuffix("_l0"): a for name, a in whole.state_dict().items()})
    x = jax.random.normal(jax.random.key(1), (batch, inputs))
    torch_x = torch.tensor(np.asarray(x))
    carry, hidden = step.initial(), (torch.zeros(batch, features),) * 2
    ours, others = [], []
    with torch.inference_mode():
        for count in range(repeats):
            start = time.perf_counter()
            carry, y = step(carry, x)
            y.block_until_ready()
            between = time.perf_counter()
            hidden = theirs(torch_x, hidden)
            end = time.perf_counter()
            ours.append(between - start)
            others.append(end - between)
            if count == 5:
                assert jnp.allclose(y, np.asarray(hidden[0]), atol=1e-5), "outputs differ"
    ratio = statistics.median(b / a for a, b in zip(ours, others, strict=True))
    return {
        "ours_us": 1e6 * statistics.median(ours),
        "torch_us": 1e6 * statistics.median(others),
        "ratio": ratio,
    }


def main(argv: Sequence[str]) -> None:
    flags = parse("stepper", lambda values: None, argv)
    repeats = max(100, flags["repeats"])
    rows = {size: measure(size, repeats) for size in SIZES}
    table = markdown(
        ("B, D, F", "stepper us", "torch.nn.LSTMCell us", "ratio"),
        [
            (
                ", ".join(map(str, size)),
                f"{row['ours_us']:.0f}",
                f"{row['torch_us']:.0f}",
                f"{row['ratio']:.2f}",
            )
            for size, row in rows.items()
        ],
    )
    print(table)
    save(flags["out"], "stepper", [{"size": size, **row} for size, row in rows.items()], table)


if __name__ == "__main__":
    main(sys.argv)
