"""An episode that an agent plays, as an animated picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.machine.mesh import Rows
from experiments.match.task import MatchTask
from experiments.settings.errors import UserError
from experiments.training.learner import Learner
from experiments.training.state import threefry_key

_KEY = 0x61F  # of what is shown: two films differ by their agents alone
_CELL = 24  # pixels
_SECONDS = 0.15  # of a picture; the last one stays for a second


def check(path: Path) -> None:
    """Raises ``UserError`` if there can be no film at a path."""
    if path.suffix != ".gif":
        raise UserError(f"--render={path} must be the name of a file that ends in .gif.")
    if not path.parent.is_dir():
        raise UserError(f"--render={path}: there is no directory {path.parent}.")
    if importlib.util.find_spec("PIL") is None:
        raise UserError("--render needs pillow: pip install pillow.")


def pictures(learner: Learner, params: Any) -> list[np.ndarray]:
    """The pictures of an episode with drawn actions, uint8 ``[rows, columns, 3]``.

    Args:
      learner: of a ``MatchTask``.
      params: of one lane.
    """
    task = learner.task
    assert isinstance(task, MatchTask)
    environment = task.environment

    def act(*args: Any, **kwargs: Any) -> Any:
        return learner.apply(params, *args, **kwargs)

    def step(stream: Any, key: jax.Array) -> tuple[Any, Any]:
        next_stream, play = task.play(act, stream, key[None], jnp.bool_(False))
        frames = (stream.environment, stream.seen.observation)
        return next_stream, (frames, play.turn.done, (play.turn.state, play.turn.observation))

    @jax.jit
    def episode() -> Any:
        keys = jax.random.split(threefry_key(_KEY), 1 + environment.steps)
        start = task.start(learner.fresh, (), keys[0], Rows(0, 1, 1))
        return jax.lax.scan(step, start, keys[1:])[1]

    scenes, done, next_scenes = jax.device_get(episode())
    count = int(np.argmax(done[:, 0])) + 1

    def picture(frames: Any, index: int) -> np.ndarray:
        state, observation = jax.tree.map(lambda leaf: leaf[index, 0], frames)
        return environment.picture(state, observation)

    return [*(picture(scenes, index) for index in range(count)), picture(next_scenes, count - 1)]


def render(learner: Learner, params: Any, path: Path) -> None:
    """Writes the film of an episode.

    Args:
      learner: of a ``MatchTask``.
      params: of one lane.
      path: of the GIF.

    Raises:
      UserError: if it cannot be written.
    """
    from PIL import Image

    images = [
        Image.fromarray(pixels.repeat(_CELL, axis=0).repeat(_CELL, axis=1))
        for pixels in pictures(learner, params)
    ]
    milliseconds = [int(1000 * _SECONDS)] * (len(images) - 1) + [1000]
    try:
        images[0].save(path, save_all=True, append_images=images[1:], duration=milliseconds, loop=0)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None
