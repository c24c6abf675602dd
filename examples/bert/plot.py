# SPDX-License-Identifier: Apache-2.0
"""One picture of a run: did it learn, and what did the loss scale do meanwhile?"""

from pathlib import Path
from typing import Any

import numpy as np

from .metrics import Row
from .options import Options
from .train import Evaluation

_LOSS, _HELD_OUT, _GREY = "#1f5fa8", "#e08a00", "#555555"
_SCALE, _SKIPPED = "#2f7d4f", "#d1341f"
_SMOOTHED = 25


def draw(
    path: Path,
    rows: list[Row],
    entropy: float,
    held_out: Evaluation | None,
    options: Options,
) -> None:
    """Writes the picture.

    Args:
      path: A PNG file.
      rows: The metrics of all steps.
      entropy: Unigram entropy of the text that was trained on.
      held_out: The evaluation after the last step, if there was one.
      options: What was trained, and how.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    skipped, steps = sum(not row.applied for row in rows), rows[-1].step
    title = (
        f"Small BERT, compute in {options.dtype}, LAMB, loss scale"
        f" {options.loss_scale}: {skipped} of {steps} steps skipped"
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    _draw_loss(top, rows, entropy, held_out)
    _draw_scale(bottom, rows)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_loss(
    axes: Any, rows: list[Row], entropy: float, held_out: Evaluation | None
) -> None:
    steps = np.array([row.step for row in rows])
    losses = np.array([row.loss for row in rows])
    axes.plot(steps, losses, color=_LOSS, alpha=0.25, linewidth=0.8, label="each step")
    width = min(_SMOOTHED, max(1, len(rows) // 4))
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    middle = steps[width // 2 :][: smooth.size]
    name = f"training, mean of {width} steps"
    axes.plot(middle, smooth, color=_LOSS, linewidth=2, label=name)
    if held_out:
        axes.plot(
            steps[-1:],
            [held_out.loss],
            "D",
            color=_HELD_OUT,
            markersize=8,
            clip_on=False,
            zorder=3,
            label=f"held-out text at the end: {held_out.loss:.2f}",
        )
    axes.axhline(
        entropy,
        color=_GREY,
        linestyle="--",
        linewidth=1.2,
        label=f"unigram entropy {entropy:.2f}: best guess without context",
    )
    axes.legend(loc="best", frameon=False)
    axes.set_ylabel("loss, nats per hidden token")


def _draw_scale(axes: Any, rows: list[Row]) -> None:
    steps = np.array([row.step for row in rows])
    scales = np.array([row.loss_scale for row in rows])
    axes.step(steps, scales, where="mid", color=_SCALE, linewidth=1.8, label="scale")
    bad = np.array([not row.applied for row in rows])
    if bad.any():
        axes.plot(
            steps[bad],
            scales[bad],
            "x",
            color=_SKIPPED,
            markersize=7,
            markeredgewidth=2,
            zorder=3,
            label="overflow: step skipped",
        )
        axes.legend(loc="upper right", frameon=False)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale")
    axes.set_xlabel("step")
