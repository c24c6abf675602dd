# SPDX-License-Identifier: Apache-2.0
"""Reading schedules: small programs written by hand, saved ones of real compilers."""

import builtins
import gzip
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_npu
from optax_npu import Chip, Links, assert_tail_overlap, schedule_report
from optax_npu._hlo import Instruction, parse_module
from optax_npu._hlo_work import flops, traffic
from optax_npu._replica_groups import replica_groups

LAYER = 2048 * 2048 * 4
# 1 us per kernel and nothing else: times can be added up by hand.
COUNTING = Chip("counting", 1e30, 1e30, 1e30, launch_seconds=1e-6)
PLAIN = Links("plain", 1e9, 1e9, 1, intra_latency=0.0, inter_latency=0.0)


def saved(name: str) -> str:
    path = Path(__file__).parent / "hlo" / f"{name}.txt.gz"
    return gzip.decompress(path.read_bytes()).decode()


def program(*lines: str, devices: int = 4, extra: str = "") -> str:
    return "\n".join(
        [
            f"HloModule jit_step, is_scheduled=true, num_partitions={devices}",
            extra,
            "%sum (a: f32[], b: f32[]) -> f32[] {",
            "  %a = f32[] parameter(0)",
            "  %b = f32[] parameter(1)",
            "  ROOT %add = f32[] add(%a, %b)",
            "}",
            "",
            "ENTRY %main (x: f32[1000]) -> f32[1000] {",
            *(f"  {line}" for line in lines),
            "}",
        ]
    )


GROUPS = "replica_groups={{0,1,2,3}}, to_apply=%sum"
TAIL = program(
    "%x = f32[1000]{0} parameter(0)",
    "%y = f32[1000]{0} parameter(1)",
    "%g0 = f32[1000]{0} negate(%x)",
    f"%s0 = f32[1000]{{0}} all-reduce-start(%g0), {GROUPS}",
    "%g1 = f32[1000]{0} negate(%y)",
    "%d0 = f32[1000]{0} all-reduce-done(%s0)",
    f"%s1 = f32[1000]{{0}} all-reduce-start(%g1), {GROUPS}",
    "%u0 = f32[1000]{0} add(%d0, %x)",
    "%d1 = f32[1000]{0} all-reduce-done(%s1)",
    "%u1 = f32[1000]{0} add(%d1, %y)",
    "ROOT %out = (f32[1000]{0}, f32[1000]{0}) tuple(%u0, %u1)",
)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=[1,4]<=[4]", [[0, 1, 2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("channel_id=1", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=mesh['n'=2,'d'=2] {'d'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['n'=2,'d'=2] {'n'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['n'=2,'d'=2] {'n','d'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['d'=4] {'d':(2)2}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['d'=4] {'d':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=@mesh<n=2,d=2> {d}", [[0, 1], [2, 3]]),
        (
            "replica_groups=mesh['n'=2,'d'=2], device_ids=([2,2]T(1,0)) {'d'}",
            [[0, 2], [1, 3]],
        ),
        (
            "replica_groups=mesh['n'=2,'d'=2], device_ids=(3,2,1,0) {'d'}",
            [[3, 2], [1, 0]],
        ),
    ],
)
def test_replica_groups_in_every_notation(text, groups):
    line = Instruction("x", "all-reduce", "f32[1]", (), f", {text}, to_apply=%sum")
    assert replica_groups(line, 4) == groups


def test_levels_come_from_groups_and_nodes():
    lines = [
        "%x = f32[1000]{0} parameter(0)",
        "%rs = f32[500]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3}},"
        " dimensions={0}, to_apply=%sum",
        "%ar = f32[500]{0} all-reduce(%rs), replica_groups={{0,2},{1,3}},"
        " to_apply=%sum",
        "%ag = f32[1000]{0} all-gather(%ar), replica_groups=[2,2]<=[4], dimensions={0}",
        "%one = f32[1000]{0} all-reduce(%ag), replica_groups={{0},{1},{2},{3}},"
        " to_apply=%sum",
        f"ROOT %all = f32[1000]{{0}} all-reduce(%one), {GROUPS}",
    ]
    found = schedule_report(program(*lines), devices_per_node=2, links=PLAIN)
    assert [(r.kind, r.level, r.group_size, r.bytes) for r in found.rows] == [
        ("reduce-scatter", "intra", 2, 4000),
        ("all-reduce", "inter", 2, 2000),
        ("all-gather", "intra", 2, 4000),
        ("all-reduce", "none", 1, 4000),
        ("all-reduce", "both", 4, 4000),
    ]
    # Between nodes: 2 groups x 2 x 2000 B x 1/2, and 2 x 4000 B x 3/4.
    assert found.bytes_between_nodes == 4000 + 6000
    text_alone = schedule_report(program(*lines))
    assert {row.level for row in text_alone.rows} == {"intra", "none"}
    assert text_alone.bytes_between_nodes == 0


def test_share_and_order_of_a_tail():
    found = schedule_report(TAIL)
    assert found.optimizer_bytes == 8000
    assert found.hidden_bytes == 4000
    assert found.share == 0.5
    first, second = found.rows
    assert first.beside.names == ("g1",)
    assert second.beside.names == ("u0",)
    assert second.beside.optimizer_bytes == 4000
    assert found.barrier == ""


def test_times_can_be_added_up_by_hand():
    # A group of 4 on one node sends 2 x 4000 B x 3/4 at 1 GB/s: 6 us. Kernels: 1 us.
    found = schedule_report(TAIL, chip=COUNTING, links=PLAIN)
    micro = [1e6 * t for row in found.rows for t in (row.start, row.end, row.exposed)]
    # g0 until 1; s0 1..7 beside g1 (until 2), waits 5; s1 7..13 beside u0, waits 5
    assert micro == pytest.approx([1, 7, 5, 7, 13, 5])
    assert 1e6 * found.step_seconds == pytest.approx(14)
    assert 1e6 * found.exposed_seconds == pytest.approx(10)
    lanes = {s.lane for s in found.timeline.segments}
    assert lanes == {"compute", "links in the node"}


def test_links_of_the_two_levels_work_side_by_side():
    lines = [
        "%x = f32[1000]{0} parameter(0)",
        "%y = f32[1000]{0} parameter(1)",
        "%s0 = f32[1000]{0} all-reduce-start(%x), replica_groups={{0,1},{2,3}},"
        " to_apply=%sum",
        "%s1 = f32[1000]{0} all-reduce-start(%y), replica_groups={{0,2},{1,3}},"
        " to_apply=%sum",
        "%s2 = f32[1000]{0} all-reduce-start(%y), replica_groups={{0,2},{1,3}},"
        " to_apply=%sum",
        "%d0 = f32[1000]{0} all-reduce-done(%s0)",
        "%d1 = f32[1000]{0} all-reduce-done(%s1)",
        "%d2 = f32[1000]{0} all-reduce-done(%s2)",
        "ROOT %out = (f32[1000], f32[1000], f32[1000]) tuple(%d0, %d1, %d2)",
    ]
    found = schedule_report(program(*lines), devices_per_node=2, links=PLAIN)
    # inside 2 x 4000/2 at 1 GB/s; between 2 x 4000/2 on half a card
    times = [(1e6 * row.start, 1e6 * row.end) for row in found.rows]
    assert times == [pytest.approx(t) for t in [(0, 4), (0, 8), (8, 16)]]


def test_a_synchronous_collective_hides_nothing():
    text = program(
        "%x = f32[1000]{0} parameter(0)",
        f"%r = f32[1000]{{0}} all-reduce(%x), {GROUPS}",
        "ROOT %u = f32[1000]{0} add(%r, %x)",
    )
    found = schedule_report(text, chip=COUNTING, links=PLAIN)
    (row,) = found.rows
    assert not row.is_async
    assert 1e6 * row.exposed == pytest.approx(6)
    assert found.share == 0
    assert str(row.beside) == "nothing"


def test_flags_and_losses_are_no_gradients():
    text = program(
        "%x = f32[1000]{0} parameter(0)",
        "%f = s32[] parameter(1)",
        "%l = f32[] parameter(2)",
        f"%flag = s32[] all-reduce(%f), {GROUPS}",
        f"%loss = f32[] all-reduce(%l), {GROUPS}",
        f"%r = f32[1000]{{0}} all-reduce(%x), {GROUPS}",
        "%u = f32[1000]{0} add(%r, %x)",
        "ROOT %out = (f32[1000]{0}, s32[], f32[]) tuple(%u, %flag, %loss)",
    )
    rows = schedule_report(text).rows
    assert [row.is_gradient for row in rows] == [False, False, True]
    assert [row.dtype for row in rows] == ["s32", "f32", "f32"]


def test_a_padded_number_of_a_tpu_is_no_gradient():
    text = program(
        "%x = f32[1,1,128]{2,1,0:T(1,128)} parameter(0)",
        f"ROOT %loss = f32[1,1,128]{{2,1,0:T(1,128)}} all-reduce(%x), {GROUPS}",
    )
    found = schedule_report(text)
    assert not found.rows[0].is_gradient
    assert found.chip.name == "TPU v5e"


def test_collectives_of_the_model_are_no_gradients():
    square = "f32[1000,1000]{1,0}"
    contract = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = program(
        f"%x = {square} parameter(0)",
        f"%p = {square} parameter(1)",
        f"%tp = {square} all-reduce(%x), {GROUPS}",
        f"%dot = {square} dot(%tp, %p), {contract}",
        f"%s = {square} all-reduce-start(%dot), {GROUPS}",
        f"%d = {square} all-reduce-done(%s)",
        f"ROOT %u = {square} add(%d, %p)",
    )
    found = schedule_report(text)
    assert [row.is_gradient for row in found.rows] == [False, True]
    assert [row.in_backward for row in found.rows] == [True, False]
    assert (found.entering, found.entering_in_backward) == (1, 0)


def test_products_of_the_optimizer_do_not_make_its_gradients_part_of_the_model():
    square = "f32[1000,1000]{1,0}"
    contract = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    backward = 'metadata={op_name="jit(step)/transpose(jvp())/dot_general"}'
    text = program(
        f"%x = {square} parameter(0)",
        f"%g = {square} dot(%x, %x), {contract}, {backward}",
        f"%r = {square} all-reduce(%g), {GROUPS}",
        f"ROOT %muon = {square} dot(%r, %r), {contract},"
        ' metadata={op_name="jit(step)/dot_general"}',
    )
    found = schedule_report(text)
    assert found.rows[0].is_gradient
    assert found.optimizer_bytes == 4_000_000


def test_a_model_without_matrix_products_has_a_backward_pass():
    backward = 'metadata={op_name="jit(step)/transpose(jvp())/mul"}'
    text = program(
        "%x = f32[1000]{0} parameter(0)",
        f"%g = f32[1000]{{0}} multiply(%x, %x), {backward}",
        f"%s = f32[1000]{{0}} all-reduce-start(%g), {GROUPS},"
        ' backend_config={"operation_queue_id":"0"}',
        f"%h = f32[1000]{{0}} multiply(%x, %x), {backward}",
        "%d = f32[1000]{0} all-reduce-done(%s)",
        f"%r = f32[1000]{{0}} all-reduce(%h), {GROUPS}",
        "%u = f32[1000]{0} add(%d, %x)",
        "%v = f32[1000]{0} add(%r, %x)",
        "ROOT %out = (f32[1000]{0}, f32[1000]{0}) tuple(%u, %v)",
    )
    found = schedule_report(text)
    assert (found.entering_in_backward, found.entering) == (1, 2)
    assert [row.in_backward for row in found.rows] == [True, False]
    assert found.chip.name == "H100 SXM"


def test_tuples_count_every_array():
    text = program(
        "%x = f32[1000]{0} parameter(0)",
        "%y = bf16[10]{0} parameter(1)",
        f"%r = (f32[1000]{{0}}, bf16[10]{{0}}) all-reduce(%x, %y), {GROUPS}",
        "%a = f32[1000]{0} get-tuple-element(%r), index=0",
        "ROOT %u = f32[1000]{0} add(%a, %x)",
    )
    (row,) = schedule_report(text).rows
    assert (row.bytes, row.dtype) == (4020, "f32")


def test_loops_count_their_trips():
    body = """
%body (t: (s32[], f32[1000])) -> (s32[], f32[1000]) {
  %t = (s32[], f32[1000]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %v = f32[1000]{0} get-tuple-element(%t), index=1
  %w = f32[1000]{0} all-reduce(%v), replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %r = (s32[], f32[1000]{0}) tuple(%i, %w)
}
%cond (t: (s32[], f32[1000])) -> pred[] {
  %t.1 = (s32[], f32[1000]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}"""
    text = program(
        "%x = (s32[], f32[1000]{0}) parameter(0)",
        "ROOT %loop = (s32[], f32[1000]{0}) while(%x), condition=%cond, body=%body,"
        ' backend_config={"known_trip_count":{"n":"5"}}',
        extra=body,
    )
    found = schedule_report(text, chip=COUNTING, links=PLAIN)
    (row,) = found.rows
    assert (row.count, row.inside) == (5, "loop")
    assert 1e6 * row.exposed == pytest.approx(5 * 6)
    assert "all-reducex5" in found.summary().replace(" ", "")


def test_a_slice_of_a_bucket_costs_the_slice():
    fused = """
%unpack (p: f32[1000]) -> f32[10] {
  %p = f32[1000]{0} parameter(0)
  ROOT %s = f32[10]{0} slice(%p), slice={[0:10]}
}
%write (q: f32[1000], r: f32[10]) -> f32[1000] {
  %q = f32[1000]{0} parameter(0)
  %r = f32[10]{0} parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1000]{0} dynamic-update-slice(%q, %r, %z)
}"""
    module = parse_module(
        program(
            "%x = f32[1000]{0} parameter(0)",
            "%part = f32[10]{0} fusion(%x), kind=kLoop, calls=%unpack",
            "ROOT %back = f32[1000]{0} fusion(%x, %part), kind=kLoop, calls=%write",
            extra=fused,
        )
    )
    body = {line.name: line for line in module.computations[module.entry]}
    assert traffic(module, "part", body) == (40, 40)
    assert traffic(module, "back", body) == (40, 40)


@pytest.mark.parametrize(
    "line",
    [
        "f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1},"
        " rhs_contracting_dims={0}",
        "f32[8,16]{1,0} convolution(%a, %b), dim_labels=bf_io->bf",
        'f32[8,16]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm"',
    ],
)
def test_operations_of_a_matrix_product(line):
    module = parse_module(
        program(
            "%a = f32[8,32]{1,0} parameter(0)",
            "%b = f32[32,16]{1,0} parameter(1)",
            f"ROOT %c = {line}",
        )
    )
    (product,) = [i for i in module.computations[module.entry] if i.is_root]
    by_name = parse_module(
        program(
            "%a = f32[8,32]{1,0} parameter(0)",
            "%b = f32[32,16]{1,0} parameter(1)",
            "ROOT %c = f32[8,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused",
            extra="%fused (a: f32[8,32], b: f32[32,16]) -> f32[8,16] {\n"
            "  %a = f32[8,32]{1,0} parameter(0)\n"
            "  %b = f32[32,16]{1,0} parameter(1)\n"
            f"  ROOT %p = {line}\n}}",
        )
    )
    root = by_name.computations[by_name.entry][-1]
    assert flops(by_name, root) == {"f32": 2 * 8 * 16 * 32}
    assert product.arrays[0].dims == (8, 16)


def test_saved_h100_flat_lamb():
    found = schedule_report(saved("h100_flat_lamb"), devices_per_node=8)
    assert [row.kind for row in found.rows] == ["all-reduce"] * 8
    assert {(r.level, r.group_size, r.bytes) for r in found.rows} == {
        ("both", 16, LAYER)
    }
    assert found.share == pytest.approx(26 / 32, abs=1e-3)
    assert (found.entering_in_backward, found.entering) == (7, 8)
    assert found.num_devices == 16
    assert found.chip.name.startswith("H100")


def test_saved_h100_usual_recipe():
    found = schedule_report(saved("h100_recipe_adam"), devices_per_node=8)
    assert found.share < 1e-3
    assert "step (train.py:35)" in found.barrier
    assert "barrier: every update waits" in found.summary()


def test_saved_h100_two_levels():
    found = schedule_report(saved("h100_two_level_adam"), devices_per_node=8)
    stages = [(r.kind, r.level, r.group_size, r.bytes) for r in found.gradient_rows]
    for stage in (
        ("reduce-scatter", "intra", 8, LAYER),
        ("all-reduce", "inter", 2, LAYER // 8),
        ("all-gather", "intra", 8, LAYER),
    ):
        assert stages.count(stage) == 8
    (flag,) = [row for row in found.rows if not row.is_gradient]
    assert (flag.dtype, flag.level) == ("s32", "both")
    assert (found.entering_in_backward, found.entering) == (7, 8)
    assert found.share == pytest.approx(7 / 8, abs=1e-3)
    # Adam on one NIC per device: 2 (S/g)(n-1)/n bytes per device between the nodes
    expected = 8 * 8 * 2 * LAYER / 8 / 2
    assert found.bytes_between_nodes == pytest.approx(expected, rel=1e-6)
    shared = schedule_report(
        saved("h100_two_level_adam"), devices_per_node=8, links="h100_shared_nic"
    )
    assert shared.step_seconds > found.step_seconds


def test_saved_v5e_slices_exchange_by_send_and_receive():
    found = schedule_report(saved("v5e_flat_adam"))
    between = [row for row in found.rows if row.level == "inter"]
    assert [(row.kind, row.group_size, row.bytes) for row in between] == [
        ("all-reduce", 2, LAYER // 8)
    ] * 8
    assert all(row.is_async and row.is_gradient for row in between)
    assert all(row.beside.names for row in between)
    assert found.share == pytest.approx(7 / 8, abs=1e-3)
    assert found.chip.name == "TPU v5e"


def test_saved_v5e_fusions_that_compute_while_they_gather():
    found = schedule_report(saved("v5e_fusions_adam"))
    gathers = [row for row in found.rows if row.kind == "all-gather"]
    assert len(gathers) == 8
    assert sum(row.is_async for row in gathers) == 7
    for row in gathers[:-1]:
        assert row.bytes == LAYER
        assert row.beside.names
        assert row.exposed < row.end - row.start


def test_saved_cpu_program_names_the_barrier():
    found = schedule_report(saved("cpu_clip_adam"), devices_per_node=4)
    (row,) = found.rows
    assert (row.kind, row.level, row.group_size) == ("all-reduce", "both", 8)
    assert row.bytes == 4 * 64 * 64 * 4
    assert found.share == 0
    assert "clip_by_global_norm (optax/transforms/_clipping.py" in found.barrier


def _live(opt: optax.GradientTransformation):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "device"))

    def step(params, state, x):
        loss = lambda p: jnp.mean(jnp.tanh(x @ p["a"]) @ p["b"])
        grads = lax.pmean(jax.grad(loss)(params), ("node", "device"))
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"a": jnp.ones((16, 16)), "b": jnp.ones((16, 4))}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(), P(mesh.axis_names)), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    state = opt.init(params)
    return jax.jit(mapped).lower(params, state, jnp.ones((64, 16))).compile()


def test_a_live_program_of_this_jax():
    found = schedule_report(_live(optax.adam(1e-3)), devices_per_node=4)
    assert found.num_devices == 8
    assert sum(row.bytes for row in found.gradient_rows) == 4 * (16 * 16 + 16 * 4)
    assert {row.level for row in found.gradient_rows} == {"both"}
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    found = schedule_report(_live(clipped))
    assert "clip_by_global_norm" in found.barrier
    assert {row.level for row in found.rows} == {"intra"}


def test_assertion_carries_the_report_and_says_what_is_missed():
    found = assert_tail_overlap(TAIL, min_share=0.5)
    assert found.share == 0.5
    with pytest.raises(optax_npu.TailOverlapError, match=r"50.0 % .* expected 60") as e:
        assert_tail_overlap(TAIL, min_share=0.6)
    assert isinstance(e.value, AssertionError)
    assert e.value.report.share == 0.5
    assert "all-reduce" in str(e.value)
    with pytest.raises(AssertionError, match="0 reductions start before"):
        assert_tail_overlap(TAIL, min_in_backward=1)
    with pytest.raises(AssertionError, match=r"waits .* s for communication"):
        assert_tail_overlap(TAIL, max_exposed_seconds=9e-6, chip=COUNTING, links=PLAIN)


def test_assertion_without_any_collective():
    compiled = jax.jit(lambda p, g: p - g).lower(1.0, 2.0).compile()
    with pytest.raises(AssertionError, match="no gradient collective"):
        assert_tail_overlap(compiled, min_share=0.0)


def test_what_is_no_scheduled_program_is_refused():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(ValueError, match="no line starts with 'HloModule'"):
        schedule_report(lowered)
    with pytest.raises(ValueError, match=r"\.compile\(\)"):
        schedule_report(lowered.as_text(dialect="hlo"))
    with pytest.raises(ValueError, match="devices_per_node=3"):
        schedule_report(TAIL, devices_per_node=3)
    with pytest.raises(ValueError, match="h100_ib"):
        schedule_report(TAIL, links="carrier pigeon")


def test_summary_is_made_for_people():
    text = schedule_report(saved("h100_two_level_adam"), devices_per_node=8).summary()
    for part in (
        "jit_step: 16 devices, 8 per node; 25 collectives, 24 (*) of gradients",
        "optimizer: 87.5 % of 402.7 MB written before the last gradient collective",
        "backward pass: 7 of 8 reductions start before it ends",
        "out of each node: 134.2 MB",
        "* reduce-scatter   intra      8    16.777 f32",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) < 120


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_writes_a_picture(tmp_path, ending):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    found = schedule_report(saved("h100_two_level_adam"), devices_per_node=8)
    path = tmp_path / f"timeline.{ending}"
    figure = found.plot(path)
    assert path.stat().st_size > 1000
    (axes,) = figure.axes
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["links between nodes", "links in the node", "compute"]
    assert "87.5 %" in axes.get_title(loc="left")


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"optax-npu\[plot\]"):
        schedule_report(TAIL).plot()
