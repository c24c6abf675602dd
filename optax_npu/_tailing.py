# SPDX-License-Identifier: Apache-2.0
"""The fence: collectives in the order asked for, in the compiled program.

Compilers merge and reorder collectives that do not depend on each other. An update
can run beside the last all-reduce only if the earlier ones are separate and finish
first. So each bucket is made to depend on the previous bucket's *result*:

* On GPU and one-slice TPU by an optimization barrier over the *whole* previous result;
  a scalar token is thrown away. Only the barrier's first output is used: with the
  second, the update of bucket k would wait for the gradients of bucket k + 1.
* On CPU, where older compilers drop barriers, by data: one element is selected between
  itself and an element of the previous result, on a predicate that is never true but
  that no compiler can know. A select never leaks a nan; a product with zero would.
* On TPU not between slices: the compiler keeps all those transfers in flight by itself;
  behind a fence it would receive one before it sends the next. A flat reduction over
  several slices is not fenced at all.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from optax_npu._compat import (
    AxisName,
    bound_axes,
    match_varying,
    tracks_varying,
    varying_axes,
)

Order = Literal["auto", "chain", "none"]
# A reduction at one level, or a stage of one at several: inside nodes, between them.
Place = Literal["flat", "inside", "between"]


def check_order(order: str) -> Order:
    """The fence mode, checked."""
    if order == "auto" or order == "chain" or order == "none":
        return order
    raise ValueError(
        f"The order of the buckets is {order!r}, but must be 'auto' (what suits the"
        " platform), 'chain' (one after the other) or 'none' (the compiler decides)."
    )


def fence(
    x: jax.Array,
    prev: jax.Array | None,
    order: Order = "auto",
    place: Place = "flat",
) -> jax.Array:
    """`x`, such that a collective on it starts after `prev` is there.

    Args:
      x: The input of the next collective; any shape and dtype.
      prev: The result of the previous one, whole. `None`: nothing to wait for. It may
        vary only over axes over which `x` varies (see `can_follow`).
      order: ``"auto"`` leaves transfers between TPU slices alone, ``"chain"`` orders
        everywhere, ``"none"`` returns `x`.
      place: Which links the collective uses.

    Returns:
      The values of `x`, bit for bit, whatever `prev` holds.
    """
    if prev is None or order == "none" or not x.size or not prev.size:
        return x
    if order == "auto" and place == "flat" and several_slices():
        return x
    axis = _any_axis(x)
    if axis is None:
        return _by_barrier(x, prev)

    def by_data(x: jax.Array, prev: jax.Array) -> jax.Array:
        return _by_data(x, prev, axis)

    free = order == "auto" and place == "between"
    tpu = (lambda x, prev: x) if free else _by_barrier
    return lax.platform_dependent(x, prev, cpu=by_data, tpu=tpu, default=_by_barrier)


def can_follow(x: jax.Array, prev: jax.Array) -> bool:
    """Whether a fence on `prev` keeps the type of `x` (it varies no further)."""
    return varying_axes(prev) <= varying_axes(x)


def several_slices() -> bool:
    """Whether the program runs on more than one TPU slice."""
    if jax.default_backend() != "tpu":
        return False
    return len({getattr(d, "slice_index", 0) for d in jax.devices()}) > 1


def _any_axis(x: jax.Array) -> AxisName | None:
    """A mapped axis on which a predicate may depend without changing the type of x."""
    varying = varying_axes(x)
    for name in bound_axes():
        if name in varying or not tracks_varying(name):
            return name
    return None


def _by_barrier(x: jax.Array, prev: jax.Array) -> jax.Array:
    return lax.optimization_barrier((x, prev))[0]


def _by_data(x: jax.Array, prev: jax.Array, axis: AxisName) -> jax.Array:
    never = lax.axis_index(axis) < 0
    corner = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)
    link = lax.slice(prev, (0,) * prev.ndim, (1,) * prev.ndim)
    link = jnp.broadcast_to(link.reshape(()).astype(x.dtype), corner.shape)
    kept = jnp.where(never, match_varying(link, corner), corner)
    return lax.dynamic_update_slice(x, kept, (0,) * x.ndim)
