# SPDX-License-Identifier: Apache-2.0
"""The rules of thirteen systems, as settings of the one engine."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from optax_npu._checks import (
    F32_MAX,
    F32_TINY,
    check_backoff,
    check_bounds,
    check_flag,
    check_growth,
    check_scale,
    check_scale_from_one,
    check_share,
    check_steps,
    is_traced,
)
from optax_npu._scale_rule import LossScale, Rule


@dataclasses.dataclass(frozen=True)
class PresetLossScale(LossScale):
    """The loss scale of a named system; made by `loss_scale_preset`.

    Attributes:
      name: The system.
      settings: Its rule.
    """

    name: str
    settings: Rule

    @property
    def rule(self) -> Rule:
        """The settings of the engine."""
        return self.settings


def loss_scale_preset(name: str, **overrides: Any) -> LossScale:
    """The loss scale of another system: its published defaults and its exact rule.

    Below, n is the growth interval, "halve" and "double" stand for the factors. A
    finite step counts, an overflow clears that count and skips the step. Growth that
    float32 cannot hold is dropped and the scale never leaves float32's normal numbers;
    "was" names what the original does instead.

    ============== =====================================================================
    name           rule, and its arguments with their defaults
    ============== =====================================================================
    ``tf1``        ``tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager``.
                   Overflows accumulate across finite steps; any due change clears both
                   counters; floor 1. `init_loss_scale` 2^15 and `incr_every_n_steps`
                   2000 (was: no default), `decr_every_n_nan_or_inf` 2, `incr_ratio` 2,
                   `decr_ratio` 0.8
    ``torch``      ``torch.amp.GradScaler``. Halve at once; no floor (was: down to 0,
                   then nan is applied). `init_scale` 2^16, `growth_factor` 2,
                   `backoff_factor` 0.5, `growth_interval` 2000, `enabled` True
    ``flax``       ``DynamicScale``. Doubles on the (n+1)-th finite step; growth is cut
                   to float32's maximum, lowering to its smallest normal number.
                   `scale` 65536, `growth_factor` 2, `backoff_factor` 0.5,
                   `growth_interval` 2000, `minimum_scale`
    ``jmp``        ``DynamicLossScale``. Halve at once, multiplying by the rounded
                   reciprocal as compiled jmp does. `loss_scale` 2^15 (was: no default),
                   `period` 2000, `factor` 2, `min_loss_scale` 1 (was: lost in ``jit``)
    ``mpx``        ``DynamicLossScaling``. As jmp; every step clips the scale to
                   [`min_loss_scaling`, 65504]. `loss_scaling` 2^15 and
                   `min_loss_scaling` 1 (was: no defaults), `factor` 2, `period` 2000.
                   (Was: a scale from 65520 on overflows by itself in float16.)
    ``keras``      ``tf_keras.mixed_precision.LossScaleOptimizer``. Halve at once; floor
                   1. `initial_scale` 2^15, `dynamic_growth_steps` 2000, `dynamic` True;
                   False: a fixed scale that never skips
    ``keras3``     ``keras.optimizers.LossScaleOptimizer``. As keras, without a floor
                   (was: down to 0, then nan is applied; up to inf, then every step is
                   skipped). `initial_scale` 2^15, `dynamic_growth_steps` 2000
    ``megatron``   ``DynamicGradScaler``. The first `hysteresis` - 1 overflows since the
                   last growth are free, every further one halves. `initial_scale` 2^32,
                   `min_scale` 1, `growth_factor` 2, `backoff_factor` 0.5,
                   `growth_interval` 1000, `hysteresis` 2 (was: grows to inf)
    ``apex``       ``apex.amp``'s ``LossScaler``. Halve at once, no floor; growth is cut
                   to 2^24. `init_scale` 2^16, `scale_factor` 2 (was: ignored),
                   `scale_window` 2000, `min_loss_scale` None, `max_loss_scale` 2^24;
                   and `hysteresis` 1 of its fused kernel, refilled by a finite step
    ``deepspeed``  ``DynamicLossScaler``. As megatron, but the first growth after the
                   start or an overflow takes n+1 finite steps. `init_scale` 2^32,
                   `scale_factor` 2, `scale_window` 1000, `min_scale` 1,
                   `delayed_shift` 1, `consecutive_hysteresis` False; True: any finite
                   step refills it. `raise_error_at_min_scale` is taken and never raises
                   (was: ends the run by default; was: grows past float32)
    ``paddle``     ``paddle.amp.GradScaler``. Only overflows *in a row* add up, in spite
                   of its documentation; no floor (was: down to 0, up to inf).
                   `init_loss_scaling` 2^16, `incr_ratio` 2, `decr_ratio` 0.5,
                   `incr_every_n_steps` 2000, `decr_every_n_nan_or_inf` 1,
                   `use_dynamic_loss_scaling` True; False: fixed, skips; `enable` True
    ``mindspore``  ``DynamicLossScaleManager`` and ``DynamicLossScaler``. Halve at once;
                   floor 1. `init_loss_scale` (or `scale_value`) 2^24 and at least 1,
                   `scale_factor` 2, `scale_window` 2000 (was: the manager keeps a
                   float64, grows past float32, and raises after 1000 overflows in a
                   row)
    ``fairseq``    ``DynamicLossScaler``. Halves if the share of overflows since the
                   last change is at least `tolerance`. `init_scale` 2^15,
                   `scale_factor` 2, `scale_window` 2000, `tolerance` 0, `threshold`
                   None (a floor), `min_loss_scale` 1e-4: a reduction that reaches it is
                   dropped (was: and ends the run)
    ============== =====================================================================

    Args:
      name: One of the names above.
      **overrides: Arguments of that system, by its own names. Every dynamic rule also
        takes our `min_loss_scale` (a floor) and `max_loss_scale` (a ceiling to which
        growth is cut).

    Returns:
      A loss scale.

    Raises:
      ValueError: The name is unknown or an argument is out of its range; also a few
        that an original would take (a period of 0, a scale of nan, a floor above the
        start).
      TypeError: That system has no such argument, or it has the wrong type.

    Example:
      >>> import optax_npu
      >>> loss_scale = optax_npu.loss_scale_preset("torch", growth_interval=100)
      >>> print(loss_scale.init().loss_scale)
      65536.0

    References:
      Each system's source, and recorded runs of the systems themselves, which the
      tests replay step by step.
    """
    if name not in _SYSTEMS:
        raise ValueError(
            f"name={name!r} is not a known preset; choose one of"
            f" {', '.join(sorted(_SYSTEMS))}."
        )
    default, arguments = _SYSTEMS[name]
    known = dict(_OURS, **arguments)
    unknown = [argument for argument in overrides if argument not in known]
    if unknown:
        raise TypeError(
            f"loss_scale_preset({name!r}) has no argument {unknown[0]!r}; it takes"
            f" {', '.join(known)}."
        )
    settings: dict[str, Any] = {}
    for argument, change in known.items():
        if argument in overrides:
            label = f"loss_scale_preset({name!r}): {argument}"
            settings |= change(label, overrides[argument])
    return PresetLossScale(name, _checked(name, default, settings))


def _checked(name: str, default: Rule, settings: dict[str, Any]) -> Rule:
    """The rule with changed settings; its bounds fit each other."""
    rule = dataclasses.replace(default, **settings)
    init = rule.init_scale
    if name == "apex" and not is_traced(init):
        init = min(init, rule.max_scale)
        rule = dataclasses.replace(rule, init_scale=init)
    if not rule.dynamic:
        return rule
    label, floor = f"loss_scale_preset({name!r})", rule.min_scale
    # A ceiling that comes with a rule may be below the start, as in mpx.
    ceiling = rule.max_scale if "max_scale" in settings else None
    check_bounds(label, init, floor, ceiling)
    check_bounds(label, floor, floor, rule.max_scale)
    return rule


# What one argument changes in a rule: (name for messages, value) -> settings.
_Change = Callable[[str, Any], dict[str, Any]]


def _set(field: str, check: Callable[[str, Any], Any], if_none: Any = ...) -> _Change:
    def change(label: str, value: Any) -> dict[str, Any]:
        if value is None and if_none is not ...:
            return {field: if_none}
        return {field: check(label, value)}

    return change


def _switch(when: bool, **settings: Any) -> _Change:
    def change(label: str, value: Any) -> dict[str, Any]:
        return settings if check_flag(label, value) is when else {}

    return change


_INIT = _set("init_scale", check_scale)
_FROM_ONE = _set("init_scale", check_scale_from_one)
_INTERVAL = _set("growth_interval", check_steps)
_GROWTH = _set("growth_factor", check_growth)
_BACKOFF = _set("backoff_factor", check_backoff)
_HYSTERESIS = _set("hysteresis", check_steps)
_FLOOR = _set("min_scale", check_scale)
_FLOOR_OR_NONE = _set("min_scale", check_scale, if_none=F32_TINY)
_DISABLED = _switch(False, init_scale=1.0, dynamic=False, skips=False)

_OURS: dict[str, _Change] = {
    "min_loss_scale": _FLOOR_OR_NONE,
    "max_loss_scale": _set("max_scale", check_scale, if_none=None),
}

_TORCH_LIKE: dict[str, _Change] = {
    "growth_factor": _GROWTH,
    "backoff_factor": _BACKOFF,
    "growth_interval": _INTERVAL,
}
_PADDLE_LIKE: dict[str, _Change] = {
    "incr_every_n_steps": _INTERVAL,
    "decr_every_n_nan_or_inf": _HYSTERESIS,
    "incr_ratio": _GROWTH,
    "decr_ratio": _BACKOFF,
}
_WINDOW: dict[str, _Change] = {"scale_factor": _GROWTH, "scale_window": _INTERVAL}
_KERAS: dict[str, _Change] = {"initial_scale": _INIT, "dynamic_growth_steps": _INTERVAL}

_SYSTEMS: Mapping[str, tuple[Rule, Mapping[str, _Change]]] = MappingProxyType(
    {
        "tf1": (
            Rule(hysteresis=2, backoff_factor=0.8, min_scale=1.0),
            {"init_loss_scale": _INIT, **_PADDLE_LIKE},
        ),
        "torch": (
            Rule(init_scale=2.0**16, backoff_factor=0.5, float64_factors=True),
            {"init_scale": _INIT, **_TORCH_LIKE, "enabled": _DISABLED},
        ),
        "flax": (
            Rule(
                init_scale=2.0**16,
                growth_delay=1,
                backoff_factor=0.5,
                max_scale=F32_MAX,
            ),
            {"scale": _INIT, **_TORCH_LIKE, "minimum_scale": _FLOOR_OR_NONE},
        ),
        "jmp": (
            Rule(reciprocal=True, min_scale=1.0),
            {
                "loss_scale": _INIT,
                "period": _INTERVAL,
                "factor": _GROWTH,
                "min_loss_scale": _FLOOR,
            },
        ),
        "mpx": (
            Rule(reciprocal=True, min_scale=1.0, max_scale=65504.0, always_clip=True),
            {
                "loss_scaling": _INIT,
                "min_loss_scaling": _FLOOR,
                "factor": _GROWTH,
                "period": _INTERVAL,
            },
        ),
        "keras": (
            Rule(min_scale=1.0),
            {**_KERAS, "dynamic": _switch(False, dynamic=False, skips=False)},
        ),
        "keras3": (Rule(), _KERAS),
        "megatron": (
            Rule(
                init_scale=2.0**32,
                growth_interval=1000,
                backoff_factor=0.5,
                hysteresis=2,
                bad_cleared_by=("growth",),
                min_scale=1.0,
            ),
            {
                "initial_scale": _INIT,
                "min_scale": _FLOOR,
                **_TORCH_LIKE,
                "hysteresis": _HYSTERESIS,
            },
        ),
        "apex": (
            Rule(init_scale=2.0**16, bad_cleared_by=("finite",), max_scale=2.0**24),
            {
                "init_scale": _INIT,
                **_WINDOW,
                "min_loss_scale": _FLOOR_OR_NONE,
                "max_loss_scale": _set("max_scale", check_scale),
                "hysteresis": _HYSTERESIS,
            },
        ),
        "deepspeed": (
            Rule(
                init_scale=2.0**32,
                growth_interval=1000,
                growth_delay=1,
                good_after_growth=1,
                bad_cleared_by=("growth",),
                min_scale=1.0,
            ),
            {
                "init_scale": _INIT,
                **_WINDOW,
                "min_scale": _FLOOR,
                "delayed_shift": _HYSTERESIS,
                "consecutive_hysteresis": _switch(True, bad_cleared_by=("finite",)),
                "raise_error_at_min_scale": _switch(True),
            },
        ),
        "paddle": (
            Rule(
                init_scale=2.0**16,
                backoff_factor=0.5,
                bad_cleared_by=("finite", "lowering"),
            ),
            {
                "init_loss_scaling": _INIT,
                **_PADDLE_LIKE,
                "use_dynamic_loss_scaling": _switch(False, dynamic=False),
                "enable": _DISABLED,
            },
        ),
        "mindspore": (
            Rule(init_scale=2.0**24, min_scale=1.0),
            {"init_loss_scale": _FROM_ONE, "scale_value": _FROM_ONE, **_WINDOW},
        ),
        "fairseq": (
            Rule(bad_cleared_by=("lowering",), drop_floor=1e-4),
            {
                "init_scale": _INIT,
                **_WINDOW,
                "tolerance": _set("tolerance", check_share),
                "threshold": _FLOOR_OR_NONE,
                "min_loss_scale": _set("drop_floor", check_scale),
            },
        ),
    }
)
