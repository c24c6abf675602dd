# SPDX-License-Identifier: Apache-2.0
"""The update rule: golden traces, edges, bounds, types, errors."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_npu
from optax_npu import LossScaleState, loss_scale_preset
from optax_npu._loss_scale import as_loss_scale
from optax_npu._scale_rule import repair_scale

SYSTEMS = ["tf1", "torch", "flax", "jmp", "mpx", "keras", "keras3", "megatron", "apex"]
SYSTEMS += ["deepspeed", "paddle", "mindspore", "fairseq"]
F32_MAX = float(np.finfo(np.float32).max)
Exponential = optax_npu.ExponentialUpdateLossScaleManager


def pattern(text: str) -> list[bool]:
    return [c == "F" for c in text.replace(" ", "")]


@functools.partial(jax.jit, static_argnums=0)
def _replay(loss_scale: Any, finite: jax.Array) -> Any:
    def step(state: Any, ok: jax.Array) -> Any:
        state, should_apply = loss_scale.update(state, ok)
        return state, (state, should_apply)

    return jax.lax.scan(step, loss_scale.init(), finite)[1]


@functools.partial(jax.jit, static_argnums=0)
def compiled_update(loss_scale: Any, state: Any, ok: Any) -> Any:
    return loss_scale.update(state, ok)


def replay(loss_scale: Any, finite: Any) -> tuple[LossScaleState, np.ndarray]:
    """All states and verdicts of a compiled run."""
    if isinstance(finite, str):
        finite = pattern(finite)
    return jax.tree.map(np.asarray, _replay(loss_scale, np.asarray(finite)))


def scales(loss_scale: Any, finite: Any) -> list[float]:
    return replay(loss_scale, finite)[0].loss_scale.tolist()


def triples(loss_scale: Any, finite: Any) -> list[tuple[float, int, int]]:
    state = replay(loss_scale, finite)[0]
    return list(
        zip(
            state.loss_scale.tolist(),
            state.good_steps.tolist(),
            state.bad_steps.tolist(),
            strict=True,
        )
    )


# --- Golden traces: start 8, growth every 3 finite steps, factor 2, floor 1 ---
INPUT = "FFFOFOFFFOOOFFFFFFOF"
HALVERS = [8, 8, 16, 8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1, 2, 2, 2, 4, 2, 2]
LATE = [8, 8, 8, 4, 4, 2, 2, 2, 2, 1, 0.5, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
ASCEND = [8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 8, 8, 8, 8, 16, 16, 16, 32, 32, 32]
ASCEND_08 = [8, 8, 16, 16, 16, 12.8, 12.8, 12.8, 25.6, 25.6, 20.48, 20.48, 20.48]
ASCEND_08 += [20.48, 40.96, 40.96, 40.96, 81.92, 81.92, 81.92]
MEGATRON = [8, 8, 16, 16, 16, 8, 8, 8, 16, 16, 8, 4, 4, 4, 8, 8, 8, 16, 16, 16]
APEX = [8, 8, 16, 16, 16, 16, 16, 16, 32, 32, 16, 8, 8, 8, 16, 16, 16, 32, 32, 32]
DEEPSPEED = [8, 8, 8, 8, 8, 4, 4, 4, 4, 2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
CONSECUTIVE = [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 2, 2, 2, 2, 4, 4, 4, 4, 4]
DEEPSPEED_1 = [8, 8, 8, 4, 4, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1]
PADDLE = [8, 8, 16, 16, 16, 16, 16, 16, 32, 32, 16, 16, 16, 16, 32, 32, 32, 64, 64, 64]

_window = {"init_scale": 8, "scale_window": 3}
GOLDEN: dict[str, tuple[Any, Any]] = {
    "ascend_D2_0.5": (Exponential(8, 3, 2, 2.0, 0.5), ASCEND),
    "ascend_D2_0.8": (Exponential(8, 3, 2, 2.0, 0.8), ASCEND_08),
    "contrib_D2_0.5": (
        loss_scale_preset(
            "tf1", init_loss_scale=8, incr_every_n_steps=3, decr_ratio=0.5
        ),
        ASCEND,
    ),
    "contrib_D2_0.8": (
        loss_scale_preset("tf1", init_loss_scale=8, incr_every_n_steps=3),
        ASCEND_08,
    ),
    "tf_dynamic": (optax_npu.DynamicLossScale(8, 3, 2), HALVERS),
    "keras": (
        loss_scale_preset("keras", initial_scale=8, dynamic_growth_steps=3),
        HALVERS,
    ),
    "keras3": (
        loss_scale_preset("keras3", initial_scale=8, dynamic_growth_steps=3),
        HALVERS,
    ),
    "torch": (loss_scale_preset("torch", init_scale=8, growth_interval=3), HALVERS),
    "jmp": (loss_scale_preset("jmp", loss_scale=8, period=3), HALVERS),
    "mpx": (loss_scale_preset("mpx", loss_scaling=8, period=3), HALVERS),
    "mindspore": (
        loss_scale_preset("mindspore", init_loss_scale=8, scale_window=3),
        HALVERS,
    ),
    "fairseq": (loss_scale_preset("fairseq", **_window), HALVERS),
    "flax": (
        loss_scale_preset("flax", scale=8, growth_interval=3),
        [*LATE, 0.5, 0.25, 0.25],
    ),
    "apex_1": (loss_scale_preset("apex", **_window), HALVERS),
    "apex_2": (loss_scale_preset("apex", **_window, hysteresis=2), APEX),
    "megatron_2": (
        loss_scale_preset("megatron", initial_scale=8, growth_interval=3),
        MEGATRON,
    ),
    "deepspeed_1": (loss_scale_preset("deepspeed", **_window), DEEPSPEED_1),
    "deepspeed_2": (
        loss_scale_preset("deepspeed", **_window, delayed_shift=2),
        DEEPSPEED,
    ),
    "deepspeed_2_consecutive": (
        loss_scale_preset(
            "deepspeed", **_window, delayed_shift=2, consecutive_hysteresis=True
        ),
        CONSECUTIVE,
    ),
    "paddle_2": (
        loss_scale_preset(
            "paddle",
            init_loss_scaling=8,
            incr_every_n_steps=3,
            decr_every_n_nan_or_inf=2,
        ),
        PADDLE,
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trace(name: str) -> None:
    loss_scale, expected = GOLDEN[name]
    # The table has 0.8 in decimals; every product is rounded to float32.
    rtol = 3e-7 if "0.8" in name else 0
    np.testing.assert_allclose(scales(loss_scale, INPUT), expected, rtol=rtol)


def test_golden_counters_of_ascend() -> None:
    state = replay(Exponential(8, 3, 2, 2.0, 0.5), INPUT)[0]
    good = [1, 2, 0, 0, 1, 0, 1, 2, 0, 0, 0, 0, 1, 2, 0, 1, 2, 0, 0, 1]
    bad = [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
    assert state.good_steps.tolist() == good
    assert state.bad_steps.tolist() == bad


# --- Edge vectors -------------------------------------------------------------
@pytest.mark.parametrize("name", ["ascend", "tf1", "tf_dynamic", "torch", "jmp"])
def test_edge_power_of_two_tops_out_at_2_127(name: str) -> None:
    make = {
        "ascend": lambda: Exponential(2.0**125, 1),
        "tf1": lambda: loss_scale_preset(
            "tf1", init_loss_scale=2.0**125, incr_every_n_steps=1
        ),
        "tf_dynamic": lambda: optax_npu.DynamicLossScale(2.0**125, 1),
        "torch": lambda: loss_scale_preset(
            "torch", init_scale=2.0**125, growth_interval=1
        ),
        "jmp": lambda: loss_scale_preset("jmp", loss_scale=2.0**125, period=1),
    }[name]
    top = 2.0**127
    assert triples(make(), "FFFF") == [(2.0**126, 0, 0)] + [(top, 0, 0)] * 3


def test_edge_ascend_at_its_floor() -> None:
    assert triples(Exponential(1, 5, 1, 2.0, 0.5), "OO") == [(1, 0, 0)] * 2


def test_edge_ascend_bad_survives_good_and_growth_clears_it() -> None:
    got = triples(Exponential(8, 3, 3, 2.0, 0.5), "OFOFFFO")
    assert [bad for _, _, bad in got] == [1, 1, 2, 2, 2, 0, 1]
    assert [scale for scale, _, _ in got] == [8, 8, 8, 8, 8, 16, 16]


def test_edge_ascend_ceiling_is_3_4e38_over_ratio() -> None:
    # Below 1.7e38 it doubles, 2^127 = 1.7014e38 does not although contrib's would fit.
    assert scales(Exponential(1.69e38, 1), "FF") == [np.float32(1.69e38) * 2] * 2
    assert scales(Exponential(1.7005e38, 1), "F") == [np.float32(1.7005e38)]
    contrib = loss_scale_preset("tf1", init_loss_scale=1.7005e38, incr_every_n_steps=1)
    assert scales(contrib, "F") == [np.float32(1.7005e38) * 2]


def test_edge_tf_fixed_applies_nan() -> None:
    state, should_apply = replay(optax_npu.FixedLossScale(8), "FOF")
    assert should_apply.tolist() == [True] * 3
    assert not state.found_inf.any()
    assert state.skipped_steps.tolist() == [0, 0, 0]


def test_tf_start_below_one_is_raised_by_the_first_overflow() -> None:
    assert scales(optax_npu.DynamicLossScale(0.5, 10), "FOF") == [0.5, 1, 1]
    assert scales(Exponential(0.5, 10, 1), "FOF") == [0.5, 1, 1]


# --- Field trouble ------------------------------------------------------------
def test_B01_missing_upper_guard() -> None:
    top = 2.0**127
    got = triples(optax_npu.DynamicLossScale(top, 1, 2), "FFO")
    assert got == [(top, 0, 0), (top, 0, 0), (2.0**126, 0, 0)]
    got = triples(Exponential(1e38, incr_every_n_steps=1, incr_ratio=10), "F")
    assert got == [(float(np.float32(1e38)), 0, 0)]


def test_B02_bad_steps_accumulate() -> None:
    got = triples(Exponential(1024, 3, 2, 2.0, 0.8), "OFOFFFOOOO")
    down, up = 819.2000122070312, 1638.4000244140625
    assert got == [
        (1024, 0, 1),
        (1024, 1, 1),
        (down, 0, 0),
        (down, 1, 0),
        (down, 2, 0),
        (up, 0, 0),
        (up, 0, 1),
        (1310.7200927734375, 0, 0),
        (1310.7200927734375, 0, 1),
        (1048.5760498046875, 0, 0),
    ]
    got = triples(Exponential(1024, 2, 2, 2.0, 0.5), "OFFOOO")
    assert got == [
        (1024, 0, 1),
        (1024, 1, 1),
        (2048, 0, 0),
        (2048, 0, 1),
        (1024, 0, 0),
        (1024, 0, 1),
    ]


def test_B04_default_floor() -> None:
    state = replay(optax_npu.DynamicLossScale(8, 2, 2), "FFFOFOOOOOFF")[0]
    assert state.loss_scale.tolist() == [8, 16, 16, 8, 8, 4, 2, 1, 1, 1, 1, 2]
    assert state.good_steps.tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    "loss_scale",
    [
        optax_npu.DynamicLossScale(1, 2, 2, min_loss_scale=2.0**-10),
        Exponential(1, 2, 1, 2.0, 0.5, min_loss_scale=2.0**-10),
        loss_scale_preset("jmp", loss_scale=1, min_loss_scale=2.0**-10),
        loss_scale_preset("flax", scale=1, minimum_scale=2.0**-10),
        loss_scale_preset("keras3", initial_scale=1, min_loss_scale=2.0**-10),
        loss_scale_preset("fairseq", init_scale=1, threshold=2.0**-10),
    ],
    ids=lambda x: getattr(x, "name", type(x).__name__),
)
def test_B04_user_floor(loss_scale: Any) -> None:
    assert scales(loss_scale, "O" * 12)[-3:] == [2.0**-10] * 3


@pytest.mark.parametrize("period", [1, 3])
def test_user_ceiling(period: int) -> None:
    loss_scale = optax_npu.DynamicLossScale(8, period, 2, max_loss_scale=20)
    assert scales(loss_scale, "F" * 9)[-1] == 20
    loss_scale = Exponential(8, period, max_loss_scale=20)
    assert scales(loss_scale, "F" * 9)[-1] == 20
    loss_scale = loss_scale_preset("apex", init_scale=2**30, scale_window=period)
    assert set(scales(loss_scale, "F" * 9)) == {2.0**24}


STARTS = {
    "float16": np.float16(2**15),
    "bfloat16": jnp.bfloat16(2**15),
    "float64": np.float64(2**15),
    "numpy_int": np.int64(2**15),
    "jnp_scalar": jnp.float32(2**15),
    "jnp_int": jnp.int32(2**15),
    "int": 2**15,
    "zero_dim_array": np.array(2.0**15, np.float16),
}


@pytest.mark.parametrize("start", STARTS)
def test_B06_scale_is_float32_whatever_the_start(start: str) -> None:
    loss_scale = optax_npu.DynamicLossScale(STARTS[start], increment_period=1)
    state = loss_scale.init()
    assert state.loss_scale.dtype == jnp.float32
    assert not state.loss_scale.weak_type
    for expected in (2.0**16, 2.0**17):
        new, _ = loss_scale.update(state, True)
        assert jax.tree.map(jnp.result_type, new) == jax.tree.map(
            jnp.result_type, state
        )
        assert new.loss_scale == expected
        state = new
    assert loss_scale == optax_npu.DynamicLossScale(2.0**15, 1)
    assert hash(loss_scale) == hash(optax_npu.DynamicLossScale(2.0**15, 1))


def test_B07_python_int_beyond_int32() -> None:
    manager = Exponential(2**32, incr_every_n_steps=1000, decr_ratio=0.5)
    assert manager.init().loss_scale == 4294967296.0
    assert jax.jit(manager.init)().loss_scale == 4294967296.0
    assert jax.eval_shape(manager.init).loss_scale.dtype == jnp.float32
    half, quarter = 2.0**31, 2.0**30
    assert triples(manager, "OOOO") == [
        (2.0**32, 0, 1),
        (half, 0, 0),
        (half, 0, 1),
        (quarter, 0, 0),
    ]


def test_B11_fixed_scale_and_the_check() -> None:
    state, should_apply = replay(optax_npu.FixedLossScaleManager(128), "FOO")
    assert should_apply.tolist() == [True, False, False]
    assert state.loss_scale.tolist() == [128] * 3
    assert not state.good_steps.any()
    assert not state.bad_steps.any()
    assert state.found_inf.tolist() == [False, True, True]
    assert state.skipped_steps.tolist() == [0, 1, 2]

    state, should_apply = replay(optax_npu.FixedLossScaleManager(128, False), "FOO")
    assert should_apply.all()
    assert not state.found_inf.any()


@pytest.mark.parametrize("value", [0.5, 0, -1, math.nan])
def test_B11_ported_fixed_scales_refuse_less_than_one(value: float) -> None:
    for fixed in (optax_npu.FixedLossScale, optax_npu.FixedLossScaleManager):
        with pytest.raises(ValueError, match=r"loss_scale must be .* from 1 to 3.4e38"):
            fixed(value)


def test_B30_verdict_and_skip_counts() -> None:
    for loss_scale in (
        optax_npu.FixedLossScaleManager(1),
        optax_npu.DynamicLossScale(1),
    ):
        state, should_apply = replay(loss_scale, "FOF")
        assert should_apply.tolist() == [True, False, True]
        assert state.found_inf.tolist() == [False, True, False]
        assert state.skipped_steps.tolist() == [0, 1, 1]
        assert state.consecutive_skips.tolist() == [0, 1, 0]
        assert state.loss_scale.tolist() == [1, 1, 1]


ALL = {
    "dynamic": optax_npu.DynamicLossScale(8, 3),
    "exponential": Exponential(8, 3),
    "fixed": optax_npu.FixedLossScale(8),
    "fixed_manager": optax_npu.FixedLossScaleManager(8),
    "none": as_loss_scale(None),
    **{name: loss_scale_preset(name) for name in SYSTEMS},
}


def signature(state: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.dtype, x.weak_type) for x in state]


@pytest.mark.parametrize("name", ALL)
def test_B44_type_stability(name: str) -> None:
    loss_scale = ALL[name]
    start = jax.eval_shape(loss_scale.init)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    after, verdict = jax.eval_shape(loss_scale.update, start, flag)
    assert signature(start) == signature(after) == signature(loss_scale.init())
    int32, flag_type = ((), jnp.int32, False), ((), jnp.bool_, False)
    assert signature(start)[1:] == [int32, int32, flag_type, int32, int32, int32]
    assert signature(start)[0] == ((), jnp.float32, False)
    assert (verdict.shape, verdict.dtype) == ((), jnp.bool_)

    traces = []

    @jax.jit
    def update(state: Any, ok: jax.Array) -> Any:
        traces.append(1)
        return loss_scale.update(state, ok)[0]

    state = loss_scale.init()
    for ok in (True, False, True, True):
        state = update(state, jnp.asarray(ok))
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["dynamic", "exponential", "fixed", "none", "torch"])
def test_B45_leaves_are_distinct_buffers(name: str) -> None:
    loss_scale = ALL[name]
    for init in (loss_scale.init, jax.jit(loss_scale.init)):
        state = init()
        pointers = [x.unsafe_buffer_pointer() for x in state]
        assert len(set(pointers)) == len(pointers)
        update = jax.jit(loss_scale.update, donate_argnums=0)
        for _ in range(2):
            state, _ = update(state, False)
        assert state.loss_scale == replay(loss_scale, "OO")[0].loss_scale[-1]


@pytest.mark.parametrize("name", ["dynamic", "exponential", "fixed", "torch", "mpx"])
def test_x64_changes_nothing(name: str) -> None:
    loss_scale = ALL[name]
    expected = replay(loss_scale, INPUT)[0]
    with jax.enable_x64(True):
        assert signature(loss_scale.init()) == signature(jax.jit(loss_scale.init)())
        got = jax.jit(
            lambda ok: jax.lax.scan(
                lambda s, x: (loss_scale.update(s, x)[0],) * 2, loss_scale.init(), ok
            )[1]
        )(np.asarray(pattern(INPUT)))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["dynamic", "exponential", "torch", "deepspeed"])
def test_B40_eager_jit_and_vmap_agree(name: str) -> None:
    loss_scale = ALL[name]
    flags = pattern("FFOFOOFFFOFF")
    compiled = replay(loss_scale, flags)[0]

    state, states = loss_scale.init(), []
    for ok in flags:
        state, _ = loss_scale.update(state, ok)
        states.append(state)
    eager = jax.tree.map(lambda *x: np.stack(x), *states)
    jax.tree.map(np.testing.assert_array_equal, eager, compiled)

    # Two members with opposite histories.
    both = np.stack([flags, np.logical_not(flags)])
    batched = jax.vmap(lambda ok: _replay(loss_scale, ok)[0])(both)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), batched, compiled)
    other = replay(loss_scale, both[1])[0]
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y), batched, other)


def test_B40_disable_jit() -> None:
    loss_scale = optax_npu.DynamicLossScale(8, 2)
    with jax.disable_jit():
        state = loss_scale.init()
        for ok in pattern("FFOFF"):
            state, should_apply = loss_scale.update(state, ok)
            assert bool(should_apply) is ok
    assert state.loss_scale == 16


@pytest.mark.parametrize("kind", [bool, np.bool_, jnp.bool_, jnp.int32, jnp.float32])
def test_flag_of_any_scalar_kind(kind: Any) -> None:
    loss_scale = optax_npu.DynamicLossScale(8, 2)
    for ok in (True, False):
        _, should_apply = loss_scale.update(loss_scale.init(), kind(ok))
        assert should_apply.dtype == jnp.bool_
        assert bool(should_apply) is ok


def test_counters_saturate() -> None:
    top = 2**31 - 1
    loss_scale = Exponential(8, 2**40, 2**40)
    state = loss_scale.init()._replace(
        good_steps=jnp.int32(top - 1),
        bad_steps=jnp.int32(top - 1),
        skipped_steps=jnp.int32(top),
        consecutive_skips=jnp.int32(top),
        steps_since_change=jnp.int32(top),
    )
    grown, _ = loss_scale.update(state, True)
    assert (grown.loss_scale, grown.good_steps) == (16, 0)
    lowered, _ = loss_scale.update(state, False)
    assert lowered.loss_scale == np.float32(6.4)
    assert (lowered.skipped_steps, lowered.consecutive_skips) == (top, top)
    # One step earlier, nothing is due yet, and the counter does not wrap.
    early = state._replace(good_steps=jnp.int32(top - 2))
    assert loss_scale.update(early, True)[0].good_steps == top - 1
    assert loss_scale.update(early, True)[0].steps_since_change == top


# --- Bounds and repair --------------------------------------------------------
UNBOUNDED = ["torch", "keras3", "paddle", "flax"]


@pytest.mark.parametrize("name", SYSTEMS)
def test_scale_never_leaves_normal_float32(name: str) -> None:
    loss_scale = loss_scale_preset(name)
    state = loss_scale.init()
    finite = jnp.zeros(400, bool)
    down = jax.jit(
        lambda s: jax.lax.scan(
            lambda s, ok: (loss_scale.update(s, ok)[0], s.loss_scale), s, finite
        )
    )(state)[0]
    # The floor of each system; the four without one end at the smallest normal.
    floor = {"apex": 2.0**-126, "fairseq": 2.0**-13}
    floor |= dict.fromkeys(UNBOUNDED, 2.0**-126)
    assert down.loss_scale == floor.get(name, 1.0)


@pytest.mark.parametrize("name", SYSTEMS)
def test_scale_grows_to_its_ceiling(name: str) -> None:
    interval = {
        **dict.fromkeys(("torch", "flax", "megatron"), "growth_interval"),
        **dict.fromkeys(("jmp", "mpx"), "period"),
        **dict.fromkeys(("tf1", "paddle"), "incr_every_n_steps"),
        **dict.fromkeys(("keras", "keras3"), "dynamic_growth_steps"),
        **dict.fromkeys(("apex", "deepspeed", "mindspore", "fairseq"), "scale_window"),
    }[name]
    got = scales(loss_scale_preset(name, **{interval: 1}), "F" * 260)
    ceiling = {"flax": F32_MAX, "mpx": 65504.0, "apex": 2.0**24}
    assert got[-1] == ceiling.get(name, 2.0**127)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 0.0, -8.0, 1e-40])
@pytest.mark.parametrize("name", ["dynamic", "exponential", "fixed_manager", "torch"])
def test_restored_scale_is_repaired(name: str, bad: float) -> None:
    loss_scale = ALL[name]
    start = loss_scale.init()
    broken = start._replace(loss_scale=jnp.float32(bad))
    # The step itself runs with a scale of 1 ...
    assert repair_scale(broken) == 1
    assert repair_scale(start) == start.loss_scale
    # ... and the next one as if the run had just begun.
    for ok in (True, False):
        repaired, should_apply = compiled_update(loss_scale, broken, ok)
        fresh, _ = compiled_update(loss_scale, start, ok)
        assert repaired.loss_scale == fresh.loss_scale
        assert bool(should_apply) is ok


def test_fixed_scale_heals_to_what_was_asked_for() -> None:
    """A checkpoint of a dynamic run, restored into a run with scaling off."""
    state = optax_npu.DynamicLossScale(2.0**20).init()
    for loss_scale, expected in ((as_loss_scale(None), 1), (as_loss_scale(64), 64)):
        assert repair_scale(state) == 2.0**20  # the loss was scaled by it
        assert loss_scale.update(state, True)[0].loss_scale == expected


def test_restored_leaves_may_be_numpy_of_other_dtypes() -> None:
    loss_scale = optax_npu.DynamicLossScale(8, 3)
    state = loss_scale.update(loss_scale.init(), True)[0]
    leaves: Any = (
        np.float64(8),
        np.int64(1),
        0,
        np.False_,
        np.int64(0),
        np.uint8(0),
        1,
    )
    restored = LossScaleState(*leaves)
    for ok in (True, False):
        new, expected = (loss_scale.update(s, ok)[0] for s in (restored, state))
        assert signature(new) == signature(expected)
        assert new == expected


# --- Arithmetic ---------------------------------------------------------------
def test_tf_divides_also_when_compiled() -> None:
    """A compiler turns division by a constant into a product; TF's is a division."""
    starts = np.random.default_rng(0).uniform(1, 1e6, 500).astype(np.float32)
    loss_scale = optax_npu.DynamicLossScale(8, multiplier=1.5)
    states = jax.vmap(lambda s: loss_scale.init()._replace(loss_scale=s))(starts)
    got = jax.jit(jax.vmap(lambda s: loss_scale.update(s, False)[0].loss_scale))(states)
    expected = np.maximum(starts / np.float32(1.5), 1)
    np.testing.assert_array_equal(got, expected)
    product = np.maximum(starts * (np.float32(1) / np.float32(1.5)), 1)
    assert np.any(product != expected)  # the case is sharp
    jmp = loss_scale_preset("jmp", factor=1.5)
    got = jax.jit(jax.vmap(lambda s: jmp.update(s, False)[0].loss_scale))(states)
    np.testing.assert_array_equal(got, product)


@pytest.mark.parametrize("factor", [0.8, 0.3, 0.7])
def test_torch_multiplies_in_float64(factor: float) -> None:
    starts = np.random.default_rng(1).uniform(1, 1e6, 500).astype(np.float32)
    torch = loss_scale_preset("torch", backoff_factor=factor)
    states = jax.vmap(lambda s: torch.init()._replace(loss_scale=s))(starts)
    got = jax.jit(jax.vmap(lambda s: torch.update(s, False)[0].loss_scale))(states)
    expected = (starts.astype(np.float64) * factor).astype(np.float32)
    np.testing.assert_array_equal(got, expected)
    assert np.any(starts * np.float32(factor) != expected)  # the case is sharp


# --- fairseq's tolerance ------------------------------------------------------
def test_fairseq_tolerance_is_a_share_of_overflows() -> None:
    loss_scale = loss_scale_preset("fairseq", init_scale=64, tolerance=0.5)
    # Shares: 1/2 lowers; then 1/4 and 2/6 do not, 3/6 would after the fifth step.
    assert scales(loss_scale, "FO") == [64, 32]
    assert scales(loss_scale, "FFFO") == [64] * 4
    assert scales(loss_scale, "FFOOFO") == [64, 64, 64, 32, 32, 16]


# --- Configuration ------------------------------------------------------------
def test_dynamic_attributes_and_config() -> None:
    loss_scale = optax_npu.DynamicLossScale()
    assert loss_scale.initial_loss_scale == 2.0**15
    assert loss_scale.increment_period == 2000
    assert loss_scale.multiplier == 2.0
    config = {"initial_loss_scale": 2.0**15, "increment_period": 2000, "multiplier": 2}
    assert loss_scale.get_config() == config
    ours = optax_npu.DynamicLossScale(8, 3, 4, min_loss_scale=0.5, max_loss_scale=64)
    assert ours.get_config()["min_loss_scale"] == 0.5
    assert optax_npu.DynamicLossScale.from_config(ours.get_config()) == ours
    fixed = optax_npu.FixedLossScale(8)
    assert optax_npu.FixedLossScale.from_config(fixed.get_config()) == fixed


def test_ascend_defaults() -> None:
    manager = Exponential(8, 3)
    assert manager.decr_every_n_nan_or_inf == 2
    assert (manager.incr_ratio, manager.decr_ratio) == (2.0, 0.8)
    assert optax_npu.FixedLossScaleManager(8).enable_overflow_check is True


PUBLISHED_STARTS = {
    "torch": 2**16,
    "flax": 2**16,
    "keras": 2**15,
    "keras3": 2**15,
    "megatron": 2**32,
    "apex": 2**16,
    "deepspeed": 2**32,
    "paddle": 2**16,
    "mindspore": 2**24,
    "fairseq": 2**15,
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_preset_defaults(name: str) -> None:
    loss_scale = loss_scale_preset(name)
    assert loss_scale.init().loss_scale == np.float32(PUBLISHED_STARTS.get(name, 2**15))
    interval = 1000 if name in ("megatron", "deepspeed") else 2000
    assert loss_scale.rule.growth_interval == interval
    assert loss_scale == loss_scale_preset(name)
    assert hash(loss_scale) == hash(loss_scale_preset(name))
    assert loss_scale.skips


@pytest.mark.parametrize(
    ("loss_scale", "scale", "applies"),
    [
        (loss_scale_preset("torch", enabled=False), 1, True),
        (loss_scale_preset("paddle", enable=False), 1, True),
        (
            loss_scale_preset(
                "paddle", init_loss_scaling=64, use_dynamic_loss_scaling=False
            ),
            64,
            False,
        ),
        (loss_scale_preset("keras", initial_scale=64, dynamic=False), 64, True),
        (as_loss_scale(None), 1, True),
        (as_loss_scale(64), 64, False),
        (as_loss_scale(np.float16(64)), 64, False),
    ],
    ids=lambda x: getattr(x, "name", type(x).__name__) if hasattr(x, "rule") else None,
)
def test_fixed_and_disabled_forms(loss_scale: Any, scale: float, applies: bool) -> None:
    state, should_apply = replay(loss_scale, "FOF")
    assert state.loss_scale.tolist() == [scale] * 3
    assert should_apply.tolist() == [True, applies, True]
    assert loss_scale.skips is not applies


def test_as_loss_scale() -> None:
    dynamic = optax_npu.DynamicLossScale(8)
    assert as_loss_scale(dynamic) is dynamic
    assert as_loss_scale("dynamic") == optax_npu.DynamicLossScale()
    assert as_loss_scale(128) == optax_npu.FixedLossScaleManager(128)
    assert not as_loss_scale(None).skips


def test_traced_settings_are_not_checked() -> None:
    """As under `optax.inject_hyperparams`."""

    @jax.jit
    def run(value: Any, period: Any) -> Any:
        fixed = as_loss_scale(value)
        dynamic = optax_npu.DynamicLossScale(value, period, value)
        state = dynamic.init()
        for ok in (True, True, False):
            state, _ = dynamic.update(state, ok)
        return fixed.update(fixed.init(), False), state.loss_scale

    (state, should_apply), scale = run(jnp.float32(4), jnp.int32(2))
    assert (state.loss_scale, should_apply) == (4, False)
    assert scale == 4  # 4 -> 16 after two, / 4 at once


def test_inject_hyperparams() -> None:
    tx = optax.inject_hyperparams(optax_npu.npu_loss_scale)(loss_scale=16.0)
    params = jnp.zeros(2)
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(jnp.array([16.0, 32.0]), state, params)
    assert updates.tolist() == [1, 2]
    state.hyperparams["loss_scale"] = jnp.float32(32)
    _, state = jax.jit(tx.update)(jnp.array([16.0, 32.0]), state, params)
    assert state.inner_state.loss_scale == 32


# --- B72: nonsense is refused when it is made ---------------------------------
NUMBERS_REFUSED = {
    "initial_loss_scale": [0, -1, math.nan, math.inf, 1e39, 1e-45, 2**2000],
    "multiplier": [1, 0.5, 0, -2, math.nan, math.inf, 1 + 1e-12],
    "increment_period": [0, -3, 2.5, math.nan, math.inf],
    "min_loss_scale": [0, -1, math.nan, math.inf],
    "max_loss_scale": [0, -1, math.nan, math.inf, 4.0],
}
EXPONENTIAL_REFUSED = {
    "init_loss_scale": [0, -1, math.nan, math.inf],
    "incr_every_n_steps": [0, -3, 2.5],
    "decr_every_n_nan_or_inf": [0, -3, 2.5],
    "incr_ratio": [1, 0.5, math.nan],
    "decr_ratio": [1, 0, 2, -0.5, math.nan, 1 - 1e-12],
}


@pytest.mark.parametrize(
    ("cls", "argument", "value"),
    [
        *(
            (optax_npu.DynamicLossScale, argument, value)
            for argument, values in NUMBERS_REFUSED.items()
            for value in values
        ),
        *(
            (Exponential, argument, value)
            for argument, values in EXPONENTIAL_REFUSED.items()
            for value in values
        ),
    ],
)
def test_B72_refused_numbers(cls: Any, argument: str, value: Any) -> None:
    good = {optax_npu.DynamicLossScale: (8, 3, 2.0), Exponential: (8, 3)}[cls]
    names = list(cls.__dataclass_fields__)[: len(good)]
    arguments = dict(zip(names, good, strict=True)) | {argument: value}
    with pytest.raises(ValueError, match=argument) as error:
        cls(**arguments)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", ["8", None, True, [8.0], 1j, object(), b"8"])
def test_B72_refused_kinds(value: Any) -> None:
    for build in (
        optax_npu.DynamicLossScale,
        lambda x: optax_npu.DynamicLossScale(increment_period=x),
        lambda x: Exponential(x, 3),
        optax_npu.FixedLossScale,
        optax_npu.FixedLossScaleManager,
        lambda x: loss_scale_preset("torch", init_scale=x),
    ):
        with pytest.raises(TypeError, match="must be"):
            build(value)
    with pytest.raises(TypeError, match="enable_overflow_check must be True or False"):
        optax_npu.FixedLossScaleManager(8, 1)  # pyright: ignore


def test_B72_bounds_must_fit() -> None:
    low = r"the floor 16.0 is above the initial scale 8.0"
    high = r"the ceiling 4.0 is below the initial scale 8.0"
    with pytest.raises(ValueError, match=low):
        optax_npu.DynamicLossScale(8, min_loss_scale=16)
    with pytest.raises(ValueError, match=high):
        Exponential(8, 3, max_loss_scale=4)
    for name, argument in (
        ("torch", "init_scale"),
        ("jmp", "loss_scale"),
        ("mpx", "loss_scaling"),
    ):
        with pytest.raises(ValueError, match=low):
            loss_scale_preset(name, **{argument: 8}, min_loss_scale=16)
        with pytest.raises(ValueError, match=high):
            loss_scale_preset(name, **{argument: 8}, max_loss_scale=4)
    with pytest.raises(ValueError, match=r"the ceiling 65504.0 is below"):
        loss_scale_preset("mpx", loss_scaling=80000, min_loss_scaling=70000)


@pytest.mark.parametrize(
    "loss_scale",
    [
        loss_scale_preset("deepspeed", init_scale=0.5, min_scale=1.0),
        loss_scale_preset("tf1", init_loss_scale=0.5, decr_every_n_nan_or_inf=1),
        loss_scale_preset("keras", initial_scale=0.5),
        loss_scale_preset("jmp", loss_scale=0.5),
    ],
    ids=lambda x: x.name,
)
def test_a_start_below_the_floor_of_one_is_raised(loss_scale: Any) -> None:
    """As in the originals: the first overflow raises it, nothing else does."""
    assert scales(loss_scale, "FFOO") == [0.5, 0.5, 1, 1]
    mpx = loss_scale_preset("mpx", loss_scaling=0.5, min_loss_scaling=1.0)
    assert scales(mpx, "FF") == [1, 1]


def test_B72_ints_and_whole_floats_are_taken() -> None:
    loss_scale = optax_npu.DynamicLossScale(8, 3.0, 2)  # pyright: ignore
    assert loss_scale == optax_npu.DynamicLossScale(8.0, 3, 2.0)
    assert type(loss_scale.increment_period) is int
    assert type(loss_scale.multiplier) is float


def test_unknown_preset_and_argument() -> None:
    with pytest.raises(ValueError, match=r"'pytorch' is not a known preset; .* torch"):
        loss_scale_preset("pytorch")
    with pytest.raises(TypeError, match=r"'torch'.* no argument 'period'; it takes"):
        loss_scale_preset("torch", period=3)
    with pytest.raises(ValueError, match=r"'flax'\): growth_factor must be"):
        loss_scale_preset("flax", growth_factor=0.5)
    with pytest.raises(TypeError, match=r"'torch'\): enabled must be True or False"):
        loss_scale_preset("torch", enabled=0)


def test_unknown_loss_scale() -> None:
    with pytest.raises(ValueError, match=r"loss_scale_preset\('torch'\)"):
        as_loss_scale("torch")
    with pytest.raises(TypeError, match=r"the class DynamicLossScale itself"):
        as_loss_scale(optax_npu.DynamicLossScale)
    for value in (object(), True, [1.0]):
        with pytest.raises(TypeError, match="must be a loss scale, a number"):
            as_loss_scale(value)
    with pytest.raises(ValueError, match="loss_scale must be"):
        as_loss_scale(0.5)


def test_flag_must_be_scalar() -> None:
    loss_scale = optax_npu.DynamicLossScale()
    with pytest.raises(
        ValueError, match=r"grads_finite must be a scalar, got .*\(3,\)"
    ):
        loss_scale.update(loss_scale.init(), jnp.ones(3, bool))


def test_state_must_be_a_scalar_loss_scale_state() -> None:
    loss_scale = optax_npu.DynamicLossScale()
    with pytest.raises(TypeError, match=r"must be a LossScaleState, got EmptyState"):
        loss_scale.update(optax.EmptyState(), True)  # pyright: ignore
    batched = jax.tree.map(lambda x: jnp.stack([x, x]), loss_scale.init())
    with pytest.raises(ValueError, match=r"state.loss_scale must be a scalar"):
        loss_scale.update(batched, True)


def test_loss_scales_are_immutable() -> None:
    loss_scale = optax_npu.DynamicLossScale()
    with pytest.raises(AttributeError):
        loss_scale.multiplier = 3  # pyright: ignore
