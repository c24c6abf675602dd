# SPDX-License-Identifier: Apache-2.0
"""Recorded runs of TensorFlow's cross-device operations, and where ours differ.

Every case runs through `HierarchicalCopyAllReduce` on as many devices. Where
TensorFlow's own result is wrong, it is shown to be, and ours is right.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optax_npu import HierarchicalCopyAllReduce, ReduceOp

ORACLE = pathlib.Path(__file__).parent / "oracle/collectives/tf_cross_device_ops.json"
CASES = json.loads(ORACLE.read_text())["cases"]
REDUCTIONS = [c for c in CASES if c["api"] in ("reduce", "batch_reduce")]
SUMS = [c for c in REDUCTIONS if "indices" not in c["inputs"][0]]
SPARSE = [c for c in REDUCTIONS if "indices" in c["inputs"][0]]


def numbers(values: Any, dtype: str, shape: list[int]) -> np.ndarray:
    """Recorded numbers; text stands for inf and nan."""
    return np.asarray(values, np.float64).astype(jnp.dtype(dtype)).reshape(shape)


def local_values(case: dict[str, Any]) -> list[np.ndarray]:
    """Per tensor the values of all replicas, stacked."""
    stacked = [
        np.stack([numbers(r, x["dtype"], x["shape"]) for r in x["replicas"]])
        for x in case["inputs"]
    ]
    # x64 is off in this suite.
    return [x.astype(np.float32) if x.dtype == np.float64 else x for x in stacked]


@functools.cache
def compiled(op: ReduceOp, packs: int, count: int) -> Any:
    """The class on a mesh of `count` devices, two nodes if that divides."""
    nodes = 2 if count % 2 == 0 else 1
    devices = np.array(jax.devices()[:count]).reshape(nodes, -1)
    ops = HierarchicalCopyAllReduce(packs)

    def step(values):
        local = [x[0] for x in values]
        place = ("node", "device")
        return ops.batch_reduce(op, [(x, place) for x in local])

    return jax.jit(
        jax.shard_map(
            step,
            mesh=Mesh(devices, ("node", "device")),
            in_specs=P(("node", "device")),
            out_specs=P(),
        )
    )


def exact(x: np.ndarray, op: ReduceOp) -> np.ndarray:
    """The right result, in float64."""
    with np.errstate(invalid="ignore"):
        total = np.sum(x.astype(np.float64), axis=0)
    return total / len(x) if op is ReduceOp.MEAN else total


def packs_of(case: dict[str, Any]) -> int:
    name = case["implementation"]
    return int(name.removeprefix("hier")) if name.startswith("hier") else 1


def tensors_by_count(case: dict[str, Any]) -> dict[int, list[int]]:
    """Tensors of a batch may have different numbers of replicas."""
    groups: dict[int, list[int]] = {}
    for i, x in enumerate(case["inputs"]):
        groups.setdefault(len(x["replicas"]), []).append(i)
    return groups


@pytest.mark.parametrize("case", SUMS, ids=[c["id"] for c in SUMS])
def test_recorded_reductions(case):
    op = ReduceOp[case["reduce_op"]]
    values = local_values(case)
    for count, which in tensors_by_count(case).items():
        mine = [values[i] for i in which]
        if op is ReduceOp.MEAN and any(x.dtype.kind == "i" for x in mine):
            with pytest.raises(TypeError, match="mean of int32 values is refused"):
                compiled(op, packs_of(case), count)(mine)
            continue
        ours = compiled(op, packs_of(case), count)(mine)
        for i, x, got in zip(which, mine, ours, strict=True):
            assert got.dtype == x.dtype
            check_ours(op, x, np.asarray(got, np.float64))
            if "error" in case:  # mixed dtypes in a pack
                assert case["error"]["gist"].endswith("packs must have one dtype")
            else:
                check_theirs(case, case["outputs"][i], op, x)


def close(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Equal, or within the rounding of the additions of `x`."""
    eps = 0.0 if x.dtype.kind == "i" else float(jnp.finfo(x.dtype).eps)
    with np.errstate(invalid="ignore"):
        bound = eps * np.sum(np.abs(x.astype(np.float64)), axis=0)
        near = np.abs(a - b) <= bound
    return near | (a == b) | (np.isnan(a) & np.isnan(b))


def check_ours(op: ReduceOp, x: np.ndarray, ours: np.ndarray) -> None:
    """The right result, or inf where the dtype cannot hold it."""
    right = exact(x, op)
    if x.dtype.kind != "i":
        largest = float(jnp.finfo(x.dtype).max)
        right = np.where(np.abs(right) > largest, np.copysign(np.inf, right), right)
    assert np.all(close(ours, right, x))


def check_theirs(
    case: dict[str, Any], theirs: dict[str, Any], op: ReduceOp, x: np.ndarray
) -> None:
    """Where TensorFlow's recorded result is right, and in which way it is not."""
    recorded = numbers(theirs["values"], theirs["dtype"], theirs["shape"])
    recorded, right = recorded.astype(np.float64), exact(x, op)
    hierarchical = case["implementation"].startswith("hier")
    if case["api"] == "batch_reduce" and hierarchical and len(x) in (3, 5, 7):
        # The last replica of an odd number is left out, and still divided by.
        lost = np.sum(x[:-1].astype(np.float64), axis=0)
        lost = lost / len(x) if op is ReduceOp.MEAN else lost
        assert np.all(close(recorded, lost, x))
        assert not np.any(close(recorded, right, x))
        return
    # A mean is a sum first, which may overflow where the mean would fit.
    overflowed = np.isinf(recorded) & np.isfinite(right)
    if overflowed.any():
        assert "overflow" in case["id"]
    assert np.all(close(recorded, right, x) | overflowed)


def test_what_the_records_prove():
    """There are cases of every mistake that ours must not make."""
    odd = [c for c in SUMS if {len(x["replicas"]) for x in c["inputs"]} & {3, 5, 7}]
    assert any(c["implementation"] == "hier1" for c in odd)
    mixed = [c for c in SUMS if "error" in c]
    assert len({c["replicas"] for c in mixed}) > 1
    means = [c for c in SUMS if c["reduce_op"] == "MEAN" and "overflow" in c["id"]]
    assert any("inf" in c["outputs"][0]["values"] for c in means)


@pytest.mark.parametrize("case", SPARSE, ids=[c["id"] for c in SPARSE])
def test_recorded_sparse_gradients_are_dense_here(case):
    """Theirs concatenates the slices of all replicas; added up, that is our result."""
    (given,), op = case["inputs"], ReduceOp[case["reduce_op"]]

    def dense(values: Any, indices: list[int]) -> np.ndarray:
        out = np.zeros(given["dense_shape"], np.float32)
        np.add.at(out, indices, np.reshape(values, (-1, out.shape[1])))
        return out

    pairs = zip(given["replicas"], given["indices"], strict=True)
    ours = compiled(op, 1, 2)([np.stack([dense(v, i) for v, i in pairs])])[0]
    for theirs in case["outputs"][0]["per_device"]:
        added = dense(np.float32(theirs["values"]), theirs["indices"])
        np.testing.assert_allclose(ours, added, rtol=1e-6)


BROADCASTS = [c for c in CASES if c["api"] == "broadcast"]


@pytest.mark.parametrize("case", BROADCASTS, ids=[c["id"] for c in BROADCASTS])
def test_recorded_broadcasts(case):
    (given,), (recorded,) = case["inputs"], case["outputs"]
    value = numbers(given["values"], given["dtype"], given["shape"])
    ops = HierarchicalCopyAllReduce()

    def step(i):
        mine = jnp.where(i == 0, jnp.asarray(value), i.astype(value.dtype))
        return ops.broadcast(mine, "data")

    out = jax.pmap(step, axis_name="data")(jnp.arange(8))
    want = numbers(recorded["values"], recorded["dtype"], recorded["shape"])
    for replica in np.asarray(out):
        np.testing.assert_array_equal(replica, want)


def test_every_recorded_case_is_used():
    kinds = {c["api"] for c in CASES}
    assert kinds == {"reduce", "batch_reduce", "broadcast", "arguments"}
    assert len(REDUCTIONS) + len(BROADCASTS) + len(ARGUMENTS) == len(CASES)


# Arguments

ARGUMENTS = {c["id"].removeprefix("args/"): c for c in CASES if c["api"] == "arguments"}


def in_vmap(fun: Any) -> Any:
    values = jnp.array([[1.0, 2.0], [10.0, 20.0]])
    return jax.vmap(fun, axis_name="data")(values)


def raised(error: dict[str, Any]) -> type[Exception]:
    return {"ValueError": ValueError, "TypeError": TypeError}[error["exception"]]


OPS = HierarchicalCopyAllReduce()
CALLS = {
    "num_packs='2'": lambda: HierarchicalCopyAllReduce("2"),
    "num_packs=None": lambda: HierarchicalCopyAllReduce(None),
    "pairs=5": lambda: OPS.batch_reduce("sum", 5),
    "pairs of lists": lambda: in_vmap(lambda x: OPS.batch_reduce("sum", [[x, x]])),
    "pairs of 1-tuples": lambda: in_vmap(lambda x: OPS.batch_reduce("sum", [(x,)])),
    "pairs is a string": lambda: OPS.batch_reduce("sum", "ab"),
    "pair value is None": lambda: OPS.batch_reduce("sum", [(None, "data")]),
    "destinations=None": lambda: in_vmap(lambda x: OPS.reduce("sum", x, None)),
    "value=None": lambda: OPS.reduce("sum", None, "data"),
    "broadcast of None": lambda: OPS.broadcast(None, "data"),
    "num_packs=-1": lambda: HierarchicalCopyAllReduce(-1),
    "num_packs=1.5": lambda: HierarchicalCopyAllReduce(1.5),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_bad_arguments_raise_what_tensorflow_raises(name):
    error = ARGUMENTS[name]["error"] if name in ARGUMENTS else None
    kind = raised(error) if error else (ValueError if "-1" in name else TypeError)
    with pytest.raises(kind):
        CALLS[name]()


@pytest.mark.parametrize("bad", ["max", "avg", 3, None, ReduceOp])
def test_bad_operations(bad):
    for call in (OPS.reduce, OPS.batch_reduce):
        with pytest.raises(ValueError, match="'sum' or 'mean'"):
            call(bad, [(jnp.ones(2), "data")], "data")


def test_texts_name_operations():
    """Theirs sums silently for "mean"."""
    recorded = ARGUMENTS["reduce_op='mean' hier batch_reduce"]["outputs"][0]["values"]
    assert recorded == [11.0, 22.0]
    for op in ("mean", "MEAN", ReduceOp.MEAN):
        (out,) = in_vmap(lambda x, op=op: OPS.batch_reduce(op, [(x, "data")]))
        np.testing.assert_array_equal(out[0], [5.5, 11.0])


def test_generators_and_one_destination_for_all():
    pairs = in_vmap(
        lambda x: OPS.batch_reduce("sum", ((x * k, "data") for k in (1, 2)))
    )
    values = in_vmap(lambda x: OPS.batch_reduce("sum", [x, 2 * x], "data"))
    for out in (pairs, values):
        np.testing.assert_array_equal(out[0][1], [11.0, 22.0])
        np.testing.assert_array_equal(out[1][1], [22.0, 44.0])
    assert OPS.batch_reduce("sum", []) == []


def test_values_of_different_destinations_keep_their_order():
    def step(x):
        inner = jax.vmap(
            lambda y: OPS.batch_reduce("sum", [(y, "a"), (y, "b"), (2 * y, "a")]),
            axis_name="b",
        )
        return inner(x)

    grid = jnp.arange(6.0).reshape(2, 3)
    over_a, over_b, twice = jax.vmap(step, axis_name="a")(grid)
    np.testing.assert_array_equal(over_a, np.tile([3.0, 5.0, 7.0], (2, 1)))
    np.testing.assert_array_equal(over_b, [[3.0] * 3, [12.0] * 3])
    np.testing.assert_array_equal(twice, np.tile([6.0, 10.0, 14.0], (2, 1)))


def test_repr():
    assert (
        repr(HierarchicalCopyAllReduce(3)) == "HierarchicalCopyAllReduce(num_packs=3)"
    )
