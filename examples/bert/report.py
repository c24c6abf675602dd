# SPDX-License-Identifier: Apache-2.0
"""What the user reads: before, during and after a run."""

import math
import shlex
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .data import Corpus
from .metrics import Row
from .options import Options
from .train import Evaluation, Metrics

_LAST = 50


def headline(options: Options, corpus: Corpus, parameters: int, devices: int) -> str:
    """What is about to be trained."""
    scale = options.loss_scale
    if scale != "off":
        scale += f" from {power_of_two(options.init_loss_scale)}"
    return (
        f"text: {corpus.name} ({corpus.train.size:,} tokens)\n"
        f"model: {parameters:,} parameters, compute in {options.dtype}, loss scale"
        f" {scale}, {devices} device{'s' * (devices > 1)}"
    )


def progress_bar(start: int, target: int, visible: bool) -> tqdm:
    """Redrawn often on a terminal, seldom in a log file."""
    return tqdm(
        total=max(start, target),
        initial=start,
        unit="step",
        disable=not visible,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    )


def postfix(told: Metrics) -> str:
    """What stands behind the progress bar."""
    scale = power_of_two(float(told.loss_scale))
    return f"loss {told.loss:.3f}, scale {scale}, skipped {told.skipped_steps}"


def summary(
    out: Path,
    rows: list[Row],
    entropy: float,
    held_out: Evaluation | None,
    seconds: float,
) -> str:
    """The numbers at the end, and where everything is."""
    last = rows[-1]
    recent = [row.loss for row in rows[-_LAST:]]
    lines = [
        f"step {last.step}, {seconds:.0f} s in this call",
        f"final loss: {np.mean(recent):.3f} nats per token (mean of the last"
        f" {len(recent)} steps); unigram entropy {entropy:.3f}",
        f"skipped steps: {last.skipped_steps} of {last.step}; loss scale"
        f" {power_of_two(last.loss_scale)}",
        f"plot, metrics and checkpoints are in {out}: loss.png, metrics.csv,"
        " tensorboard/, checkpoints/",
    ]
    if held_out:
        text = (
            f"held-out loss: {held_out.loss:.3f} nats per token; unigram entropy of"
            f" the same {held_out.tokens:,} tokens {held_out.entropy:.3f}"
        )
        lines.insert(2, text)
    return "\n".join(lines)


def resume_command(out: Path) -> str:
    """The line to paste."""
    return f"python {shlex.quote(sys.argv[0])} --out {shlex.quote(str(out))} --resume"


def power_of_two(scale: float) -> str:
    """`2^15` where it is one, else the number."""
    exponent = math.log2(scale) if scale > 0 else 0.5
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"
