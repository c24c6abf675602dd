# SPDX-License-Identifier: Apache-2.0
"""The default buckets of `npu_optimizer`: no copy where none is needed."""

from collections.abc import Sequence

from optax_npu._packing import bucket_plan
from optax_npu._plan import Bucket, BucketPlan
from optax_npu._split import MIB
from optax_npu._trees import PyTree


def tail_plan(
    tree: PyTree,
    order: Sequence[int] | Sequence[str] | None = None,
    alone_bytes: int = MIB,
) -> BucketPlan:
    """Large leaves travel alone, small ones together.

    A leaf of its own is reduced where it lies; packing costs two passes over it. So
    leaves of at least `alone_bytes` are buckets by themselves, and smaller ones of a
    dtype are collected until they are as large. What is left in the end goes before
    the last large leaf: the last bucket has to be large enough to hide the update of
    all the others.

    Args:
      tree: Gradients, parameters, or their ``jax.eval_shape``.
      order: As in ``bucket_plan``.
      alone_bytes: From how many bytes on a leaf is a bucket of its own.

    Returns:
      The plan.
    """
    plan = bucket_plan(tree, num_packs=0, order=order)
    buckets: list[Bucket] = []
    waiting: dict[str, Bucket] = {}
    for bucket in plan.buckets:
        if bucket.nbytes < alone_bytes:
            before = waiting.pop(bucket.dtype, Bucket(bucket.dtype, ()))
            bucket = Bucket(bucket.dtype, before.pieces + bucket.pieces)
        if bucket.nbytes < alone_bytes:
            waiting[bucket.dtype] = bucket
        else:
            buckets.append(bucket)
    last = buckets[-1:]
    return BucketPlan(
        plan.leaves, (*buckets[:-1], *waiting.values(), *last), plan.order
    )
