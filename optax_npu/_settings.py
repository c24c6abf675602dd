# SPDX-License-Identifier: Apache-2.0
"""How a tree is reduced: the operation, the dtypes, and what to do with odd leaves."""

import enum
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from optax_npu._axes import AxisSpec

OnReplicated = Literal["summed", "equal", "error"]
Integers = Literal["refuse", "pass"]


class ReduceOp(enum.Enum):
    """How values of several replicas become one: their sum or their mean.

    Wherever one is asked for, the strings ``"sum"`` and ``"mean"`` do as well.

    Example:
      >>> import optax_npu
      >>> optax_npu.ReduceOp("mean") is optax_npu.ReduceOp.MEAN
      True
    """

    SUM = "sum"
    MEAN = "mean"


class AlreadyReducedWarning(UserWarning):
    """Gradients arrived already summed, so their reduction could not be arranged."""


def reduce_op(op: Any) -> ReduceOp:
    """The operation that `op` names."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.lower() in ("sum", "mean"):
        return ReduceOp(op.lower())
    raise ValueError(
        f"op={op!r}, but must be ReduceOp.SUM, ReduceOp.MEAN, 'sum' or 'mean'."
    )


def float_dtype(name: str, dtype: Any) -> np.dtype | None:
    """A floating dtype that a user gave, or `None`."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{name}={dtype!r} is not a dtype.") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"{name}={found.name}, but gradients are added up in a floating dtype, e.g."
            " jnp.float32 or jnp.bfloat16."
        )
    return found


class Settings(NamedTuple):
    """How a tree is reduced; checked by `check_settings`."""

    op: ReduceOp
    reduce_dtype: np.dtype | None = None
    inter_node_dtype: np.dtype | None = None
    keep_wide: bool = False
    on_replicated: OnReplicated = "summed"
    integers: Integers = "refuse"


def check_settings(
    spec: AxisSpec | None,
    op: Any,
    reduce_dtype: Any = None,
    inter_node_dtype: Any = None,
    keep_wide: bool = False,
    on_replicated: Any = "summed",
    integers: Any = "refuse",
) -> Settings:
    """The settings of a reduction over `spec`, checked without tracing.

    Raises:
      ValueError: An unknown choice, or `inter_node_dtype` without nodes.
      TypeError: Not a dtype.
    """
    if on_replicated not in ("summed", "equal", "error"):
        raise ValueError(
            f"on_replicated={on_replicated!r}, but must be 'summed', 'equal' or"
            " 'error'."
        )
    if integers not in ("refuse", "pass"):
        raise ValueError(f"integers={integers!r}, but must be 'refuse' or 'pass'.")
    wire = float_dtype("inter_node_dtype", inter_node_dtype)
    if wire is not None and spec is not None and not spec.has_nodes:
        raise ValueError(
            f"inter_node_dtype={wire.name} with the single level {list(spec.names)}: it"
            " does not say which links run between nodes. Give a pair of mesh axes,"
            ' e.g. axis_name=("node", "device") of optax_npu.two_level_mesh(), or'
            " devices_per_node= under pmap."
        )
    acc = float_dtype("reduce_dtype", reduce_dtype)
    return Settings(reduce_op(op), acc, wire, keep_wide, on_replicated, integers)
