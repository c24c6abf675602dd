# SPDX-License-Identifier: Apache-2.0
"""Formulas against hand-computed tables (spec of the cost model), and `explain`."""

import math

import pytest

import optax_npu
from optax_npu import Chip, Links, explain
from optax_npu._cost import (
    best_last_bucket,
    bytes_between_nodes,
    collective_seconds,
    double_tree,
    exposed_seconds,
    flat_ring,
    leader,
    multi_rail_ring,
    pipelined,
    two_level,
)

IB, SHARED = Links.preset("h100_ib"), Links.preset("h100_shared_nic")
MB = 1_000_000

# Microseconds: ring on one card, on all cards, tree, two-level, two-level pipelined in
# 8 buckets. a_i = 2 us, b_i = 1/(300 GB/s); 50 GB/s cards with a_x = 6 us, or one
# shared card of 12.5 GB/s with a_x = 15 us.
TABLE = [
    (IB, 2, 1 * MB, (218, 186, 47, 48, 242)),
    (IB, 2, 250 * MB, (9_555, 1_742, 1_707, 2_123, 1_772)),
    (IB, 8, 1 * MB, (795, 763, 71, 122, 705)),
    (IB, 8, 250 * MB, (10_600, 2_397, 1_731, 2_664, 1_976)),
    (IB, 8, 1000 * MB, (40_131, 7_318, 6_731, 10_320, 6_688)),
    (IB, 64, 25 * MB, (7_130, 6_298, 267, 1_053, 6_217)),
    (SHARED, 2, 250 * MB, (37_950, 37_950, 40_058, 21_516, 20_450)),
    (SHARED, 8, 250 * MB, (41_265, 41_265, 40_118, 36_696, 36_890)),
]


@pytest.mark.parametrize(("links", "nodes", "size", "expected"), TABLE)
def test_D25_microseconds_of_each_algorithm(links, nodes, size, expected):
    names = (flat_ring, multi_rail_ring, double_tree, two_level)
    got = [1e6 * algorithm(size, nodes, 8, links) for algorithm in names]
    got.append(1e6 * pipelined([size / 8] * 8, nodes, 8, links))
    assert got == pytest.approx(expected, abs=1)


def test_logarithmic_steps_between_nodes():
    assert 1e6 * two_level(25 * MB, 64, 8, IB, "log") == pytest.approx(369, abs=1)


def test_leader_is_bound_by_one_card():
    # 2(7 x 2 us + 250 MB / 300 GB/s) + 2 x 6 us + 250 MB / 50 GB/s
    expected = 2 * (14e-6 + 250e6 / 300e9) + 12e-6 + 250e6 / 50e9
    assert leader(250 * MB, 2, 8, IB) == pytest.approx(expected)


@pytest.mark.parametrize("nodes", [2, 8, 64])
def test_longer_vectors_never_take_less(nodes):
    sizes = [10**k for k in range(10)]
    for algorithm in (flat_ring, multi_rail_ring, double_tree, leader, two_level):
        times = [algorithm(size, nodes, 8, SHARED) for size in sizes]
        assert times == sorted(times)


def test_D27_bytes_out_of_a_node():
    # flat / two-level = ((N-1)/N) / ((n-1)/n): 1.88 at 2 x 8, 1.13 at 8 x 8
    for nodes, ratio in ((2, 1.875), (8, 1.125), (64, 1.014)):
        flat = bytes_between_nodes("all-reduce", MB, nodes, 8, 8)
        shares = bytes_between_nodes("all-reduce", MB / 8, nodes, 1, 8)
        assert shares == pytest.approx(2 * MB * (nodes - 1) / nodes)
        assert flat / shares == pytest.approx(ratio, abs=1e-3)
    assert bytes_between_nodes("all-reduce", MB, 1, 8, 8) == 0
    assert bytes_between_nodes("send-recv", MB, 2, 1, 8) == 8 * MB


def test_a_collective_of_a_program_costs_what_its_algorithm_does():
    # the three stages of a two-level all-reduce, as they stand in a compiled program
    stages = [
        collective_seconds("reduce-scatter", MB, 1, 8, SHARED, 8),
        collective_seconds("all-reduce", MB / 8, 2, 1, SHARED, 8),
        collective_seconds("all-gather", MB, 1, 8, SHARED, 8),
    ]
    assert sum(stages) == pytest.approx(two_level(MB, 2, 8, SHARED))
    flat = collective_seconds("all-reduce", MB, 2, 8, IB, 8)
    assert flat == pytest.approx(double_tree(MB, 2, 8, IB))
    assert collective_seconds("all-reduce", MB, 1, 1, IB, 8) == 0


def test_best_last_bucket_of_a_h100_is_a_third_not_three_percent():
    # y S / (b + y) with b = 4.4 ps/B (400 GB/s of bus bandwidth) and y = 2.1 ps/B
    best = best_last_bucket(1.0, 0.0, 4.4e-12, 2.1e-12)
    assert best == pytest.approx(2.1 / 6.5)
    assert best_last_bucket(1000.0, 1.0, 4.4e-12, 2.1e-12) == 0


@pytest.mark.parametrize(
    ("shares", "without", "with_tail"),
    [
        ([1.0], 199, 199),
        ([0.9654, 0.0346], 194, 191),  # Ascend's default split
        ([1 / 8] * 8, 68, 66),
        ([1 / 56] * 56, 54, 52),
    ],
)
def test_exposed_time_of_bert_on_a_shared_card(shares, without, with_tail):
    # 1.4 GB, 140 ps/B, 150 ms of backward pass, 2.1 ps/B of update, 50 us per message
    sizes = [1.4e9 * share for share in shares]
    model = (0.150, 50e-6, 140e-12, 2.1e-12)
    assert 1e3 * exposed_seconds(sizes, *model, tail=False) == pytest.approx(
        without, abs=0.6
    )
    assert 1e3 * exposed_seconds(sizes, *model) == pytest.approx(with_tail, abs=0.6)


def test_explain_prefers_two_levels_only_where_they_pay():
    slow = explain(250 * MB, (2, 8), SHARED)
    assert slow.algorithm == "two-level"
    assert slow.seconds["two levels"] == pytest.approx(21_516e-6, abs=1e-6)
    assert "less than" in slow.reason
    fast = explain(250 * MB, (2, 8), IB)
    assert fast.algorithm == "flat"
    assert explain(250 * MB, (1, 8), IB).algorithm == "flat"
    assert explain(250 * MB, (8, 1), SHARED).algorithm == "flat"


def test_explain_counts_overlapping_levels_on_request():
    # 8 x 8: 8 buckets of 125 MB; tree 6,731 us, two levels 6,688 us if they overlap
    plan = [125 * MB] * 8
    assert explain(plan, (8, 8), IB).algorithm == "flat"
    both = explain(plan, (8, 8), IB, overlap_levels=True)
    assert both.seconds["two levels, overlapping"] == pytest.approx(6_688e-6, abs=1e-6)


def test_explain_takes_plans_meshes_and_names():
    import jax.numpy as jnp

    params = {"a": jnp.zeros((1000,)), "b": jnp.zeros((500,))}
    plan = optax_npu.bucket_plan(params)
    mesh = optax_npu.two_level_mesh(devices_per_node=4)
    found = explain(plan, mesh, "v5e_dcn", "v5e")
    assert sum(found.bucket_bytes) == 6000
    assert found.mesh_shape == (2, 4)
    assert explain(plan, {"node": 2, "device": 4}).mesh_shape == (2, 4)
    assert explain(plan, 8).mesh_shape == (1, 8)
    text = str(found)
    for part in ("2 x 4 devices", "two levels", "double tree", "best", "tail"):
        assert part in text


def test_explain_finds_the_size_from_which_two_levels_pay():
    # 8 x 8 on a shared card. Two levels: 28 + 210 us and 1.75/300 + 1.75/12.5 ns/B.
    # Tree: 2 (3 x 15 + 7 x 2) us and 2/12.5 ns/B.
    slope = 2 / 12.5e9 - 1.75 / 300e9 - 1.75 / 12.5e9
    found = explain([4 * MB] * 4, (8, 8), SHARED)
    assert found.crossover_bytes == pytest.approx((238e-6 - 118e-6) / slope, rel=1e-6)
    assert found.algorithm == "flat"
    assert "above 8.47 MB" in str(found)
    assert explain([40 * MB], (8, 8), SHARED).algorithm == "two-level"


def test_explain_gives_the_best_last_bucket():
    # Tree on 8 cards: a = 40 us, b = 2/300 ns/B. Adam: y = 7 / (0.9 x 3.35 TB/s).
    y = 7 / (0.9 * 3.35e12)
    found = explain([8 * MB] * 8, (2, 8), IB)
    expected = (64 * MB * y - 40e-6) / (2 / 300e9 + y)
    assert found.best_last_bucket == pytest.approx(expected, rel=1e-3)
    assert found.exposed["with tail"] < found.exposed["without tail"]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Links("x", 0, 1e9), "intra_bandwidth=0"),
        (lambda: Links("x", 1e9, 1e9, nics_per_node=0), "nics_per_node=0"),
        (lambda: Links("x", 1e9, 1e9, inter_latency=-1), "inter_latency=-1"),
        (lambda: Chip("x", 1e12, 1e12, -1), "memory_bandwidth=-1"),
        (lambda: Chip("x", 1e12, 1e12, 1e12, matmul_efficiency=2), "a share"),
        (lambda: Links.preset("infiniband"), "h100_ib"),
        (lambda: Chip.preset("B200"), "no preset"),
        (lambda: explain([], (2, 8)), "at least one"),
        (lambda: explain([-1], (2, 8)), "none below 0"),
        (lambda: explain(1, (2, 0)), "mesh_shape"),
        (lambda: explain(1, (2, 2, 2)), "mesh_shape"),
    ],
)
def test_B72_nonsense_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_a_plan_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError, match="BucketPlan"):
        explain({"a": 1}, (2, 8))


def test_your_own_figures():
    links = Links("two cards", 300e9, 12.5e9, nics_per_node=2)
    assert (links.cards(8), links.cards(1)) == (2, 1)
    one, two = (explain(100 * MB, (2, 8), x) for x in (SHARED, links))
    assert two.seconds["two levels"] < one.seconds["two levels"]
    assert math.isclose(Chip.preset("h100").matmul_seconds(494.7e12 * 0.6, "f32"), 1)
