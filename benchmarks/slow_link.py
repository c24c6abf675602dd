# SPDX-License-Identifier: Apache-2.0
"""Two and four processes of two devices each, joined by a slow network.

    sudo python -m benchmarks.slow_link [--processes 2 4] [--mbit 200] [--mib 8]

Every process is a node in a network namespace with a card of `--mbit` (`_nodes.py`);
between its two devices data moves through memory. One mean of `--mib` of float32 per
device, all contenders in alternation in one run; the time is process 0's, and the
bytes are what its network card counted.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_npu
from tests.multiprocess.jobs import Job, free_port
from tests.multiprocess.worker import end_with_parent

from ._compare import machine, seconds, table
from ._nodes import Nodes

DEVICES = 2
AXES = ("node", "device")
MIB = 2**20
BASE = "flat `pmean`, node-major"


def contenders() -> dict[str, tuple[Mesh, Callable[[Any], Any]]]:
    """Per name the order of the devices and the reduction."""
    rows = optax_npu.two_level_mesh()
    columns = Mesh(rows.devices.T, AXES[::-1])

    def two_level(**how: Any) -> tuple[Mesh, Callable[[Any], Any]]:
        return rows, lambda x: optax_npu.hierarchical_pmean(x, AXES, **how)

    return {
        BASE: (rows, lambda x: lax.pmean(x, AXES)),
        "flat `pmean`, nodes interleaved": (
            columns,
            lambda x: lax.pmean(x, AXES[::-1]),
        ),
        "two levels": two_level(num_packs=0),
        "two levels, bfloat16 between": two_level(
            num_packs=0, inter_node_dtype=jnp.bfloat16
        ),
    }


def program(mesh: Mesh, reduce: Callable[[Any], Any], mib: int) -> Callable[[], Any]:
    """A call that reduces a fixed array of `mib` per device."""
    shape = (mesh.size * mib * 2, MIB // 8)  # float32
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    local = np.random.default_rng(0).standard_normal((2 * mib, MIB // 8), np.float32)
    x = jax.make_array_from_callback(shape, sharding, lambda _: local)
    step = jax.shard_map(reduce, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P())
    compiled = jax.jit(step).lower(x).compile()
    return lambda: compiled(x)


def sent_bytes() -> int:
    """What the card of this node has sent so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith("card:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("this process is not on a node: it has no network card 'card'")


def worker(options: argparse.Namespace) -> None:
    end_with_parent()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    address, count, index = options.worker
    jax.distributed.initialize(address, int(count), int(index))
    programs = {
        name: program(mesh, reduce, options.mib)
        for name, (mesh, reduce) in contenders().items()
    }
    meet = program(optax_npu.two_level_mesh(), lambda x: lax.psum(x[0, :8], AXES), 1)
    for run in (*programs.values(), meet):
        seconds(run)
    found: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "bytes": []} for name in programs
    }
    for _ in range(options.rounds):
        for name, run in programs.items():
            seconds(meet)
            before = sent_bytes()
            found[name]["seconds"].append(seconds(run))
            seconds(meet)  # what the card still had to send is counted too
            found[name]["bytes"].append(sent_bytes() - before)
    if int(index) == 0:
        options.out.write_text(json.dumps(found))
    seconds(meet)


def measure(processes: int, options: argparse.Namespace, folder: Path) -> str:
    """The table for one number of processes."""
    out = folder / "found.json"
    passed = ["--mib", options.mib, "--rounds", options.rounds, "--out", out]
    with Nodes(processes, options.mbit) as nodes:
        address = f"{nodes.addresses[0]}:{free_port()}"
        commands = [
            [*nodes.inside(i), sys.executable, "-m", "benchmarks.slow_link"]
            + [str(x) for x in (*passed, "--worker", address, processes, i)]
            for i in range(processes)
        ]
        with Job(commands, folder) as job:
            job.succeed(options.limit)
    found = json.loads(out.read_text())
    return summary(processes, options, found)


def summary(processes: int, options: argparse.Namespace, found: Any) -> str:
    size = options.mib * MIB
    floor = 2 * size * (processes - 1) / processes
    wire = floor * 8 / (options.mbit * 1e6)
    base = np.asarray(found[BASE]["seconds"])
    rows = []
    for name, got in found.items():
        times = np.asarray(got["seconds"])
        out = float(np.median(got["bytes"]))
        ratio, typical = float(np.median(times / base)), float(np.median(times))
        rows.append([name, ratio, typical, out / MIB, out / floor])
    head = (
        f"### {processes} processes of {DEVICES} devices, {options.mbit:g} Mbit/s per"
        f" node, {options.mib} MiB per device\n\nAt least {floor / MIB:.3g} MiB of"
        f" float32 must leave a node: {wire:.2f} s on this card.\n\n"
    )
    header = ["reduction", "time / flat", "s", "MiB out of a node", "/ minimum"]
    return head + table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, default=200, help="of each node's card")
    parser.add_argument("--mib", type=int, default=8, help="per device")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds, then give up"
    )
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    parts, began = [], time.time()
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            parts.append(measure(processes, options, Path(folder)))
        print(parts[-1], flush=True)
    parts.append(f"{machine()} {time.time() - began:.0f} s in all.\n")
    print(parts[-1])
    if options.markdown:
        options.markdown.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
