# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what is in it, and what must not be overwritten.

run.json      options, target step and fingerprint of the text
checkpoints/  the two newest, see `checkpoint.py`
metrics.csv   one line per step
tensorboard/  the same for TensorBoard
loss.png      the picture, when the run has ended or was stopped
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from .errors import UserError
from .options import Options


class About(NamedTuple):
    """What `run.json` holds.

    Attributes:
      options: All options but those that may change from call to call.
      target: The step at which the run ends.
      fingerprint: Of the text and its vocabulary.
    """

    options: dict[str, Any]
    target: int
    fingerprint: str


def refuse_to_overwrite(out: Path) -> None:
    """Raises a `UserError` unless `out` is new or empty."""
    if (out / "run.json").exists():
        raise UserError(
            f"{out} holds a run already: --resume goes on with it, another --out"
            " starts a new one"
        )
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder: choose another --out")


def read_about(out: Path) -> About:
    """Reads `run.json`.

    Raises:
      UserError: It is missing or damaged.
    """
    path = out / "run.json"
    if not path.exists():
        raise UserError(f"nothing to resume in {out}: there is no {path}")
    try:
        about = About(**json.loads(path.read_text()))
        Options(**about.options)
        return about._replace(target=int(about.target))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def write_about(out: Path, options: Options, target: int, fingerprint: str) -> None:
    """Writes `run.json`, whole or not at all."""
    kept = dataclasses.asdict(options)
    del kept["resume"], kept["out"]
    fresh = out / "run.json.tmp"
    about = About(kept, target, fingerprint)._asdict()
    fresh.write_text(json.dumps(about, indent=2) + "\n")
    os.replace(fresh, out / "run.json")


def new_target(step: int, steps: int | None, about: About) -> int:
    """What was asked for; else the end of the run; else as many steps again."""
    if steps is not None:
        return steps
    if step < about.target:
        return about.target
    return step + about.options["steps"]
