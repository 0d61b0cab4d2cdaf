"""Inputs that each step projects by itself, where that is fast: forward, few inputs, on a CPU.

A projection of all steps at once is one large product, but what it makes is written to memory and
read back step by step. Beside the recurrent products that of a few inputs is small, and where the
state has one field it gives XLA's threads something to do beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from recurrent_gates import target
from recurrent_gates.backends.shared.products import declared
from recurrent_gates.base import SlotCell
from recurrent_gates.declared import Slots, recurrent_weights
from recurrent_gates.scan import Loop

# Where gru and janet, whose state has one field, were measured to be 1.0 to 1.5 times as fast (0.83
# at worst). With two fields (lstm) it is 0.6 to 1.1 times: XLA runs those products beside each
# other in any case.
_FEATURES = 180
_WIDTH = 3000  # numbers of a step's state
_INPUTS = 6  # the features over the inputs, at least


def serves(loop: Loop) -> bool:
    """Whether the steps of a loop had better project their inputs.

    Args:
      loop: the driver's.
    """
    cell = loop.settings.cell
    if target.platform() != "cpu" or loop.symbolic or not isinstance(cell, SlotCell):
        return False
    members = ("project", "emit", "products")
    if any(getattr(type(cell), name) is not getattr(SlotCell, name) for name in members):
        return False
    fields, features = jax.tree.leaves(loop.carry), cell.features
    if len(fields) > 1 or features < _FEATURES or fields[0].size < _WIDTH:
        return False
    kernels = loop.params["kernel"]
    return bool(kernels) and features >= _INPUTS * next(iter(kernels.values())).shape[0]


def product_loop(loop: Loop) -> Loop:
    """The loop over the declared products, with the inputs as they are."""
    return loop.replace(params=recurrent_weights(declared(loop.settings.cell), loop.params))


def projection(loop: Loop) -> Callable[[Any], Slots]:
    """Makes of a step's input what the step reads."""
    cell = loop.settings.cell
    products = declared(cell)
    return lambda x: products.inputs(cell.project(loop.params, x))
