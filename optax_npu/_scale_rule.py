# SPDX-License-Identifier: Apache-2.0
"""The update rule: one engine behind every loss scale.

All published rules are one rule with different settings. Two counters decide:

* ``good_steps`` counts finite steps in a row. When it reaches the growth interval,
  the scale is *due to grow*, and the counter starts again.
* ``bad_steps`` counts overflows. When it reaches the hysteresis, the scale is *due to
  be lowered*. Systems differ only in what clears it: a finite step, a growth, a
  lowering, or several of them.

An overflow always clears ``good_steps``. What a due change does to the scale depends
on the bounds; the counters move all the same when a bound keeps the scale where it is.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_npu._checks import F32_MAX, F32_TINY, is_traced


class LossScaleState(NamedTuple):
    """State of a loss scale: scalar arrays, the same tree for every rule.

    Attributes:
      loss_scale: float32, the scale for the *next* loss.
      good_steps: int32, finite steps in a row since the last change. (Under the
        DeepSpeed rule, the step that grew the scale counts as the first one.)
      bad_steps: int32, overflows that count towards the next lowering.
      found_inf: bool, whether the last step overflowed and has to be skipped.
        Always False under a loss scale that never skips.
      skipped_steps: int32, all steps skipped so far.
      consecutive_skips: int32, the steps skipped in a row up to now.
      steps_since_change: int32, steps since the scale was last due for a change.
    """

    loss_scale: jax.Array
    good_steps: jax.Array
    bad_steps: jax.Array
    found_inf: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    steps_since_change: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The settings of the engine: hashable, checked by whoever builds it.

    Attributes:
      init_scale: The scale to start from, and the one to go back to when a restored
        scale is unusable.
      dynamic: Whether the scale ever changes.
      skips: Whether a step that overflowed is skipped.
      growth_interval: Finite steps in a row until growth is due.
      growth_delay: Finite steps more that it takes in fact.
      good_after_growth: What a growth sets the counter of good steps to.
      growth_factor: The scale is multiplied by it.
      growth_limit: Growth is dropped from `growth_limit / growth_factor` on.
      max_scale: Growth is cut to it. `None`: a growth that float32 cannot hold is
        dropped.
      hysteresis: Overflows until lowering is due.
      bad_cleared_by: What clears the counter of bad steps: "finite", "growth",
        "lowering".
      backoff_factor: The scale is multiplied by it. `None`: divided by
        `growth_factor`.
      reciprocal: Whether that division multiplies by the rounded reciprocal.
      float64_factors: Whether products are rounded once, from float64.
      min_scale: Lowering is cut to it, so it also *raises* a start below it.
      drop_floor: Lowering that reaches it is dropped.
      always_clip: Whether every step clips the scale to its bounds.
      tolerance: Share of overflows since the last change below which none lowers.
    """

    init_scale: Any = 2.0**15
    dynamic: bool = True
    skips: bool = True
    growth_interval: Any = 2000
    growth_delay: int = 0
    good_after_growth: int = 0
    growth_factor: Any = 2.0
    growth_limit: float | None = None
    max_scale: Any = None
    hysteresis: Any = 1
    bad_cleared_by: tuple[str, ...] = ("growth", "lowering")
    backoff_factor: Any = None
    reciprocal: bool = False
    float64_factors: bool = False
    min_scale: Any = F32_TINY
    drop_floor: Any = 0.0
    always_clip: bool = False
    tolerance: Any = 0.0


class LossScale:
    """A loss scale: how to start, and how a step moves it. Holds no arrays.

    The base of `DynamicLossScale`, `FixedLossScale`,
    `ExponentialUpdateLossScaleManager`, `FixedLossScaleManager` and of what
    `loss_scale_preset` returns. Immutable, hashable and compared by value, so it can be
    a static argument or a field of a module. `init` and `update` are pure, and work
    under ``jit``, ``vmap``, ``lax.scan`` and ``eval_shape``.

    Example:
      >>> import optax_npu
      >>> rules = [optax_npu.DynamicLossScale(), optax_npu.loss_scale_preset("torch")]
      >>> [isinstance(rule, optax_npu.LossScale) for rule in rules]
      [True, True]
    """

    @property
    def rule(self) -> Rule:
        """The settings of the engine."""
        raise NotImplementedError

    @property
    def skips(self) -> bool:
        """Whether a step that overflowed is skipped."""
        return self.rule.skips

    def init(self) -> LossScaleState:
        """A fresh state; no two leaves share a buffer, so it can be donated."""
        # One `full` per leaf: a shared zero could not be donated twice.
        return LossScaleState(
            loss_scale=_float32(self.rule.init_scale),
            found_inf=jnp.full((), False, jnp.bool_),
            **{name: jnp.full((), 0, jnp.int32) for name in _COUNTERS},
        )

    def update(
        self, state: LossScaleState, grads_finite: jax.Array | bool
    ) -> tuple[LossScaleState, jax.Array]:
        """Moves the scale after a step.

        Args:
          state: The state that scaled this step's loss.
          grads_finite: bool[], whether all gradients of the step are finite, the same
            on all replicas.

        Returns:
          The state for the next step, and bool[] `should_apply`: whether this step's
          update may be applied.

        Raises:
          TypeError: `state` is no `LossScaleState`.
          ValueError: `grads_finite` or the state is not scalar.
        """
        rule = self.rule
        state = _checked_state(state)
        finite = _checked_flag(grads_finite)
        should_apply = finite if rule.skips else jnp.full_like(finite, True)
        moved = _move(rule, state, finite) if rule.dynamic else _stay(rule, state)
        skipped, none = ~should_apply, np.int32(0)
        total = optax.safe_increment(state.skipped_steps)
        in_a_row = optax.safe_increment(state.consecutive_skips)
        new_state = moved._replace(
            found_inf=skipped,
            skipped_steps=jnp.where(skipped, total, state.skipped_steps),
            consecutive_skips=jnp.where(skipped, in_a_row, none),
        )
        return new_state, should_apply


_COUNTERS = (
    "good_steps",
    "bad_steps",
    "skipped_steps",
    "consecutive_skips",
    "steps_since_change",
)


def is_usable(loss_scale: jax.Array) -> jax.Array:
    """Whether a scale is a positive, normal, finite number."""
    return (loss_scale >= np.float32(F32_TINY)) & (loss_scale <= np.float32(F32_MAX))


def repair_scale(state: LossScaleState) -> jax.Array:
    """The scale of this step: float32, always finite and positive.

    A restored inf, nan, zero, negative or subnormal scale counts as 1. Whoever scales
    the loss and whoever divides the gradients read it here, so that they agree without
    knowing the rule. `LossScale.update` then starts again from the initial scale.
    """
    scale = jnp.asarray(state.loss_scale, jnp.float32)
    return jnp.where(is_usable(scale), scale, np.float32(1))


def _stay(rule: Rule, state: LossScaleState) -> LossScaleState:
    """A fixed scale: the one that was asked for, whatever was restored."""
    scale = jnp.full_like(state.loss_scale, rule.init_scale)
    return state._replace(loss_scale=scale)


def _move(rule: Rule, state: LossScaleState, finite: jax.Array) -> LossScaleState:
    """A dynamic scale: counters, then the scale."""
    restart = jnp.full_like(state.loss_scale, rule.init_scale)
    scale = jnp.where(is_usable(state.loss_scale), state.loss_scale, restart)
    good = optax.safe_increment(state.good_steps)
    bad = optax.safe_increment(state.bad_steps)
    age = optax.safe_increment(state.steps_since_change)

    grows = finite & (good >= _growth_threshold(rule))
    lowers = ~finite & (bad >= rule.hysteresis)
    if is_traced(rule.tolerance) or rule.tolerance > 0:
        share = jnp.asarray(bad, jnp.float32) / jnp.asarray(age, jnp.float32)
        lowers &= share >= rule.tolerance
    clears_bad = {"finite": finite, "growth": grows, "lowering": lowers}
    cleared = jnp.full_like(finite, False)
    for event in rule.bad_cleared_by:
        cleared |= clears_bad[event]

    none = np.int32(0)
    good = jnp.where(grows, np.int32(rule.good_after_growth), good)
    scale = jnp.where(
        grows, _grown(rule, scale), jnp.where(lowers, _lowered(rule, scale), scale)
    )
    if rule.always_clip:
        scale = jnp.clip(scale, np.float32(rule.min_scale), np.float32(rule.max_scale))
    return state._replace(
        loss_scale=scale,
        good_steps=jnp.where(finite, good, none),
        bad_steps=jnp.where(cleared, none, jnp.where(finite, state.bad_steps, bad)),
        steps_since_change=jnp.where(grows | lowers, none, age),
    )


def _growth_threshold(rule: Rule) -> Any:
    if is_traced(rule.growth_interval):
        return rule.growth_interval + rule.growth_delay
    return np.int32(min(rule.growth_interval + rule.growth_delay, 2**31 - 1))


def _grown(rule: Rule, scale: jax.Array) -> jax.Array:
    """The scale after a growth that is due: finite, within the rule's bounds."""
    grown = _times(scale, rule.growth_factor, rule.float64_factors)
    if rule.growth_limit is not None:
        limit = _float32(rule.growth_limit / rule.growth_factor)
        grown = jnp.where(scale < limit, grown, scale)
    if rule.max_scale is None:
        return jnp.where(jnp.isfinite(grown), grown, scale)
    return jnp.minimum(grown, _float32(rule.max_scale))


def _lowered(rule: Rule, scale: jax.Array) -> jax.Array:
    """The scale after a lowering that is due: positive, within the rule's bounds."""
    if rule.backoff_factor is not None:
        lowered = _times(scale, rule.backoff_factor, rule.float64_factors)
    elif rule.reciprocal:
        lowered = scale * (np.float32(1) / _float32(rule.growth_factor))
    else:
        # A divisor that is not a constant: XLA turns division by a constant into a
        # product with its reciprocal, which rounds differently.
        one = np.float32(1)
        lowered = scale / jnp.where(scale > 0, _float32(rule.growth_factor), one)
    lowered = jnp.maximum(lowered, _float32(rule.min_scale))
    return jnp.where(lowered > _float32(rule.drop_floor), lowered, scale)


def _times(scale: jax.Array, factor: Any, from_float64: bool) -> jax.Array:
    """`scale * factor` in float32, or rounded to it from the product in float64."""
    if not from_float64 or is_traced(factor) or float(np.float32(factor)) == factor:
        return scale * _float32(factor)
    # Dekker's product without float64, which JAX and most chips do not have at hand:
    # halves of 12 bits multiply exactly, so `error` is what rounding took away. A
    # small scale is lifted, so that no part of it is flushed to zero.
    lift, drop = (jnp.where(scale < 1, np.float32(2.0**e), 1) for e in (64, -64))
    scale = scale * lift
    f1, f2, rest = _split(factor)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    s1 = jax.lax.bitcast_convert_type(bits & _UPPER_BITS, jnp.float32)
    s2 = scale - s1
    product = scale * np.float32(factor)
    error = ((s1 * f1 - product) + s1 * f2 + s2 * f1) + s2 * f2
    corrected = product + (error + scale * rest)
    return jnp.where(jnp.isfinite(product), corrected, product) * drop


def _split(factor: float) -> tuple[np.float32, np.float32, np.float32]:
    """A float64 as 12 bits, the rest of its float32, and the rest of it."""
    rounded = np.float32(factor)
    upper = (rounded.view(np.uint32) & _UPPER_BITS).view(np.float32)
    return upper, rounded - upper, np.float32(factor - float(rounded))


_UPPER_BITS = np.uint32(0xFFFFF000)


def _float32(x: Any) -> jax.Array:
    """A strongly typed float32 scalar of its own buffer."""
    if is_traced(x):
        return jnp.asarray(x, jnp.float32)
    return jnp.full((), x, jnp.float32)


def _checked_flag(grads_finite: jax.Array | bool) -> jax.Array:
    flag = jnp.asarray(grads_finite)
    if flag.ndim:
        raise ValueError(
            f"grads_finite must be a scalar, got shape {flag.shape}. One step has one"
            " verdict: reduce it with jnp.all(...). For several independent scales,"
            " jax.vmap init and update."
        )
    return flag if flag.dtype == jnp.bool_ else flag != 0


def _checked_state(state: LossScaleState) -> LossScaleState:
    """The state with its declared dtypes, whatever a checkpoint made of them."""
    if not isinstance(state, LossScaleState):
        raise TypeError(
            f"state must be a LossScaleState, got {type(state).__name__}. Pass what"
            " init() returned; restore a checkpoint into a fresh init() as template."
        )
    if jnp.ndim(state.loss_scale):
        raise ValueError(
            f"state.loss_scale must be a scalar, got shape {state.loss_scale.shape}."
            " A vmapped or replicated state needs a vmapped or mapped update."
        )
    return LossScaleState(
        loss_scale=jnp.asarray(state.loss_scale, jnp.float32),
        found_inf=jnp.asarray(state.found_inf, jnp.bool_),
        **{name: jnp.asarray(getattr(state, name), jnp.int32) for name in _COUNTERS},
    )
