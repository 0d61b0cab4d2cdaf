"""Where a backend's derivatives end: one more would be wrong, or is not there, and is refused."""

from __future__ import annotations

import functools
from typing import Any

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def once(sentence: str, tree: Any) -> Any:
    """A tree of arrays as it is; a derivative with respect to it is an error, which says why.

    Raises:
      ValueError: with the sentence, where it is differentiated.
    """
    del sentence
    return tree


@once.defjvp
def _refused(sentence: str, primals: tuple, tangents: tuple) -> Any:
    del primals, tangents
    raise ValueError(sentence)
