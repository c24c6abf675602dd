# SPDX-License-Identifier: Apache-2.0
"""Side by side in one run: ratios that a busy machine disturbs least."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


def seconds(run: Callable[[], Any]) -> float:
    """Wall time until the result is there."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def alternate(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, repeats: int = 1
) -> dict[str, np.ndarray]:
    """Per contender the median seconds of each round; everyone runs in every round."""
    for run in contenders.values():
        seconds(run)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(float(np.median([seconds(run) for _ in range(repeats)])))
    return {name: np.asarray(values) for name, values in times.items()}


def ratios(times: Mapping[str, np.ndarray], base: str) -> dict[str, float]:
    """Per contender the median over rounds of its time over the base's."""
    return {name: float(np.median(t / times[base])) for name, t in times.items()}


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats with three significant digits."""
    lines = [header, ["---"] * len(header), *[[_cell(x) for x in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


def machine() -> str:
    """What the numbers were taken on, and when."""
    return (
        f"JAX {jax.__version__}, Python {platform.python_version()},"
        f" {os.cpu_count()} cores ({platform.machine()}), load"
        f" {os.getloadavg()[0]:.1f} at the end, {time.strftime('%Y-%m-%d')}."
    )
