# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: its options, and its state, which differs between replicas."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from optax_npu._axes import axis_spec
from optax_npu._compat import (
    AxisName,
    axis_size,
    bound_axes,
    cast_varying,
    is_bound,
    tracks_varying,
    varying_axes,
)
from optax_npu._trees import PyTree, compute_dtype, inexact_leaves, is_inexact

OnOverflow = Literal["drop_micro_batch", "drop_window"]


class LocalAccumulator(NamedTuple):
    """What one replica has added up; replicas differ along the first axis.

    Attributes:
      total: Sums of unscaled gradients, at least float32, each of shape (1, ...).
      good: int32[1], how many micro-batches are in them.
      flag: bool[1], whether an outside flag came in this window.
    """

    total: PyTree
    good: jax.Array
    flag: jax.Array


class AccumulationState(NamedTuple):
    """State of `accumulate_gradients`.

    Attributes:
      micro_step: int32[], micro-batches seen in this window, equal on all replicas.
      dropped: int32[], micro-batches of all replicas dropped so far.
      local: What differs between replicas; see `accumulation_specs`.
      inner: The state of the wrapped transformation.
    """

    micro_step: jax.Array
    dropped: jax.Array
    local: LocalAccumulator
    inner: PyTree


def new_accumulator(params: PyTree, axes: tuple[AxisName, ...]) -> LocalAccumulator:
    """An empty accumulator, typed as local where `axes` are bound."""
    local = LocalAccumulator(
        jax.tree.map(_empty, params), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.bool_)
    )
    bound = [name for name in axes if is_bound(name)]
    return jax.tree.map(lambda x: cast_varying(x, bound), local)


def _empty(param: Any) -> jax.Array:
    if not is_inexact(param):
        return jnp.zeros((1, 0))
    param = jnp.asarray(param)
    return jnp.zeros((1, *param.shape), compute_dtype(param.dtype))


def accumulation_specs(opt_state: PyTree, axis_name: Any) -> PyTree:
    """Partition specs for a state with an accumulator, for ``shard_map``.

    Use it as the ``in_specs`` and ``out_specs`` of the optimizer state; also to create
    the state, because a mapped ``tx.init`` makes one accumulator per replica.

    Args:
      opt_state: A state, or its ``jax.eval_shape``.
      axis_name: The mesh axes that the gradients differ along.

    Returns:
      A tree like `opt_state`: ``P()`` for what replicas share, ``P(axes)`` for their
      accumulators.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_npu
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh, axes = optax_npu.two_level_mesh(), ("node", "device")
      >>> tx = optax_npu.accumulate_gradients(optax.sgd(0.1), 4, axis_name=axes)
      >>> params = jnp.zeros(3)
      >>> specs = optax_npu.accumulation_specs(jax.eval_shape(tx.init, params), axes)
      >>> init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
      >>> jax.jit(init)(params).local.total.shape == (mesh.size, 3)
      True
    """
    mine = PartitionSpec(axis_spec(axis_name).names)

    def specs(node: Any) -> Any:
        spec = mine if isinstance(node, LocalAccumulator) else PartitionSpec()
        return jax.tree.map(lambda _: spec, node)

    return jax.tree.map(
        specs, opt_state, is_leaf=lambda x: isinstance(x, LocalAccumulator)
    )


class Options(NamedTuple):
    """The checked arguments of `accumulate_gradients`."""

    every_k: int
    on_overflow: str
    axes: tuple[AxisName, ...]
    agreement_axes: tuple[AxisName, ...]


def check_every_k(value: Any) -> int:
    """A number of micro-batches: a whole number from 1 on."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"every_k={value!r} must be a whole number of micro-batches.")
    if value < 1:
        raise ValueError(f"every_k={value}, but a window holds at least 1 micro-batch.")
    return int(value)


def check_policy(policy: Any) -> str:
    """What to do about an overflow."""
    if policy in ("drop_micro_batch", "drop_window"):
        return policy
    raise ValueError(
        f"on_overflow={policy!r}, but must be 'drop_micro_batch' (the window goes on"
        " without it) or 'drop_window' (the whole window is skipped)."
    )


def check_mapped(grads: PyTree, options: Options) -> None:
    """Local gradients, of replicas that are known."""
    others = [name for name in bound_axes() if name not in options.agreement_axes]
    if others and not options.axes:
        raise ValueError(
            "accumulate_gradients is used in a mapped function with the axes"
            f" {list(bound_axes())}, but axis_name is missing: name the axes that the"
            f" optimizer reduces over, e.g. axis_name={tuple(others)!r}."
        )
    typed = [name for name in options.axes if is_bound(name) and tracks_varying(name)]
    for leaf in inexact_leaves(grads):
        missing = [name for name in typed if name not in varying_axes(leaf)]
        if axis_size(missing) > 1:
            raise ValueError(
                "The gradients that reach accumulate_gradients do not vary over all of"
                f" the mesh axes {typed}: under shard_map(check_vma=True) JAX has"
                " summed them already, at every micro-batch. Differentiate with"
                " optax_npu.scaled_value_and_grad(loss_fn, opt_state,"
                f" axis_name={options.axes!r}) to get local ones."
            )
