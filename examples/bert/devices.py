# SPDX-License-Identifier: Apache-2.0
"""Which devices a run uses: one, eight simulated ones, or many processes' own."""

import os
from typing import Any

import jax
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

import optax_npu

from .errors import UserError

AXES = ("node", "device")
SIMULATED = 8


def start(distributed: bool) -> Mesh | None:
    """Prepares JAX; the mesh to train on, or `None` for a single device.

    Call it before anything else touches a device. Under ``mpirun`` or ``srun`` JAX
    finds the other processes by itself.

    Raises:
      UserError: Several processes without ``--distributed``, or they don't meet.
    """
    processes = _launched_processes()
    if not distributed:
        if processes > 1:
            raise UserError(f"started as {processes} processes: add --distributed")
        return None
    per_process = max(1, SIMULATED // processes)
    simulate: Any = jax.config
    if simulate.jax_num_cpu_devices != per_process:
        simulate.update("jax_num_cpu_devices", per_process)
    if processes > 1:
        try:
            jax.distributed.initialize()
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"the {processes} processes don't meet: {reason}"
            ) from error
    simulated = processes == 1 and jax.default_backend() == "cpu"
    return optax_npu.two_level_mesh(
        devices_per_node=SIMULATED // 2 if simulated else None, axis_names=AXES
    )


def _launched_processes() -> int:
    names = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    return max(int(os.environ.get(name, "1")) for name in names)


def is_first() -> bool:
    """Whether this process writes logs and plots."""
    return jax.process_index() == 0


def split_over(mesh: Mesh | None) -> NamedSharding | None:
    """Batches: one share of the rows per device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(AXES))


def same_on(mesh: Mesh | None) -> Sharding:
    """Parameters and optimizer state: the same everywhere."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, PartitionSpec())
