# SPDX-License-Identifier: Apache-2.0
"""Which devices a collective connects, in every notation that XLA prints.

==========================================  =====================================
``{{0,1},{2,3}}``                           listed
``[2,8]<=[8,2]T(1,0)``                      counted, transposed, cut
``mesh['node'=2,'device'=8] {'device'}``    along axes of a mesh
``source_target_pairs={{0,1},{1,0}}``       pairs of a permute
==========================================  =====================================
"""

import itertools
import math
import re

from optax_npu._hlo import Instruction

_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_MESH = (
    r"[\[<]([^\]>]*)[\]>](?:,\s*device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
)


def replica_groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """The groups of devices between which a collective moves data.

    Args:
      instruction: An all-reduce, all-gather, reduce-scatter, all-to-all or
        collective-permute, or the start of one.
      num_devices: Devices of the program, for the empty notation (all of them).

    Returns:
      One list of device numbers for each group. Pairs for a permute.
    """
    text = instruction.attributes
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", text):
        return _braces(pairs[1])
    if iota := re.search(rf"replica_groups=\[([\d,]+)\]<={_IOTA}", text):
        flat = _iota(*iota.groups()[1:])
        width = int(iota[1].split(",")[-1])
        return [flat[i : i + width] for i in range(0, len(flat), width)]
    if mesh := re.search(rf"replica_groups=@?mesh{_MESH}\s*\{{([^}}]*)\}}", text):
        return _mesh_groups(*mesh.groups())
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", text)
    return _braces(listed[1]) if listed else [list(range(num_devices))]


def _braces(text: str) -> list[list[int]]:
    return [
        [int(number) for number in group.split(",") if number]
        for group in re.findall(r"\{([\d,]*)\}", text)
    ]


def _iota(dims: str, order: str | None) -> list[int]:
    """`[8,2]T(1,0)`: count up in an array of that shape, then transpose it."""
    shape = [int(d) for d in dims.split(",")]
    axes = [int(d) for d in order.split(",")] if order else list(range(len(shape)))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    ranges = [range(0, shape[a] * strides[a], strides[a]) for a in axes]
    return [sum(index) for index in itertools.product(*ranges)]


def _mesh_groups(sizes: str, devices: str | None, axes: str) -> list[list[int]]:
    """`mesh['node'=2,'device'=8] {'device'}`: the groups along the named axes.

    A part of an axis is written `'device':(2)4`: four steps of the axis once it is
    cut into 2 x 4 x rest.
    """
    shape = [(n, int(k)) for n, k in re.findall(r"'?([\w.]+)'?=(\d+)", sizes)]
    cuts = re.findall(r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?", axes)
    dims: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name, size in shape:
        parts = sorted((int(p), int(k)) for n, p, k in cuts if n == name and p)
        edges = sorted({1, size, *(p for p, _ in parts), *(p * k for p, k in parts)})
        for low, high in itertools.pairwise(edges):
            position[name, low] = len(dims)
            dims.append(high // low)
        position.setdefault((name, 1), len(dims))
        if size == 1:
            dims.append(1)
    inside = [position[name, int(pre or 1)] for name, pre, _ in cuts]
    outside = [axis for axis in range(len(dims)) if axis not in inside]
    order = ",".join(map(str, outside + inside))
    numbers = _iota(",".join(map(str, dims)), order)
    if devices:
        layout = re.fullmatch(_IOTA, devices)
        ids = (
            _iota(*layout.groups()) if layout else [int(d) for d in devices.split(",")]
        )
        numbers = [ids[number] for number in numbers]
    width = math.prod(dims[axis] for axis in inside)
    return [numbers[i : i + width] for i in range(0, len(numbers), width)]
