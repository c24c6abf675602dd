# SPDX-License-Identifier: Apache-2.0
"""Schedules of the reference step, for H100s and TPU slices that need not be there.

    python -m benchmarks.schedule [--target h100 v5e] [--model dense bert]
                                  [--markdown FILE] [--plots DIR]

The same step (8 dense layers, or the main job's BERT, see `reference_step.py`) without
loss scaling, with the usual recipe, and with `npu_optimizer`, flat and in two levels:
what the compiler keeps in flight beside the optimizer, what the verdict costs, and the
estimated step time, relative to the recipe, in one cost model (`optax_npu.Links`,
`optax_npu.Chip`). Shares and bytes are read from the compiled program and are exact;
times are estimates.
"""

import argparse
import importlib.metadata
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import optax_npu
from benchmarks.reference_step import (
    OPTIMIZERS,
    Builder,
    bert,
    compile_step,
    dense,
    no_loss_scale,
    ours,
    usual_recipe,
)
from examples.aot import h100, mesh_of, v5e

TARGETS = {
    "h100": (h100, ("h100_ib", "h100_shared_nic")),
    "v5e": (v5e, ("v5e_dcn",)),
}
MODELS = {"dense": dense, "bert": bert}
PROGRAMS: dict[str, tuple[Builder, bool]] = {
    "usual recipe": (usual_recipe, False),
    "no loss scale": (no_loss_scale, False),
    "ours, flat": (ours, True),
    "ours, two-level": (ours, False),
}


class Row(NamedTuple):
    """One program on one target, with one report per set of links."""

    target: str
    model: str
    optimizer: str
    program: str
    reports: tuple[optax_npu.ScheduleReport, ...]


def measure(target: str, model: str, optimizer: str) -> Iterator[Row]:
    """Compiles and reads all programs; the usual recipe first."""
    devices, networks = TARGETS[target]
    mesh = mesh_of(devices())
    line = Mesh(mesh.devices.reshape(-1), ("data",))
    for program, (builder, flat) in PROGRAMS.items():
        where = line if flat else mesh
        compiled = compile_step(MODELS[model](), builder, OPTIMIZERS[optimizer], where)
        reports = [
            optax_npu.schedule_report(compiled, devices_per_node=node, links=links)
            for node in [8 if target == "h100" else None]
            for links in networks
        ]
        yield Row(target, model, optimizer, program, tuple(reports))


def table(rows: list[Row]) -> str:
    """The rows as Markdown; ratios are to the usual recipe and to no loss scale."""
    lines = [
        "| target | model | optimizer | step | hidden share | reductions in backward"
        " | elementwise traffic | out of a node | estimated time |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        base = _find(rows, row, "usual recipe")
        plain = _find(rows, row, "no loss scale")
        first = row.reports[0]
        times = ", ".join(
            f"{mine.step_seconds / theirs.step_seconds:.2f}"
            f" ({1e3 * mine.step_seconds:.2f} ms, {mine.links.name})"
            for mine, theirs in zip(row.reports, base.reports, strict=True)
        )
        traffic = first.elementwise_traffic / plain.reports[0].elementwise_traffic
        lines.append(
            f"| {row.target} | {row.model} | {row.optimizer} | {row.program}"
            f" | {first.share:.1%}"
            f" | {first.entering_in_backward} of {first.entering} | {traffic:.2f}"
            f" | {first.bytes_between_nodes / 1e6:.0f} MB | {times} |"
        )
    return "\n".join(lines)


def _find(rows: list[Row], like: Row, program: str) -> Row:
    same = (*like[:3], program)
    return next(row for row in rows if row[:4] == same)


def _versions() -> str:
    names = ("jax", "optax", "libtpu", "jax-cuda12-plugin")
    found = {dist.metadata["Name"]: dist.version for dist in _installed(names)}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def _installed(names: tuple[str, ...]) -> Iterator[Any]:
    for dist in importlib.metadata.distributions():
        if dist.metadata["Name"] in names:
            yield dist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--plots", type=Path, help="folder for one timeline per row")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rows: list[Row] = []
    for case in itertools.product(args.target, args.model, OPTIMIZERS):
        for row in measure(*case):
            rows.append(row)
            print("==", *row[:4])
            print(row.reports[0].summary(), flush=True)
            if args.plots:
                name = "_".join(row[:4]).replace(", ", "_").replace(" ", "_")
                args.plots.mkdir(parents=True, exist_ok=True)
                row.reports[0].plot(args.plots / f"{name}.svg")
    text = f"{_versions()}\n\n{table(rows)}\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
