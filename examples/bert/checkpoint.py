# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with Orbax: complete or absent, and checked when they are read."""

import hashlib
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from .errors import UserError
from .train import State


class Checkpoints:
    """The two newest checkpoints of a run, in a folder.

    Each holds parameters and optimizer state, and beside them the step and a checksum.
    Data and random numbers are functions of seed and step, so there is nothing else to
    save. Orbax writes into a temporary folder and renames it at the end: a checkpoint
    is complete or it isn't there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=2, create=True, enable_async_checkpointing=False
            ),
        )

    def save(self, step: int, state: State) -> None:
        """Saves, and returns when the checkpoint is complete."""
        about = {"step": step, "checksum": checksum(state)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
            ),
            force=True,
        )

    def restore(self, like: State) -> tuple[int, State]:
        """The newest step and its arrays, placed and typed as those of `like`.

        Raises:
          UserError: There is none, or it is damaged.
        """
        step = self._manager.latest_step()
        if step is None:
            raise UserError(f"nothing to resume: no checkpoint in {self.folder}")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            saved = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(shapes),
                    about=ocp.args.JsonRestore(),
                ),
            )
            good = saved["about"]["checksum"] == checksum(saved["state"])
        except Exception as error:  # Orbax and TensorStore raise many kinds
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise self._damaged(step, reason[:160]) from error
        if not good:
            raise self._damaged(step, "the checksum is wrong")
        return step, saved["state"]

    def _damaged(self, step: int, reason: str) -> UserError:
        others = [s for s in self._manager.all_steps() if s != step]
        hint = f"; move it away to go on from step {max(others)}" if others else ""
        return UserError(
            f"checkpoint {self.folder / str(step)} is damaged: {reason}{hint}"
        )

    def close(self) -> None:
        """Lets go of the folder."""
        self._manager.close()


def checksum(state: State) -> str:
    """SHA-256 of all arrays; replicas are equal, so each process reads its own."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        array = np.asarray(leaf.addressable_data(0))
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
