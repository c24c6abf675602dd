# SPDX-License-Identifier: Apache-2.0
"""The same numbers in every mode, on every mesh, for every plan and every leaf."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import PartitionSpec as P

import optax_npu
from optax_npu import AlreadyReducedWarning, hierarchical_all_reduce
from tests._modes import (
    AXES,
    MAPPED_MODES,
    MODES,
    SHAPES,
    How,
    assert_same_bits,
    indices,
    mapped,
    mesh_named,
    mesh_of,
    run,
)

F32_MAX = float(np.finfo(np.float32).max)
PLANS = {
    "one_bucket": {},
    "three_buckets": {"num_packs": 3},
    "unpacked": {"num_packs": 0},
    "tf_packs": {"split": "tf_packs", "num_packs": 4},
}


def leaves(d: Any) -> dict[str, Any]:
    """Gradients of replica `d` that are exact in their dtypes; any array module."""
    np_ = jnp if isinstance(d, jax.Array) else np
    real = np_.asarray(d, np_.float32)

    def ramp(shape: tuple[int, ...]) -> Any:
        return 16 * real + np_.arange(np.prod(shape), dtype=np_.float32).reshape(shape)

    return {
        "scalar": ramp(()),
        "one": ramp((1,)),
        "three": ramp((3,)),
        "eight": ramp((8,)),
        "ten": ramp((10,)),
        "cube": ramp((2, 3, 5)),
        "square": ramp((7, 7)),
        "odd": ramp((1003,)),
        "empty": ramp((0, 3)),
        "half": ramp((5,)).astype(np_.float16),
        "bfloat": (real * np_.ones((3, 3), np_.float32)).astype(jnp.bfloat16),
        "float8": (2 * np_.ones(3, np_.float32) + 0 * real).astype(jnp.float8_e5m2),
        "complex": (real + 1j * (7 - real)).astype(np_.complex64),
        "none": None,
    }


def expected(count: int, op: str) -> dict[str, Any]:
    """The reduced leaves, in float64."""
    locals_ = [leaves(d) for d in range(count)]

    def total(*xs: np.ndarray) -> np.ndarray:
        wide = [x.astype(np.result_type(x, np.float64, x)) for x in map(_widen, xs)]
        return np.sum(wide, axis=0) / (count if op == "mean" else 1)

    return jax.tree.map(total, *locals_)


def _widen(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def local(tree: Any, how: How) -> Any:
    """Types constants as local values."""
    return tree if how.mode == "pmap" else optax_npu.local_params(tree, how.axis_name)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B20_B23_B24_B26_B48_B50_every_leaf_in_every_mode(mode, shape):
    count = shape[0] * shape[1]
    options = {"mean": PLANS["three_buckets"], "sum": PLANS["one_bucket"]}

    def step(_, d, how):
        grads = local(leaves(d), how)
        out = {}
        for op in ("mean", "sum"):
            tx = hierarchical_all_reduce(**how.reduce_over, op=op, **options[op])
            out[op] = tx.update(grads, tx.init(grads))[0]
        return out

    both = assert_same_bits(run(mode, shape, step, 0.0, indices(shape)))
    for op, out in both.items():
        want = expected(count, op)
        for name, value in leaves(0).items():
            if value is None:
                assert out[name] is None
                continue
            assert out[name].dtype == value.dtype, name
            assert out[name].shape == value.shape, name
            np.testing.assert_array_equal(
                _widen(out[name]), _widen(want[name].astype(value.dtype)), err_msg=name
            )


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_results_do_not_depend_on_the_plan(mode, plan):
    rng = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda n: rng.normal(size=(8, n)).astype(np.float32), [3, 1000, 1, 129, 64]
    )

    def planned(_, grads, how):
        tx = hierarchical_all_reduce(**how.reduce_over, **PLANS[plan])
        return tx.update(grads, tx.init(grads))[0]

    out = assert_same_bits(run(mode, (2, 4), planned, 0.0, batch))
    exact = [np.mean(x.astype(np.float64), axis=0) for x in batch]
    for got, want in zip(out, exact, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-7)


@pytest.mark.parametrize("count", [3, 6, 7, 8])
def test_D10_mean_of_the_largest_numbers_is_finite(count):
    shape = (count // 2, 2) if count % 2 == 0 else (1, count)
    top = {
        "float32": jnp.full(5, jnp.finfo(jnp.float32).max),
        "bfloat16": jnp.full(5, jnp.finfo(jnp.bfloat16).max, jnp.bfloat16),
        "float16": jnp.full(5, jnp.finfo(jnp.float16).max, jnp.float16),
    }

    def step(tree, _, how):
        tree = local(tree, how)
        return optax_npu.hierarchical_pmean(tree, **how.reduce_over)

    for mode in ("pmap", "checked"):
        out = assert_same_bits(run(mode, shape, step, top, indices(shape)))
        jax.tree.map(np.testing.assert_array_equal, out, jax.tree.map(np.asarray, top))


EXTREMES = st.sampled_from([0.0, 1.0, F32_MAX, -F32_MAX, F32_MAX / 3, -1e38, 1e-38])


@settings(max_examples=60, deadline=None)
@given(
    values=hnp.arrays(
        np.float32,
        st.tuples(st.sampled_from([2, 3, 5, 7]), st.just(8)),
        elements=EXTREMES | st.floats(-F32_MAX, F32_MAX, width=32),
    )
)
def test_D10_local_finite_implies_mean_finite(values):
    mean = jax.vmap(lambda x: optax_npu.hierarchical_pmean(x, "data"), axis_name="data")
    out = np.asarray(mean(values))
    assert np.all(np.isfinite(out))
    top = np.abs(values).max(axis=0).astype(np.float64)
    assert np.all(np.abs(out) <= top * (1 + len(values) * 2.0**-23))


@pytest.mark.parametrize("wire", [None, jnp.bfloat16])
def test_the_way_around_gloo_gives_the_same_numbers(monkeypatch, wire):
    """Under jax.distributed on CPU no reduce-scatter is left in the program."""
    batch = np.arange(8 * 1003, dtype=np.float32).reshape(8, 1003) % 64

    def reduced():
        step = lambda _, x, how: optax_npu.hierarchical_pmean(
            x, **how.reduce_over, inter_node_dtype=wire
        )
        fun = mapped("checked", (2, 4), step)
        text = fun.lower(0.0, batch).compile().as_text()
        return np.asarray(fun(0.0, batch)), "reduce-scatter(" in text

    native, scattered = reduced()
    assert scattered
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    around, scattered = reduced()
    assert not scattered
    np.testing.assert_array_equal(around, native)
    np.testing.assert_array_equal(native, batch.mean(axis=0))


@pytest.mark.parametrize("shape", [(3, 2), (1, 7), (7, 1)], ids=str)
def test_mean_of_equal_integers_is_that_integer(shape):
    """For 3, 6 and 7 replicas too, where a rounded reciprocal misses half of them."""
    numbers = jnp.arange(1.0, 4000.0) * 587  # seven of the largest fit 24 bits

    def step(x, _, how):
        x = optax_npu.local_params(x, AXES)
        return optax_npu.hierarchical_pmean(x, **how.reduce_over)

    out = assert_same_bits(run("checked", shape, step, numbers, indices(shape)))
    np.testing.assert_array_equal(out, np.asarray(numbers))


HALF = {
    "a": [10000.0] * 8,
    "b": [2.0**-24] * 8,
    "c": [60000.0, 60000.0, -60000.0, -60000.0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B53_float16_range(mode):
    batch = {k: jnp.array(v, jnp.float16) for k, v in HALF.items()}

    def step(_, grads, how):
        tx = optax.chain(hierarchical_all_reduce(**how.reduce_over), optax.sgd(1.0))
        return tx.update(grads, tx.init(grads))[0]

    out = assert_same_bits(run(mode, (2, 4), step, 0.0, batch))
    assert out == {"a": -10000.0, "b": -(2.0**-24), "c": 0.0}
    assert {x.dtype for x in out.values()} == {np.dtype(np.float16)}


def test_B53_float16_accumulated_in_float16_splits_the_division():
    """10000 + 10000 + 10000 + 10000 fits, the sum of eight does not."""
    batch = jnp.full(8, 10000.0, jnp.float16)

    def step(_, x, how):
        return optax_npu.hierarchical_pmean(
            x, **how.reduce_over, reduce_dtype=jnp.float16
        )

    assert assert_same_bits(run("checked", (2, 4), step, 0.0, batch)) == 10000.0


@pytest.mark.parametrize("mode", MAPPED_MODES)
@pytest.mark.parametrize("wire", [jnp.bfloat16, jnp.float16])
def test_what_crosses_between_nodes_is_rounded_and_added_in_float32(mode, wire):
    # Node means are 256 and 1: bfloat16 holds both, but not 257 / 2 = 128.5.
    batch = jnp.array([256.0] * 4 + [1.0] * 4)

    def step(_, x, how):
        return optax_npu.hierarchical_pmean(x, **how.reduce_over, inter_node_dtype=wire)

    out = assert_same_bits(run(mode, (2, 4), step, 0.0, batch))
    assert out == float(jnp.asarray(128.5, wire))


def test_D22_float32_accumulation_at_both_levels():
    """256 + 7 x 1 = 263: a bfloat16 sum of eight nodes stops at 256."""
    batch = jnp.array([256.0] + [1.0] * 7)

    def step(_, x, how):
        return optax_npu.hierarchical_psum(
            x, **how.reduce_over, inter_node_dtype=jnp.bfloat16
        )

    out = assert_same_bits(run("unchecked", (8, 1), step, 0.0, batch))
    assert out == float(jnp.asarray(263.0, jnp.bfloat16)) == 264.0


def test_B56_buckets_never_mix_dtypes():
    grads = {
        "A": jnp.array([100000.0, 16777218.0]),
        "B": jnp.array([1.0], jnp.float16),
        "C": jnp.array([3.0], jnp.bfloat16),
        "D": jnp.array([1 + 2j], jnp.complex64),
    }

    def step(grads, _, how):
        grads = local(grads, how)
        return [
            hierarchical_all_reduce(**how.reduce_over, **plan, fence=fence).update(
                grads, optax.EmptyState()
            )[0]
            for plan in PLANS.values()
            for fence in (False, True)
        ]

    for out in assert_same_bits(run("checked", (2, 4), step, grads, indices((2, 4)))):
        for name, value in grads.items():
            assert out[name].dtype == value.dtype
            np.testing.assert_array_equal(out[name], np.asarray(value))


def quadratic(params, batch):
    return jnp.mean(params["w"] * batch) + jnp.mean(params["v"] * batch)


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("mode", [*MODES, "already_summed"])
def test_B48_B49_one_gradient_in_all_modes(mode, op):
    """Mean of 0..7 is 3.5, their sum 28; never 28 for a mean in silence."""
    params = {"w": jnp.float32(2.0), "v": jnp.ones(3)}
    batch = jnp.arange(8.0)

    def step(params, batch, how):
        if how.reduce_over is None:
            loss = quadratic if op == "mean" else lambda p, b: 8 * quadratic(p, b)
            return jax.grad(lambda p: loss(p, batch[:, None]))(params)
        if mode == "checked":
            params = optax_npu.local_params(params, how.axis_name)
        grads = jax.grad(quadratic)(params, batch)
        tx = hierarchical_all_reduce(**how.reduce_over, op=op)
        return tx.update(grads, tx.init(params))[0]

    if mode == "already_summed":
        with pytest.warns(
            AlreadyReducedWarning, match=r"local_params\(params, \('node'"
        ):
            replicas = run("checked", (2, 4), step, params, batch)
    else:
        replicas = run(mode, (2, 4), step, params, batch)
    out = assert_same_bits(replicas)
    total = 28.0 if op == "sum" else 3.5
    np.testing.assert_allclose(out["w"], total, rtol=1e-6)
    np.testing.assert_allclose(out["v"], np.full(3, total / 3), rtol=1e-6)


def test_B49_a_leaf_that_still_varies_over_one_axis():
    """JAX has summed it over nodes, not over devices: what is missing is done."""
    mesh = mesh_of((2, 4))

    def step(params, batch):
        seen = {
            "both": optax_npu.local_params(params["both"], AXES),
            "device": optax_npu.local_params(params["device"], "device"),
            "none": params["none"],
        }
        grads = jax.grad(
            lambda p: jnp.mean((p["both"] + p["device"] + p["none"]) * batch)
        )(seen)
        tx = hierarchical_all_reduce(AXES, num_packs=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = tx.update(grads, tx.init(params))[0]
        assert "2 of 3 leaves (first: 'device')" in str(caught[0].message)
        return out

    params = {"both": jnp.ones(()), "device": jnp.ones(()), "none": jnp.ones(())}
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P())
    out = jax.jit(step)(params, jnp.arange(8.0))
    assert jax.tree.map(float, out) == {"both": 3.5, "device": 3.5, "none": 3.5}


def test_B49_functions_refuse_what_may_be_summed_already():
    mesh = mesh_of((2, 4))

    def reduce(x, fun, **options):
        step = lambda x: fun({"loss": x}, AXES, **options)
        return jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(x)

    with pytest.raises(ValueError, match=r"'loss'.*on_replicated='summed'"):
        reduce(jnp.float32(8.0), optax_npu.hierarchical_pmean)
    summed, equal = {"on_replicated": "summed"}, {"on_replicated": "equal"}
    eight = jnp.float32(8.0)
    with pytest.warns(AlreadyReducedWarning):
        assert reduce(eight, optax_npu.hierarchical_pmean, **summed)["loss"] == 1.0
    with pytest.warns(AlreadyReducedWarning):
        assert reduce(eight, optax_npu.hierarchical_psum, **summed)["loss"] == 8.0
    assert reduce(eight, optax_npu.hierarchical_pmean, **equal)["loss"] == 8.0
    assert reduce(eight, optax_npu.hierarchical_psum, **equal)["loss"] == 64.0


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_counting_replicas_with_a_constant(mode):
    step = lambda _, d, how: optax_npu.hierarchical_psum(1, **how.reduce_over)
    assert assert_same_bits(run(mode, (2, 4), step, 0.0, indices((2, 4)))) == 8


def test_a_single_device_is_not_warned_about():
    def step(params, batch, how):
        grads = jax.grad(quadratic)(params, batch)
        tx = hierarchical_all_reduce(**how.reduce_over)
        return tx.update(grads, tx.init(params))[0]

    params = {"w": jnp.float32(2.0), "v": jnp.ones(3)}
    (out,) = run("checked", (1, 1), step, params, jnp.full(1, 6.0))
    assert out["w"] == 6.0


def test_model_parallel_leaves_keep_their_axis():
    """Reducing over data leaves the type over model alone, in every bucket."""
    mesh = mesh_named(("data", "model"), (4, 2))

    def step(sharded, batch):
        local_ = optax_npu.local_params({"a": sharded, "b": jnp.ones(2)}, "data")
        grads = jax.grad(lambda p: jnp.sum(p["a"] * batch) + jnp.sum(p["b"] * batch))
        tx = hierarchical_all_reduce("data", num_packs=2)
        reduced = grads(local_)
        assert reduced["b"].shape == (2,)
        return tx.update(reduced, tx.init(local_))[0]

    out = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("model"), P("data")),
            out_specs={"a": P("model"), "b": P()},
        )
    )(jnp.ones(4), jnp.arange(4.0))
    np.testing.assert_array_equal(out["a"], np.full(4, 1.5))
    # Both model shards use b, and JAX adds up what they say.
    np.testing.assert_array_equal(out["b"], np.full(2, 3.0))


def test_three_levels_and_tuples_of_axes():
    mesh = mesh_named(("pod", "node", "device"), (2, 2, 2))
    names = ("pod", "node", "device")

    def step(x):
        by = {
            "three": names,
            "slow_pair": (("pod", "node"), "device"),
            "fast_pair": ("pod", ("node", "device")),
            "flat": (names,),
            "wired": names,
        }
        return {
            kind: optax_npu.hierarchical_pmean(
                x, axes, inter_node_dtype=jnp.bfloat16 if kind == "wired" else None
            )
            for kind, axes in by.items()
        }

    for check in (True, False):
        out = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=P(names), out_specs=P(), check_vma=check
            )
        )(jnp.arange(8.0))
        assert {float(x[0]) for x in out.values()} == {3.5}


@pytest.mark.parametrize("per_node", [None, 1, 2, 4, 8])
def test_B52_index_groups(per_node):
    reduce = lambda x: optax_npu.hierarchical_pmean(
        x, "data", devices_per_node=per_node
    )
    for wrap in (jax.pmap, jax.vmap):
        out = wrap(reduce, axis_name="data")(jnp.arange(8.0))
        np.testing.assert_array_equal(out, np.full(8, 3.5))
    mesh = mesh_named(("data",), (8,))

    def sharded(check):
        step = jax.shard_map(
            lambda x: reduce(x[0]),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            check_vma=check,
        )
        return float(jax.jit(step)(jnp.arange(8.0)))

    assert sharded(False) == 3.5
    if per_node in (2, 4):
        with pytest.raises(ValueError, match="two_level_mesh\\(devices_per_node="):
            sharded(True)
    else:
        assert sharded(True) == 3.5


def test_B62_replicated_types_and_stable_scan():
    """The result passes out_specs=P(), and a scan of updates keeps its types."""
    mesh = mesh_of((2, 4))
    tx = optax.chain(hierarchical_all_reduce(AXES), optax.adam(0.1))

    def train(params, batch):
        def one(carry, _):
            params, state = carry
            grads = jax.grad(lambda p: jnp.sum(p * batch))(
                optax_npu.local_params(params, AXES)
            )
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), grads

        carry, _ = jax.lax.scan(one, (params, tx.init(params)), length=3)
        return carry

    step = jax.shard_map(train, mesh=mesh, in_specs=(P(), P(AXES)), out_specs=P())
    params, _ = jax.jit(step)(jnp.zeros(10), jnp.arange(8.0))
    # Adam moves by the learning rate as long as the gradient does not change.
    np.testing.assert_allclose(params, np.full(10, -0.3), rtol=1e-5)


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B64_mean_over_valid_items(mode):
    batch = (jnp.arange(8.0), jnp.array([1.0, 2, 3, 4, 1, 2, 3, 4]))

    def step(_, batch, how):
        total, count = optax_npu.hierarchical_psum(batch, **how.reduce_over)
        return total / count

    out = assert_same_bits(run(mode, (2, 4), step, 0.0, batch))
    assert out == np.float32(1.4)


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B21_leaves_that_are_no_gradients_pass(mode):
    params = {
        "w": jnp.ones(2),
        "n": jnp.arange(3),
        "k": jax.random.key(0),
        "flag": jnp.array(True),
        "masked": optax.MaskedNode(),
    }
    kept: list[Any] = []

    def step(_, batch, how):
        w = local(params["w"], how)
        loss = lambda p: jnp.sum(p["w"] ** 2) * batch
        grads = jax.grad(loss, allow_int=True)({**params, "w": w})
        grads["key"], grads["bool"] = params["k"], params["flag"]
        tx = hierarchical_all_reduce(**how.reduce_over, num_packs=0)
        out = tx.update(grads, tx.init(params))[0]
        kept.append((grads, out))
        return out["w"]

    out = assert_same_bits(run(mode, (2, 4), step, 0.0, jnp.ones(8)))
    np.testing.assert_array_equal(out, [2.0, 2.0])
    before, after = kept[0]
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for name in ("n", "k", "key", "bool", "flag"):
        assert after[name] is before[name], name
    assert before["n"].dtype == jax.dtypes.float0


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_integers_are_summed_exactly_and_their_mean_is_refused(mode):
    batch = {"i": jnp.arange(8, dtype=jnp.int32) + 2**24, "b": jnp.ones(8, jnp.int8)}

    def total(_, x, how):
        return optax_npu.hierarchical_psum(x, **how.reduce_over)

    out = assert_same_bits(run(mode, (2, 4), total, 0.0, batch))
    assert out == {"i": 8 * 2**24 + 28, "b": 8}
    assert out["b"].dtype == np.int8

    def mean(_, x, how):
        tx = hierarchical_all_reduce(**how.reduce_over)
        return tx.update(x, tx.init(x))[0]

    with pytest.raises(TypeError, match=r"mean of int.* refused.*op='sum'"):
        run(mode, (2, 4), mean, 0.0, batch)


def test_integers_may_pass():
    tx = hierarchical_all_reduce("data", integers="pass")

    def step(x, n):
        return tx.update({"x": x, "n": n}, tx.init(None))[0]

    out = jax.pmap(step, axis_name="data")(jnp.arange(8.0), jnp.arange(8))
    np.testing.assert_array_equal(out["x"], np.full(8, 3.5))
    np.testing.assert_array_equal(out["n"], np.arange(8))


def test_inf_and_nan_reach_their_element_on_all_replicas_and_no_other():
    batch = jnp.zeros((8, 5)).at[3, 1].set(jnp.nan).at[5, 2].set(jnp.inf)

    def step(_, x, how):
        grads = {"a": x, "b": x + 1}
        tx = hierarchical_all_reduce(**how.reduce_over, num_packs=2)
        return tx.update(grads, tx.init(grads))[0]

    for mode in MAPPED_MODES:
        out = assert_same_bits(run(mode, (2, 4), step, 0.0, batch))
        np.testing.assert_array_equal(out["a"], [0, np.nan, np.inf, 0, 0])
        np.testing.assert_array_equal(out["b"], [1, np.nan, np.inf, 1, 1])


def test_B46_replicated_state_as_in_flax():
    from flax import jax_utils

    tx = optax.chain(hierarchical_all_reduce("data"), optax.adam(0.1))
    params = {"w": jnp.ones(3)}
    grads = {"w": jnp.arange(24.0).reshape(8, 3)}
    state = jax_utils.replicate(tx.init(params))
    assert all(x.shape[0] == 8 for x in jax.tree.leaves(state))
    _, state = jax.pmap(lambda g, s: tx.update(g, s), axis_name="data")(grads, state)
    alone = optax.chain(optax.identity(), optax.adam(0.1))
    mean = {"w": jnp.mean(grads["w"], axis=0)}
    _, want = alone.update(mean, alone.init(params), params)
    jax.tree.map(
        np.testing.assert_array_equal, jax_utils.unreplicate(state)[1], want[1]
    )


# Bad input


def test_B63_outside_a_mapped_function():
    tx = hierarchical_all_reduce(AXES)
    with pytest.raises(ValueError, match=r"'node'.*bound axes: none.*shard_map"):
        jax.jit(tx.update)(jnp.ones(3), tx.init(None))


def test_B63_wrong_axis_name():
    step = mapped(
        "checked",
        (2, 4),
        lambda _, x, how: optax_npu.hierarchical_pmean(x, ("node", "local")),
    )
    with pytest.raises(ValueError, match=r"'local'.*\['node', 'device'\]"):
        step(0.0, jnp.arange(8.0))


@pytest.mark.parametrize(
    ("axis_name", "error", "match"),
    [
        (("node", "node"), ValueError, "more than once"),
        ((("a", "b"), "a"), ValueError, "'a' more than once"),
        ((), ValueError, "names no axis"),
        (("node", ()), ValueError, "names no axis in one of its levels"),
        (None, ValueError, "axis_name is missing"),
        (("node", {}), TypeError, "hashable"),
        (("node", None), TypeError, "hashable"),
    ],
)
def test_B63_bad_axis_names(axis_name, error, match):
    with pytest.raises(error, match=match):
        hierarchical_all_reduce(axis_name)


def test_B63_swapped_axes_give_the_same_mean():
    step = lambda _, x, how: optax_npu.hierarchical_pmean(x, AXES[::-1])
    out = assert_same_bits(run("checked", (2, 4), step, 0.0, jnp.arange(8.0)))
    assert out == 3.5


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"devices_per_node": 4}, ValueError, "several axes already say"),
        ({"num_packs": -1}, ValueError, "num_packs=-1"),
        ({"num_packs": 1.5}, TypeError, "num_packs=1.5"),
        ({"num_packs": True}, TypeError, "num_packs=True"),
        ({"num_packs": "2"}, TypeError, "num_packs='2'"),
        ({"op": "avg"}, ValueError, "op='avg'"),
        ({"op": None}, ValueError, "op=None"),
        ({"reduce_dtype": jnp.int32}, ValueError, "reduce_dtype=int32"),
        ({"reduce_dtype": "fast"}, TypeError, "reduce_dtype='fast'"),
        ({"inter_node_dtype": jnp.complex64}, ValueError, "inter_node_dtype=complex64"),
        ({"on_replicated": "maybe"}, ValueError, "on_replicated='maybe'"),
        ({"integers": "mean"}, ValueError, "integers='mean'"),
    ],
)
def test_B72_bad_options_fail_in_the_factory(options, error, match):
    with pytest.raises(error, match=match):
        hierarchical_all_reduce(AXES, **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"devices_per_node": 0}, ValueError, "at least 1"),
        ({"devices_per_node": 2.0}, TypeError, "whole number"),
        ({"devices_per_node": True}, TypeError, "whole number"),
        ({"inter_node_dtype": jnp.bfloat16}, ValueError, "which links run between"),
    ],
)
def test_B72_bad_options_of_one_axis(options, error, match):
    with pytest.raises(error, match=match):
        hierarchical_all_reduce("data", **options)


def test_B72_nodes_that_do_not_divide():
    tx = hierarchical_all_reduce("data", devices_per_node=3)
    with pytest.raises(ValueError, match=r"3 does not divide the 8.*\[1, 2, 4, 8\]"):
        jax.pmap(lambda x: tx.update(x, None)[0], axis_name="data")(jnp.arange(8.0))


def test_a_plan_for_another_tree_is_refused():
    plan = optax_npu.bucket_plan({"a": jnp.ones(3), "b": jnp.ones(2)})
    tx = hierarchical_all_reduce("data", split=plan)
    with pytest.raises(ValueError, match="first difference is at 'b'"):
        jax.vmap(lambda x: tx.update({"a": x, "b": x}, None)[0], axis_name="data")(
            jnp.ones((8, 3))
        )
