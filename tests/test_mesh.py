# SPDX-License-Identifier: Apache-2.0
"""Meshes whose rows are nodes, and the axes that an argument means."""

import dataclasses

import jax
import numpy as np
import pytest

from optax_npu import _axes, two_level_mesh
from optax_npu._axes import Level, ResolvedAxes, axis_spec


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of another machine."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "fake"


def grid_ids(mesh: jax.sharding.Mesh) -> list[list[int]]:
    return [[d.id for d in row] for row in mesh.devices]


def test_one_process_is_one_node():
    mesh = two_level_mesh()
    assert dict(mesh.shape) == {"node": 1, "device": 8}


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_simulated_nodes_are_consecutive_devices(per_node):
    mesh = two_level_mesh(devices_per_node=per_node, axis_names=("slow", "fast"))
    assert dict(mesh.shape) == {"slow": 8 // per_node, "fast": per_node}
    assert grid_ids(mesh) == np.arange(8).reshape(-1, per_node).tolist()


def test_rows_are_processes_even_if_devices_are_interleaved():
    devices = [FakeDevice(i, process_index=i % 2) for i in range(8)]
    assert grid_ids(two_level_mesh(devices)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_rows_are_slices_where_there_are_several():
    devices = [
        FakeDevice(i, process_index=i // 2, slice_index=i // 4) for i in range(8)
    ]
    assert grid_ids(two_level_mesh(devices)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_several_processes_per_node():
    devices = [FakeDevice(i, process_index=i) for i in range(8)]
    assert len(two_level_mesh(devices).devices) == 8
    nodes = two_level_mesh(devices, devices_per_node=4)
    assert grid_ids(nodes) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_D28_ragged_nodes_are_refused_with_the_flat_way_out():
    devices = [FakeDevice(i, process_index=int(i > 2)) for i in range(8)]
    with pytest.raises(ValueError, match=r"ragged.*\{0: 3, 1: 5\}.*axis_name=\"data\""):
        two_level_mesh(devices)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"devices_per_node": 3}, ValueError, r"3 does not divide the 8 devices"),
        ({"devices_per_node": 16}, ValueError, r"16 does not divide"),
        ({"devices_per_node": 0}, ValueError, "at least 1"),
        ({"devices_per_node": -4}, ValueError, "at least 1"),
        ({"devices_per_node": 4.0}, TypeError, "whole number"),
        ({"devices_per_node": True}, TypeError, "whole number"),
        ({"devices": []}, ValueError, "empty"),
        ({"axis_names": ("a", "a")}, ValueError, "two different names"),
        ({"axis_names": ("a",)}, ValueError, "two different names"),
    ],
)
def test_bad_meshes(options, error, match):
    with pytest.raises(error, match=match):
        two_level_mesh(**options)


@pytest.mark.parametrize(
    ("axis_name", "levels"),
    [
        ("data", (("data",),)),
        (("data",), (("data",),)),
        (("node", "device"), (("node",), ("device",))),
        (["node", "device"], (("node",), ("device",))),
        ((("pod", "node"), "device"), (("pod", "node"), ("device",))),
        ((("pod", ("rack", "node")), "device"), (("pod", "rack", "node"), ("device",))),
        ((("node", "device"),), (("node", "device"),)),
        ((frozenset({1}), 3), ((frozenset({1}),), (3,))),
    ],
)
def test_forms_of_axis_name(axis_name, levels):
    assert axis_spec(axis_name).levels == levels


def resolved(sizes, *, typed=False, per_node=None):
    """Axes of given sizes, without a mapped function."""
    levels = tuple(
        Level((name,), (size,), between_nodes=i < len(sizes) - 1)
        for i, (name, size) in enumerate(sizes.items())
    )
    total = int(np.prod(list(sizes.values())))
    kept = _axes._without_ones(levels, typed)
    return ResolvedAxes(kept, tuple(sizes), total, typed)


def test_D4_levels_of_one_replica_are_left_out():
    axes = resolved({"node": 1, "device": 8})
    assert [level.names for level in axes.levels] == [("device",)]
    assert resolved({"node": 1, "device": 1}).levels == ()


def test_D4_typed_axes_of_one_replica_ride_along():
    axes = resolved({"node": 1, "device": 8}, typed=True)
    assert [(x.names, x.size) for x in axes.levels] == [(("device", "node"), 8)]
    axes = resolved({"node": 4, "device": 1}, typed=True)
    assert [(x.names, x.size) for x in axes.levels] == [(("node", "device"), 4)]
    assert axes.levels[0].between_nodes
    axes = resolved({"node": 1, "device": 1}, typed=True)
    assert [(x.names, x.size) for x in axes.levels] == [(("node", "device"), 1)]


def test_restriction_and_flattening():
    axes = resolved({"pod": 2, "node": 2, "device": 4}, typed=True)
    part = axes.only(["node", "device"])
    assert (part.names, part.size) == (("node", "device"), 8)
    assert [level.names for level in part.levels] == [("node",), ("device",)]
    assert axes.only([]).levels == ()
    assert axes.only([]).size == 1
    flat = axes.flat()
    assert [(level.names, level.size) for level in flat.levels] == [(axes.names, 16)]


def test_index_groups_are_nodes_and_rails():
    def groups(x):
        axes = _axes.resolve_axes(axis_spec("data", 4))
        inter, intra = axes.levels
        assert inter.groups == ((0, 4), (1, 5), (2, 6), (3, 7))
        assert intra.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
        assert (inter.size, intra.size, axes.size) == (2, 4, 8)
        assert (inter.between_nodes, intra.between_nodes) == (True, False)
        return x

    jax.pmap(groups, axis_name="data")(np.arange(8))
