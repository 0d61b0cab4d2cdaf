"""Reviews that are made up: what they say of the film is turned by words far from it.

A review is words of no meaning in which stand, at random places,

- near its start perhaps the word "hardly", which turns the verdict of the whole review;
- three statements SUBJECT was ADVERB ADJECTIVE, one of a film and two of something else. The
  adverb "not" turns its own statement alone.

The verdict is the film's adjective, turned by each of the two. A reader who only counts words is
right in two of three reviews (``by_counts``). To do better, a reader must know which adjective is
the film's, and whether its adverb turns it.

Letters: T steps, B batch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

FILMS = ("film", "movie", "picture")
OTHERS = ("book", "weather", "crowd", "seat", "trailer")
GOOD = ("good", "great", "fine", "superb", "clever", "moving", "bright", "strong")
BAD = ("bad", "poor", "dull", "awful", "clumsy", "empty", "grim", "weak")
ADVERBS = ("very", "rather", "quite", "so")
_FILLERS = (
    "the and then we of a in it that my with on for her his at by this they as or from there "
    "after one who all seen told came went back home once night friends evening people others"
)
FILLERS = tuple(_FILLERS.split())

WORDS = ("", "hardly", "not", "was", *FILMS, *OTHERS, *GOOD, *BAD, *ADVERBS, *FILLERS)
"""The vocabulary; the first is the padding in front of a review."""

_SHORTEST = 24  # words of a review: three statements and "hardly" have room
_STATEMENTS = 3
_OPENING = 6  # "hardly" stands among so many first words
_HARDLY = 0.3  # probability that a review has it
_NOT = 0.25  # and a statement its "not"


def reviews(key: jax.Array, length: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Words int32 ``[T, B]``, with padding in front, and verdicts bool ``[B]``, in favour or not.

    Args:
      key: a PRNG key.
      length: T; a review has 24 words to so many.
      count: B.
    """
    keys = jax.random.split(key, count)
    words, verdicts = jax.vmap(lambda key: _review(key, length))(keys)
    return words.T, verdicts


def _review(key: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    keys = iter(jax.random.split(key, 12))
    size = jax.random.randint(next(keys), (), _SHORTEST, length + 1)
    words = _word_sample(next(keys), FILLERS, (length,))
    hardly = jax.random.bernoulli(next(keys), _HARDLY)
    place = jax.random.randint(next(keys), (), 0, _OPENING)
    words = words.at[place].set(jnp.where(hardly, WORDS.index("hardly"), words[place]))
    # The rest is cut into as many stretches as there are statements of four words.
    stretch = (size - _OPENING) // _STATEMENTS
    shape = (_STATEMENTS,)
    starts = _OPENING + stretch * jnp.arange(_STATEMENTS, dtype=jnp.int32)
    starts = starts + jax.random.randint(next(keys), shape, 0, stretch - 3)
    film_mask = jnp.arange(_STATEMENTS) == jax.random.randint(next(keys), (), 0, _STATEMENTS)
    subjects = jnp.where(
        film_mask, _word_sample(next(keys), FILMS, shape), _word_sample(next(keys), OTHERS, shape)
    )
    negated = jax.random.bernoulli(next(keys), _NOT, shape)
    adverbs = jnp.where(negated, WORDS.index("not"), _word_sample(next(keys), ADVERBS, shape))
    adjectives = _word_sample(next(keys), GOOD + BAD, shape)
    verbs = jnp.full(shape, WORDS.index("was"), jnp.int32)
    statements = jnp.stack([subjects, verbs, adverbs, adjectives], axis=1)
    places = starts[:, None] + jnp.arange(4, dtype=jnp.int32)[None]
    words = words.at[places].set(statements)
    good = adjectives < WORDS.index(BAD[0])
    verdict = (film_mask & (good ^ negated)).any() ^ hardly
    # The review ends at the last step, with padding in front.
    step = jnp.arange(length, dtype=jnp.int32) - (length - size)
    return jnp.where(step < 0, 0, words[jnp.maximum(step, 0)]), verdict


def _word_sample(key: jax.Array, words: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
    """Some of the words, which stand beside each other in the vocabulary, int32."""
    first = WORDS.index(words[0])
    return jax.random.randint(key, shape, first, first + len(words), jnp.int32)


def by_counts() -> tuple[float, float]:
    """The accuracy, and the mean loss in nats, of a reader who knows how often each word stands in
    a review, but not where. g counts the good adjectives, n the adverbs "not"; each statement is
    the film's with the same probability."""
    accuracy = loss = 0.0
    count = _STATEMENTS
    for g in range(count + 1):
        for n in range(count + 1):
            weight = math.comb(count, g) / 2**count
            weight *= math.comb(count, n) * _NOT**n * (1 - _NOT) ** (count - n)
            p = (g * (count - n) + (count - g) * n) / count**2
            accuracy += weight * max(p, 1 - p)
            loss -= weight * sum(q * math.log(q) for q in (p, 1 - p) if q)
    return accuracy, loss


def text(words: jax.Array) -> str:
    """A review ``[T]`` in words."""
    return " ".join(WORDS[int(word)] for word in words if word)
