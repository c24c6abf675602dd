# SPDX-License-Identifier: Apache-2.0
"""Schedules of the real H100 and TPU compilers, made here without the chips.

The reference step: 8 dense layers of 2048 x 2048, float32, on 2 x 8 devices. One layer
of 8 must be reduced last, so 7/8 of Adam's bytes can be hidden at best. LAMB writes
four arrays per layer, the last one behind a norm; without loss scaling XLA hides 26/32.
"""

import functools
from typing import Any

import pytest

import optax_npu
from benchmarks.reference_step import (
    OPTIMIZERS,
    compile_step,
    no_loss_scale,
    usual_recipe,
)
from tests._aot import TARGETS, aot_mesh
from tests._hand_made_steps import hand_made

BUILDERS = {
    "no loss scale": no_loss_scale,
    "recipe": usual_recipe,
    **{f"verdict {v}": hand_made(v) for v in ("before last", "first", "last", "after")},
}


@functools.cache
def compiled(target: str, builder: str, optimizer: str) -> Any:
    mesh = aot_mesh(target)
    return compile_step(BUILDERS[builder], OPTIMIZERS[optimizer], mesh)


@functools.cache
def report(target: str, builder: str, optimizer: str) -> optax_npu.ScheduleReport:
    return optax_npu.schedule_report(compiled(target, builder, optimizer))


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
