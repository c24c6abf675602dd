# SPDX-License-Identifier: Apache-2.0
"""Metrics of every step: a CSV file, and TensorBoard."""

import csv
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from tensorboardX import SummaryWriter

from .errors import UserError
from .train import Metrics


class Row(NamedTuple):
    """One line of `metrics.csv`."""

    step: int
    loss: float
    loss_scale: float
    applied: int
    skipped_steps: int


class Log:
    """Appends to the metrics of a run; what came after `step` is written anew."""

    def __init__(self, out: Path, step: int) -> None:
        path = csv_path(out)
        rows = [row for row in read(path) if row.step <= step] if step else []
        fresh = path.with_suffix(".csv.tmp")
        with fresh.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
        os.replace(fresh, path)
        self._file = path.open("a", newline="", buffering=1)
        self._csv = csv.writer(self._file, lineterminator="\n")
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        """Adds a step, numbered from 1."""
        row = Row(
            step,
            float(metrics.loss),
            float(metrics.loss_scale),
            int(metrics.applied),
            int(metrics.skipped_steps),
        )
        self._csv.writerow(row)
        self._board.add_scalar("loss", row.loss, step)
        self._board.add_scalar("loss_scale_log2", math.log2(row.loss_scale), step)
        self._board.add_scalar("skipped_steps", row.skipped_steps, step)

    def close(self) -> None:
        """Writes what is still in memory."""
        self._file.close()
        self._board.close()


def csv_path(out: Path) -> Path:
    """Where the metrics of a run are."""
    return out / "metrics.csv"


def read(path: Path) -> list[Row]:
    """All rows; none if there is no file.

    Raises:
      UserError: A line is not what `Log` writes.
    """
    if not path.exists():
        return []
    whole_lines = path.read_text().rpartition("\n")[0].splitlines()
    lines = list(csv.reader(whole_lines))
    return [_row(path, number, line) for number, line in enumerate(lines[1:], 2)]


def _row(path: Path, number: int, line: list[Any]) -> Row:
    try:
        step, loss, scale, applied, skipped = line
        return Row(int(step), float(loss), float(scale), int(applied), int(skipped))
    except ValueError as error:
        raise UserError(
            f"{path} line {number} is damaged: {','.join(line)[:60]!r}; move the file"
            " away to go on without it"
        ) from error
