# SPDX-License-Identifier: Apache-2.0
"""Gradient all-reduce on eight simulated devices, against a plain `lax.pmean` tree map.

    python -m benchmarks.all_reduce [--quick] [--markdown FILE]

Times are ratios to the plain tree map, all contenders in alternation in one process.
The number of collectives and the bytes that leave a node are read from the compiled
programs. For real links between real processes see `benchmarks.slow_link`.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_npu

from ._compare import alternate, machine, ratios, table

AXES = ("node", "device")
FLAT = (AXES,)  # both axes as one level
MIB = 2**20
TREES = {
    "8 leaves of 4 MiB": [(1024, 1024)] * 8,
    "2,000 leaves of 2 KB": [(500,)] * 2000,
}
Reduce = Callable[[Any], Any]


def plain(tree: Any) -> Any:
    return jax.tree.map(lambda g: lax.pmean(g, AXES), tree)


def ours(axis_name: Any, **how: Any) -> Reduce:
    tx = optax_npu.hierarchical_all_reduce(axis_name, **how)
    return lambda tree: tx.update(tree, tx.init(tree))[0]


def whole_optimizer(axis_name: Any) -> Reduce:
    """Stages 1 to 7 with an optimizer that does nothing, to see their price."""
    tx = optax_npu.npu_optimizer(
        optax.identity(), is_distributed=True, axis_name=axis_name
    )
    return lambda tree: tx.update(tree, tx.init(tree), tree)[0]


CONTENDERS: dict[str, Reduce] = {
    "plain `jax.tree.map(pmean)`": plain,
    "one level, every leaf alone (`num_packs=0`)": ours(FLAT, num_packs=0),
    "one level, packed (`num_packs=1`)": ours(FLAT),
    "one level, buckets of `npu_optimizer`": whole_optimizer(FLAT),
    "two levels 2x4, every leaf alone": ours(AXES, num_packs=0),
    "two levels 2x4, packed": ours(AXES),
    "two levels 2x4, packed, bfloat16 between": ours(
        AXES, inter_node_dtype=jnp.bfloat16
    ),
    "two levels 2x4, buckets of `npu_optimizer`": whole_optimizer(AXES),
}


class Built(NamedTuple):
    """A compiled reduction."""

    compiled: Any
    trace_seconds: float
    compile_seconds: float


def local_gradients(mesh: Mesh, shapes: list[tuple[int, ...]]) -> list[jax.Array]:
    """Different values on every device, with no copy to get at the local part."""
    sharding = NamedSharding(mesh, P(AXES))
    random = np.random.default_rng(0)
    tree = []
    for first, *rest in shapes:
        values = random.standard_normal((mesh.size * first, *rest), np.float32)
        tree.append(jax.device_put(values, sharding))
    return tree


def build(reduce: Reduce, mesh: Mesh, tree: Any) -> Built:
    step = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=P(AXES), out_specs=P()))
    start = time.perf_counter()
    lowered = step.lower(tree)
    traced = time.perf_counter()
    compiled = lowered.compile()
    return Built(compiled, traced - start, time.perf_counter() - traced)


def compare(shapes: list[tuple[int, ...]], rounds: int) -> str:
    """The table of one tree."""
    mesh = optax_npu.two_level_mesh(devices_per_node=4)
    tree = local_gradients(mesh, shapes)
    built = {name: build(reduce, mesh, tree) for name, reduce in CONTENDERS.items()}
    programs = {
        name: (lambda compiled=b.compiled: compiled(tree)) for name, b in built.items()
    }
    times = alternate(programs, rounds)
    base, *_ = CONTENDERS
    ratio = ratios(times, base)
    rows = []
    for name, b in built.items():
        report = optax_npu.schedule_report(b.compiled, devices_per_node=4)
        total = sum(int(np.prod(shape)) * 4 for shape in shapes)
        rows.append(
            [
                name,
                len(report.rows),
                ratio[name],
                1e3 * float(np.median(times[name])),
                b.trace_seconds,
                b.compile_seconds,
                report.bytes_between_nodes / total,
            ]
        )
    return table(
        [
            "reduction",
            "collectives",
            "time / plain",
            "ms",
            "trace, s",
            "compile, s",
            "bytes out of a node / S",
        ],
        rows,
    )


def traffic(nodes: int) -> str:
    """Bytes out of each node per step, from the compiled programs."""
    per_node = 8 // nodes
    mesh = optax_npu.two_level_mesh(devices_per_node=per_node)
    shapes = TREES["8 leaves of 4 MiB"]
    tree = local_gradients(mesh, shapes)
    size = sum(int(np.prod(shape)) * 4 for shape in shapes)
    lowest = 2 * size * (nodes - 1) / nodes
    rows = []
    for name, reduce, width in (
        ("flat, node-major", ours(FLAT, num_packs=0), 4),
        ("two levels", ours(AXES, num_packs=0), 4),
        (
            "two levels, bfloat16 between",
            ours(AXES, num_packs=0, inter_node_dtype=jnp.bfloat16),
            2,
        ),
    ):
        compiled = build(reduce, mesh, tree).compiled
        report = optax_npu.schedule_report(compiled, devices_per_node=per_node)
        out, floor = report.bytes_between_nodes, lowest * width / 4
        rows.append([f"{nodes}x{per_node}", name, out / MIB, floor / MIB, out / floor])
    return table(
        ["mesh", "reduction", "MiB out of a node", "minimum, MiB", "ratio"], rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    parts = []
    for name, shapes in TREES.items():
        parts.append(f"### {name}\n\n" + compare(shapes, 5 if args.quick else 15))
        print(parts[-1], flush=True)
    parts.append("### Bytes between nodes\n\n" + "\n".join(map(traffic, (2, 4))))
    print(parts[-1], flush=True)
    parts.append(machine() + "\n")
    print(parts[-1])
    if args.markdown:
        args.markdown.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
