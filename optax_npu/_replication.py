# SPDX-License-Identifier: Apache-2.0
"""Over which axes does a leaf still vary, and what does it mean if it does not?

Under `shard_map(check_vma=True)` JAX sums the gradient of a replicated parameter while
differentiating: it arrives reduced, and reducing it again would be wrong by the number
of replicas. Its type tells. Elsewhere types tell nothing, and every leaf is local.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from optax_npu._axes import ResolvedAxes
from optax_npu._compat import AxisName, varying_axes
from optax_npu._settings import AlreadyReducedWarning, ReduceOp, Settings
from optax_npu._trees import is_inexact, is_integer


class Replication(NamedTuple):
    """How one leaf takes part in a reduction.

    Attributes:
      reduced: Whether it does; else it passes untouched.
      over: The axes that it is still to be reduced over.
      missing: Along how many replicas it is known not to vary.
      constant: Whether it is a Python or NumPy constant, which is no gradient.
    """

    reduced: bool
    over: tuple[AxisName, ...] = ()
    missing: int = 1
    constant: bool = False


def replication_of(
    leaf: Any, raw: Any, axes: ResolvedAxes, settings: Settings
) -> Replication:
    """How `leaf` takes part; `raw` is the leaf as the caller gave it."""
    whole = is_integer(leaf)
    if not (whole or is_inexact(leaf)):
        return Replication(reduced=False)
    if whole and settings.op is ReduceOp.MEAN and settings.integers == "pass":
        return Replication(reduced=False)
    over = axes.names
    if axes.typed:
        varying = varying_axes(leaf)
        over = tuple(name for name in axes.names if name in varying)
    missing = axes.size // axes.only(over).size if leaf.size else 1
    return Replication(True, over, missing, not isinstance(raw, jax.Array))


def report(
    states: Sequence[Replication],
    paths: Sequence[str],
    axes: ResolvedAxes,
    settings: Settings,
) -> None:
    """Says what happens to leaves that do not vary over all axes."""
    odd = [
        (path, [n for n in axes.names if n not in state.over])
        for path, state in zip(paths, states, strict=True)
        if state.missing > 1 and not state.constant
    ]
    if not odd or settings.on_replicated == "equal":
        return
    path, names = odd[0]
    what = (
        f"{len(odd)} of {sum(s.reduced for s in states)} leaves (first: {path!r}) do"
        f" not vary over the mesh axes {names}. Under shard_map(check_vma=True) JAX has"
        " summed the gradient of a replicated parameter already."
    )
    fix = (
        " For local gradients differentiate with optax_npu.scaled_value_and_grad("
        f"loss_fn, opt_state, axis_name={axes.names!r}), or with respect to"
        f" optax_npu.local_params(params, {axes.names!r})."
    )
    if settings.on_replicated == "error":
        raise ValueError(
            f"{what} Reducing it again would be wrong.{fix} If it is such a sum, pass"
            " on_replicated='summed'; if it is a value that is equal on all replicas,"
            " leave it out, or pass on_replicated='equal'."
        )
    done = f"; the mean divides by {axes.size}" if settings.op is ReduceOp.MEAN else ""
    warnings.warn(
        f"{what} They are not summed again{done}. But packing, order and dtypes of"
        f" their reduction are not in effect.{fix}",
        AlreadyReducedWarning,
        stacklevel=4,
    )
