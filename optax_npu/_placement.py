# SPDX-License-Identifier: Apache-2.0
"""Where the devices of a compiled program stand: which share a node."""

from collections.abc import Sequence
from typing import Any

import jax

from optax_npu._hlo import Module
from optax_npu._hlo_collectives import Collective


def spread_over_nodes(collective: Collective, nodes: Sequence[int]) -> tuple[int, int]:
    """Nodes over which a group spreads, and its members on one node."""
    if collective.slices > 1:
        return collective.slices, 1
    group = collective.groups[0] if collective.groups else ()
    touched = {nodes[device] if device < len(nodes) else 0 for device in group}
    count = max(1, len(touched))
    return count, max(1, len(group) // count)


def nodes_of_devices(
    compiled: Any, module: Module, devices_per_node: int | None
) -> list[int]:
    """The node of each device, in the numbering of the program."""
    count = module.num_devices
    if devices_per_node is not None:
        if devices_per_node < 1 or count % min(devices_per_node, count):
            raise ValueError(
                f"devices_per_node={devices_per_node}, but the program runs on {count}"
                " devices, which must be a multiple of it."
            )
        return [device // devices_per_node for device in range(count)]
    devices = [] if isinstance(compiled, str) else _devices(compiled)
    if len(devices) != count:
        return [0] * count
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if len(slices) > 1:
        return [getattr(device, "slice_index", 0) for device in devices]
    return [device.process_index for device in devices]


def _devices(compiled: Any) -> list[Any]:
    """The devices of a compiled function, in the order of its device assignment."""
    try:
        shardings = jax.tree.leaves(
            (compiled.input_shardings, compiled.output_shardings)
        )
    except (AttributeError, NotImplementedError):
        return []
    for sharding in shardings:
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh = sharding.mesh
            return (
                list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else []
            )
    return []


def platform_of(text: str) -> str:
    """The kind of device that a text was compiled for, from its layouts and fusions."""
    if ":T(" in text or "_xla_megascale" in text:
        return "tpu"
    gpu = ("fusion_backend_config", "operation_queue_id", "collective_backend_config")
    return "gpu" if any(mark in text for mark in gpu) else "cpu"
