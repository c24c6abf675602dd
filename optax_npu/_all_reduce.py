# SPDX-License-Identifier: Apache-2.0
"""Two-level sums and means of trees, as functions and as a transformation."""

from collections.abc import Sequence
from typing import Any

import optax

from optax_npu._axes import AxisSpec, axis_spec, resolve_axes
from optax_npu._packing import Split, bucket_plan, check_num_packs
from optax_npu._plan import BucketPlan
from optax_npu._reduce import reduce_tree
from optax_npu._settings import (
    Integers,
    OnReplicated,
    ReduceOp,
    Settings,
    check_settings,
)
from optax_npu._trees import PyTree


class Packing:
    """The checked packing options of a reduction; gives a plan for a tree."""

    def __init__(
        self,
        num_packs: int = 1,
        split: Split | BucketPlan = None,
        bucket_bytes: int | None = None,
        order: Sequence[int] | Sequence[str] | None = None,
        fence: bool | None = None,
    ):
        self.num_packs = check_num_packs(num_packs)
        self.split = split
        self.bucket_bytes = bucket_bytes
        self.order = order
        several = self.num_packs > 1 or split is not None or bucket_bytes is not None
        self.fence = several if fence is None else fence

    def plan(self, tree: PyTree, replicas: int) -> BucketPlan:
        """The plan for `tree`."""
        if isinstance(self.split, BucketPlan):
            return self.split
        return bucket_plan(
            tree,
            self.split,
            self.num_packs,
            self.bucket_bytes,
            self.order,
            replicas=replicas,
        )


def _reduce(
    tree: PyTree, spec: AxisSpec, packing: Packing, settings: Settings
) -> PyTree:
    axes = resolve_axes(spec)
    reduced, _ = reduce_tree(
        tree,
        axes,
        plan=packing.plan(tree, axes.size),
        fence=packing.fence,
        **settings._asdict(),
    )
    return reduced


def hierarchical_psum(
    tree: PyTree,
    axis_name: Any,
    *,
    devices_per_node: int | None = None,
    num_packs: int = 1,
    reduce_dtype: Any = None,
    inter_node_dtype: Any = None,
    split: Split | BucketPlan = None,
    on_replicated: OnReplicated = "error",
) -> PyTree:
    """``jax.lax.psum`` of a tree over two levels of links.

    For use anywhere in a mapped function. Arguments as in ``hierarchical_pmean``.

    **On overflow** of a sum in the leaf's dtype the result is inf, as everywhere;
    fp16, bf16 and fp8 leaves are accumulated in float32 and rounded once.

    Example:
      >>> import jax, jax.numpy as jnp, optax_npu
      >>> total = jax.vmap(  # stands for a pmap of 8 devices
      ...     lambda x: optax_npu.hierarchical_psum(x, "data", devices_per_node=4),
      ...     axis_name="data")
      >>> print(total(jnp.arange(8.0)))
      [28. 28. 28. 28. 28. 28. 28. 28.]
    """
    spec = axis_spec(axis_name, devices_per_node)
    settings = check_settings(
        spec, ReduceOp.SUM, reduce_dtype, inter_node_dtype, False, on_replicated
    )
    return _reduce(tree, spec, Packing(num_packs, split), settings)


def hierarchical_pmean(
    tree: PyTree,
    axis_name: Any,
    *,
    devices_per_node: int | None = None,
    num_packs: int = 1,
    reduce_dtype: Any = None,
    inter_node_dtype: Any = None,
    split: Split | BucketPlan = None,
    on_replicated: OnReplicated = "error",
) -> PyTree:
    """``jax.lax.pmean`` of a tree over two levels of links.

    For use anywhere in a mapped function: metrics, batch statistics, gradients in a
    loop of your own.

    **On overflow:** the mean of finite values is finite, also where their sum would not
    be. An inf or nan of one replica reaches its element on all of them.

    Args:
      tree: Values of this replica: floating or complex; see Raises for the others.
      axis_name: A pair ``(inter, intra)`` of mesh axes, slow links first (each may be a
        tuple of axes), one ``pmap`` axis with `devices_per_node`, or one axis: a flat
        reduction.
      devices_per_node: Cuts the one axis into nodes of this many devices.
      num_packs: How many buckets; 0: every leaf on its own.
      reduce_dtype: Accumulate in this dtype; by default at least float32.
      inter_node_dtype: What crosses between nodes is rounded to this dtype, e.g.
        ``jnp.bfloat16``: half the bytes. It is added up in `reduce_dtype`.
      split: See ``bucket_plan``; or a plan.
      on_replicated: Only where types are tracked (``shard_map(check_vma=True)``): a
        leaf that does not vary over the axes is refused (``"error"``), because it may
        be a gradient that JAX has summed already (``"summed"``) or a value that is
        equal on all replicas (``"equal"``, the meaning of ``lax.pmean``).

    Returns:
      A tree of the same dtypes, equal bit for bit on all replicas, typed as replicated.
      ``None``, booleans, float0 and PRNG keys pass untouched.

    Raises:
      ValueError: An axis is not bound or named twice, `devices_per_node` does not fit,
        a leaf is replicated already, an option is unknown.
      TypeError: A leaf holds integers, whose mean would be rounded (a sum is fine).

    Example:
      >>> import jax, jax.numpy as jnp, optax_npu
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = optax_npu.two_level_mesh()
      >>> axes = ("node", "device")
      >>> mean = jax.shard_map(
      ...     lambda x: optax_npu.hierarchical_pmean(x, axes),
      ...     mesh=mesh, in_specs=P(axes), out_specs=P())
      >>> print(mean(jnp.full(mesh.size, 3.5)))
      [3.5]

    References:
      The two-level all-reduce of HCCL and of Jia et al., `Highly Scalable Deep Learning
      Training System <https://arxiv.org/abs/1807.11205>`_; the 2-D torus of Mikami et
      al., `Massively Distributed SGD <https://arxiv.org/abs/1811.05233>`_.
    """
    spec = axis_spec(axis_name, devices_per_node)
    settings = check_settings(
        spec, ReduceOp.MEAN, reduce_dtype, inter_node_dtype, False, on_replicated
    )
    return _reduce(tree, spec, Packing(num_packs, split), settings)


def hierarchical_all_reduce(
    axis_name: Any,
    *,
    devices_per_node: int | None = None,
    op: ReduceOp | str = "mean",
    num_packs: int = 1,
    reduce_dtype: Any = None,
    inter_node_dtype: Any = None,
    split: Split | BucketPlan = None,
    bucket_bytes: int | None = None,
    order: Sequence[int] | Sequence[str] | None = None,
    fence: bool | None = None,
    on_replicated: OnReplicated = "summed",
    integers: Integers = "refuse",
) -> optax.GradientTransformationExtraArgs:
    """Sums or averages gradients over two levels of links.

    Put it before everything that reads gradients. With a loss scale use
    ``npu_optimizer``, which takes the overflow flag before the reduction::

        optax.chain(hierarchical_all_reduce(("node", "device")), optax.adamw(1e-3))

    Three stages: a reduce-scatter in the node, an all-reduce of each device's share
    between nodes, an all-gather in the node. Numbers are the same in all modes: under
    ``pmap``, and under ``shard_map`` with ``check_vma`` on or off. Under plain ``jit``
    with sharded arrays the compiler reduces by itself: leave this out. (Under
    ``jax.distributed`` on CPU the reduce-scatter is an exchange and a local sum: Gloo's
    own has returned wrong values for large shares, jax#40830.)

    **On overflow** see ``hierarchical_pmean``; nothing is skipped here.

    **Already summed gradients.** Under ``shard_map(check_vma=True)``, JAX's default,
    the gradient of a replicated parameter arrives summed over all replicas. That is
    recognised leaf by leaf: it is not summed again, a mean divides by the number of
    replicas, and an ``AlreadyReducedWarning`` says how to get local gradients.

    Args:
      axis_name: A pair ``(inter, intra)`` of mesh axes, slow links first (each may be a
        tuple of axes), one ``pmap`` axis with `devices_per_node`, or one axis: a flat
        reduction.
      devices_per_node: Cuts the one axis into nodes of this many devices.
      op: ``"mean"`` or ``"sum"``.
      num_packs: How many buckets of about equal bytes; 0: every leaf on its own.
      reduce_dtype: Accumulate in this dtype; by default at least float32.
      inter_node_dtype: What crosses between nodes is rounded to this dtype, e.g.
        ``jnp.bfloat16``: half the bytes. It is added up in `reduce_dtype`.
      split: How to cut into buckets, see ``bucket_plan``; or a plan.
      bucket_bytes: See ``bucket_plan``.
      order: The order of the backward pass, see ``backward_order``.
      fence: Whether the buckets' collectives are kept apart and in order; by default
        where several buckets are asked for.
      on_replicated: ``"summed"`` as above; ``"error"`` refuses such leaves; ``"equal"``
        treats them as values that are equal on all replicas.
      integers: The mean of an integer leaf is refused, or the leaf passes untouched
        (``"pass"``). Sums of integers are exact.

    Returns:
      A transformation without state. Updates keep their dtypes and are equal bit for
      bit on all replicas. ``None``, masked nodes, booleans, float0 and keys pass.

    Raises:
      ValueError: See ``hierarchical_pmean`` and ``bucket_plan``.
      TypeError: The mean of integers; a number that is not a whole number.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_npu
      >>> tx = optax.chain(
      ...     optax_npu.hierarchical_all_reduce("data", devices_per_node=4),
      ...     optax.sgd(1.0))
      >>> def step(grads):
      ...     return tx.update(grads, tx.init(grads))[0]
      >>> print(jax.vmap(step, axis_name="data")(jnp.arange(8.0)))  # or pmap
      [-3.5 -3.5 -3.5 -3.5 -3.5 -3.5 -3.5 -3.5]

    References:
      ``tf.distribute.HierarchicalCopyAllReduce``; the two-level all-reduce of HCCL.
    """
    spec = axis_spec(axis_name, devices_per_node)
    settings = check_settings(
        spec, op, reduce_dtype, inter_node_dtype, False, on_replicated, integers
    )
    packing = Packing(num_packs, split, bucket_bytes, order, fence)

    def init_fn(params: PyTree) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        del params, extra_args
        return _reduce(updates, spec, packing, settings), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
