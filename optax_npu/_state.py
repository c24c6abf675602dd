# SPDX-License-Identifier: Apache-2.0
"""Where the loss scale is in the state of a whole optimizer."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_npu._scale_rule import LossScaleState
from optax_npu._trees import PyTree


def nodes(tree: PyTree, kind: type) -> list[Any]:
    """The nodes of one type, not looking inside them."""

    def is_kind(x: Any) -> bool:
        return isinstance(x, kind)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_kind) if is_kind(x)]


def map_loss_scale(fun: Callable[[LossScaleState], Any], state: PyTree) -> PyTree:
    """`state` with every `LossScaleState` replaced."""

    def is_scaling(x: Any) -> bool:
        return isinstance(x, LossScaleState)

    return jax.tree.map(
        lambda x: fun(x) if is_scaling(x) else x, state, is_leaf=is_scaling
    )


def find_loss_scale_state(opt_state: PyTree) -> LossScaleState:
    """The one `LossScaleState` in an optimizer state.

    Raises:
      ValueError: There is none, there are several, or it sits where it cannot work:
        inside ``optax.MultiSteps`` (which would accumulate *scaled* gradients and
        never recovers from one overflow) or ``optax.apply_if_finite``.
    """
    for wrapper, why in _CANNOT_HOLD_A_LOSS_SCALE.items():
        if any(nodes(node, LossScaleState) for node in nodes(opt_state, wrapper)):
            raise ValueError(why)
    found = nodes(opt_state, LossScaleState)
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"opt_state holds {len(found)} loss-scale states, but exactly one is needed;"
        f" its type is {type(opt_state).__name__}. Pass the state that `init` of the"
        " whole optimizer returned (restore a checkpoint into it as the target), and"
        " put npu_loss_scale once, at the head of the chain:"
        " optax_npu.chain(optax_npu.npu_loss_scale(), optax.adam(1e-3))."
    )


_CANNOT_HOLD_A_LOSS_SCALE: dict[type, str] = {
    optax.MultiStepsState: (
        "opt_state holds the loss scale inside optax.MultiSteps, which accumulates"
        " gradients while they are still scaled and stays NaN for ever after one"
        " overflow. Put the accumulation inside:"
        " optax_npu.chain(npu_loss_scale(), optax.MultiSteps(optimizer, k)"
        ".gradient_transformation()), or use optax_npu.accumulate_gradients."
    ),
    optax.ApplyIfFiniteState: (
        "opt_state holds the loss scale inside optax.apply_if_finite, which keeps"
        " the scale from ever coming down and lets a bad update through in the end."
        " Leave apply_if_finite out: optax_npu.chain(npu_loss_scale(), optimizer)"
        " skips bad steps by itself."
    ),
}
