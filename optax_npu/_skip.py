# SPDX-License-Identifier: Apache-2.0
"""The spellings of the gate: around a transformation, a chain, or a whole step."""

from typing import Any

import optax

from optax_npu._checks import check_state
from optax_npu._gate import GatedUpdate, keep_where
from optax_npu._scale_rule import LossScaleState
from optax_npu._state import find_loss_scale_state, nodes
from optax_npu._trees import PyTree


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
    check_transformation("tx", tx)
    return optax.GradientTransformationExtraArgs(tx.init, _guarded_update(tx))


def _guarded_update(tx: optax.GradientTransformation) -> GatedUpdate:
    inner = optax.with_extra_args_support(tx)
    return GatedUpdate(
        head=lambda g, state, p, extra: inner.update(g, state, p, **extra),
        tail=lambda g, state, p, extra: (g, state),
        split=lambda state: (state, ()),
        join=lambda state, nothing: state,
    )


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
    for i, tx in enumerate(transforms):
        check_transformation(f"transforms[{i}]", tx)
    members = [optax.with_extra_args_support(tx) for tx in transforms]

    def run(part: list[Any], grads: PyTree, states: PyTree, params: PyTree, extra: Any):
        new = []
        for member, state in zip(part, states, strict=True):
            grads, state = member.update(grads, state, params, **extra)
            new.append(state)
        return grads, tuple(new)

    def split(states: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        check_state("chain", states, tuple)
        if len(states) != len(members) or hasattr(states, "_fields"):
            raise ValueError(
                f"state is a {type(states).__name__} of {len(states)}, but chain needs"
                f" the tuple of {len(members)} that its own init returned, one state"
                " for each member. The state of another optimizer does not fit."
            )
        return _split_behind_the_loss_scale(states)

    update = GatedUpdate(
        head=lambda g, s, p, extra: run(members[: len(s)], g, s, p, extra),
        tail=lambda g, s, p, extra: run(
            members[-len(s) :] if s else [], g, s, p, extra
        ),
        split=split,
        join=lambda head, tail: head + tail,
    )
    return optax.GradientTransformationExtraArgs(optax.chain(*members).init, update)


def _split_behind_the_loss_scale(states: tuple[PyTree, ...]) -> tuple[Any, Any]:
    holds = [bool(nodes(state, LossScaleState)) for state in states]
    end = holds.index(True) + 1 if any(holds) else len(states)
    return tuple(states[:end]), tuple(states[end:])


def check_transformation(name: str, tx: Any) -> None:
    """Refuses what is no gradient transformation, with the fix."""
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{name} is a {type(tx).__name__}, but an optax.GradientTransformation is"
            " needed, e.g. optax.adam(1e-3). (optax.MultiSteps: call its"
            " .gradient_transformation().)"
        )


def apply_gradients(
    tx: optax.GradientTransformation,
    params: PyTree,
    grads: PyTree,
    opt_state: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Update and apply as one gated step; returns new parameters and new state.

    ``tx.update`` and ``optax.apply_updates`` in the fastest form where the compiler
    cannot fuse a select (CPU): one branch around the whole step, so that parameters
    and state are updated in place when they are donated. XLA may round the last
    product and the sum once instead of twice, as in any jitted step.

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
    check_transformation("tx", tx)
    update = tx.update
    if not isinstance(update, GatedUpdate):
        update = _guarded_update(tx)
    return update.run(grads, opt_state, params, extra_args, apply=True)


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
      >>> new, old = {"mean": jnp.array(jnp.nan)}, {"mean": jnp.array(0.5)}
      >>> print(optax_npu.keep_if_applied(state, new, old)["mean"])
      0.5
    """
    return keep_where(find_loss_scale_state(opt_state).found_inf, old_tree, new_tree)
