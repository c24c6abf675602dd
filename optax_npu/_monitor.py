# SPDX-License-Identifier: Apache-2.0
"""What a training loop wants to see of the loss scale."""

import jax

from optax_npu._state import find_loss_scale_state
from optax_npu._trees import PyTree


class LossScaleError(RuntimeError):
    """Raised by `check_health` when training has stopped making progress."""


def loss_scale_metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """The numbers of the loss scale for a logger; reads the state, no host sync.

    Args:
      opt_state: The optimizer state after a step.

    Returns:
      Scalar arrays: ``loss_scale`` (float32, of the *next* step), ``applied`` (bool,
      whether the last step was), ``good_steps`` and ``bad_steps`` (int32, the rule's
      counters), ``skipped_steps`` (int32, total) and ``consecutive_skips`` (int32).

    Raises:
      ValueError: See ``get_loss_scale``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(), optax.sgd(1.0))
      >>> metrics = optax_npu.loss_scale_metrics(tx.init(jnp.zeros(1)))
      >>> {name: x.item() for name, x in metrics.items()}
      {'loss_scale': 32768.0, 'applied': True, 'good_steps': 0, 'bad_steps': 0,
       'skipped_steps': 0, 'consecutive_skips': 0}
    """
    state = find_loss_scale_state(opt_state)
    return {
        "loss_scale": state.loss_scale,
        "applied": ~state.found_inf,
        "good_steps": state.good_steps,
        "bad_steps": state.bad_steps,
        "skipped_steps": state.skipped_steps,
        "consecutive_skips": state.consecutive_skips,
    }


def check_health(opt_state: PyTree, max_consecutive_skips: int = 50) -> None:
    """Raises when every one of the last steps was skipped. For the host loop.

    Reads the state back to the host, so call it every now and then, not every step.
    Nothing is ever raised from inside a compiled step, and no bad update is ever let
    through instead.

    Args:
      opt_state: The optimizer state, outside of ``jit``. Replicated state (a leading
        axis as in ``pmap``) is read as a whole.
      max_consecutive_skips: How many steps in a row may be skipped, at least 1. A
        dynamic scale from 2^32 needs about 20 to 40 to come down to float16's range.

    Raises:
      LossScaleError: More steps than that were skipped in a row. The message holds
        the numbers; a scale at its floor usually means a nan in the model itself.
      ValueError: `max_consecutive_skips` is below 1, or see ``get_loss_scale``.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(), optax.sgd(1.0))
      >>> optax_npu.check_health(tx.init(jnp.zeros(1)))
    """
    if max_consecutive_skips < 1:
        raise ValueError(
            f"max_consecutive_skips={max_consecutive_skips!r}, but at least 1 is"
            " needed: a single skipped step is normal for a dynamic loss scale."
        )
    state = jax.device_get(find_loss_scale_state(opt_state))
    consecutive = int(state.consecutive_skips.max())
    if consecutive <= max_consecutive_skips:
        return
    raise LossScaleError(
        f"the last {consecutive} steps were all skipped (max_consecutive_skips="
        f"{max_consecutive_skips}); loss scale {float(state.loss_scale.min()):g},"
        f" {int(state.skipped_steps.max())} steps skipped in total. The parameters"
        " are those of the last good step. A scale at its floor means that the loss"
        " or a gradient is nan whatever the scale: check the data and the model"
        " (jax_debug_nans); a large scale that is still falling only needs time."
    )
