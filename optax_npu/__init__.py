# SPDX-License-Identifier: Apache-2.0
"""Loss scaling, two-level gradient all-reduce and tail hiding for Optax."""

from optax_npu._accumulate import accumulate_gradients as accumulate_gradients
from optax_npu._accumulator import AccumulationState as AccumulationState
from optax_npu._accumulator import accumulation_specs as accumulation_specs
from optax_npu._all_reduce import hierarchical_all_reduce as hierarchical_all_reduce
from optax_npu._all_reduce import hierarchical_pmean as hierarchical_pmean
from optax_npu._all_reduce import hierarchical_psum as hierarchical_psum
from optax_npu._backward_order import backward_order as backward_order
from optax_npu._cross_device import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from optax_npu._explain import Explanation as Explanation
from optax_npu._explain import explain as explain
from optax_npu._grad import get_loss_scale as get_loss_scale
from optax_npu._grad import local_params as local_params
from optax_npu._grad import scale_loss as scale_loss
from optax_npu._grad import scaled_value_and_grad as scaled_value_and_grad
from optax_npu._links import Chip as Chip
from optax_npu._links import Links as Links
from optax_npu._loss_scale import DynamicLossScale as DynamicLossScale
from optax_npu._loss_scale import (
    ExponentialUpdateLossScaleManager as ExponentialUpdateLossScaleManager,
)
from optax_npu._loss_scale import FixedLossScale as FixedLossScale
from optax_npu._loss_scale import FixedLossScaleManager as FixedLossScaleManager
from optax_npu._mesh import two_level_mesh as two_level_mesh
from optax_npu._monitor import LossScaleError as LossScaleError
from optax_npu._monitor import check_health as check_health
from optax_npu._monitor import loss_scale_metrics as loss_scale_metrics
from optax_npu._optimizer import NPUOptimizerState as NPUOptimizerState
from optax_npu._optimizer import (
    npu_distributed_optimizer as npu_distributed_optimizer,
)
from optax_npu._optimizer import npu_loss_scale_optimizer as npu_loss_scale_optimizer
from optax_npu._optimizer import npu_optimizer as npu_optimizer
from optax_npu._packing import bucket_plan as bucket_plan
from optax_npu._plan import BucketPlan as BucketPlan
from optax_npu._presets import loss_scale_preset as loss_scale_preset
from optax_npu._replicas import assert_replicas_equal as assert_replicas_equal
from optax_npu._replicas import broadcast_from as broadcast_from
from optax_npu._report import CollectiveRow as CollectiveRow
from optax_npu._report import ScheduleReport as ScheduleReport
from optax_npu._scale_rule import LossScale as LossScale
from optax_npu._scale_rule import LossScaleState as LossScaleState
from optax_npu._schedule import TailOverlapError as TailOverlapError
from optax_npu._schedule import assert_tail_overlap as assert_tail_overlap
from optax_npu._schedule import schedule_report as schedule_report
from optax_npu._settings import AlreadyReducedWarning as AlreadyReducedWarning
from optax_npu._settings import ReduceOp as ReduceOp
from optax_npu._skip import apply_gradients as apply_gradients
from optax_npu._skip import chain as chain
from optax_npu._skip import keep_if_applied as keep_if_applied
from optax_npu._skip import skip_on_overflow as skip_on_overflow
from optax_npu._tail_lint import TailFinding as TailFinding
from optax_npu._tail_lint import tail_lint as tail_lint
from optax_npu._unscale import npu_loss_scale as npu_loss_scale
from optax_npu._weight_decay import (
    exclude_from_weight_decay as exclude_from_weight_decay,
)
