# SPDX-License-Identifier: Apache-2.0
"""Thirteen loss scalers in plain Python, each told in its own system's terms.

A second opinion on the engine: nothing is shared with it, not even the counters.
`clip` is what ours promises on top: the scale stays a normal float32.
"""

from typing import Any

import numpy as np

F32 = np.float32
TINY = np.finfo(F32).tiny
MAX = np.finfo(F32).max


def product(a: Any, b: Any) -> np.float32:
    with np.errstate(over="ignore"):
        return F32(a) * F32(b)


class TF1:
    """tf.contrib and Ascend: accumulated overflows; both counters clear together."""

    def __init__(
        self, scale=2.0**15, n=2000, d=2, up=2.0, down=0.8, ascend_limit: float = 0.0
    ):
        self.scale, self.n, self.d = F32(scale), n, d
        self.up, self.down, self.ascend_limit = up, down, ascend_limit
        self.good = self.bad = 0

    def may_grow(self) -> bool:
        if self.ascend_limit:
            return bool(self.scale < F32(self.ascend_limit / self.up))
        return bool(np.isfinite(product(self.scale, self.up)))

    def step(self, finite: bool) -> None:
        if finite and self.good + 1 >= self.n:
            if self.may_grow():
                self.scale = product(self.scale, self.up)
            self.good = self.bad = 0
        elif finite:
            self.good += 1
        elif self.bad + 1 >= self.d:
            self.scale = max(F32(1), product(self.scale, self.down))
            self.good = self.bad = 0
        else:
            self.bad += 1
            self.good = 0


class Halver:
    """TF 2, Keras, jmp, MindSpore's scaler: lower at once, grow after n in a row."""

    def __init__(self, scale, n, factor, floor, reciprocal=False):
        self.scale, self.n, self.factor = F32(scale), n, F32(factor)
        self.floor, self.reciprocal = F32(floor), reciprocal
        self.counter = 0

    def step(self, finite: bool) -> None:
        if not finite:
            by = F32(1) / self.factor
            low = self.scale * by if self.reciprocal else self.scale / self.factor
            self.scale = max(low, self.floor)
            self.counter = 0
        elif self.counter == self.n - 1:
            grown = product(self.scale, self.factor)
            self.scale = grown if np.isfinite(grown) else self.scale
            self.counter = 0
        else:
            self.counter += 1


class Torch:
    """torch: as above in float64 factors, no floor."""

    def __init__(self, scale=2.0**16, up=2.0, down=0.5, n=2000):
        self.scale, self.up, self.down, self.n = F32(scale), up, down, n
        self.tracker = 0

    def step(self, finite: bool) -> None:
        if not finite:
            self.scale = max(F32(float(self.scale) * self.down), TINY)
            self.tracker = 0
            return
        self.tracker += 1
        if self.tracker == self.n:
            grown = float(self.scale) * self.up
            self.scale = F32(grown) if grown <= float(MAX) else self.scale
            self.tracker = 0


class Flax:
    """flax: finds the interval reached one step later."""

    def __init__(self, scale=65536.0, up=2.0, down=0.5, n=2000, floor=TINY):
        self.scale, self.up, self.down, self.n = F32(scale), up, down, n
        self.floor, self.fin_steps = F32(floor), 0

    def step(self, finite: bool) -> None:
        if not finite:
            self.scale = max(product(self.scale, self.down), self.floor)
            self.fin_steps = 0
        elif self.fin_steps == self.n:
            self.scale = min(product(self.scale, self.up), MAX)
            self.fin_steps = 0
        else:
            self.fin_steps += 1


class Mpx(Halver):
    """mpx: jmp, then clipped on every step."""

    def __init__(self, scale=2.0**15, n=2000, factor=2.0, floor=1.0):
        super().__init__(scale, n, factor, floor, reciprocal=True)

    def step(self, finite: bool) -> None:
        super().step(finite)
        self.scale = min(max(self.scale, self.floor), F32(65504))


class Megatron:
    """Megatron: a budget of tolerated overflows, refilled by growth only."""

    def __init__(
        self, scale=2.0**32, floor=1.0, up=2.0, down=0.5, n=1000, hysteresis=2
    ):
        self.scale, self.floor, self.up, self.down = F32(scale), F32(floor), up, down
        self.n, self.hysteresis = n, hysteresis
        self.growth_tracker, self.hysteresis_tracker = 0, hysteresis

    def step(self, finite: bool) -> None:
        if not finite:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(product(self.scale, self.down), self.floor)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.n:
            self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
            grown = product(self.scale, self.up)
            self.scale = grown if np.isfinite(grown) else self.scale


class Apex:
    """Apex's fused kernel (hysteresis 1: amp's scaler) under amp's ceiling."""

    def __init__(self, scale=2.0**16, n=2000, ceiling=2.0**24, hysteresis=1):
        self.ceiling, self.n, self.hysteresis = F32(ceiling), n, hysteresis
        self.scale = min(self.ceiling, F32(scale))
        self.unskipped, self.left = 0, hysteresis

    def step(self, finite: bool) -> None:
        if not finite:
            self.left -= 1
            self.unskipped = 0
            if self.left <= 0:
                self.scale = max(self.scale / F32(2), TINY)
            return
        self.left = self.hysteresis
        self.unskipped += 1
        if self.unskipped == self.n:
            self.scale = min(self.ceiling, product(self.scale, 2))
            self.unskipped = 0


class DeepSpeed:
    """DeepSpeed: iteration numbers instead of counters."""

    def __init__(self, scale=2.0**32, n=1000, floor=1.0, shift=1, consecutive=False):
        self.scale, self.n, self.floor = F32(scale), n, F32(floor)
        self.shift, self.consecutive = shift, consecutive
        self.cur_iter, self.last_overflow, self.left = 0, -1, shift

    def step(self, finite: bool) -> None:
        if not finite:
            if self.shift == 1 or self.left == 1:
                self.scale = max(self.scale / F32(2), self.floor)
            else:
                self.left -= 1
            self.last_overflow = self.cur_iter
        else:
            if self.consecutive:
                self.left = self.shift
            stable = self.cur_iter - self.last_overflow - 1
            if stable > 0 and stable % self.n == 0:
                self.left = self.shift
                grown = product(self.scale, 2)
                self.scale = grown if np.isfinite(grown) else self.scale
        self.cur_iter += 1


class Paddle:
    """Paddle: overflows in a row."""

    def __init__(self, scale=2.0**16, n=2000, d=1, up=2.0, down=0.5):
        self.scale, self.n, self.d = F32(scale), n, d
        self.up, self.down = up, down
        self.incr_count = self.decr_count = 0

    def step(self, finite: bool) -> None:
        if not finite:
            self.incr_count = 0
            self.decr_count += 1
            if self.decr_count == self.d:
                self.scale = max(product(self.scale, self.down), TINY)
                self.decr_count = 0
        else:
            self.decr_count = 0
            self.incr_count += 1
            if self.incr_count == self.n:
                grown = product(self.scale, self.up)
                self.scale = grown if np.isfinite(grown) else self.scale
                self.incr_count = 0


class MindSpore:
    """MindSpore's manager: iteration numbers, the last change is the last overflow."""

    def __init__(self, scale=2.0**24, factor=2, n=2000):
        self.scale, self.factor, self.n = F32(scale), F32(factor), n
        self.cur_iter, self.last_overflow = 1, 0

    def step(self, finite: bool) -> None:
        if not finite:
            self.scale = max(self.scale / self.factor, F32(1))
            self.last_overflow = self.cur_iter
        elif (self.cur_iter - self.last_overflow) % self.n == 0:
            grown = product(self.scale, self.factor)
            self.scale = grown if np.isfinite(grown) else self.scale
        self.cur_iter += 1


class Fairseq:
    """fairseq: a tolerated share of overflows since the last change."""

    def __init__(
        self,
        scale=2.0**15,
        factor=2.0,
        n=2000,
        tolerance=0.0,
        threshold=None,
        minimum=1e-4,
    ):
        self.scale, self.factor, self.n = F32(scale), F32(factor), n
        self.tolerance, self.threshold, self.minimum = tolerance, threshold, minimum
        self.it, self.last_overflow, self.last_rescale, self.overflows = 0, -1, -1, 0

    def step(self, finite: bool) -> None:
        if finite:
            if (self.it - self.last_overflow) % self.n == 0:
                grown = product(self.scale, self.factor)
                self.scale = grown if np.isfinite(grown) else self.scale
                self.last_rescale = self.it
        else:
            before = self.scale
            since = self.it - self.last_rescale
            self.last_overflow = self.it
            self.overflows += 1
            if self.overflows / float(since) >= self.tolerance:
                self.scale = self.scale / self.factor
                if self.threshold is not None:
                    self.scale = max(self.scale, F32(self.threshold))
                self.last_rescale, self.overflows = self.it, 0
            if self.scale <= self.minimum:
                self.scale = before
        self.it += 1


def trace(model: Any, finite: Any) -> np.ndarray:
    """The scale after every step."""
    scales = []
    for ok in finite:
        model.step(bool(ok))
        scales.append(model.scale)
    return np.asarray(scales, F32)
