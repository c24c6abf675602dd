# SPDX-License-Identifier: Apache-2.0
"""`explain`: which reduction and which last bucket the numbers favour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optax_npu._cost import (
    best_last_bucket,
    bytes_between_nodes,
    double_tree,
    exposed_seconds,
    flat,
    flat_ring,
    halving_doubling,
    leader,
    multi_rail_ring,
    pipelined,
    stage_seconds,
    two_level,
)
from optax_npu._links import Chip, Links

_FLAT = {
    "flat ring, one card": flat_ring,
    "flat ring, all cards": multi_rail_ring,
    "halving and doubling": halving_doubling,
    "double tree": double_tree,
    "leader per node": leader,
    "two levels": two_level,
}


@dataclass(frozen=True)
class Explanation:
    """What the cost model says about a plan; print it.

    Attributes:
      algorithm: ``"flat"`` or ``"two-level"``.
      reason: Why, with the numbers that decided.
      seconds: Predicted time of all buckets by algorithm.
      bytes_between_nodes: Bytes that a node sends to others, by ``"flat"`` and
        ``"two-level"``.
      crossover_bytes: Bucket size from which on two levels win; `None`: never or
        always.
      bucket_bytes: The buckets.
      best_last_bucket: Bytes of the last bucket that expose least.
      exposed: Seconds behind the backward pass, ``"without tail"`` and ``"with
        tail"``.
      links: The links.
      chip: The chip.
      mesh_shape: Nodes and devices of a node.
    """

    algorithm: str
    reason: str
    seconds: dict[str, float]
    bytes_between_nodes: dict[str, float]
    crossover_bytes: float | None
    bucket_bytes: tuple[int, ...]
    best_last_bucket: float
    exposed: dict[str, float]
    links: Links
    chip: Chip
    mesh_shape: tuple[int, int]

    def __str__(self) -> str:
        total, last = sum(self.bucket_bytes), self.bucket_bytes[-1]
        nodes, devices = self.mesh_shape
        lines = [
            f"{nodes} x {devices} devices, {self.links.name}; {total / 1e6:.1f} MB in"
            f" {len(self.bucket_bytes)} buckets",
            f"{self.algorithm}: {self.reason}",
        ]
        lines += [
            f"  {name:<24}{1e6 * s:12,.0f} us" for name, s in self.seconds.items()
        ]
        moved = self.bytes_between_nodes
        lines += [
            f"out of each node: flat {moved['flat'] / 1e6:.1f} MB,"
            f" two-level {moved['two-level'] / 1e6:.1f} MB",
            f"last bucket: {last / 1e6:.1f} MB ({_percent(last, total)}); best"
            f" {self.best_last_bucket / 1e6:.1f} MB"
            f" ({_percent(self.best_last_bucket, total)})",
            f"behind the backward pass: {1e6 * self.exposed['without tail']:,.0f} us"
            f" without, {1e6 * self.exposed['with tail']:,.0f} us with tail hiding",
        ]
        if self.crossover_bytes is not None:
            size = self.crossover_bytes / 1e6
            lines.append(f"two levels win for buckets above {size:.2f} MB")
        return "\n".join(lines)


def explain(
    plan: Any,
    mesh_shape: Any,
    links: Links | str = "h100_ib",
    chip: Chip | str = "h100",
    *,
    update_traffic: float = 7.0,
    backward_seconds: float = 0.0,
    overlap_levels: bool = False,
) -> Explanation:
    """Flat or two-level, and how large the last bucket: by the numbers.

    A pure calculation with the formulas of `optax_npu.Links`; it measures nothing.

    Args:
      plan: A `BucketPlan`, or the bytes of the buckets: an int or a sequence.
      mesh_shape: A mesh, its `shape`, or ``(nodes, devices_per_node)``. One number is
        one node.
      links: The links, or the name of a preset.
      chip: The chip, or the name of a preset.
      update_traffic: Bytes that the optimizer moves per byte of gradient: 7 for
        float32 Adam (reads gradient, parameter, two moments; writes three of them).
      backward_seconds: Duration of the backward pass; 0 leaves its overlap out.
      overlap_levels: Count with stages of different buckets that overlap. XLA does
        that on multi-slice TPU; on GPU only with
        `xla_gpu_experimental_parallel_collective_overlap_limit` above 1.

    Returns:
      An `Explanation`. The decision is two-level when the time that it adds inside the
      nodes is less than what it saves between them. The choice stays yours.

    Raises:
      ValueError: For an empty plan, sizes below 0, or a mesh without devices.

    Example:
      >>> ib = explain(250_000_000, (2, 8), "h100_ib")
      >>> ib.algorithm
      'flat'
      >>> shared = explain(250_000_000, (2, 8), "h100_shared_nic")
      >>> shared.algorithm, round(1e6 * shared.seconds["two levels"])
      ('two-level', 21516)
    """
    sizes = _bucket_bytes(plan)
    nodes, devices = _mesh_shape(mesh_shape)
    links, chip = Links.preset(links), Chip.preset(chip)
    seconds: dict[str, float] = {
        name: sum(algorithm(size, nodes, devices, links) for size in sizes)
        for name, algorithm in _FLAT.items()
        if nodes > 1
    }
    one = sum(flat(size, nodes, devices, links) for size in sizes)
    two = pipelined(sizes, nodes, devices, links)
    serial = sum(two_level(size, nodes, devices, links) for size in sizes)
    if nodes > 1:
        seconds["two levels, overlapping"] = two
    else:
        seconds["ring in the node"] = one
    two = two if overlap_levels else serial
    algorithm, reason = _decide(one, two, sizes, nodes, devices, links)
    a, b = _affine(algorithm, sum(sizes) / len(sizes), nodes, devices, links)
    y = update_traffic * chip.memory_seconds(1)
    model = (backward_seconds, a, b, y)
    return Explanation(
        algorithm=algorithm,
        reason=reason,
        seconds=seconds,
        bytes_between_nodes=_between(sizes, nodes, devices),
        crossover_bytes=_crossover(nodes, devices, links),
        bucket_bytes=sizes,
        best_last_bucket=best_last_bucket(sum(sizes), a, b, y),
        exposed={
            "without tail": exposed_seconds(sizes, *model, tail=False),
            "with tail": exposed_seconds(sizes, *model),
        },
        links=links,
        chip=chip,
        mesh_shape=(nodes, devices),
    )


def _decide(
    one: float,
    two: float,
    sizes: tuple[int, ...],
    nodes: int,
    devices: int,
    links: Links,
) -> tuple[str, str]:
    if nodes == 1 or devices == 1:
        return "flat", "there is only one level of links"
    between = sum(stage_seconds(size, nodes, devices, links)[1] for size in sizes)
    added, saved = 1e6 * max(two - between, 0), 1e6 * (one - between)
    verdict = "less" if two < one else "no less"
    return (
        "two-level" if two < one else "flat",
        f"two levels add {added:,.0f} us inside the nodes, {verdict} than the"
        f" {saved:,.0f} us that they save between them",
    )


def _affine(
    algorithm: str, size: float, nodes: int, devices: int, links: Links
) -> tuple[float, float]:
    """Fixed seconds and seconds per byte of one reduction around a size."""
    cost = two_level if algorithm == "two-level" else flat
    high, low = (cost(s, nodes, devices, links) for s in (size * 1.01, size * 0.99))
    slope = (high - low) / (0.02 * size) if size else 0.0
    return max(high - slope * size * 1.01, 0.0), slope


def _between(sizes: tuple[int, ...], nodes: int, devices: int) -> dict[str, float]:
    shares = [
        bytes_between_nodes("all-reduce", size / devices, nodes, 1, devices)
        for size in sizes
    ]
    whole = [
        bytes_between_nodes("all-reduce", size, nodes, devices, devices)
        for size in sizes
    ]
    return {"flat": sum(whole), "two-level": sum(shares)}


def _crossover(nodes: int, devices: int, links: Links) -> float | None:
    """The size at which two levels begin to win, by bisection on 1 B to 1 TB."""

    def gain(size: float) -> float:
        return flat(size, nodes, devices, links) - two_level(
            size, nodes, devices, links
        )

    low, high = 1.0, 1e12
    if nodes == 1 or devices == 1 or gain(low) > 0 or gain(high) <= 0:
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


def _bucket_bytes(plan: Any) -> tuple[int, ...]:
    buckets = getattr(plan, "buckets", plan)
    if isinstance(buckets, int | float):
        buckets = [buckets]
    if not isinstance(buckets, Sequence):
        raise TypeError(
            f"plan is a {type(plan).__name__}, but must be a BucketPlan, a number of"
            " bytes or a sequence of them, for example"
            " explain(optax_npu.bucket_plan(params), (2, 8))."
        )
    sizes = tuple(int(getattr(bucket, "nbytes", bucket)) for bucket in buckets)
    if not sizes or min(sizes) < 0:
        raise ValueError(
            f"plan has the buckets {sizes}, but needs at least one, and none below 0"
            " bytes."
        )
    return sizes


def _mesh_shape(mesh_shape: Any) -> tuple[int, int]:
    shape = getattr(mesh_shape, "shape", mesh_shape)
    if isinstance(shape, Mapping):
        shape = tuple(shape.values())
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    shape = (1, *shape) if len(shape) == 1 else shape
    if len(shape) != 2 or min(shape) < 1:
        raise ValueError(
            f"mesh_shape={mesh_shape!r}, but must be (nodes, devices_per_node), both at"
            " least 1, or a mesh with these two axes, such as"
            " optax_npu.two_level_mesh()."
        )
    return shape


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"
