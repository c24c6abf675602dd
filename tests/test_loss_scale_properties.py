# SPDX-License-Identifier: Apache-2.0
"""The engine against a second opinion: thirteen scalers in plain Python.

Long random histories for every preset, and a random walk through all public moves with
the invariants that hold under every rule.
"""

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import optax_npu
from optax_npu import loss_scale_preset as preset
from tests import _loss_scale_model as model

STEPS = 5000

# Settings with short intervals, so that bounds are met; (loss scale, its model).
PAIRS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "ascend": (
        optax_npu.ExponentialUpdateLossScaleManager(1e6, 7),
        lambda: model.TF1(1e6, 7, ascend_limit=3.4e38),
    ),
    "ascend_d3": (
        optax_npu.ExponentialUpdateLossScaleManager(2**32, 3, 3, 10, 0.25),
        lambda: model.TF1(2**32, 3, 3, 10, 0.25, ascend_limit=3.4e38),
    ),
    "tf1": (
        preset("tf1", incr_every_n_steps=5),
        lambda: model.TF1(n=5),
    ),
    "tf_dynamic": (
        optax_npu.DynamicLossScale(2.0**15, 4, 1.5),
        lambda: model.Halver(2.0**15, 4, 1.5, 1),
    ),
    "tf_dynamic_below_one": (
        optax_npu.DynamicLossScale(0.3, 4, 3),
        lambda: model.Halver(0.3, 4, 3, 1),
    ),
    "torch": (
        preset("torch", growth_interval=3, backoff_factor=0.8, growth_factor=1.5),
        lambda: model.Torch(n=3, down=0.8, up=1.5),
    ),
    "torch_0.5": (preset("torch", growth_interval=2), lambda: model.Torch(n=2)),
    "flax": (
        preset("flax", growth_interval=2, backoff_factor=0.6),
        lambda: model.Flax(n=2, down=0.6),
    ),
    "jmp": (
        preset("jmp", period=3, factor=1.5, min_loss_scale=0.25),
        lambda: model.Halver(2.0**15, 3, 1.5, 0.25, reciprocal=True),
    ),
    "mpx": (
        preset("mpx", loss_scaling=2**18, period=2, factor=3),
        lambda: model.Mpx(2**18, 2, 3),
    ),
    "keras": (
        preset("keras", dynamic_growth_steps=3),
        lambda: model.Halver(2**15, 3, 2, 1),
    ),
    "keras3": (
        preset("keras3", dynamic_growth_steps=3),
        lambda: model.Halver(2**15, 3, 2, model.TINY),
    ),
    "megatron": (
        preset("megatron", growth_interval=4, hysteresis=3, backoff_factor=0.7),
        lambda: model.Megatron(n=4, hysteresis=3, down=0.7),
    ),
    "megatron_default": (
        preset("megatron", growth_interval=6),
        lambda: model.Megatron(n=6),
    ),
    "apex": (preset("apex", scale_window=4), lambda: model.Apex(n=4)),
    "apex_hysteresis": (
        preset("apex", scale_window=3, hysteresis=2),
        lambda: model.Apex(n=3, hysteresis=2),
    ),
    "deepspeed": (preset("deepspeed", scale_window=4), lambda: model.DeepSpeed(n=4)),
    "deepspeed_shift": (
        preset("deepspeed", scale_window=3, delayed_shift=3, min_scale=0.5),
        lambda: model.DeepSpeed(n=3, shift=3, floor=0.5),
    ),
    "deepspeed_consecutive": (
        preset(
            "deepspeed", scale_window=1, delayed_shift=2, consecutive_hysteresis=True
        ),
        lambda: model.DeepSpeed(n=1, shift=2, consecutive=True),
    ),
    "paddle": (
        preset("paddle", incr_every_n_steps=4, decr_every_n_nan_or_inf=2),
        lambda: model.Paddle(n=4, d=2),
    ),
    "paddle_d1": (
        preset("paddle", incr_every_n_steps=2, decr_ratio=0.9),
        lambda: model.Paddle(n=2, down=0.9),
    ),
    "mindspore": (
        preset("mindspore", scale_window=3, scale_factor=3),
        lambda: model.MindSpore(factor=3, n=3),
    ),
    "fairseq": (preset("fairseq", scale_window=3), lambda: model.Fairseq(n=3)),
    "fairseq_tolerance": (
        preset("fairseq", scale_window=3, tolerance=0.3, threshold=0.5),
        lambda: model.Fairseq(n=3, tolerance=0.3, threshold=0.5),
    ),
    # A growth does not forget the tolerated overflows before it.
    "fairseq_tolerant": (
        preset("fairseq", scale_window=2, tolerance=0.6),
        lambda: model.Fairseq(n=2, tolerance=0.6),
    ),
}


@functools.partial(jax.jit, static_argnums=0)
def replay(loss_scale: Any, finite: jax.Array) -> Any:
    def step(state: Any, ok: jax.Array) -> Any:
        state, should_apply = loss_scale.update(state, ok)
        return state, (state, should_apply)

    return jax.lax.scan(step, loss_scale.init(), finite)[1]


def histories() -> np.ndarray:
    """Three of `STEPS`: mostly finite, changing moods, even."""
    rng = np.random.default_rng(20240501)
    moods = np.repeat(rng.uniform(0.0, 1.0, STEPS // 50), 50)
    chances = np.stack([np.full(STEPS, 0.9), moods, np.full(STEPS, 0.5)])
    return rng.uniform(size=chances.shape) < chances


@pytest.mark.parametrize("name", PAIRS)
def test_long_random_histories(name: str) -> None:
    loss_scale, make = PAIRS[name]
    for finite in histories():
        state, should_apply = jax.tree.map(np.asarray, replay(loss_scale, finite))
        np.testing.assert_array_equal(state.loss_scale, model.trace(make(), finite))
        np.testing.assert_array_equal(should_apply, finite)
        np.testing.assert_array_equal(state.found_inf, ~finite)
        np.testing.assert_array_equal(state.skipped_steps, np.cumsum(~finite))
        assert np.all(np.isfinite(state.loss_scale) & (state.loss_scale >= model.TINY))


def test_histories_meet_the_bounds() -> None:
    """The histories above are sharp: they grow, shrink, hit floors and ceilings."""
    for name, low, high in (
        ("tf_dynamic", 1.0, 1e37),
        ("keras3", 2.0**-126, 2.0**127),
        ("mpx", 1.0, 65504.0),
        ("apex", 2.0**-126, 2.0**24),
        ("ascend_d3", 1.0, 1e37),
    ):
        seen = np.stack([replay(PAIRS[name][0], f)[0].loss_scale for f in histories()])
        assert seen.min() == low
        assert seen.max() >= high


settings = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
scale_numbers = st.floats(2.0**-20, 2.0**100, width=32)


@settings
@hypothesis.given(
    init=scale_numbers,
    period=st.integers(1, 4),
    tolerated=st.integers(1, 3),
    up=st.sampled_from([1.25, 2.0, 3.0, 1e10]),
    down=st.sampled_from([0.1, 0.5, 0.8, 0.999]),
    finite=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_any_exponential_settings(
    init: float,
    period: int,
    tolerated: int,
    up: float,
    down: float,
    finite: list[bool],
) -> None:
    """Settings traced, so that all examples share one compiled program."""
    floats = [jnp.float32(x) for x in (init, up, down)]
    counts = [jnp.int32(x) for x in (period, tolerated)]
    got = _traced_exponential(floats, counts, jnp.asarray(finite))
    expected = model.TF1(init, period, tolerated, up, down, ascend_limit=3.4e38)
    np.testing.assert_array_equal(got, model.trace(expected, finite))


@jax.jit
def _traced_exponential(floats: Any, counts: Any, finite: jax.Array) -> jax.Array:
    init, up, down = floats
    period, tolerated = counts
    manager = optax_npu.ExponentialUpdateLossScaleManager(
        init, period, tolerated, up, down
    )

    def step(state: Any, ok: jax.Array) -> Any:
        state, _ = manager.update(state, ok)
        return state, state.loss_scale

    return jax.lax.scan(step, manager.init(), finite)[1]


class LossScaleMachine(RuleBasedStateMachine):
    """Steps, corrupted and foreign checkpoints in any order."""

    loss_scales = tuple(
        [loss_scale for loss_scale, _ in PAIRS.values()]
        + [
            optax_npu.FixedLossScale(8),
            optax_npu.FixedLossScaleManager(8),
            preset("torch", enabled=False),
        ]
    )

    @initialize(loss_scale=st.sampled_from(loss_scales[::3]))
    def start(self, loss_scale: Any) -> None:
        self.loss_scale = loss_scale
        self.state = loss_scale.init()
        self.skipped = self.in_a_row = 0

    @rule(ok=st.booleans(), times=st.integers(1, 5))
    def step(self, ok: bool, times: int) -> None:
        for _ in range(times):
            self.state, should_apply = _update(self.loss_scale, self.state, ok)
            assert bool(should_apply) is (ok or not self.loss_scale.skips)
            skip = not ok and self.loss_scale.skips
            self.skipped += skip
            self.in_a_row = self.in_a_row + 1 if skip else 0
            assert bool(self.state.found_inf) is skip

    @rule(bad=st.sampled_from([np.inf, -np.inf, np.nan, 0.0, -1.0, 1e-42]))
    def corrupt(self, bad: float) -> None:
        self.state = self.state._replace(loss_scale=jnp.float32(bad))
        self.step(True, 1)

    @rule(loss_scale=st.sampled_from(loss_scales[::3]))
    def switch(self, loss_scale: Any) -> None:
        self.loss_scale = loss_scale
        self.step(True, 1)

    @invariant()
    def scale_is_normal(self) -> None:
        if not hasattr(self, "state"):
            return
        assert model.TINY <= float(self.state.loss_scale) <= model.MAX
        assert int(self.state.skipped_steps) == self.skipped
        assert int(self.state.consecutive_skips) == self.in_a_row
        assert int(self.state.good_steps) >= 0
        assert int(self.state.bad_steps) >= 0


_update = jax.jit(
    lambda loss_scale, state, ok: loss_scale.update(state, ok), static_argnums=0
)
TestLossScaleMachine = LossScaleMachine.TestCase
TestLossScaleMachine.settings = hypothesis.settings(
    max_examples=20, stateful_step_count=25, deadline=None, derandomize=True
)
