# SPDX-License-Identifier: Apache-2.0
"""npu_optimizer: all stages together, in every mode."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import optax_npu
from optax_npu import DynamicLossScale, FixedLossScaleManager, npu_optimizer
from tests import _modes
from tests._modes import MAPPED_MODES, MODES
from tests._steps import (
    INF,
    NAN,
    as_bytes,
    assert_same_bits,
    count_of,
    scale_of,
    vec,
    without_loss_scale,
)

SHAPE = (2, 4)


def make(inner, how, loss_scale=1.0, **options):
    """The optimizer for a mode; under plain jit the compiler reduces."""
    return npu_optimizer(
        inner,
        loss_scale,
        is_distributed=True,
        is_loss_scale=loss_scale is not None,
        **(how.reduce_over or {}),
        **options,
    )


def update_once(mode, shape, inner, per_replica, params, loss_scale=1.0, **options):
    """One update of every replica with its row of `per_replica`."""

    def step(shared, grads, how):
        params, state = shared
        if mode == "jit":
            op = options.get("op", "mean")
            reduce = jnp.mean if op == "mean" else jnp.sum
            grads = jax.tree.map(lambda g: reduce(g, axis=0), grads)
        kept = {k: v for k, v in options.items() if mode != "jit" or k != "op"}
        return make(inner, how, loss_scale, **kept).update(grads, state, params)

    how = _modes.How(mode, shape)
    state = make(inner, how, loss_scale, **options).init(params)
    out = _modes.run(mode, shape, step, (params, state), per_replica)
    return _modes.assert_same_bits(out)


@pytest.mark.parametrize("tailing", [False, True])
@pytest.mark.parametrize(("op", "expected"), [("mean", -3.5), ("sum", -28.0)])
@pytest.mark.parametrize("mode", MODES)
def test_B48_mean_and_sum(mode, op, expected, tailing):
    grads = {"a": jnp.arange(8.0)[:, None] * jnp.ones(5), "b": jnp.arange(8.0)}
    params = {"a": jnp.zeros(5), "b": jnp.zeros(())}
    updates, _ = update_once(
        mode,
        SHAPE,
        optax.sgd(1.0),
        grads,
        params,
        op=op,
        is_tailing_optimization=tailing,
    )
    np.testing.assert_array_equal(updates["a"], np.full(5, expected))
    assert float(updates["b"]) == expected


@pytest.mark.parametrize("shape", _modes.SHAPES)
@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_every_mesh_gives_the_same_numbers(mode, shape):
    n = shape[0] * shape[1]
    grads = 16.0 * jnp.arange(float(n))[:, None] + jnp.arange(1003.0)
    updates, state = update_once(
        mode,
        shape,
        optax.sgd(1.0),
        {"w": grads * 4},
        {"w": jnp.zeros(1003)},
        DynamicLossScale(4.0),
        is_tailing_optimization=True,
    )
    expected = 16 * (n - 1) / 2 + np.arange(1003.0)
    np.testing.assert_array_equal(updates["w"], -expected)
    assert int(state.scaling.good_steps) == 1


@pytest.mark.parametrize("mode", MAPPED_MODES)
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([10000.0] * 8, -10000.0),
        ([2.0**-24] * 8, -(2.0**-24)),
        ([60000.0, 60000.0, -60000.0, -60000.0, 0, 0, 0, 0], 0.0),
    ],
    ids=["large", "small", "cancelling"],
)
def test_B53_float16_range_of_the_reduction(mode, values, expected):
    grads = jnp.asarray(values, jnp.float16)[:, None]
    updates, state = update_once(
        mode, SHAPE, optax.sgd(1.0), grads, jnp.zeros(1, jnp.float32)
    )
    assert updates.dtype == np.float32
    assert float(updates[0]) == expected
    assert not bool(state.scaling.found_inf)


@pytest.mark.parametrize("tailing", [False, True])
@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B56_mixed_dtypes_never_share_a_buffer(mode, tailing):
    one = {
        "A": vec(100000.0, 16777218.0),
        "B": vec(1.0, dtype=jnp.float16),
        "C": vec(3.0, dtype=jnp.bfloat16),
        "D": vec(1 + 2j, dtype=jnp.complex64),
    }
    grads = jax.tree.map(lambda x: jnp.broadcast_to(x, (8, *x.shape)), one)
    updates, _ = update_once(
        mode,
        SHAPE,
        optax.identity(),
        grads,
        one,
        is_tailing_optimization=tailing,
        num_packs=1,
    )
    assert_same_bits(updates, one)


BAD = [(i, v) for v in (INF, -INF, NAN) for i in (0, 3, 7)]


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B58_one_bad_element_of_one_replica_stops_all(mode, op):
    inner = optax.adam(0.1)
    params = jnp.zeros(2)
    cases = [{i: v} for i, v in BAD] + [{1: INF, 6: -INF}]
    rows = np.ones((len(cases), 8, 2), np.float32)
    for row, case in zip(rows, cases, strict=True):
        for device, value in case.items():
            row[device, device % 2] = value

    def step(shared, grads, how):
        tx = make(inner, how, DynamicLossScale(16.0), op=op)
        updates, states = [], []
        for case in range(len(cases)):
            state = tx.init(shared)
            update, state = tx.update(grads[case], state, shared)
            updates.append(update)
            states.append(state)
        return updates, states

    out = _modes.run(mode, SHAPE, step, params, jnp.asarray(rows).swapaxes(0, 1))
    updates, states = _modes.assert_same_bits(out)
    for update, state in zip(updates, states, strict=True):
        assert not np.any(update)
        assert float(state.scaling.loss_scale) == 8.0
        assert_same_bits(state.inner, inner.init(params))


@pytest.mark.parametrize("tailing", [False, True])
@pytest.mark.parametrize("mode", MAPPED_MODES)
@pytest.mark.parametrize(
    ("dtype", "value", "options"),
    [
        (jnp.float32, 3e38, {"op": "sum"}),
        (jnp.float16, 60000.0, {"op": "sum"}),
        (jnp.float16, 60000.0, {"op": "sum", "reduce_dtype": jnp.float16}),
        (jnp.float32, 1e5, {"op": "mean", "inter_node_dtype": jnp.float16}),
        (jnp.bfloat16, 3e38, {"op": "sum"}),
    ],
    ids=["f32", "f16", "f16-in-f16", "f16-wire", "bf16"],
)
def test_an_overflow_that_only_the_reduction_makes_is_caught(
    mode, dtype, value, options, tailing
):
    # Every local value is finite; the flag, taken before the reduction, must know.
    grads = jnp.full((8, 3), value, dtype)
    updates, state = update_once(
        mode,
        SHAPE,
        optax.sgd(1.0),
        grads,
        jnp.zeros(3, dtype),
        is_tailing_optimization=tailing,
        **options,
    )
    assert not np.any(updates.astype(np.float32))
    assert bool(state.scaling.found_inf)


@pytest.mark.parametrize("mode", MAPPED_MODES)
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_no_report_means_finite(mode, op):
    # Values up to the largest that pass: never a non-finite update.
    rng = np.random.default_rng(0)
    exponents = rng.uniform(100, 128, size=(8, 400))
    grads = np.minimum(np.exp2(exponents), np.finfo(np.float32).max)
    params = {str(i): jnp.zeros(()) for i in range(400)}

    def step(shared, grads, how):
        tx = make(optax.sgd(1.0), how, op=op)
        one = jnp.zeros(())
        state = tx.init(one)
        outs = jax.vmap(lambda g: tx.update(g, state, one))(grads)
        return outs[0], outs[1].scaling.found_inf

    out = _modes.run(mode, SHAPE, step, params, jnp.asarray(grads, jnp.float32))
    updates, skipped = _modes.assert_same_bits(out)
    assert np.all(np.isfinite(updates))
    assert 0 < skipped.sum() < 400
    assert np.all((updates == 0) == skipped)


def loss_of(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((h @ params["w2"]) ** 2)


def mlp_params():
    rng = np.random.default_rng(1)
    return {
        "w1": jnp.asarray(rng.normal(size=(6, 5)), jnp.float32),
        "b1": jnp.zeros(5),
        "w2": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32),
    }


def batches(steps, bad=()):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(steps, 16, 6)).astype(np.float32)
    for i in bad:
        x[i, (3 * i) % 16, i % 6] = (INF, NAN, -INF)[i % 3]
    return jnp.asarray(x)


def train(mode, shape, inner, x, loss_scale, **options):
    """Trains on all of `x`; returns the replicas' (params, state)."""

    def step(shared, rows, how):
        tx = make(inner, how, loss_scale, **options)

        def body(carry, rows):
            params, state = carry
            _, grads = optax_npu.scaled_value_and_grad(
                loss_of, state, axis_name=how.axis_name
            )(params, rows)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, shared, rows)[0]

    n = shape[0] * shape[1]
    params = mlp_params()
    state = make(inner, _modes.How("jit", shape), loss_scale).init(params)
    if mode != "jit":
        x = x.reshape(x.shape[0], n, -1, x.shape[-1]).swapaxes(0, 1)
    return _modes.run(mode, shape, step, (params, state), x)


@pytest.mark.parametrize("name", ["lamb", "adam"])
@pytest.mark.parametrize("mode", MODES)
def test_training_equals_the_float64_run_on_one_device(mode, name):
    inner = {"lamb": optax.lamb, "adam": optax.adam}[name](1e-2)
    bad = (0, 5, 6)
    x = batches(12, bad)
    out = train(
        mode, SHAPE, inner, x, DynamicLossScale(8.0), is_tailing_optimization=True
    )
    params, state = _modes.assert_same_bits(out)
    assert int(state.scaling.skipped_steps) == len(bad)
    assert float(state.scaling.loss_scale) == 1.0

    with jax.enable_x64(True):
        reference = jax.tree.map(lambda p: p.astype(jnp.float64), mlp_params())
        ref_state = inner.init(reference)
        for i in range(12):
            if i in bad:
                continue
            grads = jax.grad(loss_of)(reference, x[i].astype(jnp.float64))
            updates, ref_state = inner.update(grads, ref_state, reference)
            reference = optax.apply_updates(reference, updates)
        for key in reference:
            np.testing.assert_allclose(
                params[key], reference[key], rtol=2e-5, atol=1e-6
            )


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_B66_tailing_and_buckets_change_no_bit(mode):
    x = batches(10, (0, 4, 7))
    options = [
        dict(is_tailing_optimization=tail, **how)
        for tail in (False, True)
        for how in (
            {},
            {"num_packs": 0},
            {"num_packs": 1},
            {"num_packs": 2},
            {"split": [50.0, 50.0]},
            {"split": "ascend"},
            {"order": ["w2", "w1", "b1"]},
        )
    ]
    if mode != "unchecked":  # the other modes compile to the same collectives
        options = options[::3]
    results = [
        _modes.assert_same_bits(
            train(mode, SHAPE, optax.lamb(1e-2), x, DynamicLossScale(8.0), **o)
        )
        for o in options
    ]
    for option, result in zip(options, results, strict=True):
        assert as_bytes(result) == as_bytes(results[0]), option


@pytest.mark.parametrize("mode", MODES)
def test_B74_the_step_count_is_equal_everywhere(mode):
    def step(shared, rows, how):
        params, state = shared
        tx = make(optax.adam(0.1), how, 1.0)
        for i in range(5):
            grads = rows[i] if how.mode != "jit" else jnp.mean(rows[:, i], axis=0)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return state

    rows = np.zeros((8, 5, 2), np.float32)
    rows[4:] = 1.0
    rows[2, 1] = rows[6, 2, 0] = NAN
    params = jnp.zeros(2)
    state = make(optax.adam(0.1), _modes.How("jit", SHAPE)).init(params)
    out = _modes.run(mode, SHAPE, step, (params, state), jnp.asarray(rows))
    assert count_of(_modes.assert_same_bits(out)) == 3


def test_B49_already_summed_gradients_are_not_summed_again():
    mesh = _modes.mesh_of(SHAPE)
    tx = npu_optimizer(optax.sgd(1.0), 4.0, True, True, axis_name=("node", "device"))
    w = jnp.zeros(())

    def step(local, w, state, b):
        def loss(w):
            return jnp.mean(w * b)

        axes = ("node", "device") if local else None
        _, grads = optax_npu.scaled_value_and_grad(loss, state, axis_name=axes)(w)
        return tx.update(grads, state, w)[0]

    def run(local):
        return jax.jit(
            jax.shard_map(
                lambda *a: step(local, *a),
                mesh=mesh,
                in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(_modes.AXES)),
                out_specs=PartitionSpec(),
            )
        )(w, tx.init(w), jnp.arange(8.0))

    assert float(run(True)) == -3.5
    with pytest.warns(optax_npu.AlreadyReducedWarning, match="scaled_value_and_grad"):
        assert float(run(False)) == -3.5


@pytest.mark.parametrize("check_vma", [True, False])
def test_model_axes_vote_but_are_not_reduced(check_vma):
    mesh = _modes.mesh_named(("data", "model"), (4, 2))
    tx = npu_optimizer(
        optax.sgd(1.0), DynamicLossScale(4.0), True, True,
        axis_name="data", agreement_axes="model",
    )  # fmt: skip

    def step(params, state, grads):
        return tx.update(grads[0], state, params)

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(
                PartitionSpec("model"),
                PartitionSpec(),
                PartitionSpec("data", "model"),
            ),
            out_specs=(PartitionSpec("model"), PartitionSpec()),
            check_vma=check_vma,
        )
    )
    params = jnp.zeros(2)
    state = tx.init(params)
    grads = 4 * (10.0 * jnp.arange(4.0)[:, None] + jnp.arange(2.0))
    updates, after = run(params, state, grads)
    np.testing.assert_array_equal(updates, [-15.0, -16.0])
    assert scale_of(after) == 4.0
    # An overflow of one model shard on one replica: both shards hold still.
    updates, after = run(params, state, grads.at[2, 1].set(INF))
    assert not np.any(updates)
    assert scale_of(after) == 2.0


def test_a_model_axis_that_was_left_out_is_found():
    mesh = _modes.mesh_named(("data", "model"), (4, 2))
    tx = npu_optimizer(optax.sgd(1.0), 4.0, True, True, axis_name="data")

    def step(grads):
        return tx.update(grads, tx.init(grads), grads)[0]

    with pytest.raises(ValueError, match=r"'model'.*agreement_axes"):
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=PartitionSpec("data", "model"),
            out_specs=PartitionSpec("data", "model"),
        )(jnp.ones((4, 2)))


SCALES = {
    "off": None,
    "fixed": FixedLossScaleManager(2.0),
    "dynamic": DynamicLossScale(2.0),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("mode", MODES)
def test_B68_every_combination_of_switches(mode, scale):
    params = jnp.zeros(1)
    good, bad = jnp.full((8, 1), 4.0), jnp.full((8, 1), 4.0).at[5].set(INF)
    results = {}
    for tailing, (name, grads) in itertools.product(
        (False, True), (("good", good), ("bad", bad))
    ):
        updates, state = update_once(
            mode,
            SHAPE,
            optax.sgd(1.0),
            grads,
            params,
            SCALES[scale],
            is_tailing_optimization=tailing,
        )
        results[tailing, name] = (updates, state)
        if name == "good":
            assert float(updates[0]) == (-4.0 if scale == "off" else -2.0)
        elif scale == "off":
            assert not np.isfinite(updates[0])
            assert not bool(state.scaling.found_inf)
        else:
            assert float(updates[0]) == 0
            assert bool(state.scaling.found_inf)
    for name in ("good", "bad"):
        assert as_bytes(results[True, name]) == as_bytes(results[False, name])


def test_the_state_tree_is_the_same_whatever_is_switched_on():
    params = vec(1.0)
    trees = {
        jax.tree.structure(
            make(optax.adam(0.1), _modes.How("jit", SHAPE), s).init(params)
        )
        for s in SCALES.values()
    }
    assert len(trees) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_loss_scale": True}, "without a loss_scale_manager"),
        ({"is_tailing_optimization": True}, "hides the optimizer behind"),
        ({"axis_name": "data"}, "without is_distributed=True.*drift"),
        (
            {"is_distributed": True, "axis_name": ("n", "d"), "agreement_axes": ("d",)},
            "agreement_axes names 'd'",
        ),
        (
            {"is_distributed": True, "axis_name": ("n", "d"), "devices_per_node": 2},
            "devices_per_node",
        ),
        ({"is_distributed": True, "axis_name": ("n", "n")}, "n"),
        ({"is_distributed": True, "axis_name": "n", "num_packs": -1}, "num_packs"),
        ({"is_distributed": True, "axis_name": "n", "op": "avg"}, "op='avg'"),
    ],
)
def test_switches_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        npu_optimizer(optax.sgd(1.0), **arguments)


def test_switches_must_be_bools():
    with pytest.raises(TypeError, match=r"is_distributed='data'.*axis_name="):
        npu_optimizer(optax.sgd(1.0), 1.0, "data")
    with pytest.raises(TypeError, match="opt is a float"):
        npu_optimizer(0.1)


def test_B63_axes_that_are_not_bound():
    tx = npu_optimizer(optax.sgd(1.0), 1.0, True, True, axis_name=("node", "device"))
    params = vec(0.0)
    with pytest.raises(ValueError, match=r"(?s)'node'.*bound.*none"):
        jax.jit(tx.update)(params, tx.init(params), params)
    mesh = _modes.mesh_of(SHAPE)
    wrong = npu_optimizer(
        optax.sgd(1.0), 1.0, True, True, axis_name=("nodes", "device")
    )
    with pytest.raises(ValueError, match=r"(?s)'nodes'.*'node', 'device'"):
        jax.shard_map(
            lambda p: wrong.update(p, wrong.init(p), p)[0],
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )(params)


def test_distributed_without_an_axis_in_a_mapped_function_is_refused():
    tx = npu_optimizer(optax.sgd(1.0), 1.0, True, True)
    with pytest.raises(ValueError, match=r"(?s)without axis_name.*'node', 'device'"):
        jax.shard_map(
            lambda p: tx.update(p, tx.init(p), p)[0],
            mesh=_modes.mesh_of(SHAPE),
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
        )(vec(0.0))


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_an_outside_flag_of_one_replica_stops_all(mode):
    def step(shared, index, how):
        tx = make(optax.sgd(1.0), how, DynamicLossScale(4.0))
        flag = index == 6
        return tx.update(jnp.ones(2), tx.init(shared), shared, found_inf=flag)

    # The gradients are equal on all replicas here, and said to be.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optax_npu.AlreadyReducedWarning)
        out = _modes.run(mode, SHAPE, step, jnp.zeros(2), _modes.indices(SHAPE))
    updates, state = _modes.assert_same_bits(out)
    assert not np.any(updates)
    assert float(state.scaling.loss_scale) == 2.0


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_odd_leaves_pass(mode):
    params = {
        "w": jnp.zeros(3),
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "masked": jnp.zeros(2),
    }
    inner = optax.sgd(1.0)

    def step(shared, index, how):
        tx = make(inner, how, 2.0, is_tailing_optimization=True)
        grads = {
            "w": index * jnp.ones(3),
            "none": None,
            "empty": index * jnp.zeros((0, 3)),
            "masked": optax.MaskedNode(),
        }
        masked = {**shared, "masked": optax.MaskedNode()}
        return tx.update(grads, tx.init(masked), masked)[0]

    out = _modes.run(mode, SHAPE, step, params, jnp.arange(8.0))
    updates = _modes.assert_same_bits(out)
    np.testing.assert_array_equal(updates["w"], np.full(3, -1.75))
    assert updates["none"] is None
    assert updates["empty"].shape == (0, 3)
    assert isinstance(updates["masked"], optax.MaskedNode)


def test_B69_collectives_are_counted():
    params = {k: jnp.zeros((16, 4)) for k in "abc"}

    def lowered(tail, **options):
        tx = npu_optimizer(
            optax.sgd(1.0), 1.0, True, True, tail, axis_name=_modes.AXES, **options
        )

        def step(params, state, x):
            grads = jax.tree.map(lambda p: (p + 1) * x[0], params)
            return tx.update(grads, state, params)[0]

        return (
            jax.jit(
                jax.shard_map(
                    step,
                    mesh=_modes.mesh_of(SHAPE),
                    in_specs=(
                        PartitionSpec(),
                        PartitionSpec(),
                        PartitionSpec(_modes.AXES),
                    ),
                    out_specs=PartitionSpec(),
                    check_vma=False,
                )
            )
            .lower(params, tx.init(params), jnp.ones(8))
            .as_text()
        )

    for tail, (buckets, options) in itertools.product(
        (False, True), ((3, {"num_packs": 0}), (1, {"num_packs": 1}), (1, {}))
    ):
        text = lowered(tail, **options)
        assert text.count("stablehlo.reduce_scatter") == buckets
        assert text.count("stablehlo.all_gather") == buckets
        assert text.count("stablehlo.all_reduce") == buckets + 1  # and the vote


@pytest.mark.parametrize("tail", [False, True])
def test_B70_vmap_and_grad_through_the_update(tail):
    tx = npu_optimizer(
        optax.sgd(1.0), 2.0, True, True, tail, axis_name="data", num_packs=0
    )
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, 2))}

    def one(params, x):
        grads = jax.tree.map(lambda p: (p + 2.0) * x, params)
        updates, _ = tx.update(grads, tx.init(params), params)
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    def step(params, x):
        return jax.vmap(one, (0, None))(params, x), jax.grad(
            lambda p: jnp.sum(jax.vmap(one, (0, None))(p, x))
        )(params)

    value, grads = jax.pmap(step, "data", in_axes=(None, 0))(params, jnp.arange(8.0))
    np.testing.assert_array_equal(value, np.full((8, 2), -5 * 3.5))
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


def test_everything_else_stays_on_overflow():
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    tx = npu_optimizer(inner, DynamicLossScale(4.0), is_loss_scale=True)
    params = {"w": jnp.ones(3)}
    before = tx.init(params)
    updates, after = jax.jit(tx.update)({"w": vec(1.0, NAN, 1.0)}, before, params)
    assert not np.any(updates["w"])
    assert_same_bits(without_loss_scale(after), without_loss_scale(before))
    assert scale_of(after) == 2.0


def test_extra_arguments_reach_the_inner_optimizer():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
    tx = npu_optimizer(inner, 2.0, is_loss_scale=True)
    params = vec(0.0)
    updates, _ = tx.update(
        vec(2.0), tx.init(params), params, value=jnp.float32(1.0), found_inf=False
    )
    assert float(updates[0]) == -1.0


@pytest.mark.parametrize("mode", ["unchecked", "checked"])
def test_the_two_halves_compose(mode):
    def step(shared, index, how):
        distributed = optax_npu.npu_distributed_optimizer(
            optax.sgd(1.0), axis_name=how.axis_name
        )
        tx = optax_npu.npu_loss_scale_optimizer(
            distributed, DynamicLossScale(4.0), True, axis_name=how.axis_name
        )
        state = tx.init(shared)
        good, state = tx.update(4 * index * jnp.ones(2), state, shared)
        bad, state = tx.update(jnp.where(index == 3, NAN, 1.0) * shared, state, shared)
        return good, bad, optax_npu.get_loss_scale(state)

    out = _modes.run(mode, SHAPE, step, jnp.ones(2), jnp.arange(8.0))
    good, bad, scale = _modes.assert_same_bits(out)
    np.testing.assert_array_equal(good, [-3.5, -3.5])
    assert not np.any(bad)
    assert float(scale) == 2.0
