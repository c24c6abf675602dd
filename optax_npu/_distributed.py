# SPDX-License-Identifier: Apache-2.0
"""Stages 1 to 4 on many replicas: flag, buckets, reduction and unscaling as one.

The flag is taken from local gradients and travels just before the last bucket, so that
the update of every other bucket can run beside the last reduction. A mean is not
divided on the way but together with the loss scale: one pass less over every gradient.
The head-room test makes that safe.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_npu._axes import AxisSpec, ResolvedAxes, axis_spec, resolve_axes
from optax_npu._collectives import power_of_two
from optax_npu._compat import AxisName, bound_axes
from optax_npu._overflow import Headroom, agree, tied_overflow
from optax_npu._packing import bucket_plan, check_num_packs
from optax_npu._plan import BucketPlan
from optax_npu._reduce import reduce_tree
from optax_npu._settings import ReduceOp, Settings, check_settings
from optax_npu._tail_plan import tail_plan
from optax_npu._tailing import can_follow, fence
from optax_npu._trees import PyTree

# Emits the agreed verdict, ordered behind a result of the reduction.
Vote = Callable[[jax.Array | None], jax.Array]


class Buckets(NamedTuple):
    """How gradients are cut into buckets, as the user asked for it."""

    num_packs: int | None = None
    split: Any = None
    bucket_bytes: int | None = None
    order: Sequence[int] | Sequence[str] | None = None

    def plan(self, tree: PyTree, replicas: int) -> BucketPlan:
        """The plan for a tree; by default large leaves alone, small ones together."""
        if isinstance(self.split, BucketPlan):
            return self.split
        if self.num_packs is None and self.split is None and self.bucket_bytes is None:
            return tail_plan(tree, self.order)
        packs = 1 if self.num_packs is None else self.num_packs
        return bucket_plan(
            tree, self.split, packs, self.bucket_bytes, self.order, replicas=replicas
        )


class Reduction(NamedTuple):
    """A checked reduction of gradients; `None` in its place means nothing to reduce."""

    spec: AxisSpec
    settings: Settings
    buckets: Buckets
    tailing: bool

    def headroom(self, axes: ResolvedAxes) -> Headroom:
        """How far a value can grow before it reaches the optimizer."""
        given = (self.settings.reduce_dtype, self.settings.inter_node_dtype)
        return Headroom(
            replicas=axes.size,
            summed=self.settings.op is ReduceOp.SUM or self._divides_late(axes),
            shrinks=self.settings.op is ReduceOp.MEAN,
            dtypes=tuple(dtype for dtype in given if dtype is not None),
        )

    def _divides_late(self, axes: ResolvedAxes) -> bool:
        """Whether the mean is divided with the scale, exactly and in range."""
        given = (self.settings.reduce_dtype, self.settings.inter_node_dtype)
        wide = all(t is None or jnp.finfo(t).maxexp >= 128 for t in given)
        mean = self.settings.op is ReduceOp.MEAN
        return mean and wide and power_of_two(axes.size) == axes.size

    def run(
        self, grads: PyTree, axes: ResolvedAxes, vote: Vote | None
    ) -> tuple[PyTree, jax.Array | None, int]:
        """Reduced gradients, the verdict, and what is left to divide by."""
        late = self._divides_late(axes)
        reduced, verdict = reduce_tree(
            grads,
            axes,
            plan=self.buckets.plan(grads, axes.size),
            fence=self.tailing,
            before_last=vote,
            divide=not late,
            **self.settings._asdict(),
        )
        return reduced, verdict, axes.size if late else 1


def reduction(
    axis_name: Any,
    devices_per_node: int | None,
    op: Any,
    reduce_dtype: Any,
    inter_node_dtype: Any,
    on_replicated: Any,
    integers: Any,
    buckets: Buckets,
    tailing: bool,
) -> Reduction:
    """Checks the options of a reduction, without tracing."""
    spec = axis_spec(axis_name, devices_per_node)
    settings = check_settings(
        spec, op, reduce_dtype, inter_node_dtype, True, on_replicated, integers
    )
    if buckets.num_packs is not None:
        check_num_packs(buckets.num_packs)
    return Reduction(spec, settings, buckets, tailing)


def vote_and_reduce(
    grads: PyTree,
    loss_scale: jax.Array,
    how: Reduction | None,
    agreement_axes: tuple[AxisName, ...],
    outside: Callable[[jax.Array], jax.Array] | None,
) -> tuple[PyTree, jax.Array | None, int]:
    """Stages 1 to 3.

    Args:
      grads: Local, scaled gradients.
      loss_scale: The scale they carry.
      how: The reduction, or `None`.
      agreement_axes: Further axes that vote.
      outside: Adds an outside flag to the local one. `None`: no test at all.

    Returns:
      The gradients, the verdict (bool[], or `None` without a test), and what they are
      still to be divided by.
    """
    axes = resolve_axes(how.spec) if how else None
    voters = (axes.names if axes else ()) + agreement_axes
    vote: Vote | None = None
    if outside is not None:
        headroom = how.headroom(axes) if how and axes else None
        grads, local = tied_overflow(grads, loss_scale, headroom)
        vote = _vote(outside(local), voters)
    if how is None or axes is None:
        return grads, vote(None) if vote else None, 1
    return how.run(grads, axes, vote)


def _vote(bad: jax.Array, voters: tuple[AxisName, ...]) -> Vote:
    def vote(prev: jax.Array | None) -> jax.Array:
        ordered = prev is not None and can_follow(bad, prev)
        return agree(fence(bad, prev, "chain") if ordered else bad, voters)

    return vote


def require_axes(axis_name: Any, is_distributed: bool) -> None:
    """Refuses a distributed optimizer that would silently reduce nothing."""
    if is_distributed and axis_name is None and bound_axes():
        raise ValueError(
            "is_distributed=True without axis_name, inside a mapped function with the"
            f" axes {list(bound_axes())}: it does not say over which of them gradients"
            f" are reduced. Pass axis_name={tuple(bound_axes())!r} (slow links first),"
            " and model-parallel axes as agreement_axes."
        )
