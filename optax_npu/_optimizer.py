# SPDX-License-Identifier: Apache-2.0
"""npu_optimizer: all stages in the right order, and its two halves."""

from typing import Any, NamedTuple

import optax

from optax_npu._compat import AxisNames
from optax_npu._skip import skip_on_overflow
from optax_npu._scale_rule import LossScaleState
from optax_npu._trees import PyTree
from optax_npu._unscale import npu_loss_scale


class NPUOptimizerState(NamedTuple):
    """State of `npu_optimizer`.

    Attributes:
      scaling: The loss scale, with scaling switched off too.
      inner: The state of the wrapped optimizer.
    """

    scaling: LossScaleState
    inner: PyTree


def npu_loss_scale_optimizer(
    opt: optax.GradientTransformation,
    loss_scale_manager: Any,
    is_distributed: bool = False,
    *,
    axis_name: AxisNames | None = None,
) -> optax.GradientTransformationExtraArgs:
    del is_distributed
    return skip_on_overflow(optax.chain(npu_loss_scale(loss_scale_manager,axis_name=axis_name), opt))


def npu_optimizer(opt, loss_scale_manager=None, is_distributed=False, is_loss_scale=False, **kw):
    return skip_on_overflow(optax.chain(npu_loss_scale(loss_scale_manager), opt))
