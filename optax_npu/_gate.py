# SPDX-License-Identifier: Apache-2.0
"""Stage 6: a step that overflowed changes nothing but the loss-scale state.

A guarded optimizer has a *head*, up to and with the loss scale, which finds the flag,
and a *tail*, the work that a skipped step need not do. Two forms, one meaning:

* The *select* runs both and picks old or new leaf by leaf. On accelerators it fuses
  into the update, and a leaf waits only for its own gradient and the flag.
* The *branch* finds the flag first and then runs everything or nothing. On CPU a
  select keeps updates from running in place and costs several passes over all state,
  so the branch is taken there, outside mapped functions, where the flag is one value
  for the whole program.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_npu._checks import is_traced
from optax_npu._compat import bound_axes, match_varying
from optax_npu._scale_rule import LossScaleState
from optax_npu._state import find_loss_scale_state, map_loss_scale, nodes
from optax_npu._trees import PyTree
from optax_npu._unscale import AssumedFinite, assume_finite, neutral, zero_where

# (gradients, state, parameters, extra arguments) -> (gradients or updates, state)
Stage = Callable[[Any, Any, Any, dict[str, Any]], tuple[PyTree, PyTree]]
# The same, with the extra arguments filled in.
Part = Callable[[Any, Any, Any], tuple[PyTree, PyTree]]


@dataclasses.dataclass(frozen=True)
class GatedUpdate:
    """The ``update`` of a guarded transformation.

    Attributes:
      head: What comes up to and with the loss scale: it finds the flag.
      tail: What comes behind it.
      split: The state as a pair, of the head and of the tail.
      join: The pair as the state.
      skips: False for a loss scale that never skips.
    """

    head: Stage
    tail: Stage
    split: Callable[[PyTree], tuple[PyTree, PyTree]]
    join: Callable[[PyTree, PyTree], PyTree]
    skips: bool = True

    def __call__(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        return self.run(updates, state, params, extra)

    def run(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree | None,
        extra: dict[str, Any],
        apply: bool = False,
    ) -> tuple[PyTree, PyTree]:
        """The updates, or with `apply` the new parameters, and the new state."""

        def head(grads: PyTree, state: PyTree, params: PyTree):
            return self.head(grads, state, params, extra)

        def tail(grads: PyTree, state: PyTree, params: PyTree):
            updates, state = self.tail(grads, state, params, extra)
            return (optax.apply_updates(params, updates) if apply else updates), state

        states = self.split(state)
        decided = nodes(state, AssumedFinite)  # by an outer gate
        if decided or not self.skips or not nodes(state, LossScaleState):
            result, states = _both(head, tail, grads, states, params)
            return result, self.join(*states)
        find_loss_scale_state(state)
        inputs = (grads, states, params)
        if _branch_is_possible(inputs):
            head, tail = jax.jit(head), jax.jit(tail)  # trace each of them once
            result, states = lax.platform_dependent(
                *inputs,
                cpu=functools.partial(_branch, head, tail, apply),
                default=functools.partial(_select, head, tail, apply),
            )
        else:
            result, states = _select(head, tail, apply, *inputs)
        return result, self.join(*states)


def _both(head: Part, tail: Part, grads: PyTree, states: PyTree, params: PyTree):
    head_state, tail_state = states
    grads, head_state = head(grads, head_state, params)
    result, tail_state = tail(grads, tail_state, params)
    return result, (head_state, tail_state)


def _branch_is_possible(inputs: PyTree) -> bool:
    """Whether this is a compiled program with one flag.

    Not in a mapped function, where updates must not wait for the flag; not outside
    of ``jit``, where nothing fuses; not with float0, which XLA does not know.
    """
    leaves = jax.tree.leaves(inputs)
    traced = any(is_traced(x) for x in leaves)
    float0 = any(getattr(x, "dtype", None) == jax.dtypes.float0 for x in leaves)
    return traced and not float0 and not bound_axes()


def _select(
    head: Part, tail: Part, apply: bool, grads: PyTree, states: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    result, new = _both(head, tail, grads, states, params)
    scaling = find_loss_scale_state(new)
    skip = scaling.found_inf
    result = keep_where(skip, params, result) if apply else zero_where(skip, result)
    return result, map_loss_scale(lambda _: scaling, keep_where(skip, states, new))


def _branch(
    head: Part, tail: Part, apply: bool, grads: PyTree, states: PyTree, params: PyTree
) -> tuple[PyTree, PyTree]:
    # Of this run of the head only the loss-scale state is used; the rest is dead.
    scaling = find_loss_scale_state(head(grads, states[0], params)[1])

    known_good = map_loss_scale(assume_finite, states)

    def run() -> tuple[PyTree, PyTree]:
        return _both(head, tail, grads, known_good, params)

    def stand_still() -> tuple[PyTree, PyTree]:
        like_result, like_states = jax.eval_shape(run)
        if apply:
            result = jax.tree.map(_with_dtype, params, like_result)
        else:
            result = jax.tree.map(_nothing, like_result)
        return result, jax.tree.map(_with_dtype, states, like_states)

    # The branch that updates comes first: older XLA copies all state otherwise.
    result, new = lax.cond(~scaling.found_inf, run, stand_still)
    return result, map_loss_scale(lambda _: scaling, new)


def _nothing(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(like.shape, neutral(like), like.dtype)


def _with_dtype(old: Any, like: Any) -> Any:
    return old if old.dtype == like.dtype else jnp.asarray(old, like.dtype)


def keep_where(skip: jax.Array, old: PyTree, new: PyTree) -> PyTree:
    """`old` where the step was skipped, else `new`; a select, never a product."""

    def leaf(new: Any, old: Any) -> Any:
        if not hasattr(new, "dtype") or new.dtype == jax.dtypes.float0:
            return new
        old = _with_dtype(old if isinstance(old, jax.Array) else jnp.asarray(old), new)
        return lax.select(skip, match_varying(old, new), match_varying(new, old))

    return jax.tree.map(leaf, new, old)
