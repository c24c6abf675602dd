# SPDX-License-Identifier: Apache-2.0
"""The cost model: what a reduction takes on given links.

A message of `s` bytes takes ``a + b s`` seconds: latency plus bytes over bandwidth.
With `n` nodes of `g` devices, `N = n g`, `R` network cards per node, latency and
seconds per byte `a_i`, `b_i` inside a node and `a_x`, `b_x` between nodes, an
all-reduce of `S` bytes per device takes

================================  ======================================================
ring, one card                    2(N-1) a_x + 2 S (N-1)/N b_x
ring, R cards                     2(N-1) a_x + max(2 S/R (N-1)/N b_x, 2 S (N-1)/N b_i)
halving and doubling              2 log2 N a_x + max(2 S/R (n-1)/n b_x, 2 S (N-1)/N b_i)
double tree, R cards              2(log2 n a_x + (g-1) a_i) + max(2 S/R b_x, 2 S b_i)
leader (reduce, AR, broadcast)    2((g-1) a_i + S b_i) + 2(n-1) a_x + 2 S (n-1)/n b_x
two levels (RS, AR, AG)           2((g-1) a_i + S (g-1)/g b_i)
                                  + 2(n-1) a_x + 2 S/g (n-1)/n (g/R) b_x
two levels, K buckets pipelined   fill + (K-1) max(T_rs + T_ag, T_ar)
================================  ======================================================

after Hockney's model, Thakur et al. 2005 (ring, halving and doubling), Sanders et al.
2009 (double tree) and Cho et al. 2019 (two levels). The arithmetic of the reduction is
left out. Every figure is an argument: put in what you measured.
"""

import math
from collections.abc import Sequence

from optax_npu._links import Links


def flat_ring(size: float, nodes: int, devices: int, links: Links) -> float:
    """Seconds of a ring over all devices that crosses nodes on one card."""
    n = nodes * devices
    return 2 * (n - 1) * links.inter_latency + 2 * size * (n - 1) / n / (
        links.inter_bandwidth
    )


def multi_rail_ring(size: float, nodes: int, devices: int, links: Links) -> float:
    """Seconds of as many rings as a node has cards."""
    n, rails = nodes * devices, links.cards(devices)
    share = 2 * size * (n - 1) / n
    between, inside = (
        share / rails / links.inter_bandwidth,
        share / links.intra_bandwidth,
    )
    return 2 * (n - 1) * links.inter_latency + max(between, inside)


def halving_doubling(size: float, nodes: int, devices: int, links: Links) -> float:
    """Seconds of recursive halving and doubling."""
    n, rails = nodes * devices, links.cards(devices)
    between = 2 * size / rails * (nodes - 1) / nodes / links.inter_bandwidth
    inside = 2 * size * (n - 1) / n / links.intra_bandwidth
    return 2 * math.log2(n) * links.inter_latency + max(between, inside)


def double_tree(size: float, nodes: int, devices: int, links: Links) -> float:
    """Seconds of two complementary trees over the nodes."""
    steps = math.log2(nodes) * links.inter_latency + (devices - 1) * links.intra_latency
    between = 2 * size / links.cards(devices) / links.inter_bandwidth
    return 2 * steps + max(between, 2 * size / links.intra_bandwidth)


def leader(size: float, nodes: int, devices: int, links: Links) -> float:
    """Seconds of: reduce to one device per node, all-reduce those, broadcast."""
    inside = (devices - 1) * links.intra_latency + size / links.intra_bandwidth
    between = (nodes - 1) * (links.inter_latency + size / nodes / links.inter_bandwidth)
    return 2 * inside + 2 * between


def stage_seconds(
    size: float, nodes: int, devices: int, links: Links, steps: str = "ring"
) -> tuple[float, float]:
    """The two parts of a two-level all-reduce.

    Args:
      size: Bytes per device.
      nodes: Nodes.
      devices: Devices of a node.
      links: The links.
      steps: ``"ring"``, or ``"log"`` for logarithmic steps between nodes.

    Returns:
      Seconds inside the nodes (reduce-scatter plus all-gather), and between them.
    """
    inside = (
        2
        * (devices - 1)
        * (links.intra_latency + size / devices / links.intra_bandwidth)
    )
    count = math.log2(nodes) if steps == "log" else nodes - 1
    per_card = size / links.cards(devices)
    moved = 2 * per_card * (nodes - 1) / nodes / links.inter_bandwidth
    return inside, 2 * count * links.inter_latency + moved


def two_level(
    size: float, nodes: int, devices: int, links: Links, steps: str = "ring"
) -> float:
    """Seconds of reduce-scatter, all-reduce between nodes, all-gather."""
    return sum(stage_seconds(size, nodes, devices, links, steps))


def pipelined(sizes: Sequence[float], nodes: int, devices: int, links: Links) -> float:
    """Seconds of two-level all-reduces whose stages overlap from bucket to bucket."""
    stages = [stage_seconds(size, nodes, devices, links) for size in sizes]
    return sum(stages[0]) + sum(max(stage) for stage in stages[1:])


def flat(size: float, nodes: int, devices: int, links: Links) -> float:
    """Seconds of a flat all-reduce: the faster of rings and trees, as NCCL chooses."""
    if nodes == 1:
        return stage_seconds(size, 1, devices, links)[0]
    ring = multi_rail_ring(size, nodes, devices, links)
    return min(ring, double_tree(size, nodes, devices, links))


def collective_seconds(
    kind: str, size: float, nodes: int, devices: int, links: Links, node: int
) -> float:
    """Seconds of one collective of a compiled program.

    Args:
      kind: ``"all-reduce"``, ``"reduce-scatter"``, ``"all-gather"``, …
      size: The whole vector of one device, in bytes.
      nodes: Nodes over which one group spreads.
      devices: Members of a group on one node.
      links: The links.
      node: Devices of a node; groups on it share its cards.

    Returns:
      Its duration once all members have arrived.
    """
    members = nodes * devices
    if members == 1:
        return 0.0
    if kind in ("collective-permute", "send-recv", "collective-broadcast"):
        hop = (links.inter_latency, links.inter_bandwidth * links.cards(node) / node)
        inside = (links.intra_latency, links.intra_bandwidth)
        latency, bandwidth = hop if nodes > 1 else inside
        return latency + size / bandwidth
    rounds = 2 if kind == "all-reduce" else 1
    share = rounds * size * (members - 1) / members
    if nodes == 1:
        latency = rounds * (members - 1) * links.intra_latency
        return latency + share / links.intra_bandwidth
    rails = links.cards(node) * devices / node
    inside = share / links.intra_bandwidth if devices > 1 else 0.0
    ring = rounds * (members - 1) * links.inter_latency + max(
        share / rails / links.inter_bandwidth, inside
    )
    if kind != "all-reduce":
        return ring
    steps = math.log2(nodes) * links.inter_latency + (devices - 1) * links.intra_latency
    whole = 2 * size / links.intra_bandwidth if devices > 1 else 0.0
    return min(ring, 2 * steps + max(2 * size / rails / links.inter_bandwidth, whole))


def bytes_between_nodes(
    kind: str, size: float, nodes: int, devices: int, node: int
) -> float:
    """Bytes that one node sends to others in a collective (all its groups)."""
    members, groups = nodes * devices, max(1, node // devices)
    if nodes == 1:
        return 0.0
    if kind in ("collective-permute", "send-recv", "collective-broadcast"):
        return size * groups
    rounds = 2 if kind == "all-reduce" else 1
    return groups * rounds * size * (members - 1) / members


def best_last_bucket(
    size: float, latency: float, seconds_per_byte: float, update_seconds_per_byte: float
) -> float:
    """The bytes of the last of two buckets that expose least: (y S - a)/(b + y).

    Args:
      size: `S`, bytes of all gradients.
      latency: `a`, fixed seconds of one reduction.
      seconds_per_byte: `b`, of a reduction.
      update_seconds_per_byte: `y`, of the optimizer, per byte of gradient.

    Returns:
      Bytes between 0 and `S`. Larger: the updates of the first bucket end before the
      last reduction does. Smaller: after.
    """
    best = (update_seconds_per_byte * size - latency) / (
        seconds_per_byte + update_seconds_per_byte
    )
    return min(max(best, 0.0), size)


def exposed_seconds(
    sizes: Sequence[float],
    backward_seconds: float,
    latency: float,
    seconds_per_byte: float,
    update_seconds_per_byte: float,
    *,
    tail: bool = True,
) -> float:
    """Seconds from the end of the backward pass to the end of the step.

    Args:
      sizes: Bytes of the buckets, in the order of their reduction. A bucket is ready
        when that share of the backward pass is done.
      backward_seconds: Duration of the backward pass.
      latency: Fixed seconds of one reduction.
      seconds_per_byte: Of a reduction.
      update_seconds_per_byte: Of the optimizer.
      tail: Whether a bucket is updated as soon as it is there (and the verdict is).

    Returns:
      Reductions and updates that nothing hides.
    """
    total, ready, reduced = sum(sizes), 0.0, 0.0
    updated = backward_seconds
    for size in sizes:
        ready += backward_seconds * size / total if total else 0.0
        reduced = max(ready, reduced) + latency + seconds_per_byte * size
        updated = max(reduced, updated) + update_seconds_per_byte * size
    if not tail:
        updated = max(reduced, backward_seconds) + update_seconds_per_byte * total
    return updated - backward_seconds
