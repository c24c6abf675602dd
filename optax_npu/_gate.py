# SPDX-License-Identifier: Apache-2.0
"""Stage 6: a step that overflowed changes nothing but the loss-scale state.

Two forms with the same bits. The *select* runs the optimizer and picks old or new
leaf by leaf: on accelerators it fuses into the update, and a leaf waits only for its
own gradient and the flag. The *branch* decides first and then runs the optimizer or
does nothing: on CPU a select keeps the update from running in place and costs
several passes over all state. The branch is taken on CPU, outside mapped functions,
where the flag is the same for the whole program.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_npu._compat import bound_axes, match_varying
from optax_npu._scale_rule import LossScaleState
from optax_npu._trees import PyTree
from optax_npu._unscale import AssumedFinite, neutral, zero_where

# (gradients, optimizer state, parameters) -> (updates or new parameters, new state)
StepFn = Callable[..., tuple[PyTree, PyTree]]


def find_loss_scale_state(opt_state: PyTree) -> LossScaleState:
    """The one `LossScaleState` in an optimizer state.

    Raises:
      ValueError: There is none, there are several, or it sits where it cannot work:
        inside ``optax.MultiSteps`` (which would accumulate *scaled* gradients and
        never recovers from one overflow) or ``optax.apply_if_finite``.
    """
    for wrapper, why in _CANNOT_HOLD_A_LOSS_SCALE.items():
        for node in _nodes(opt_state, wrapper):
            if _nodes(node, LossScaleState):
                raise ValueError(why)
    found = _nodes(opt_state, LossScaleState)
    if len(found) != 1:
        raise ValueError(
            f"opt_state holds {len(found)} loss-scale states, but exactly one is"
            f" needed; its type is {type(opt_state).__name__}. Pass the state that"
            " `init` of the whole optimizer returned, and put npu_loss_scale once,"
            " at the head of the chain:"
            " optax_npu.chain(optax_npu.npu_loss_scale(), optax.adam(1e-3))."
        )
    return found[0]


_CANNOT_HOLD_A_LOSS_SCALE: dict[type, str] = {
    optax.MultiStepsState: (
        "opt_state holds the loss scale inside optax.MultiSteps, which accumulates"
        " gradients while they are still scaled and stays NaN for ever after one"
        " overflow. Put the accumulation inside:"
        " optax_npu.chain(npu_loss_scale(), optax.MultiSteps(optimizer, k)), or use"
        " optax_npu.accumulate_gradients."
    ),
    optax.ApplyIfFiniteState: (
        "opt_state holds the loss scale inside optax.apply_if_finite, which keeps"
        " the scale from ever coming down and lets a bad update through in the end."
        " Leave apply_if_finite out: optax_npu.chain(npu_loss_scale(), optimizer)"
        " skips bad steps by itself."
    ),
}


def _nodes(tree: PyTree, kind: type) -> list[Any]:
    def is_kind(x: Any) -> bool:
        return isinstance(x, kind)

    return [x for x in jax.tree.leaves(tree, is_leaf=is_kind) if is_kind(x)]


def skip_on_overflow(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Makes a step that overflowed change nothing but the loss-scale state.

    Wraps any finished transformation that has ``npu_loss_scale`` somewhere in it:
    ``optax.chain``, ``named_chain``, ``partition``, ``masked``, .... The state is
    the wrapped transformation's own.

    **On overflow** the updates are exact zeros (-0.0, which leaves every parameter
    bit for bit as it is) and every other leaf of the state, that is moments, step
    counts, schedules, injected hyper-parameters, accumulators, is kept bit for bit.

    Args:
      tx: The transformation. Without a loss scale in it, it runs as it is.

    Returns:
      A transformation that passes extra arguments on. Wrap it in nothing that keeps
      step counts of its own: a schedule outside counts skipped steps too.

    Raises:
      ValueError: `tx` has several loss scales, or one in a place where it cannot
        work (see ``get_loss_scale``).
      TypeError: `tx` is not a gradient transformation.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.skip_on_overflow(
      ...     optax.chain(optax_npu.npu_loss_scale(2.0), optax.adam(0.1)))
      >>> params = jnp.ones(2)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([jnp.inf, 1.0]), state, params)
      >>> int(optax.tree.get(state, "count")), bool(jnp.all(updates == 0))
      (0, True)

    References:
      The conditional apply of ``tf.mixed_precision.LossScaleOptimizer`` and Ascend's
      ``NPUOptimizer``.
    """
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"tx is a {type(tx).__name__}, but an optax.GradientTransformation is"
            " needed, e.g. optax.adam(1e-3). (optax.MultiSteps: call its"
            " .gradient_transformation().)"
        )
    inner = optax.with_extra_args_support(tx)

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            return inner.update(grads, state, params, **extra_args)

        if _nodes(state, AssumedFinite) or not _nodes(state, LossScaleState):
            return step(updates, state, params)
        return gated(step, updates, state, params)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def chain(*transforms: Any) -> optax.GradientTransformationExtraArgs:
    """``optax.chain`` that truly skips a step on overflow.

    The same as ``skip_on_overflow(optax.chain(*transforms))``, bit for bit; without
    ``npu_loss_scale`` among the members it is ``optax.chain``.

    Args:
      *transforms: Gradient transformations, ``npu_loss_scale`` before any clipping.

    Returns:
      The transformation; its state is a tuple with one entry per member.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(), optax.lamb(1e-3))
      >>> state = tx.init(jnp.ones(3))
      >>> print(optax_npu.get_loss_scale(state))
      32768.0
    """
    return skip_on_overflow(optax.chain(*transforms))


def apply_gradients(
    tx: optax.GradientTransformation,
    params: PyTree,
    grads: PyTree,
    opt_state: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Update and apply as one gated step: ``params, opt_state = apply_gradients(...)``.

    The same numbers as ``tx.update`` and ``optax.apply_updates``, in the fastest
    form where the compiler cannot fuse a select (CPU): one branch around the whole
    step, so that parameters and state are updated in place when they are donated.

    **On overflow** parameters and everything but the loss-scale state are returned
    bit for bit.

    Args:
      tx: A transformation with a loss scale, guarded (``optax_npu.chain``) or not.
      params: The parameters.
      grads: The scaled gradients, a tree like `params`.
      opt_state: The state of `tx`.
      **extra_args: Passed on to ``tx.update``.

    Returns:
      New parameters and new state.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(2.0), optax.sgd(1.0))
      >>> params = jnp.zeros(2)
      >>> params, state = optax_npu.apply_gradients(
      ...     tx, params, jnp.array([2.0, 4.0]), tx.init(params))
      >>> print(params)
      [-1. -2.]
    """
    inner = optax.with_extra_args_support(tx)

    def step(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = inner.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    if not _nodes(opt_state, LossScaleState):
        return step(grads, opt_state, params)
    return gated(step, grads, opt_state, params, keep_params=True)


def gated(
    step: StepFn,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    keep_params: bool = False,
) -> tuple[PyTree, PyTree]:
    """Runs `step`, or keeps everything but the loss-scale state on overflow.

    Args:
      step: ``step(grads, state, params) -> (result, state)``, without a gate.
      grads: Scaled gradients.
      state: Optimizer state that holds one `LossScaleState`.
      params: Parameters or `None`.
      keep_params: What a skipped step results in: `params`, or zero updates.

    Returns:
      The result and the new state.
    """
    find_loss_scale_state(state)
    inputs = jax.tree.leaves((grads, state, params))
    if _branch_pays(inputs):
        select = functools.partial(_select, jax.jit(step), keep_params)
        branch = functools.partial(_branch, jax.jit(step), keep_params)
        return lax.platform_dependent(grads, state, params, cpu=branch, default=select)
    return _select(step, keep_params, grads, state, params)


def _branch_pays(inputs: list[Any]) -> bool:
    """Whether a branch is possible here, and in place on CPU.

    Not in a mapped function, where updates must not wait for the flag; nor outside
    of a compiled one, where nothing fuses; nor with float0, which XLA does not know.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in inputs)
    float0 = any(getattr(x, "dtype", None) == jax.dtypes.float0 for x in inputs)
    return traced and not float0 and not bound_axes()


def _select(
    step: StepFn, keep_params: bool, grads: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    result, new = step(grads, state, params)
    scaling = find_loss_scale_state(new)
    skip = scaling.found_inf
    held = keep_where(skip, params, result) if keep_params else zero_where(skip, result)
    return held, _map_loss_scale(lambda _: scaling, keep_where(skip, state, new))


def _branch(
    step: StepFn, keep_params: bool, grads: PyTree, state: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    # Of the first call only the loss-scale state is used; the rest is dead code.
    scaling = find_loss_scale_state(step(grads, state, params)[1])
    known_good = _map_loss_scale(AssumedFinite, state)

    def run() -> tuple[PyTree, PyTree]:
        return step(grads, known_good, params)

    def stand_still() -> tuple[PyTree, PyTree]:
        like = jax.eval_shape(run)
        return _stand_still(like, params if keep_params else None, state)

    # The branch that updates comes first: older XLA copies all state otherwise.
    result, new = lax.cond(~scaling.found_inf, run, stand_still)
    return result, _map_loss_scale(lambda _: scaling, new)


def _stand_still(like: PyTree, params: PyTree | None, state: PyTree) -> PyTree:
    """The results of a skipped step, with the dtypes of a step that ran."""
    like_result, like_state = like

    def nothing(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.broadcast_to(neutral(jnp.zeros((), x.dtype)), x.shape)

    if params is None:
        result = jax.tree.map(nothing, like_result)
    else:
        result = jax.tree.map(_as, params, like_result)
    return result, jax.tree.map(_as, state, like_state)


def _as(old: Any, like: Any) -> Any:
    """`old` with the dtype of `like`."""
    return old if old.dtype == like.dtype else jnp.asarray(old, like.dtype)


def keep_where(skip: jax.Array, old: PyTree, new: PyTree) -> PyTree:
    """`old` where the step was skipped, else `new`; a select, never a product."""

    def leaf(new: Any, old: Any) -> Any:
        if not hasattr(new, "dtype") or new.dtype == jax.dtypes.float0:
            return new
        return jnp.where(skip, match_varying(_as(jnp.asarray(old), new), new), new)

    return jax.tree.map(leaf, new, old)


def _map_loss_scale(fun: Callable[[LossScaleState], Any], state: PyTree) -> PyTree:
    """`state` with its `LossScaleState` replaced."""

    def leaf(x: Any) -> Any:
        return fun(x) if isinstance(x, LossScaleState) else x

    return jax.tree.map(leaf, state, is_leaf=lambda x: isinstance(x, LossScaleState))


def keep_if_applied(opt_state: PyTree, new_tree: PyTree, old_tree: PyTree) -> PyTree:
    """`new_tree` if the last step was applied, `old_tree` if it was skipped.

    For everything that lives outside the optimizer but must follow its gate: batch
    statistics, moving averages, RNG counters.

    Args:
      opt_state: The optimizer state *after* the step.
      new_tree: The tree that the forward pass of this step produced.
      old_tree: The tree from before the step, of the same structure and shapes.

    Returns:
      A tree like `new_tree`, selected leaf by leaf.

    Raises:
      ValueError: `opt_state` holds no loss scale, or the trees differ in structure.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> tx = optax_npu.chain(optax_npu.npu_loss_scale(2.0), optax.sgd(1.0))
      >>> params = jnp.zeros(1)
      >>> _, state = tx.update(jnp.array([jnp.nan]), tx.init(params), params)
      >>> print(optax_npu.keep_if_applied(
      ...     state, {"mean": jnp.array(jnp.nan)}, {"mean": jnp.array(0.5)}))
      {'mean': Array(0.5, dtype=float32...)}
    """
    return keep_where(find_loss_scale_state(opt_state).found_inf, old_tree, new_tree)
