# SPDX-License-Identifier: Apache-2.0
"""Bucket plans: where they cut, what they promise, what they refuse."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_npu import BucketPlan, _split, backward_order, bucket_plan


def equal(count: int, elements: int = 1) -> list[np.ndarray]:
    return [np.zeros(elements, np.float32) for _ in range(count)]


def sized(*elements: int) -> list[np.ndarray]:
    return [np.zeros(n, np.float32) for n in elements]


def last_indices(plan: BucketPlan) -> list[int]:
    """The last position of every bucket, in the order of reduction."""
    ends = itertools.accumulate(len(bucket.pieces) for bucket in plan.buckets)
    return [end - 1 for end in ends]


def in_order(tree, **options) -> list[int]:
    return last_indices(bucket_plan(tree, order=range(len(tree)), **options))


@pytest.mark.parametrize(
    ("tree", "last"),
    [
        (equal(20), [18, 19]),
        (equal(100), [95, 99]),
        (equal(3), [2]),
        (equal(2), [1]),
        (equal(1), [0]),
        (sized(*[1] * 9, 91), [9]),
        (sized(91, *[1] * 9), [6, 9]),
    ],
)
def test_golden_ascend_default(tree, last):
    assert in_order(tree, split="ascend") == last


@pytest.mark.parametrize(
    ("tree", "percent", "last"),
    [
        (equal(10), [60, 20, 20], [5, 7, 9]),
        (equal(10), [90, 10], [8, 9]),
        (sized(3, 1, 4, 1, 5, 9, 2, 6), [60, 20, 20], [4, 6, 7]),
        (sized(3, 1, 4, 1, 5, 9, 2, 6), [80, 20], [6, 7]),
        (sized(100, 1, 1, 1), [50, 50], [0, 3]),
        (sized(1, 1, 1, 100), [50, 50], [2, 3]),
    ],
)
def test_golden_percentages(tree, percent, last):
    assert in_order(tree, split=percent) == last
    assert in_order(tree, split=[float(p) for p in percent]) == last


def test_golden_last_indices():
    assert in_order(equal(160), split=[20, 100, 159]) == [20, 100, 159]
    assert in_order(equal(1), split=[0]) == [0]


def test_golden_tf_packs():
    """Packs of equal numbers of elements that cut through tensors."""
    assert _split.element_packs(10, 3) == [3, 3, 4]
    assert _split.element_packs(5, 9) == [0] * 8 + [5]
    plan = bucket_plan(sized(4, 6), "tf_packs", num_packs=3, order=[0, 1])
    assert [bucket.pieces for bucket in plan.buckets] == [
        ((0, 0, 3),),
        ((0, 3, 4), (1, 0, 2)),
        ((1, 2, 6),),
    ]
    plan = bucket_plan(sized(5), "tf_packs", num_packs=9)
    assert [bucket.size for bucket in plan.buckets] == [5]


def test_golden_tf_bytes():
    """A pack is closed only once it is larger than the limit; the list is reversed."""
    plan = bucket_plan(equal(4), "tf_bytes", bucket_bytes=8)
    leaves = [[piece.leaf for piece in bucket.pieces] for bucket in plan.buckets]
    assert leaves == [[3, 2, 1], [0]]


def test_ddp():
    """The first bucket holds 1 MiB, the others 25 MiB; the last leaf may overshoot."""
    mib = 2**20 // 4
    tree = jax.eval_shape(lambda: [jnp.zeros(n * mib) for n in (24, 9, 20, 9, 0, 9)])
    tree += jax.eval_shape(lambda: [jnp.zeros(mib // 2), jnp.zeros(mib // 2)])
    plan = bucket_plan(tree, "ddp")
    leaves = [[piece.leaf for piece in bucket.pieces] for bucket in plan.buckets]
    assert leaves == [[7, 6], [5, 3, 2], [1, 0]]


def test_ddp_keeps_a_bucket_open_per_dtype():
    tree = [np.zeros(4, np.float32), np.zeros(4, np.float16)] * 2
    plan = bucket_plan(tree, "ddp", bucket_bytes=32)
    leaves = [[piece.leaf for piece in bucket.pieces] for bucket in plan.buckets]
    assert leaves == [[3, 1], [2, 0]]


def test_megatron():
    tree = jax.eval_shape(lambda: [jnp.zeros(30_000_000)] * 4)
    assert last_indices(bucket_plan(tree, "megatron")) == [1, 3]
    assert last_indices(bucket_plan(tree, "megatron", replicas=64)) == [2, 3]


def test_horovod():
    """A bucket never exceeds 128 MiB, unless one leaf does."""
    million = 2**20 // 4
    sizes = (100, 100, 28, 200, 1)
    tree = jax.eval_shape(lambda: [jnp.zeros(n * million) for n in sizes])
    plan = bucket_plan(tree, "horovod", order=range(5))
    leaves = [[piece.leaf for piece in bucket.pieces] for bucket in plan.buckets]
    assert leaves == [[0], [1, 2], [3], [4]]


def test_num_packs_are_of_about_equal_bytes_and_keep_leaves_whole():
    plan = bucket_plan(equal(9, 5), num_packs=3)
    assert [bucket.nbytes for bucket in plan.buckets] == [60, 60, 60]
    assert len(bucket_plan(equal(9), num_packs=0).buckets) == 9
    assert len(bucket_plan(equal(9), num_packs=1).buckets) == 1
    assert len(bucket_plan(equal(2), num_packs=7).buckets) == 2
    huge = bucket_plan(sized(1, 1000, 1), num_packs=3)
    assert sorted(bucket.size for bucket in huge.buckets) == [1, 1, 1000]


def test_bucket_bytes_closes_once_full():
    assert in_order(equal(5), bucket_bytes=8) == [1, 3, 4]
    assert in_order(sized(1, 50, 1), bucket_bytes=8) == [1, 2]


def test_the_default_order_is_the_reverse_of_the_tree():
    plan = bucket_plan({"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)})
    assert plan.order == (2, 1, 0)
    assert [piece.leaf for piece in plan.buckets[0].pieces] == [2, 1, 0]


def test_order_by_path():
    tree = {"out": {"w": np.zeros(2)}, "in": {"w": np.zeros(3)}}
    plan = bucket_plan(tree, num_packs=0, order=["in/w", "out/w"])
    assert [plan.leaves[b.pieces[0].leaf].path for b in plan.buckets] == [
        "in/w",
        "out/w",
    ]


def test_what_takes_part():
    tree = {
        "bool": np.ones(3, bool),
        "complex": np.ones(3, np.complex64),
        "empty": np.ones((0, 3), np.float32),
        "float0": np.zeros(3, jax.dtypes.float0),
        "half": np.float16(1),
        "int": np.ones(3, np.int32),
        "key": jax.random.key(0),
        "none": None,
        "scalar": jnp.float32(1),
    }
    plan = bucket_plan(tree)
    taking = {
        plan.leaves[piece.leaf].path: bucket.dtype
        for bucket in plan.buckets
        for piece in bucket.pieces
    }
    assert taking == {
        "complex": "complex64",
        "half": "float16",
        "int": "int32",
        "scalar": "float32",
    }
    assert bucket_plan({}).buckets == ()
    assert bucket_plan({"e": np.zeros(0)}, "ascend").buckets == ()


def test_D6_the_plan_is_plain_data_and_the_same_everywhere():
    a = {"x": np.zeros(3, np.float32), "y": {"z": np.zeros((2, 2), np.float16)}}
    b = {"y": {"z": np.zeros((2, 2), np.float16)}, "x": np.zeros(3, np.float32)}
    one, two = bucket_plan(a, num_packs=2), bucket_plan(b, num_packs=2)
    assert one == two
    assert hash(one) == hash(two)
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != bucket_plan(a, num_packs=0, order=[0, 1]).fingerprint
    assert BucketPlan.from_json(one.to_json()) == one
    assert "y/z" in str(one)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, a))
    assert bucket_plan(shapes, num_packs=2) == one


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.sampled_from("efd")), max_size=12),
    option=st.sampled_from(
        [{"num_packs": n} for n in (0, 1, 2, 5)]
        + [{"split": s} for s in ("ascend", "ddp", "megatron", "horovod")]
        + [{"split": "tf_packs", "num_packs": 3}, {"bucket_bytes": 16}]
    ),
    seed=st.randoms(use_true_random=False),
)
def test_every_element_travels_once_in_a_bucket_of_its_dtype(sizes, option, seed):
    tree = [np.zeros(n, np.dtype(kind)) for n, kind in sizes]
    order = list(range(len(tree)))
    seed.shuffle(order)
    plan = bucket_plan(tree, **option, order=order)
    seen = [np.zeros(n, int) for n, _ in sizes]
    for bucket in plan.buckets:
        assert bucket.size > 0
        for piece in bucket.pieces:
            assert tree[piece.leaf].dtype.name == bucket.dtype
            seen[piece.leaf][piece.start : piece.stop] += 1
    assert all((count == 1).all() for count in seen)
    if option.get("split") in (None, "ascend"):
        # The last gradient of a bucket decides when it leaves.
        rank = {leaf: i for i, leaf in enumerate(order)}
        ends = [rank[bucket.pieces[-1].leaf] for bucket in plan.buckets]
        assert ends == sorted(ends)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_packs": -1}, ValueError, "num_packs=-1 is negative"),
        ({"num_packs": 2.0}, TypeError, "whole number"),
        ({"split": [3, 1, 9]}, ValueError, "Indices must rise and end at 9"),
        ({"split": [3, 7]}, ValueError, "end at 9.*add to 10"),
        ({"split": [60, 30]}, ValueError, "add to 100 .these add to 90"),
        ({"split": [60.0, 30.0]}, ValueError, "these add to 90"),
        ({"split": [150.0, -50.0]}, ValueError, "must be positive"),
        ({"split": []}, ValueError, "fits neither"),
        ({"split": "nccl"}, ValueError, "not a preset.*'ascend'"),
        ({"split": "tf_bytes"}, ValueError, "needs bucket_bytes"),
        ({"split": [50, 50], "bucket_bytes": 8}, ValueError, "give one of them"),
        ({"bucket_bytes": 0}, ValueError, "at least 1 byte"),
        ({"order": [0, 1]}, ValueError, "not a permutation of the 10 leaves"),
        ({"order": ["0"] * 10}, ValueError, "not a permutation"),
    ],
)
def test_B72_bad_plans(options, error, match):
    with pytest.raises(error, match=match):
        bucket_plan(equal(10), **options)


def test_a_list_that_could_be_both_is_refused():
    with pytest.raises(ValueError, match=r"could be.*\[25\.0, 75\.0\]"):
        bucket_plan(equal(76), split=[25, 75])
    assert in_order(equal(76), split=[25.0, 75.0]) == [18, 75]


def mlp(params, x):
    """The layers' names sort against the order of use."""
    x = jnp.tanh(x @ params["z_first"])
    x = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, params["m_second"])
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["b_stack"])
    return jnp.sum(x @ params["a_last"])


def mlp_params():
    return {
        "a_last": jnp.ones((3, 1)),
        "b_stack": jnp.ones((2, 3, 3)),
        "m_second": jnp.ones((3, 3)),
        "z_first": jnp.ones((2, 3)),
    }


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint, jax.jit])
def test_backward_order_is_read_from_the_gradient(wrap):
    order = backward_order(wrap(mlp), mlp_params(), jnp.ones((5, 2)))
    names = list(mlp_params())
    assert [names[i] for i in order] == ["a_last", "b_stack", "m_second", "z_first"]


def test_backward_order_takes_shapes_aux_and_odd_leaves():
    params = mlp_params() | {"n": jnp.arange(3), "unused": jnp.ones(2)}
    shapes = jax.eval_shape(lambda: params)
    order = backward_order(
        lambda p, x: (mlp(p, x), x), shapes, jnp.ones((5, 2)), has_aux=True
    )
    assert sorted(order) == list(range(6))
    names = [list(sorted(params))[i] for i in order]
    used = [name for name in names if name not in ("n", "unused")]
    assert used == ["a_last", "b_stack", "m_second", "z_first"]
    plan = bucket_plan(params, num_packs=0, order=order)
    assert plan.order == order
