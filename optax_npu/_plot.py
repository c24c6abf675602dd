# SPDX-License-Identifier: Apache-2.0
"""Draws a timeline; the only file that knows matplotlib."""

from typing import Any

from optax_npu._timeline import BETWEEN, COMPUTE, INSIDE, Timeline

_COLORS = {
    "model": ("#8da0cb", "forward and backward"),
    "optimizer": ("#66a61e", "optimizer"),
    "gradient": ("#e6550d", "gradients on the wire"),
    "other": ("#bdbdbd", "checks, flags, the rest"),
}


def plot_timeline(timeline: Timeline, title: str, path: Any = None) -> Any:
    """Draws one lane each for compute and for the links.

    Args:
      timeline: What to draw.
      title: What a reader should see first.
      path: File to write, or `None`.

    Returns:
      The matplotlib figure.

    Raises:
      ImportError: Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "plot needs matplotlib, which is not installed:"
            " pip install 'optax-npu[plot]'. report.summary() works without it."
        ) from error
    lanes = [BETWEEN, INSIDE, COMPUTE]
    lanes = [lane for lane in lanes if any(s.lane == lane for s in timeline.segments)]
    figure = Figure(figsize=(11, 1.2 + 0.8 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for segment in timeline.segments:
        color, _ = _COLORS.get(segment.role, _COLORS["other"])
        span = (1e3 * segment.start, 1e3 * (segment.end - segment.start))
        axes.broken_barh(
            [span],
            (lanes.index(segment.lane) + 0.12, 0.76),
            facecolors=color,
            edgecolors="white",
            linewidth=0.3,
        )
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], lanes)
    axes.set_xlim(0, 1e3 * max(timeline.seconds, 1e-9))
    axes.set_xlabel("estimated milliseconds")
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    used = {segment.role for segment in timeline.segments}
    handles = [
        Patch(color=color, label=label)
        for role, (color, label) in _COLORS.items()
        if role in used
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
