"""Marks arrays whose derivative a backend does not have: asking for it is an error."""

from __future__ import annotations

import functools
from typing import Any

import jax


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def refuse_derivative(sentence: str, tree: Any) -> Any:
    """A tree of arrays as it is; a derivative with respect to it is an error, which says why.

    Raises:
      ValueError: with the sentence, where it is differentiated.
    """
    del sentence
    return tree


@refuse_derivative.defjvp
def _refused(sentence: str, primals: tuple, tangents: tuple) -> Any:
    del primals, tangents
    raise ValueError(sentence)
