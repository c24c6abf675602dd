# SPDX-License-Identifier: Apache-2.0
"""Meshes whose rows are the physical nodes."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_npu._axes import check_devices_per_node, check_divisible


def two_level_mesh(
    devices: Sequence[Any] | None = None,
    *,
    devices_per_node: int | None = None,
    axis_names: tuple[str, str] = ("node", "device"),
) -> jax.sharding.Mesh:
    """A mesh whose rows are the physical nodes.

    Reduce over it with ``axis_name=("node", "device")``: only one device's share of
    the gradients then crosses the borders of a node.

    Args:
      devices: The devices, by default all of them. Their order is kept within a
        node, and nodes stand in the order of their first device.
      devices_per_node: By default a node is a TPU slice where there are several,
        else a process. Give the number where neither is right: ``8`` for eight
        one-GPU processes per host, or to simulate nodes. Consecutive devices of the
        list then form a node.
      axis_names: Names of the slow and of the fast axis.

    Returns:
      A ``jax.sharding.Mesh`` of shape (nodes, devices per node).

    Raises:
      ValueError: Nodes have different numbers of devices, the number of devices is
        not divisible, there are no devices, or the two names are equal.
      TypeError: `devices_per_node` is not a whole number.

    Example:
      >>> import jax, optax_npu
      >>> mesh = optax_npu.two_level_mesh(jax.devices()[:1])
      >>> dict(mesh.shape)
      {'node': 1, 'device': 1}

    References:
      The hybrid meshes of ``jax.experimental.mesh_utils``, whose outer axis is the
      slow network too.
    """
    names = tuple(axis_names)
    if len(names) != 2 or names[0] == names[1]:
        raise ValueError(
            f"axis_names={axis_names!r}, but a two-level mesh needs two different"
            ' names: the slow axis, then the fast one, e.g. ("node", "device").'
        )
    found = list(jax.devices() if devices is None else devices)
    if not found:
        raise ValueError("devices is empty: a mesh needs at least one device.")
    if devices_per_node is None:
        rows = _physical_nodes(found)
    else:
        size = check_devices_per_node(devices_per_node)
        check_divisible(len(found), size, "devices")
        rows = [found[i : i + size] for i in range(0, len(found), size)]
    grid = np.empty((len(rows), len(rows[0])), dtype=object)
    for i, row in enumerate(rows):
        grid[i] = row
    return jax.sharding.Mesh(grid, names)


def _physical_nodes(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices grouped by TPU slice, or by process where there is one slice."""
    slices = {getattr(d, "slice_index", 0) for d in devices}
    kind = "slice_index" if len(slices) > 1 else "process_index"
    rows: dict[Any, list[Any]] = {}
    for device in devices:
        rows.setdefault(getattr(device, kind), []).append(device)
    sizes = {node: len(row) for node, row in rows.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"The nodes are ragged: devices per {kind} are {sizes}. A two-level mesh"
            " needs equal nodes. Leave devices out until they are equal, give"
            " devices_per_node= if a node is not one process, or reduce flat:"
            ' mesh = jax.make_mesh((jax.device_count(),), ("data",)) with'
            ' axis_name="data".'
        )
    return list(rows.values())
