"""A training step of copying or of pixels beside the same model in PyTorch: ``python -m
benchmarks.sequences``.

Ours are ``experiments.copy`` and ``experiments.pixels`` with h-detach's settings: an LSTM of 128,
batches of 100, Adam, the gradient's norm clipped at 1. Torch's is nn.LSTM, nn.Linear,
cross_entropy and Adam; with h-detach nn.LSTMCell in a loop, since the state must be detached
between two steps. Both sides begin at the same parameters and see the same batches, which torch
finds ready; their losses must agree before times are taken.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from absl import flags
from absl.flags import FlagValues

from benchmarks import process, speed_report
from benchmarks.command import fail, markdown, parse, save, say
from benchmarks.pair import interleave
from benchmarks.training import Trainer, check_losses, copied

EXPERIMENTS = ("copy", "pixels")
_RATE = 1e-3
_DETACH = (0.0, 0.25)
_BATCHES = 20  # that both sides begin with, and torch goes through again


def define(values: FlagValues) -> None:
    """Defines the program's flags."""
    flags.DEFINE_list("experiments", list(EXPERIMENTS), "of copy, pixels", flag_values=values)
    flags.DEFINE_integer("steps", 20, "timed together", 1, flag_values=values)


def measure(
    experiment: str,
    detach_prob: float,
    steps: int,
    repeats: int,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A row: runs in a process of its own (``process.call``).

    Args:
      experiment: "copy" or "pixels".
      detach_prob: of h-detach; 0: none, and torch's side is nn.LSTM.
      steps: of training, timed together.
      repeats: pairs of times.
      settings: other than the protocol's.

    Raises:
      MismatchError: if the losses of the first steps differ; with h-detach, whose masks differ,
        of the first step alone.
    """
    ours, params, batches = our_side(experiment, detach_prob, settings or {})
    theirs = torch_side(params, batches, detach_prob)
    losses = check_losses(ours, theirs, 1 if detach_prob else 3)
    times = interleave(lambda: ours.steps(steps), lambda: theirs.steps(steps), repeats)
    facts = {"losses": losses, "ours": ours.facts, "theirs": theirs.facts, "times": times}
    return {"experiment": experiment, "detach_prob": detach_prob, "steps": steps, **facts}


def our_side(
    experiment: str, detach_prob: float, settings: dict[str, Any]
) -> tuple[Trainer, Any, list[tuple[np.ndarray, np.ndarray]]]:
    """Our side, its first parameters, and the inputs and targets of its first batches."""
    import jax

    from experiments.copy.settings import COPY
    from experiments.pixels.settings import PIXELS
    from experiments.settings.resolver import resolve
    from experiments.training.learner import Learner
    from experiments.training.state import Purpose, key_of

    settings = {"detach_prob": detach_prob, "learning_rates": (_RATE,), **settings}
    with tempfile.TemporaryDirectory() as directory:
        if experiment == "pixels" and "dataset" not in settings:
            write_images(Path(directory))
            settings["data_dir"] = directory
        definition = {"copy": COPY, "pixels": PIXELS}[experiment]
        config = resolve(definition, "hdetach", settings)
        learner = Learner(config)
        learner.prepare()
    state = learner.initial()
    params = jax.tree.map(np.array, state.params)

    key = key_of(learner.lanes.each[0], Purpose.DATA)
    size, task = config.training.batch_size, cast(Any, learner.task)
    draw = jax.jit(lambda step: task.batch(learner.data["loaded"], key, step, size))
    batches = [draw(step) for step in range(_BATCHES)]
    arrays = []
    for batch in batches:
        inputs = np.array(batch.inputs, np.float32)
        encoded = inputs[..., None] if experiment == "copy" else inputs / task.source.maximum
        arrays.append((encoded, np.array(batch.targets)))
    return Trainer.of(learner, state), params, arrays


def write_images(directory: Path) -> None:
    """Random images in MNIST's files."""
    from experiments.datasets import SOURCES

    rng = np.random.default_rng(0)
    for part, counts in (("train", SOURCES["mnist"].train), ("t10k", SOURCES["mnist"].test)):
        count = sum(counts)
        header = np.array([2051, count, 28, 28], ">i4").tobytes()
        pixels = rng.integers(0, 256, count * 784, np.uint8).tobytes()
        (directory / f"{part}-images-idx3-ubyte").write_bytes(header + pixels)
        header = np.array([2049, count], ">i4").tobytes()
        labels = rng.permutation(np.repeat(np.arange(10, dtype=np.uint8), counts))
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def torch_side(
    params: Any, batches: Sequence[tuple[np.ndarray, np.ndarray]], detach_prob: float
) -> Trainer:
    """The same model in PyTorch, from the same parameters, on the same batches."""
    import torch
    from torch import nn

    import recurrent_gates as rg

    arrays = rg.to_torch([{"forward": params["recurrent"]["cell"]}])
    features, inputs = arrays["weight_hh_l0"].shape[1], arrays["weight_ih_l0"].shape[1]
    decoder_params = params["decoder"]["Dense_0"]
    decoder = nn.Linear(*decoder_params["kernel"].shape)
    copied(decoder.weight, decoder_params["kernel"].T)
    copied(decoder.bias, decoder_params["bias"])
    lstm: nn.Module = nn.LSTMCell(inputs, features) if detach_prob else nn.LSTM(inputs, features)
    for name, array in arrays.items():
        copied(getattr(lstm, name.removesuffix("_l0") if detach_prob else name), array)
    model = nn.ModuleList([lstm, decoder])
    adam = torch.optim.Adam(model.parameters(), lr=_RATE)
    rng = np.random.default_rng(0)
    tensors = [(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))) for x, y in batches]
    step_index = 0

    def outputs(xs: Any, length: int) -> Any:
        if not detach_prob:
            return lstm(xs)[0][-length:]
        h = c = torch.zeros(xs.shape[1], features)
        ys = []
        for x, detached in zip(xs, rng.random(len(xs)) < detach_prob, strict=True):
            h, c = lstm(x, (h.detach() if detached else h, c))
            ys.append(h)
        return torch.stack(ys[-length:])

    def steps(count: int) -> float:
        nonlocal step_index
        for _ in range(count):
            xs, targets = tensors[step_index % len(tensors)]
            step_index += 1
            targets = targets.reshape(-1, targets.shape[-1])
            logits = decoder(outputs(xs, len(targets)))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
        return float(loss.detach())

    return Trainer(steps, {"threads": torch.get_num_threads()})


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = []
    for row in report["rows"]:
        ours, theirs = (
            f"{row['steps'] / row['times'][side]['median']:.1f}" for side in ("ours", "theirs")
        )
        peer = "nn.LSTMCell in a loop" if row["detach_prob"] else "nn.LSTM"
        name = f"h-detach {row['detach_prob']}" if row["detach_prob"] else "plain"
        ratio = speed_report.ratio(row["times"])
        rows.append([row["experiment"], name, peer, ours, theirs, ratio])
    heading = ["experiment", "LSTM", "beside", "ours, steps/s", "theirs, steps/s", "ratio"]
    return f"{report['machine']['device']}, float32\n\n{markdown(heading, rows)}"


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status."""
    options = parse("sequences", define, argv)
    if importlib.util.find_spec("torch") is None:
        fail("sequences", "torch is not installed, and there is nothing to compare with.")
    for name in options["experiments"]:
        if name not in EXPERIMENTS:
            fail("sequences", f"--experiments: {name!r} is neither copy nor pixels.")
    devices = options["devices"]
    report: dict[str, Any] = {"machine": process.call("benchmarks.pair.machine", {}, devices)}
    report["rows"] = []
    for experiment in options["experiments"]:
        for detach_prob in _DETACH:
            say(f"{experiment}, h-detach {detach_prob}")
            arguments = {"experiment": experiment, "detach_prob": detach_prob}
            arguments |= {"steps": options["steps"], "repeats": options["repeats"]}
            try:
                row = process.call("benchmarks.sequences.measure", arguments, devices)
            except process.ProcessError as error:
                say(f"failed: {error}")
                return 1
            report["rows"].append(row)
            save(options["out"], "sequences", report, table(report))
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
