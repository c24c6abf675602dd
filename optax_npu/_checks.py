# SPDX-License-Identifier: Apache-2.0
"""Checks of numbers that a user passes to a factory.

Only concrete numbers are checked: under ``optax.inject_hyperparams`` a setting can be a
tracer, which passes as it is.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.core import Tracer

F32_MAX = float(np.finfo(np.float32).max)
F32_TINY = float(np.finfo(np.float32).tiny)
_INT32_MAX = 2**31 - 1


def check_state(name: str, state: Any, kind: type) -> None:
    """Refuses the state of another optimizer, or one restored without its types."""
    if not isinstance(state, kind):
        raise TypeError(
            f"state is a {type(state).__name__}, but {name} needs the {kind.__name__}"
            " that its own init returned. A checkpoint that comes back as lists and"
            " dicts is restored with init(params) as its target; the state of another"
            " optimizer does not fit."
        )


def is_traced(x: Any) -> bool:
    """Whether a value is known only when the compiled program runs."""
    return isinstance(x, Tracer)


def check_scale(name: str, value: Any, *, at_least: float = F32_TINY) -> Any:
    """A loss scale: finite, positive and normal in float32."""
    least = "2**-126" if at_least == F32_TINY else f"{at_least:g}"
    return _number(
        name,
        value,
        lambda x: at_least <= x <= F32_MAX,
        f"a finite number from {least} to 3.4e38, which float32 can hold",
        "2.0**15 is a common start for float16, 1.0 for bfloat16.",
    )


def check_scale_from_one(name: str, value: Any) -> Any:
    """A loss scale of at least 1, as the ported fixed scales demand."""
    return check_scale(name, value, at_least=1.0)


def check_growth(name: str, value: Any) -> Any:
    """A factor that the scale is multiplied by when it grows."""
    return _number(
        name,
        value,
        lambda x: x <= F32_MAX and np.float32(x) > 1,
        "a finite number above 1",
        "It makes the scale grow; 2.0 keeps scaling exact.",
    )


def check_backoff(name: str, value: Any) -> Any:
    """A factor that the scale is multiplied by after an overflow."""
    return _number(
        name,
        value,
        lambda x: x >= F32_TINY and np.float32(x) < 1,
        "a number above 0 and below 1",
        "It makes the scale shrink; 0.5 keeps scaling exact.",
    )


def check_share(name: str, value: Any) -> Any:
    """A share of steps."""
    return _number(
        name, value, lambda x: 0 <= x <= 1, "a share from 0 to 1", "0 is the default."
    )


def check_steps(name: str, value: Any) -> Any:
    """A number of steps: a whole number from 1 on; more than int32 holds is 'never'."""
    steps = _number(
        name,
        value,
        lambda x: x >= 1 and x == int(x),
        "a whole number of steps, at least 1",
        "2000 is a common growth interval, 1 the usual number of overflows.",
    )
    return steps if is_traced(steps) else int(min(steps, _INT32_MAX))


def check_flag(name: str, value: Any) -> bool:
    """A switch: a Python or NumPy bool, known when the program is built."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(
        f"{name} must be True or False, got {value!r}: it decides how the program is"
        " built and cannot be a number or a traced value."
    )


def check_fields(instance: Any, **checks: Any) -> None:
    """Replaces fields of a frozen dataclass by their checked Python values."""
    for name, check in checks.items():
        label = f"{type(instance).__name__}: {name}"
        object.__setattr__(instance, name, check(label, getattr(instance, name)))


def check_bounds(label: str, init: Any, floor: Any, ceiling: Any) -> None:
    """A start, a floor and a ceiling (or `None`) that fit each other."""
    if any(is_traced(x) for x in (init, floor, ceiling)):
        return
    # The floor of 1 that most rules have may be above the start, as in the originals:
    # the first overflow raises the scale to it. A higher one can only be a mistake.
    if floor > max(init, 1.0):
        raise ValueError(
            f"{label}: the floor {floor!r} is above the initial scale {init!r}, but a"
            " scale has to start at its floor or above. Lower one or raise the other."
        )
    if ceiling is not None and ceiling < max(floor, init):
        raise ValueError(
            f"{label}: the ceiling {ceiling!r} is below the initial scale {init!r} or"
            f" the floor {floor!r}. Raise it, or start lower."
        )


def _number(
    name: str, value: Any, is_good: Callable[[float], Any], need: str, hint: str
) -> Any:
    """`value` as a Python float; a tracer as it is."""
    if is_traced(value):
        return value
    kind_error = TypeError(
        f"{name} must be {need}, got {value!r} of type {type(value).__name__}. {hint}"
    )
    if isinstance(value, bool | np.bool_ | str | bytes) or np.ndim(value):
        raise kind_error
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise kind_error from error
    except OverflowError:
        number = math.inf
    if math.isfinite(number) and is_good(number):
        return number
    raise ValueError(f"{name} must be {need}, got {value!r}. {hint}")
