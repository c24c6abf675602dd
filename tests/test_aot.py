# SPDX-License-Identifier: Apache-2.0
"""Schedules of the real H100 and TPU compilers, made here without the chips.

The reference step: 8 dense layers of 2048 x 2048, float32, on 2 x 8 devices. One layer
of 8 must be reduced last, so 7/8 of Adam's bytes can be hidden at best. LAMB writes
four arrays per layer, the last one behind a norm; without loss scaling XLA hides 26/32.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import optax_npu
from benchmarks.reference_step import (
    OPTIMIZERS,
    compile_step,
    dense,
    no_loss_scale,
    ours,
    usual_recipe,
)
from tests._aot import TARGETS, aot_mesh
from tests._hand_made_steps import hand_made

BUILDERS = {
    "no loss scale": no_loss_scale,
    "recipe": usual_recipe,
    "two-level": ours,
    "flat": ours,
    **{f"verdict {v}": hand_made(v) for v in ("before last", "first", "last", "after")},
}


@functools.cache
def compiled(target: str, builder: str, optimizer: str) -> Any:
    mesh = aot_mesh(target, ("data",) if builder == "flat" else ("node", "device"))
    return compile_step(dense(), BUILDERS[builder], OPTIMIZERS[optimizer], mesh)


@functools.cache
def report(
    target: str, builder: str, optimizer: str, links: str | None = None
) -> optax_npu.ScheduleReport:
    program = compiled(target, builder, optimizer)
    node = 8 if target == "h100" else None
    return optax_npu.schedule_report(program, devices_per_node=node, links=links)


def time_over_recipe(target: str, builder: str, optimizer: str, links: str) -> float:
    """Estimated step time over that of the usual recipe with its flat psum."""
    mine, recipe = (report(target, b, optimizer, links) for b in (builder, "recipe"))
    return mine.step_seconds / recipe.step_seconds


@pytest.mark.parametrize(("optimizer", "share"), [("adam", 7 / 8), ("lamb", 26 / 32)])
def test_h100_without_loss_scaling(optimizer, share):
    found = report("h100", "no loss scale", optimizer)
    assert found.share == pytest.approx(share, abs=1e-3)
    assert (found.entering_in_backward, found.entering) == (7, 8)
    assert found.barrier == ""


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_usual_recipe_waits_for_everything(target, optimizer):
    found = report(target, "recipe", optimizer)
    assert found.share < (0.01 if (target, optimizer) != ("v5e", "lamb") else 0.25)
    assert "reference_step.py" in found.barrier


@pytest.mark.parametrize("target", TARGETS)
def test_levels_sizes_and_traffic_of_a_flat_reduction(target):
    found = report(target, "no loss scale", "adam")
    layer = 2048 * 2048 * 4
    if target == "h100":
        rows = found.gradient_rows
        assert [row.kind for row in rows] == ["all-reduce"] * 8
        assert {(row.level, row.group_size, row.bytes) for row in rows} == {
            ("both", 16, layer)
        }
        assert found.bytes_between_nodes == 8 * 2 * layer * 15 / 16
    else:
        kinds = [(row.kind, row.level, row.bytes) for row in found.gradient_rows]
        for stage in (
            ("reduce-scatter", "intra", layer),
            ("all-reduce", "inter", layer // 8),
            ("all-gather", "intra", layer),
        ):
            assert kinds.count(stage) == 8
        assert found.bytes_between_nodes == 8 * 2 * layer / 2
    assert all(row.dtype == "f32" for row in found.gradient_rows)
    assert found.devices_per_node == 8


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_h100_verdict_before_the_last_bucket(optimizer):
    share = 7 / 8 if optimizer == "adam" else 26 / 32
    program = compiled("h100", "verdict before last", optimizer)
    found = optax_npu.assert_tail_overlap(
        program, min_share=share - 1e-3, min_in_backward=7
    )
    flags = [row for row in found.rows if not row.is_gradient]
    assert [row.dtype for row in flags] == ["s32"]
    assert found.rows.index(flags[0]) == 7


@pytest.mark.parametrize("verdict", ["first", "last", "after"])
def test_h100_mutants_are_caught(verdict):
    program = compiled("h100", f"verdict {verdict}", "adam")
    with pytest.raises(optax_npu.TailOverlapError) as caught:
        optax_npu.assert_tail_overlap(program, min_share=0.87, min_in_backward=7)
    found = caught.value.report
    if verdict == "first":
        assert found.entering_in_backward == 0
    else:
        assert found.share < 0.01


def test_an_extra_pass_for_the_verdict_costs_one_read_per_gradient():
    layers = 8 * 2048 * 2048 * 4
    plain = report("h100", "no loss scale", "adam").elementwise_traffic
    ours = report("h100", "verdict before last", "adam").elementwise_traffic
    assert ours - plain == pytest.approx(layers, rel=0.01)


@pytest.mark.parametrize("reduction", ["flat", "two-level"])
@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_h100_loss_scaling_keeps_the_tail(optimizer, reduction):
    found = report("h100", reduction, optimizer)
    plain = report("h100", "no loss scale", optimizer)
    assert found.share >= plain.share - 1e-3 >= 0.81
    assert found.share >= 0.87 or optimizer == "lamb"
    assert (found.entering_in_backward, found.entering) == (7, 8)
    assert found.elementwise_traffic <= 1.15 * plain.elementwise_traffic
    assert found.barrier == ""


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_v5e_slices_keep_the_tail(optimizer):
    found = report("v5e", "two-level", optimizer)
    plain = report("v5e", "no loss scale", optimizer)
    assert found.share >= 0.85
    assert found.share >= plain.share - 1e-3
    assert found.elementwise_traffic <= 1.15 * plain.elementwise_traffic
    assert found.bytes_between_nodes == pytest.approx(
        plain.bytes_between_nodes, rel=1e-3
    )
    assert found.step_seconds < report("v5e", "recipe", optimizer).step_seconds


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_h100_two_levels_take_turns_in_order(optimizer):
    rows = report("h100", "two-level", optimizer).rows
    layer = 2048 * 2048 * 4
    stages = [
        ("reduce-scatter", "intra", layer),
        ("all-reduce", "inter", layer // 8),
        ("all-gather", "intra", layer),
    ]
    gradients = [row for row in rows if row.is_gradient]
    for stage in stages:
        assert [(r.kind, r.level, r.bytes) for r in gradients].count(stage) == 8
    flags = [row for row in rows if not row.is_gradient]
    assert flags
    assert {row.dtype for row in flags} == {"s32"}
    first = min(rows.index(flag) for flag in flags)
    scatters = [rows.index(r) for r in gradients if r.kind == "reduce-scatter"]
    assert sum(position < first for position in scatters) == 7


# Limits are what these compilers reach today, rounded up; see benchmarks/schedule.py.
@pytest.mark.parametrize(
    ("target", "reduction", "optimizer", "links", "limit"),
    [
        ("h100", "flat", "adam", "h100_ib", 0.92),
        ("h100", "flat", "lamb", "h100_ib", 0.93),
        ("h100", "two-level", "adam", "h100_shared_nic", 0.60),
        ("h100", "two-level", "lamb", "h100_shared_nic", 0.60),
    ],
)
def test_estimated_time_over_the_recipe(target, reduction, optimizer, links, limit):
    assert time_over_recipe(target, reduction, optimizer, links) <= limit


def test_the_example_runs(tmp_path):
    aot_mesh("h100")
    root = Path(__file__).parent.parent
    script = root / "examples" / "04_tail_overlap.py"
    sizes = ["--layers", "1", "--hidden", "64", "--target", "h100"]
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path), *sizes],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for part in (
        "jit_step: 16 devices",
        "clip_by_global_norm",
        "two-level: two levels",
    ):
        assert part in done.stdout
    assert (tmp_path / "h100.svg").stat().st_size > 1000
