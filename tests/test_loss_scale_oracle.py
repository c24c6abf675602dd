# SPDX-License-Identifier: Apache-2.0
"""Every recorded loss-scale run of the real systems, replayed step by step.

Scales are compared bit for bit, counters wherever the system has a counterpart. Where
ours differs on purpose, the reason stands in `_reason`.
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import optax_npu

ORACLE = pathlib.Path(__file__).parent / "oracle" / "loss_scale"
F32_MAX = float(np.finfo(np.float32).max)


def preset(name: str, **more: Any) -> Callable[..., optax_npu.LossScale]:
    return functools.partial(optax_npu.loss_scale_preset, name, **more)


def tf_fixed(loss_scale_value: float) -> optax_npu.FixedLossScale:
    return optax_npu.FixedLossScale.from_config({"loss_scale_value": loss_scale_value})


# How each recorded constructor is spelled with ours, its own arguments given.
CONSTRUCTORS: dict[str, dict[str, Callable[..., optax_npu.LossScale]]] = {
    "tf1_contrib": {
        "ExponentialUpdateLossScaleManager": preset("tf1"),
        "FixedLossScaleManager": optax_npu.FixedLossScaleManager,
    },
    "npu_bridge": {
        "ExponentialUpdateLossScaleManager": (
            optax_npu.ExponentialUpdateLossScaleManager
        ),
        "FixedLossScaleManager": optax_npu.FixedLossScaleManager,
    },
    "tf_dynamic_loss_scale": {
        "DynamicLossScale": optax_npu.DynamicLossScale,
        "FixedLossScale": tf_fixed,
    },
    "tf23_loss_scale_optimizer": {
        "DynamicLossScale": optax_npu.DynamicLossScale,
        "FixedLossScale": tf_fixed,
    },
    "tf_keras_loss_scale_optimizer": {"LossScaleOptimizer": preset("keras")},
    "keras3_tensorflow": {"LossScaleOptimizer": preset("keras3")},
    "keras3_jax": {"LossScaleOptimizer": preset("keras3")},
    "torch_gradscaler": {"GradScaler": preset("torch")},
    "flax_dynamic_scale": {"DynamicScale": preset("flax")},
    "jmp": {
        "DynamicLossScale": preset("jmp"),
        "StaticLossScale": optax_npu.FixedLossScaleManager,
    },
    "mpx": {"DynamicLossScaling": preset("mpx")},
    "deepspeed": {
        "DynamicLossScaler": preset("deepspeed"),
        "LossScaler": lambda scale: optax_npu.FixedLossScale(scale),
    },
    "deepspeed_consecutive": {"DynamicLossScaler": preset("deepspeed")},
    "paddle_gradscaler": {"GradScaler": preset("paddle")},
    # The operator of static graphs: the same rule with a floor of 1.
    "paddle_update_loss_scaling": {
        "GradScaler": preset("paddle", min_loss_scale=1.0),
        "update_loss_scaling": preset("paddle", min_loss_scale=1.0),
    },
    "mindspore_manager": {
        "DynamicLossScaleManager": preset("mindspore"),
        "FixedLossScaleManager": optax_npu.FixedLossScaleManager,
    },
    "mindspore_scaler": {
        "DynamicLossScaler": preset("mindspore"),
        "StaticLossScaler": lambda scale_value: optax_npu.FixedLossScaleManager(
            scale_value
        ),
    },
}

# Original scales are Python doubles. Ours is the float32 that the loss is multiplied
# by, so factors that are no power of two differ in the last bits.
DOUBLES = {("mindspore_manager", "c04"), ("mindspore_manager", "c33")}


@functools.cache
def recorded(system: str) -> dict[str, Any]:
    return json.loads((ORACLE / f"{system}.json").read_text())


CASES = [
    pytest.param(system, i, id=f"{system}-{case['id']}")
    for system in CONSTRUCTORS
    for i, case in enumerate(recorded(system)["cases"])
]


@functools.partial(jax.jit, static_argnums=0)
def replay(loss_scale: Any, finite: jax.Array) -> Any:
    def step(state: Any, ok: jax.Array) -> Any:
        state, should_apply = loss_scale.update(state, ok)
        return state, (state, should_apply)

    return jax.lax.scan(step, loss_scale.init(), finite)[1]


def finite_steps(case: dict[str, Any]) -> np.ndarray:
    """What the gradients of every step were, seen with the scale that they had."""
    if "recorded_steps" not in case:
        return np.asarray(case["trace"]["finite_seen"])
    finite = np.ones(case["steps"], bool)
    finite[case["overflow_steps"]] = False
    return finite


@pytest.mark.parametrize(("system", "index"), CASES)
def test_recorded_run(system: str, index: int) -> None:
    case = recorded(system)["cases"][index]
    trace = {k: np.asarray(v) for k, v in case["trace"].items()}
    loss_scale = CONSTRUCTORS[system][case["constructor"]](**case["arguments"])
    state, should_apply = replay(loss_scale, finite_steps(case))
    if "recorded_steps" in case:
        keep = np.asarray(case["recorded_steps"])
        state, should_apply = jax.tree.map(lambda x: x[keep], (state, should_apply))
    state = jax.tree.map(np.asarray, state)

    assert loss_scale.init().loss_scale == np.float32(case["start"]["scale"])
    _compare_scales(system, case, state.loss_scale)
    _compare_counters(system, case, trace, state)
    _compare_decisions(case, trace, np.asarray(should_apply))


def _compare_scales(system: str, case: dict[str, Any], ours: np.ndarray) -> None:
    with np.errstate(over="ignore"):
        theirs = np.asarray([float(x) for x in case["trace"]["scale"]]).astype("f4")
    same, reason = _reason(system, case, theirs)
    if reason == "double":
        np.testing.assert_allclose(ours, theirs, rtol=2e-6)
    else:
        np.testing.assert_array_equal(ours[:same], theirs[:same])
    # ... and where the original runs away, ours is where it was last.
    assert np.all(np.isfinite(ours) & (ours > 0))
    if same < len(ours):
        assert ours[same] == (theirs[same - 1] if same else case["start"]["scale"])


def _reason(system: str, case: dict[str, Any], theirs: np.ndarray) -> tuple[int, str]:
    """How many steps have to agree bit for bit, and why not all."""
    left = np.flatnonzero(~np.isfinite(theirs) | (theirs < 2.0**-126))
    if left.size:
        # keras3, paddle's GradScaler, DeepSpeed and MindSpore's manager grow without
        # a test; torch, keras3 and paddle's GradScaler shrink without one. Ours keeps
        # the scale, so the runs part for good.
        assert system in {
            "keras3_jax",
            "keras3_tensorflow",
            "paddle_gradscaler",
            "deepspeed",
            "mindspore_manager",
            "torch_gradscaler",
        }
        return int(left[0]), "unbounded"
    if (system, case["id"][:3]) in DOUBLES:
        return len(theirs), "double"
    return len(theirs), ""


def _compare_counters(
    system: str, case: dict[str, Any], trace: dict[str, np.ndarray], state: Any
) -> None:
    if "recorded_steps" not in case:
        skipped = ~trace["finite_seen"] & _skips(system, case)
        np.testing.assert_array_equal(state.skipped_steps, np.cumsum(skipped))
        np.testing.assert_array_equal(state.found_inf, skipped)
    if "good_steps" in trace:
        np.testing.assert_array_equal(state.good_steps, trace["good_steps"])
    if system == "mindspore_manager" and "bad_steps" in trace:
        # Its counter of overflows in a row only serves to give up after 1000.
        np.testing.assert_array_equal(state.consecutive_skips, trace["bad_steps"])
    elif "bad_steps" in trace:
        np.testing.assert_array_equal(state.bad_steps, trace["bad_steps"])
    if "last_overflow_iter" in trace:
        since = trace["cur_iter"] - trace["last_overflow_iter"] - 1
        window = case["arguments"].get("scale_window", 2000)
        if system.startswith("deepspeed"):
            since = np.where(since > 0, (since - 1) % window + 1, 0)
            left = np.maximum(1, case["arguments"]["delayed_shift"] - state.bad_steps)
            np.testing.assert_array_equal(left, trace["cur_hysteresis"])
        else:
            since = since % window
        np.testing.assert_array_equal(state.good_steps, since)


def _skips(system: str, case: dict[str, Any]) -> bool:
    """TF 2's, Keras's and DeepSpeed's fixed scales never skip."""
    never = ("tf_", "tf23_", "deepspeed")
    return not (case["id"].startswith("f01") and system.startswith(never))


def _compare_decisions(
    case: dict[str, Any], trace: dict[str, np.ndarray], should_apply: np.ndarray
) -> None:
    if "applied" in trace:
        np.testing.assert_array_equal(should_apply, trace["applied"])
    elif case["id"][:3] not in {"c17", "c19", "c21"}:
        # Without the column, what moved tells. Next to 2^127, TF 2 flushes 1/scale to
        # zero, applies a zero gradient and moves nothing.
        np.testing.assert_array_equal(should_apply, trace["params_changed"])


# Constructor checks: our spelling of a recorded call, and whether ours refuses it.
def _exponential(**more: Any) -> optax_npu.LossScale:
    arguments = {"init_loss_scale": 16.0, "incr_every_n_steps": 3} | more
    return optax_npu.ExponentialUpdateLossScaleManager(**arguments)


def _dynamic(**more: Any) -> optax_npu.LossScale:
    return optax_npu.DynamicLossScale(**more)


ACCEPTS, REFUSES = False, True
_MANAGERS = {
    "FixedLossScaleManager(0.5)": (
        lambda: optax_npu.FixedLossScaleManager(0.5),
        REFUSES,
    ),
    "FixedLossScaleManager(-1)": (lambda: optax_npu.FixedLossScaleManager(-1), REFUSES),
    "FixedLossScaleManager(inf)": (
        lambda: optax_npu.FixedLossScaleManager(math.inf),
        REFUSES,
    ),
    "FixedLossScaleManager(1)": (lambda: optax_npu.FixedLossScaleManager(1), ACCEPTS),
    "init_loss_scale=0.5": (lambda: _exponential(init_loss_scale=0.5), ACCEPTS),
    "init_loss_scale=-4": (lambda: _exponential(init_loss_scale=-4), REFUSES),
    "init_loss_scale=nan": (lambda: _exponential(init_loss_scale=math.nan), REFUSES),
    "incr_every_n_steps=0": (lambda: _exponential(incr_every_n_steps=0), REFUSES),
    "decr_every_n_nan_or_inf=0": (
        lambda: _exponential(decr_every_n_nan_or_inf=0),
        REFUSES,
    ),
    "incr_ratio=1": (lambda: _exponential(incr_ratio=1), REFUSES),
    "decr_ratio=1": (lambda: _exponential(decr_ratio=1), REFUSES),
    "init_loss_scale='big'": (lambda: _exponential(init_loss_scale="big"), REFUSES),
}
_KERAS3 = {
    "dynamic=False": (lambda: preset("keras3")(dynamic=False), REFUSES),
    "initial_scale=0.5": (lambda: preset("keras3")(initial_scale=0.5), ACCEPTS),
    "initial_scale=-2": (lambda: preset("keras3")(initial_scale=-2), REFUSES),
    "dynamic_growth_steps=0": (
        lambda: preset("keras3")(dynamic_growth_steps=0),
        REFUSES,
    ),
    "clipnorm=1.0": (lambda: preset("keras3")(clipnorm=1.0), REFUSES),
    "unknown=1": (lambda: preset("keras3")(unknown=1), REFUSES),
}
CHECKS: dict[str, dict[str, tuple[Callable[[], Any], bool]]] = {
    "tf1_contrib": _MANAGERS,
    "npu_bridge": _MANAGERS,
    "tf_dynamic_loss_scale": {
        "FixedLossScale(0.5)": (lambda: optax_npu.FixedLossScale(0.5), REFUSES),
        "FixedLossScale(-3)": (lambda: optax_npu.FixedLossScale(-3), REFUSES),
        "FixedLossScale('8')": (
            lambda: optax_npu.FixedLossScale("8"),  # pyright: ignore
            REFUSES,
        ),
        "FixedLossScale(inf)": (lambda: optax_npu.FixedLossScale(math.inf), REFUSES),
        "FixedLossScale(True)": (lambda: optax_npu.FixedLossScale(True), REFUSES),
        "FixedLossScale(1)": (lambda: optax_npu.FixedLossScale(1), ACCEPTS),
        "initial_loss_scale=0.5": (lambda: _dynamic(initial_loss_scale=0.5), ACCEPTS),
        "initial_loss_scale=-2": (lambda: _dynamic(initial_loss_scale=-2), REFUSES),
        "initial_loss_scale='8'": (lambda: _dynamic(initial_loss_scale="8"), REFUSES),
        "increment_period=0": (lambda: _dynamic(increment_period=0), REFUSES),
        "increment_period=2.9": (lambda: _dynamic(increment_period=2.9), REFUSES),
        "multiplier=1": (lambda: _dynamic(multiplier=1), REFUSES),
        "multiplier=0.5": (lambda: _dynamic(multiplier=0.5), REFUSES),
    },
    "keras3_jax": _KERAS3,
    "keras3_tensorflow": _KERAS3,
    "torch_gradscaler": {
        "growth_factor=1": (lambda: preset("torch")(growth_factor=1), REFUSES),
        "backoff_factor=1": (lambda: preset("torch")(backoff_factor=1), REFUSES),
        "backoff_factor=0": (lambda: preset("torch")(backoff_factor=0), REFUSES),
        "growth_interval=0": (lambda: preset("torch")(growth_interval=0), REFUSES),
        "init_scale=0": (lambda: preset("torch")(init_scale=0), REFUSES),
        "init_scale=nan": (lambda: preset("torch")(init_scale=math.nan), REFUSES),
        "enabled=False": (lambda: preset("torch")(enabled=False), ACCEPTS),
    },
    "flax_dynamic_scale": {
        "growth_interval=0": (lambda: preset("flax")(growth_interval=0), REFUSES),
        "backoff_factor=2": (lambda: preset("flax")(backoff_factor=2), REFUSES),
        "scale=-1": (lambda: preset("flax")(scale=-1), REFUSES),
        "scale=0": (lambda: preset("flax")(scale=0), REFUSES),
    },
    "jmp": {
        "loss_scale=int32 16": (
            lambda: preset("jmp")(loss_scale=np.int32(16)),
            ACCEPTS,
        ),
        "period=0": (lambda: preset("jmp")(period=0), REFUSES),
        "factor=0": (lambda: preset("jmp")(factor=0), REFUSES),
    },
    "mpx": {
        "loss_scaling a python float": (
            lambda: preset("mpx")(loss_scaling=16.0),
            ACCEPTS,
        ),
        "period=0": (lambda: preset("mpx")(period=0), REFUSES),
        "min above the scale": (
            lambda: preset("mpx")(loss_scaling=16.0, min_loss_scaling=32.0),
            REFUSES,
        ),
    },
    "deepspeed": {
        "scale_window=0": (lambda: preset("deepspeed")(scale_window=0), REFUSES),
        "delayed_shift=-1": (lambda: preset("deepspeed")(delayed_shift=-1), REFUSES),
        "min_scale above init_scale": (
            lambda: preset("deepspeed")(init_scale=16, min_scale=64),
            REFUSES,
        ),
    },
    "mindspore_manager": {
        "init_loss_scale=0.5": (
            lambda: preset("mindspore")(init_loss_scale=0.5),
            REFUSES,
        ),
        "scale_window=0": (lambda: preset("mindspore")(scale_window=0), REFUSES),
        "scale_factor=0": (lambda: preset("mindspore")(scale_factor=0), REFUSES),
        "scale_factor=1": (lambda: preset("mindspore")(scale_factor=1), REFUSES),
        "FixedLossScaleManager(0.5)": (
            lambda: optax_npu.FixedLossScaleManager(0.5),
            REFUSES,
        ),
        "FixedLossScaleManager(1)": (
            lambda: optax_npu.FixedLossScaleManager(1),
            ACCEPTS,
        ),
    },
    "mindspore_scaler": {
        "scale_value=0.5": (lambda: preset("mindspore")(scale_value=0.5), REFUSES),
        # A factor of 1.5 works in ours; the original wants an integer.
        "scale_factor=1.5": (lambda: preset("mindspore")(scale_factor=1.5), ACCEPTS),
        "scale_window=0": (lambda: preset("mindspore")(scale_window=0), REFUSES),
        "scale_factor=1": (lambda: preset("mindspore")(scale_factor=1), REFUSES),
    },
    "paddle_gradscaler": {
        "incr_ratio=1": (lambda: preset("paddle")(incr_ratio=1), REFUSES),
        "decr_ratio=1": (lambda: preset("paddle")(decr_ratio=1), REFUSES),
        "incr_every_n_steps=0": (
            lambda: preset("paddle")(incr_every_n_steps=0),
            REFUSES,
        ),
        "init_loss_scaling=0": (
            lambda: preset("paddle")(init_loss_scaling=0),
            REFUSES,
        ),
    },
}

# Recorded checks that are no constructor calls: where ours is tested, or why not.
OTHER_CHECKS = {
    "get_config round trip (1024, 7, 3)": "test_get_config_round_trip",
    "update(()) with no gradients": "an empty tree is finite: test_unscale.py",
    "update of a nested structure holding one nan": "test_unscale.py",
    "FixedLossScale(8).update([nan]): should_apply": "case f01_fixed_1000",
    "raise_error_at_min_scale=True (default), five overflows from 2": "never raises",
    "DynamicLossScaler.has_overflow_serial": "a defect of the original",
    "pytree_loses_floor": "test_B04_user_floor, which runs under jit",
    "adjust(vector)": "test_flag_must_be_scalar",
    "1001 overflows in a row": "never raises",
    "step() twice before update()": "one call does both",
    "unscale_() twice before update()": "one call does both",
    "step() when no parameter has a gradient": "an empty tree is finite",
    "GradScaler() on CPU, guards in place": "no such guard",
    "scale() outside float16 auto_cast": "no such guard",
}

RECORDED_CHECKS = [
    pytest.param(system, check, id=f"{system}-{check['arguments']}")
    for system in CONSTRUCTORS
    for check in recorded(system).get("constructor_checks", [])
    if check["arguments"] not in OTHER_CHECKS
]


@pytest.mark.parametrize(("system", "check"), RECORDED_CHECKS)
def test_recorded_constructor_check(system: str, check: dict[str, Any]) -> None:
    build, refuses = CHECKS[system][check["arguments"]]
    if refuses:
        with pytest.raises((ValueError, TypeError), match=r"got|no argument|above"):
            build()
    else:
        build()
    # Ours refuses whatever the original refuses, but for two that work here.
    works_here = {"loss_scaling a python float", "scale_factor=1.5"}
    if check["outcome"] == "raises" and check["arguments"] not in works_here:
        assert refuses


def test_get_config_round_trip() -> None:
    (check,) = [
        c
        for c in recorded("tf_dynamic_loss_scale")["constructor_checks"]
        if c["arguments"].startswith("get_config")
    ]
    ours = optax_npu.DynamicLossScale(1024, 7, 3)
    assert ours.get_config() == check["config"]
    assert optax_npu.DynamicLossScale.from_config(check["config"]) == ours


@pytest.mark.parametrize(
    "case", recorded("optax_apply_if_finite")["cases"], ids=lambda c: c["id"]
)
def test_apply_if_finite_gives_up_and_ours_does_not(case: dict[str, Any]) -> None:
    """Same counters until optax applies a bad update; from then on its params are nan.

    Ours never applies one.
    """
    trace = {k: np.asarray(v) for k, v in case["trace"].items()}
    finite = np.asarray(case["finite"])
    loss_scale = optax_npu.FixedLossScaleManager(1.0)
    state, should_apply = jax.tree.map(np.asarray, replay(loss_scale, finite))
    np.testing.assert_array_equal(should_apply, finite)
    gave_up = np.flatnonzero(trace["applied"] & ~finite)
    until = int(gave_up[0]) if gave_up.size else len(finite)
    np.testing.assert_array_equal(should_apply[:until], trace["applied"][:until])
    np.testing.assert_array_equal(
        state.consecutive_skips[:until], trace["notfinite_count"][:until]
    )
    np.testing.assert_array_equal(
        state.skipped_steps[:until], trace["total_notfinite"][:until]
    )
