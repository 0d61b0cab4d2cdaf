"""How fast data come, beside training on them: ``python -m benchmarks.loaders``.

A training step is that of the experiment's default, the loader alone is its task's ``draw``:
windows read from a text, stays and reviews drawn or gathered in an order of their own. Both are
compiled programs of as many steps, timed in turn.

Pictures come from files, so their loader is the host's: features of ResNet-152 that were kept
(``captioning_features``), or JPEGs to train ResNet-152 on (``captioning_pixels``). The files are
made for the measurement, of random pictures and features; the model has h-detach's sizes, and
Show, Attend and Tell's decoder. Its training reads ahead beside its own work, as ever.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from absl import flags
from absl.flags import FlagValues

from benchmarks import process
from benchmarks.command import fail, markdown, parse, save, say
from benchmarks.pair import interleave

EXPERIMENTS = ("language_model", "stay", "sentiment")
# Pixels of a side (regions of 32 x 32), and pictures of a batch.
PICTURES = {"captioning_features": (448, 10), "captioning_pixels": (224, 2)}
_FILES = 32  # pictures


def define(values: FlagValues) -> None:
    """Defines the program's flags."""
    flags.DEFINE_list(
        "experiments",
        list(EXPERIMENTS),
        f"whose defaults are timed; pictures: {', '.join(PICTURES)}",
        flag_values=values,
    )
    flags.DEFINE_integer("steps", 20, "timed together", 1, flag_values=values)


def measure(experiment: str, settings: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    """Times of training and of drawing alone; runs in a process of its own (``process.call``).

    Args:
      experiment: its name in the catalog.
      settings: beside its default.
      steps: timed together.
      repeats: pairs of times.
    """
    import jax
    import jax.numpy as jnp

    from experiments.catalog import EXPERIMENTS as CATALOG
    from experiments.machine.mesh import Rows
    from experiments.settings.resolver import resolve
    from experiments.training.learner import Learner

    definition = next(entry for entry in CATALOG if entry.name == experiment)
    config = resolve(definition, "small", settings)
    learner = Learner(config)
    learner.prepare()
    state, data, key = learner.initial(), learner.data, jax.random.key(0)
    task, batch = learner.task, config.training.batch_size
    rows = Rows(jnp.int32(0), batch, batch)
    start = task.start(learner.fresh, data, key, rows)

    @jax.jit
    def draw(data: Any, stream: Any) -> tuple[Any, jax.Array]:
        def body(step: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            stream, total = state
            window, stream = task.draw(lambda *_: None, data, stream, key, step, rows)
            sums = [leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(window)]
            return stream, total + sum(sums)  # all of a window is made

        return jax.lax.fori_loop(0, steps, body, (stream, jnp.float32(0)))

    step_count = 0

    def train() -> None:
        nonlocal state, step_count
        state = learner.advance(state, step_count, step_count + steps)
        step_count += steps

    times = interleave(lambda: jax.block_until_ready(draw(data, start)), train, repeats)
    units = batch * task.units_per_row * steps
    return {"experiment": experiment, "unit": task.unit, "units": units, "times": times}


def measure_pictures(experiment: str, steps: int, repeats: int) -> dict[str, Any]:
    """The same of pictures in files; runs in a process of its own (``process.call``).

    Args:
      experiment: one of ``PICTURES``.
      steps: timed together.
      repeats: pairs of times.
    """
    import jax
    import numpy as np

    from experiments.captioning import pictures, resnet
    from experiments.captioning.settings import CAPTIONING
    from experiments.settings.resolver import resolve
    from experiments.training.learner import Learner

    size, batch = PICTURES[experiment]
    rng = np.random.default_rng(0)

    def random_features(
        files: Any, encode: Any, params: Any, numbers: Sequence[int]
    ) -> tuple[Any, Any]:
        regions = rng.random((len(numbers), pictures.regions_of(size), resnet.FEATURES))
        return regions.mean(axis=1), regions

    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "dataset": "flickr8k", "data_dir": folder, "captioner": "show_attend_tell",
            "image_size": size, "batch_size": batch, "min_count": 0, "evaluation": "bleu",
            "steps": steps * (1 + repeats),
        }  # fmt: skip
        make_flickr8k(Path(folder), rng)
        if experiment == "captioning_features":
            settings["weights"] = str(Path(folder, "none.safetensors"))
            Path(settings["weights"]).touch()
        else:
            settings["train_encoder"] = True
        with (
            mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}),
            mock.patch.object(resnet, "read_weights"),
            mock.patch.object(pictures.PictureFiles, "_make", random_features),
        ):
            learner = Learner(resolve(CAPTIONING, "hdetach", settings))
            learner.prepare()
            files: Any = learner.task.data()
        files.batched(batch)
        state, step_count = learner.initial(), 0

        def load() -> None:
            for step in range(steps):
                files.read(1, step, np.arange(batch))

        def train() -> None:
            nonlocal state, step_count
            state = jax.block_until_ready(learner.advance(state, step_count, step_count + steps))
            step_count += steps

        times = interleave(load, train, repeats)
        learner.close()
    return {"experiment": experiment, "unit": "pictures", "units": batch * steps, "times": times}


def make_flickr8k(folder: Path, rng: Any) -> None:
    """JPEGs of 640 x 480 pixels, as large as photographs are, in Flickr8k's layout."""
    import numpy as np
    from PIL import Image

    names = [f"{number}.jpg" for number in range(_FILES)]
    (folder / "Flicker8k_Dataset").mkdir()
    for name in names:
        coarse = Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8))
        picture = np.asarray(coarse.resize((640, 480), Image.Resampling.BICUBIC), np.float32)
        picture = np.clip(picture + rng.normal(scale=8, size=picture.shape), 0, 255)
        image = Image.fromarray(picture.astype(np.uint8))
        image.save(folder / "Flicker8k_Dataset" / name, quality=90)
    words = [f"word{number}" for number in range(1000)]
    lines = [
        f"{name}#{index}\t{' '.join(rng.choice(words, size=16))}"
        for name in names
        for index in range(5)
    ]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines))
    for part, part_names in (("train", names[:-2]), ("dev", names[-2:-1]), ("test", names[-1:])):
        (folder / f"Flickr_8k.{part}Images.txt").write_text("\n".join(part_names))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = []
    for row in rows:
        times = row["times"]
        ratio = times["ratio"]
        lines.append(
            [
                f"`{row['experiment']}`",
                row["unit"],
                *(f"{row['units'] / times[side]['median']:,.0f}" for side in ("ours", "theirs")),
                f"{ratio['median']:.1f} [{ratio['low']:.1f}, {ratio['high']:.1f}]",
            ]
        )
    titles = ["experiment", "unit", "loader, a second", "training, a second", "ratio"]
    return markdown(titles, lines)


def main(argv: Sequence[str]) -> int:
    """The program; returns its exit status."""
    options = parse("loaders", define, argv)
    rows = []
    for name in options["experiments"]:
        if name not in (*EXPERIMENTS, *PICTURES):
            names = ", ".join((*EXPERIMENTS, *PICTURES))
            fail("loaders", f"An experiment is one of {names}, got {name!r}.")
    for name in options["experiments"]:
        say(name)
        arguments: dict[str, Any] = {"experiment": name}
        arguments |= {"steps": options["steps"], "repeats": options["repeats"]}
        function = "measure_pictures" if name in PICTURES else "measure"
        if function == "measure":
            arguments["settings"] = {}
        rows.append(process.call(f"benchmarks.loaders.{function}", arguments, options["devices"]))
        save(options["out"], "loaders", rows, table(rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
