# SPDX-License-Identifier: Apache-2.0
"""Stage 1: did this step overflow, and do all replicas agree on the answer?

The flag is read from the *local*, still scaled gradients, before any reduction, so
that no optimizer work has to wait for the last all-reduce. It is sound: when no
replica reports, neither the reduced nor the unscaled gradients can be non-finite.
A replica therefore reports

1. a value that is not finite,
2. a value so large that the reduction could overflow on the way (`Headroom`),
3. a value that would overflow when it is divided by a loss scale below 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_npu._compat import (
    AxisName,
    axis_size,
    require_bound,
    varying_axes,
)
from optax_npu._trees import PyTree, compute_dtype, is_inexact, real_dtype


class Headroom(NamedTuple):
    """How far a value may grow between the test and the optimizer.

    Attributes:
      replicas: How many replicas are reduced.
      summed: Whether they are summed on the way; a mean cannot grow.
      shrinks: Whether the sum is divided again behind the reduction.
      dtypes: Further dtypes in which the reduction accumulates or travels, beside
        the default of at least float32.
    """

    replicas: int = 1
    summed: bool = False
    shrinks: bool = False
    dtypes: tuple[Any, ...] = ()

    def growth(self) -> int:
        """The largest factor by which the reduction can grow a value."""
        return self.replicas if self.summed else 1


def local_overflow(
    tree: PyTree, loss_scale: jax.Array, headroom: Headroom | None = None
) -> jax.Array:
    """Whether any floating or complex value of this replica overflows.

    Args:
      tree: The scaled gradients of this replica.
      loss_scale: The scale they carry, float32[].
      headroom: The reduction that follows, if the test stands before one.

    Returns:
      bool[]. An empty tree is finite.
    """
    return tied_overflow(tree, loss_scale, headroom, tie=False)[1]


def tied_overflow(
    tree: PyTree,
    loss_scale: jax.Array,
    headroom: Headroom | None = None,
    tie: bool = True,
) -> tuple[PyTree, jax.Array]:
    """`local_overflow`, and a tree that is there only once it has been tested.

    Collectives reduce in place on GPU. A test that may run after one has started makes
    the compiler copy every large gradient first; one that is tied to it does not.
    """
    leaves, structure = jax.tree.flatten(tree)
    parts = {i: jnp.asarray(x) for i, x in enumerate(leaves) if _is_tested(x)}
    limits = {
        dtype: _largest_safe(dtype, loss_scale, headroom or Headroom())
        for dtype in dict.fromkeys(x.dtype for x in parts.values())
    }
    good: list[jax.Array] = []
    for x in _together([x for x in parts.values() if x.size <= _SMALL]):
        good.append(_within(x, _in_turn(limits[x.dtype], good, x)))
    for i, x in parts.items():
        if x.size <= _SMALL:
            continue
        limit = limits[x.dtype] if tie else _in_turn(limits[x.dtype], good, x)
        verdict = _within(x, limit)
        if tie:
            leaves[i], verdict = lax.optimization_barrier((x, verdict))
        good.append(verdict)
    tree = jax.tree.unflatten(structure, leaves)
    bad = ~jnp.all(jnp.stack(good)) if good else jnp.zeros((), jnp.bool_)
    # Without the barrier XLA repeats the whole conjunction for every use of the flag.
    return tree, lax.optimization_barrier(bad)


# Leaves up to this many elements are tested together: a test of its own costs more
# time, to compile and to run, than a copy of so little.
_SMALL = 4096
_TOGETHER = 2**16


def _is_tested(leaf: Any) -> bool:
    return is_inexact(leaf) and np.size(leaf) > 0


def _together(small: list[jax.Array]) -> list[jax.Array]:
    """The same values in few arrays, each of one dtype."""
    groups: list[list[jax.Array]] = []
    for dtype in dict.fromkeys(x.dtype for x in small):
        size = _TOGETHER
        for x in (x for x in small if x.dtype == dtype):
            if size + x.size > _TOGETHER:
                groups.append([])
                size = 0
            groups[-1].append(x.ravel())
            size += x.size
    # The barrier keeps XLA from testing the pieces one by one after all.
    return [lax.optimization_barrier(jnp.concatenate(group)) for group in groups]


def _in_turn(limit: jax.Array, good: list[jax.Array], x: jax.Array) -> jax.Array:
    """The limit, known only when a test some places before is done.

    On CPU a test writes a byte per element. With as many tests under way as an element
    has bytes, they take no more memory than one leaf.
    """
    ahead = x.dtype.itemsize
    return jnp.where(good[-ahead], limit, -1) if len(good) >= ahead else limit


def _within(x: jax.Array, limit: jax.Array) -> jax.Array:
    """Whether `-limit <= x <= limit` everywhere; False for nan.

    Every element is compared: the minimum and maximum of a large array lose nan on
    XLA's CPU backend.
    """
    if jnp.iscomplexobj(x):
        return _within(x.real, limit) & _within(x.imag, limit)
    return jnp.all(jnp.abs(x.astype(limit.dtype)) <= limit)


def _largest_safe(dtype: Any, loss_scale: jax.Array, headroom: Headroom) -> jax.Array:
    """The largest magnitude that neither the reduction nor the unscaling overflows."""
    wide = real_dtype(compute_dtype(dtype))
    own = jnp.finfo(dtype).max.astype(wide)
    growth = headroom.growth()
    on_the_way = [wide, *(real_dtype(t) for t in headroom.dtypes)]
    limits = [own] + [_shrunk(t, headroom.replicas, growth, wide) for t in on_the_way]
    # The result is `x / scale`, or `growth * x / scale`, in the dtype of the leaf.
    ratio = loss_scale.astype(wide) / (1 if headroom.shrinks else growth)
    rounded = own * jnp.asarray(1 - 4 * float(jnp.finfo(wide).eps), wide)
    limits.append(jnp.where(ratio < 1, rounded * ratio, own))
    return jnp.min(jnp.stack(limits))


def _shrunk(dtype: Any, replicas: int, growth: int, wide: Any) -> jax.Array:
    """`max / growth`, less what rounding in `replicas` additions can add."""
    info = jnp.finfo(dtype)
    slack = 0.0 if replicas == 1 else min(0.5, (replicas + 4) * float(info.eps))
    largest = min(float(info.max), float(jnp.finfo(wide).max))
    return jnp.asarray(largest / growth * (1 - slack), wide)


def agree(flag: jax.Array, axis_names: Sequence[AxisName]) -> jax.Array:
    """Whether any replica along `axis_names` raised its flag, equal on all of them.

    An int32 sum: `max` would be fine for a flag but drops NaN when it is used on
    the values themselves, a byte would wrap at 256 replicas, and "some replica is
    finite" is the wrong question.

    Raises:
      ValueError: An axis is not bound, or the flag still differs along a mesh axis
        that was not named (the replicas would drift apart).
    """
    require_bound(axis_names)
    count = flag.astype(jnp.int32)
    if axis_names and axis_size(axis_names) > 1:
        count = lax.psum(count, tuple(axis_names))
    left = sorted(map(repr, varying_axes(count) - set(axis_names)))
    if left:
        raise ValueError(
            f"axis_name={tuple(axis_names)!r} leaves out the mesh axes"
            f" {', '.join(left)}, along which the gradients differ. Some replicas"
            " would skip a step that others apply. Name every axis along which"
            " gradients differ, data and model axes alike (in npu_optimizer:"
            " agreement_axes=...)."
        )
    return count > 0
