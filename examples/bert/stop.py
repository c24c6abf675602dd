# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and the scheduler's SIGTERM: finish the step, save, leave."""

import os
import signal
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils


class Stop:
    """Turns the first signal into a wish; the second one stops at once, unsaved."""

    def __init__(self) -> None:
        self._wished = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._wish)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _wish(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._wished = True
        self.__exit__()
        os.write(2, b"\nstopping after this step\n")  # print() is not reentrant

    def agreed(self) -> bool:
        """Whether any process was told to stop; the same answer in all of them."""
        if jax.process_count() == 1:
            return self._wished
        return bool(multihost_utils.process_allgather(np.array(self._wished)).any())
