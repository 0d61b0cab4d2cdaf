"""A training step of a language model beside the same model in PyTorch: ``python -m
benchmarks.language``.

Ours is ``experiments.language_model`` with an LSTM at the size of Penn Treebank: 10,000 words,
embedding and hidden size 650, batch 20, windows of 70 steps. Torch's is nn.Embedding, nn.LSTM,
nn.Linear, cross_entropy and Adam. Both read the same text of drawn words, begin at the same
parameters and carry their state on; their losses must agree before times are taken.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from absl.flags import FlagValues

from benchmarks import process, speed_report
from benchmarks.command import fail, markdown, parse, save, say
from benchmarks.pair import interleave
from benchmarks.training import Trainer, check_losses, copied

_SIZES = {"words": 10_000, "hidden": 650, "embedding": 650, "batch": 20, "window": 70}
_RATE = 1e-4
_WINDOWS = 60  # of the drawn text; both sides begin anew at its end
_COMPARED = 3  # steps whose losses are compared


def define(values: FlagValues) -> None:
    """Defines the program's flags."""
    for name, value in _SIZES.items():
        flags.DEFINE_integer(name, value, "of the model or its windows", 1, flag_values=values)
    flags.DEFINE_integer("steps", 10, "timed together", 1, flag_values=values)


def measure(sizes: dict[str, int], steps: int, repeats: int) -> dict[str, Any]:
    """Times of both sides; runs in a process of its own (``process.call``).

    Args:
      sizes: as the flags.
      steps: of training, timed together.
      repeats: pairs of times.

    Raises:
      MismatchError: if the losses of the first steps differ.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_text(Path(directory), **{name: sizes[name] for name in ("words", "batch", "window")})
        ours, params, tokens = our_side(sizes, directory)
    theirs = torch_side(sizes, params, tokens)
    losses = check_losses(ours, theirs, _COMPARED)
    times = interleave(lambda: ours.steps(steps), lambda: theirs.steps(steps), repeats)
    return {
        "sizes": sizes,
        "steps": steps,
        "losses": losses,
        "ours": ours.facts,
        "theirs": theirs.facts,
        "times": times,
    }


def write_text(directory: Path, words: int, batch: int, window: int) -> None:
    """Three parts of lines of drawn words, Zipf's law; all words are in the training part."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, words)
    count = batch * (window * _WINDOWS + 1)
    tokens = rng.choice(words - 1, count, p=share / share.sum())
    tokens[: words - 1] = rng.permutation(words - 1)
    for name, numbers in (("train", tokens), ("valid", tokens[:1000]), ("test", tokens[:1000])):
        # The end of the only line is the last of the words.
        (directory / f"{name}.txt").write_text(" ".join(f"w{n}" for n in numbers) + "\n")


def our_side(sizes: dict[str, int], data_dir: str) -> tuple[Trainer, Any, np.ndarray]:
    """Our side, its first parameters, and the training part's tokens."""
    import jax

    from experiments.language_model.settings import LANGUAGE_MODEL
    from experiments.settings.resolver import resolve
    from experiments.training.learner import Learner

    settings = {
        "cell": "lstm",
        "dataset": "own",
        "data_dir": data_dir,
        "hidden_size": sizes["hidden"],
        "embedding": sizes["embedding"],
        "batch_size": sizes["batch"],
        "window": sizes["window"],
        "window_deviation": 0.0,
        "short_window_prob": 0.0,
        "learning_rates": (_RATE,),
        "weight_decay": 0.0,
        "keep_best": False,
    }
    learner = Learner(resolve(LANGUAGE_MODEL, "gato", settings))
    learner.prepare()
    state = learner.initial()
    params = jax.tree.map(np.array, state.params)
    tokens = np.asarray(learner.data["train"].tokens)
    return Trainer.of(learner, state), params, tokens


def torch_side(sizes: dict[str, int], params: Any, tokens: np.ndarray) -> Trainer:
    """The same model in PyTorch, from the same parameters, on the same windows."""
    import torch
    from torch import nn

    import recurrent_gates as rg

    embedding = nn.Embedding(sizes["words"], sizes["embedding"])
    lstm = nn.LSTM(sizes["embedding"], sizes["hidden"])
    decoder = nn.Linear(sizes["hidden"], sizes["words"])

    copied(embedding.weight, params["encoder"]["Embed_0"]["embedding"])
    for name, array in rg.to_torch([{"forward": params["recurrent"]["cell"]}]).items():
        copied(getattr(lstm, name), array)
    copied(decoder.weight, params["softmax"]["table"])
    copied(decoder.bias, params["softmax"]["bias"])
    model = nn.ModuleList([embedding, lstm, decoder])
    adam = torch.optim.Adam(model.parameters(), lr=_RATE)
    batch, window = sizes["batch"], sizes["window"]
    stretch = len(tokens) // batch
    rows = torch.from_numpy(tokens[: stretch * batch].astype(np.int64)).view(batch, stretch).t()
    state, place = None, 0

    def steps(count: int) -> float:
        nonlocal state, place
        for _ in range(count):
            inputs, targets = rows[place : place + window], rows[place + 1 : place + 1 + window]
            ys, state = lstm(embedding(inputs), state)
            logits = decoder(ys).view(-1, sizes["words"])
            loss = nn.functional.cross_entropy(logits, targets.reshape(-1))
            adam.zero_grad()
            loss.backward()
            adam.step()
            state = tuple(leaf.detach() for leaf in state)
            place += window
            if place >= stretch - 1:
                state, place = None, 0
        return float(loss.detach())

    return Trainer(steps, {"threads": torch.get_num_threads()})


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    times, sizes = report["times"], report["sizes"]
    tokens = sizes["batch"] * sizes["window"] * report["steps"]
    rows = []
    for name, side in (("ours", "ours"), ("torch", "theirs")):
        seconds = times[side]
        rows.append(
            [
                name,
                *(f"{tokens / seconds[quantile]:,.0f}" for quantile in ("median", "high", "low")),
            ]
        )
    facts = ", ".join(
        f"{value} {name}" for side in ("ours", "theirs") for name, value in report[side].items()
    )
    return "\n".join(
        [
            f"{report['machine']['device']} ({facts}), float32: "
            + ", ".join(f"{name} {value:,}" for name, value in sizes.items()),
            "",
            markdown(["side", "tokens a second", "lower quartile", "upper quartile"], rows),
            "",
            f"Ours is {speed_report.ratio(times)} times as fast.",
        ]
    )


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status."""
    options = parse("language", define, argv)
    if importlib.util.find_spec("torch") is None:
        fail("language", "torch is not installed, and there is nothing to compare with.")
    sizes = {name: options[name] for name in _SIZES}
    if sizes["words"] > sizes["batch"] * sizes["window"] * _WINDOWS:
        fail("language", "--words must be fewer than the words of the drawn text.")
    report = {"machine": process.call("benchmarks.pair.machine", {}, options["devices"])}
    say(f"{options['repeats']} pairs of {options['steps']} steps")
    arguments = {"sizes": sizes, "steps": options["steps"], "repeats": options["repeats"]}
    try:
        report |= process.call("benchmarks.language.measure", arguments, options["devices"])
    except process.ProcessError as error:
        say(f"failed: {error}")
        return 1
    save(options["out"], "language", report, table(report))
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
