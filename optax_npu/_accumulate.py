# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: gradients are added up locally and reduced once per window."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_npu._accumulator import (
    AccumulationState,
    LocalAccumulator,
    OnOverflow,
    Options,
    check_every_k,
    check_mapped,
    check_policy,
    new_accumulator,
)
from optax_npu._axes import axis_spec
from optax_npu._checks import check_state
from optax_npu._compat import (
    AxisNames,
    as_axis_tuple,
    axis_size,
    cast_varying,
    varying_axes,
)
from optax_npu._gate import GatedUpdate, keep_where
from optax_npu._overflow import agree, local_overflow
from optax_npu._scale_rule import LossScaleState, repair_scale
from optax_npu._skip import check_transformation
from optax_npu._state import find_loss_scale_state, map_loss_scale, nodes
from optax_npu._trees import PyTree, is_inexact
from optax_npu._unscale import (
    neutral,
    output_dtype,
    unscale,
    with_outside_flag,
    zero_where,
)

_INT32_MAX = 2**31 - 1


def accumulate_gradients(
    tx: optax.GradientTransformation,
    every_k: int,
    *,
    axis_name: Any = None,
    agreement_axes: AxisNames = (),
    on_overflow: OnOverflow = "drop_micro_batch",
) -> optax.GradientTransformationExtraArgs:
    """Adds up the gradients of `every_k` micro-batches and then updates once.

    Wrap the whole optimizer, reduction and loss scale included::

        tx = accumulate_gradients(
            npu_optimizer(optax.lamb(1e-3), DynamicLossScale(), is_distributed=True,
                          is_loss_scale=True, axis_name=("node", "device")),
            every_k=8, axis_name=("node", "device"))

    Gradients are reduced once per window: the collectives sit in a branch that the
    other micro-steps do not take. (``optax.MultiSteps`` around a reduction communicates
    at every micro-step, and stays nan for ever after one overflow.) Sums are float32
    and unscaled, so the loss scale may move between windows; within one it stands
    still. The update sees the mean over the micro-batches. Other micro-steps return
    exact zeros, so always apply the updates.

    **On overflow** of a micro-batch, by policy:

    * ``"drop_micro_batch"``: that replica leaves it out, and the window's mean is that
      of all good micro-batches of all replicas. The loss scale moves as after an
      overflow. If none is good, the window is skipped. The flag is known only after
      the last backward pass, which then hides no communication.
    * ``"drop_window"``: nothing is tested here. The window is skipped, by all replicas,
      and the accumulator starts anew, as in PyTorch's recipe.

    Args:
      tx: The optimizer that gets the mean gradients. With a loss scale it must be
        guarded: ``npu_optimizer(...)`` or ``optax_npu.chain(...)``.
      every_k: Micro-batches per window, at least 1.
      axis_name: In mapped functions: the axes that `tx` reduces over.
      agreement_axes: Model-parallel axes, whose replicas drop a micro-batch together.
      on_overflow: The policy.

    Returns:
      A transformation whose state is an ``AccumulationState``. Gradients must be local
      (``scaled_value_and_grad(..., axis_name=...)``). The extra argument ``found_inf``
      of any micro-step counts as its overflow; others reach `tx` with the last one.

      Replicas hold different sums, so between calls of ``shard_map`` the state needs
      ``accumulation_specs``; under ``pmap``, plain ``jit``, or within one call with a
      ``lax.scan`` over micro-batches nothing is needed.

    Raises:
      ValueError: `every_k` is below 1, the policy is unknown, `axis_name` is missing in
        a mapped function, or gradients arrive already summed.
      TypeError: `tx` is no transformation, `every_k` is not a whole number, or the loss
        scale of `tx` cannot be moved without a step (``"drop_micro_batch"``).

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.accumulate_gradients(optax.sgd(1.0), every_k=2)
      >>> params = jnp.zeros(1)
      >>> state = tx.init(params)
      >>> for grad in (2.0, 4.0):
      ...     updates, state = tx.update(jnp.array([grad]), state, params)
      ...     print(updates)
      [-0.]
      [-3.]

    References:
      ``backward_passes_per_step`` of Horovod, ``no_sync`` of PyTorch DDP.
    """
    check_transformation("tx", tx)
    inner = optax.with_extra_args_support(tx)
    options = Options(
        check_every_k(every_k),
        check_policy(on_overflow),
        () if axis_name is None else axis_spec(axis_name).names,
        as_axis_tuple(agreement_axes),
    )

    def init_fn(params: PyTree) -> AccumulationState:
        return AccumulationState(
            micro_step=jnp.zeros((), jnp.int32),
            dropped=jnp.zeros((), jnp.int32),
            local=new_accumulator(params, options.axes),
            inner=inner.init(params),
        )

    def update_fn(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        found_inf: jax.Array | bool | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, AccumulationState]:
        check_state("accumulate_gradients", state, AccumulationState)
        check_mapped(updates, options)
        local = _add(updates, state, found_inf, options)
        last = state.micro_step + 1 >= options.every_k

        def emit() -> tuple[PyTree, PyTree, jax.Array]:
            return _emit(updates, local, state, params, extra_args, inner, options)

        like = jax.eval_shape(emit)[0]

        def wait() -> tuple[PyTree, PyTree, jax.Array]:
            return jax.tree.map(_nothing, like), state.inner, state.dropped

        out, inner_state, dropped = lax.cond(last, emit, wait)
        local = keep_where(last, jax.tree.map(jnp.zeros_like, local), local)
        micro_step = jnp.where(last, 0, state.micro_step + 1)
        return out, AccumulationState(micro_step, dropped, local, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _scale_of(state: AccumulationState) -> jax.Array:
    if not nodes(state.inner, LossScaleState):
        return jnp.ones((), jnp.float32)
    return repair_scale(find_loss_scale_state(state.inner))


def _add(
    grads: PyTree, state: AccumulationState, found_inf: Any, options: Options
) -> LocalAccumulator:
    """The accumulator with one micro-batch more, or without a bad one."""
    total, good, flag = state.local
    scale = _scale_of(state)
    outside = with_outside_flag(jnp.zeros((), jnp.bool_), found_inf)
    bad = jnp.zeros((), jnp.bool_)
    if options.on_overflow == "drop_micro_batch":
        bad = local_overflow(grads, scale) | outside
        if options.agreement_axes:
            bad = agree(bad, options.agreement_axes)

    def leaf(total: jax.Array, grad: Any) -> jax.Array:
        if not is_inexact(grad):
            return total
        unscaled = unscale(grad, scale, None, like=total)
        return jnp.where(bad, total, total + unscaled[None])

    return LocalAccumulator(
        jax.tree.map(leaf, total, grads),
        good + jnp.where(bad, 0, 1),
        flag | (outside & ~bad),
    )


def _emit(
    grads: PyTree,
    local: LocalAccumulator,
    state: AccumulationState,
    params: PyTree | None,
    extra_args: dict[str, Any],
    inner: optax.GradientTransformationExtraArgs,
    options: Options,
) -> tuple[PyTree, PyTree, jax.Array]:
    """The update of a full window: updates, inner state, dropped micro-batches."""
    replicas = axis_size(options.axes)
    wanted = options.every_k * replicas
    if options.on_overflow == "drop_window":
        found_inf, count, dropped = local.flag[0], jnp.int32(wanted), jnp.int32(0)
    else:
        count = local.good[0]
        count = lax.psum(count, options.axes) if replicas > 1 else count
        found_inf, dropped = count == 0, wanted - count
    factor = _scale_of(state) * replicas / jnp.maximum(count, 1)
    mean = _means(grads, local.total, factor, params)
    if nodes(state.inner, LossScaleState):
        extra_args = extra_args | {"found_inf": found_inf}
    updates, new = inner.update(mean, state.inner, params, **extra_args)
    if options.on_overflow == "drop_micro_batch":
        if not (isinstance(inner.update, GatedUpdate) and inner.update.skips):
            updates, new = _stand_still(found_inf, updates, state.inner, new)
        new = _move_scale(inner, state.inner, new, dropped > 0)
    return (
        updates,
        new,
        state.dropped + jnp.minimum(dropped, _INT32_MAX - state.dropped),
    )


def _stand_still(
    skip: jax.Array, updates: PyTree, old: PyTree, new: PyTree
) -> tuple[PyTree, PyTree]:
    """Nothing changes if no micro-batch was good, for a `tx` that has no gate."""
    kept = keep_where(skip, old, new)
    for scaling in nodes(new, LossScaleState):
        kept = map_loss_scale(lambda _, scaling=scaling: scaling, kept)
    return zero_where(skip, updates), kept


def _means(
    grads: PyTree, total: PyTree, factor: jax.Array, params: PyTree | None
) -> PyTree:
    """Scaled gradients of the window, in the dtypes that the optimizer would get."""

    def leaf(grad: Any, total: jax.Array, param: Any = None) -> Any:
        if not is_inexact(grad):
            return grad
        mean = total[0] * factor.astype(jnp.finfo(total.dtype).dtype)
        return mean.astype(output_dtype(grad, param))

    rest = () if params is None else (params,)
    return jax.tree.map(leaf, grads, total, *rest)


def _move_scale(
    inner: optax.GradientTransformationExtraArgs,
    old: PyTree,
    new: PyTree,
    dropped: jax.Array,
) -> PyTree:
    """`new`, but where micro-batches were dropped with the scale of an overflow.

    The head of the optimizer, run on no gradients with an outside flag, tells what its
    rule makes of an overflow.
    """
    if not nodes(old, LossScaleState):
        return new
    update = inner.update
    try:
        if not isinstance(update, GatedUpdate):
            raise TypeError("not guarded")
        head = update.head({}, update.split(old)[0], None, {"found_inf": True})[1]
        lowered = find_loss_scale_state(head)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "on_overflow='drop_micro_batch' moves the loss scale of tx without a step,"
            " which works for optax_npu.npu_optimizer(...) and for"
            " optax_npu.chain(npu_loss_scale(...), ...). Use one of them, or"
            " on_overflow='drop_window'."
        ) from error

    def moved(scaling: LossScaleState) -> LossScaleState:
        applied = lowered._replace(
            found_inf=scaling.found_inf,
            skipped_steps=scaling.skipped_steps,
            consecutive_skips=scaling.consecutive_skips,
        )
        return keep_where(dropped & ~scaling.found_inf, applied, scaling)

    return map_loss_scale(moved, new)


def _nothing(like: Any) -> jax.Array:
    zeros = jnp.full(like.shape, neutral(like), like.dtype)
    return cast_varying(zeros, tuple(varying_axes(like)))
