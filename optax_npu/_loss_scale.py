# SPDX-License-Identifier: Apache-2.0
"""The loss scales ported from TensorFlow and Ascend; each is a setting of one engine.

Ours stay finite and positive where an original can run to inf or 0, refuse settings
that cannot work when they are made, and count skipped steps.
"""

import dataclasses
from typing import Any, Self

from optax_npu._checks import (
    check_backoff,
    check_bounds,
    check_fields,
    check_flag,
    check_growth,
    check_scale,
    check_scale_from_one,
    check_steps,
)
from optax_npu._scale_rule import LossScale, Rule


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """TensorFlow's dynamic loss scale: halve on overflow, double every 2000 good steps.

    The rule. A finite step adds one to ``good_steps``; at `increment_period` the
    scale is multiplied by `multiplier` if float32 can hold the result, and the
    counter goes back to 0 either way. **On overflow** the scale is divided by
    `multiplier`, at once and not below `min_loss_scale`, the counter goes back to 0,
    and the step is skipped.

    Args:
      initial_loss_scale: The scale to start with: a positive finite number (float,
        int, NumPy or JAX scalar). A start below `min_loss_scale`'s default of 1 is
        taken as in the original: the first overflow raises it to 1.
      increment_period: Finite steps in a row until the scale grows, at least 1.
      multiplier: Factor of growth and divisor of the reduction, above 1. A power of
        two keeps scaling and unscaling exact.
      min_loss_scale: The floor; may be below 1 for models that need it. Not in the
        original, where it is always 1.
      max_loss_scale: A ceiling, to which growth is cut. `None`: 3.4e38, float32's own.
        Not in the original.

    Raises:
      TypeError: An argument is not a number.
      ValueError: An argument is out of its range. (The original takes a multiplier of
        0 or -1, a period of 0, and rounds 2.9 to 2.)

    Example:
      >>> import optax_npu
      >>> loss_scale = optax_npu.DynamicLossScale(8.0, increment_period=2)
      >>> state = loss_scale.init()
      >>> for grads_finite in (True, True, False):
      ...     state, should_apply = loss_scale.update(state, grads_finite)
      ...     print(state.loss_scale, should_apply)
      8.0 True
      16.0 True
      8.0 False

    References:
      ``tf.mixed_precision.experimental.DynamicLossScale`` (TensorFlow 2.4),
      ``tf.compat.v1.mixed_precision.DynamicLossScale``.
    """

    initial_loss_scale: float = 2.0**15
    increment_period: int = 2000
    multiplier: float = 2.0
    _: dataclasses.KW_ONLY
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            initial_loss_scale=check_scale,
            increment_period=check_steps,
            multiplier=check_growth,
        )
        _check_bounds(self, self.initial_loss_scale)

    @property
    def rule(self) -> Rule:
        """The settings of the engine."""
        return Rule(
            init_scale=self.initial_loss_scale,
            growth_interval=self.increment_period,
            growth_factor=self.multiplier,
            min_scale=self.min_loss_scale,
            max_scale=self.max_loss_scale,
        )

    def get_config(self) -> dict[str, Any]:
        """The arguments as a dict: TensorFlow's three, and ours where they are set."""
        config = dataclasses.asdict(self)
        return {
            name: value
            for name, value in config.items()
            if name in _TF_CONFIG or value != _OURS[name]
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The loss scale that a `get_config` dict, ours or TensorFlow's, describes."""
        return cls(**config)


_TF_CONFIG = ("initial_loss_scale", "increment_period", "multiplier")
_OURS = {"min_loss_scale": 1.0, "max_loss_scale": None}


@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """TensorFlow's fixed loss scale: never changes and **never skips**.

    **On overflow** the step is applied, inf and nan included, as in the original; the
    counters and ``found_inf`` stay at zero. To skip bad steps under a fixed scale, use
    `FixedLossScaleManager`, or just pass a number to ``npu_loss_scale``.

    Args:
      loss_scale: The scale, a finite number of at least 1.

    Raises:
      TypeError: It is not a number.
      ValueError: It is below 1 or not finite. (The original takes inf.)

    Example:
      >>> import optax_npu
      >>> loss_scale = optax_npu.FixedLossScale(1024)
      >>> state, should_apply = loss_scale.update(loss_scale.init(), False)
      >>> print(state.loss_scale, should_apply)
      1024.0 True

    References:
      ``tf.mixed_precision.experimental.FixedLossScale`` (TensorFlow 2.4).
    """

    loss_scale: float

    def __post_init__(self) -> None:
        check_fields(self, loss_scale=check_scale_from_one)

    @property
    def rule(self) -> Rule:
        """The settings of the engine."""
        return Rule(init_scale=self.loss_scale, dynamic=False, skips=False)

    def get_config(self) -> dict[str, Any]:
        """The argument as a dict, under TensorFlow's name ``loss_scale_value``."""
        return {"loss_scale_value": self.loss_scale}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The loss scale that a `get_config` dict, ours or TensorFlow's, describes."""
        return cls(config["loss_scale_value"])


@dataclasses.dataclass(frozen=True)
class ExponentialUpdateLossScaleManager(LossScale):
    """Ascend's dynamic loss scale: tolerates single overflows.

    The rule. A finite step adds one to ``good_steps`` and leaves ``bad_steps`` alone;
    at `incr_every_n_steps` the scale S becomes ``S * incr_ratio`` if
    ``S < 3.4e38 / incr_ratio``. **On overflow** the step is skipped, ``good_steps``
    goes to 0 and ``bad_steps`` gains one; at `decr_every_n_nan_or_inf` the scale
    becomes ``max(1, S * decr_ratio)``. So overflows *accumulate* across finite
    steps, while good steps have to come in a row. Any change that is due clears both
    counters, even if a bound keeps the scale where it is.

    Args:
      init_loss_scale: The scale to start with: a positive finite number. Ascend's
        samples use ``2**32``.
      incr_every_n_steps: Finite steps in a row until the scale grows, at least 1.
      decr_every_n_nan_or_inf: Overflows until it is lowered, at least 1.
      incr_ratio: Factor of growth, above 1.
      decr_ratio: Factor of reduction, above 0 and below 1. The published samples pass
        0.5, which keeps scaling exact; 0.8 is the default of the class.
      min_loss_scale: The floor. Not in the original, where it is always 1.
      max_loss_scale: A ceiling, to which growth is cut. `None`: the 3.4e38 above.
        Not in the original.

    Raises:
      TypeError: An argument is not a number.
      ValueError: An argument is out of its range. (The original takes anything.)

    Example:
      >>> import optax_npu
      >>> loss_scale = optax_npu.ExponentialUpdateLossScaleManager(
      ...     init_loss_scale=2**32, incr_every_n_steps=1000, decr_ratio=0.5)
      >>> state = loss_scale.init()
      >>> for grads_finite in (False, True, False):
      ...     state, _ = loss_scale.update(state, grads_finite)
      ...     print(state.loss_scale, state.good_steps, state.bad_steps)
      4294967300.0 0 1
      4294967300.0 1 1
      2147483600.0 0 0

    References:
      ``npu_bridge`` of Ascend's TensorFlow adapter; for the rule its ancestor
      ``tf.contrib.mixed_precision`` (TensorFlow 1.15), which tests that the product is
      finite instead: ``loss_scale_preset("tf1")``.
    """

    init_loss_scale: float
    incr_every_n_steps: int
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8
    _: dataclasses.KW_ONLY
    min_loss_scale: float = 1.0
    max_loss_scale: float | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            init_loss_scale=check_scale,
            incr_every_n_steps=check_steps,
            decr_every_n_nan_or_inf=check_steps,
            incr_ratio=check_growth,
            decr_ratio=check_backoff,
        )
        _check_bounds(self, self.init_loss_scale)

    @property
    def rule(self) -> Rule:
        """The settings of the engine."""
        return Rule(
            init_scale=self.init_loss_scale,
            growth_interval=self.incr_every_n_steps,
            growth_factor=self.incr_ratio,
            growth_limit=3.4e38,
            hysteresis=self.decr_every_n_nan_or_inf,
            backoff_factor=self.decr_ratio,
            min_scale=self.min_loss_scale,
            max_scale=self.max_loss_scale,
        )


@dataclasses.dataclass(frozen=True)
class FixedLossScaleManager(LossScale):
    """Ascend's fixed loss scale: never changes; skips on overflow unless told not to.

    **On overflow** the step is skipped and counted in ``skipped_steps``; the rule's own
    counters stay at zero. With ``enable_overflow_check=False`` it is applied, inf and
    nan included, as under `FixedLossScale`.

    Args:
      loss_scale: The scale, a finite number of at least 1.
      enable_overflow_check: Whether a step with a non-finite gradient is skipped.

    Raises:
      TypeError: `loss_scale` is not a number, or the switch is not a bool.
      ValueError: `loss_scale` is below 1 or not finite. (The original takes inf.)

    Example:
      >>> import optax_npu
      >>> loss_scale = optax_npu.FixedLossScaleManager(128)
      >>> state, should_apply = loss_scale.update(loss_scale.init(), False)
      >>> print(state.loss_scale, should_apply, state.skipped_steps)
      128.0 False 1

    References:
      ``npu_bridge`` of Ascend's TensorFlow adapter. There, ``NPUOptimizer`` ignores
      the switch; here it holds everywhere.
    """

    loss_scale: float
    enable_overflow_check: bool = True

    def __post_init__(self) -> None:
        check_fields(
            self, loss_scale=check_scale_from_one, enable_overflow_check=check_flag
        )

    @property
    def rule(self) -> Rule:
        """The settings of the engine."""
        return Rule(
            init_scale=self.loss_scale, dynamic=False, skips=self.enable_overflow_check
        )


@dataclasses.dataclass(frozen=True)
class NoLossScale(LossScale):
    """Loss scaling switched off: scale 1, never skips, the state tree of the others."""

    @property
    def rule(self) -> Rule:
        """The settings of the engine."""
        return Rule(init_scale=1.0, dynamic=False, skips=False)


def as_loss_scale(value: Any) -> LossScale:
    """What ``npu_loss_scale`` and ``npu_optimizer`` take as a loss scale.

    Args:
      value: A loss scale, as it is; ``"dynamic"``, which is ``DynamicLossScale()``; a
        number, which is ``FixedLossScaleManager(number)``, a fixed scale that skips
        overflows; or `None`, which switches scaling and skipping off.

    Raises:
      TypeError: It is something else.
      ValueError: It is another string, or a number below 1.
    """
    if isinstance(value, LossScale):
        return value
    if value is None:
        return NoLossScale()
    if isinstance(value, str):
        if value == "dynamic":
            return DynamicLossScale()
        raise ValueError(
            f'loss_scale={value!r} is unknown: "dynamic" is the only name here. For the'
            f" rule of another system, pass loss_scale_preset({value!r})."
        )
    if isinstance(value, type) and issubclass(value, LossScale):
        raise TypeError(
            f"loss_scale is the class {value.__name__} itself, an instance is needed:"
            f" {value.__name__}(...)."
        )
    number: Any = value
    try:
        return FixedLossScaleManager(number)
    except TypeError as error:
        raise TypeError(
            f"loss_scale must be a loss scale, a number, 'dynamic' or None, got"
            f" {value!r} of type {type(value).__name__}."
        ) from error


def _check_bounds(loss_scale: Any, init: Any) -> None:
    check_fields(loss_scale, min_loss_scale=check_scale)
    if loss_scale.max_loss_scale is not None:
        check_fields(loss_scale, max_loss_scale=check_scale)
    low, high = loss_scale.min_loss_scale, loss_scale.max_loss_scale
    name = type(loss_scale).__name__
    label = f"{name}(min_loss_scale={low!r}, max_loss_scale={high!r})"
    check_bounds(label, init, low, high)
