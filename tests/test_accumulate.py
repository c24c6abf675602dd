# SPDX-License-Identifier: Apache-2.0
"""One reduction per window, the same numbers in every mode, and bad micro-batches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import optax_npu
from optax_npu import DynamicLossScale, accumulate_gradients, npu_optimizer
from tests._modes import AXES, MODES, assert_same_bits, mesh_named, mesh_of, run

SHAPE = (2, 4)
POLICIES = ("drop_micro_batch", "drop_window")
# Of replica r at micro-step m: 8 r + m, or nan. Two windows of four.
BATCH = np.arange(64, dtype=np.float32).reshape(8, 8)


def optimizer(how, opt=None, **options):
    """The whole optimizer, with loss scale, for a mode."""
    reduce = how.reduce_over or {}
    return npu_optimizer(
        opt or optax.sgd(1.0),
        DynamicLossScale(8.0, increment_period=100),
        is_distributed=True,
        is_loss_scale=True,
        **reduce,
        **options,
    )


def trainer(policy, every_k=4, opt=None, **options):
    """A step function that trains over all micro-batches of its batch."""

    def train(params, batch, how):
        tx = accumulate_gradients(
            optimizer(how, opt, **options),
            every_k,
            axis_name=how.axis_name,
            on_overflow=policy,
        )
        batch = batch.T if how.mode == "jit" else batch  # micro-steps first

        def one(carry, x):
            params, state = carry
            value_and_grad = optax_npu.scaled_value_and_grad(
                lambda p: jnp.mean(p["w"][0] * x + 0 * p["w"][1]),
                state,
                axis_name=how.axis_name,
            )
            _, grads = value_and_grad(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), updates["w"][0]

        (params, state), updates = lax.scan(one, (params, tx.init(params)), batch)
        scaling = state.inner.scaling
        kept = {"params": params, "updates": updates, "dropped": state.dropped}
        return kept | {"scale": scaling.loss_scale, "skipped": scaling.skipped_steps}

    return train


START = {"w": jnp.zeros(2)}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_D14_a_window_is_one_big_batch(mode, policy):
    out = assert_same_bits(run(mode, SHAPE, trainer(policy), START, BATCH))
    windows = [-BATCH[:, :4].mean(), -BATCH[:, 4:].mean()]
    want = np.zeros(8, np.float32)
    want[3], want[7] = windows
    np.testing.assert_array_equal(out["updates"], want)
    np.testing.assert_array_equal(out["params"]["w"], [sum(windows), 0])
    assert (out["scale"], out["skipped"], out["dropped"]) == (8.0, 0, 0)


@pytest.mark.parametrize(
    ("mode", "bad"), [("pmap", np.nan), ("unchecked", np.inf), ("checked", -np.inf)]
)
def test_B35_a_bad_micro_batch_is_dropped(mode, bad):
    """The mean of the 31 good ones; the scale comes down; the next window is clean."""
    batch = BATCH.copy()
    batch[3, 1] = bad
    train = trainer("drop_micro_batch")
    out = assert_same_bits(run(mode, SHAPE, train, START, batch))
    good = np.delete(BATCH[:, :4].ravel(), 3 * 4 + 1)
    np.testing.assert_allclose(out["updates"][3], -good.mean(), rtol=1e-6)
    assert out["updates"][7] == -BATCH[:, 4:].mean()
    assert (out["scale"], out["skipped"], out["dropped"]) == (4.0, 0, 1)


@pytest.mark.parametrize(
    ("mode", "bad"), list(zip(MODES, [np.nan, np.inf, -np.inf, np.nan], strict=True))
)
def test_B35_a_bad_window_is_dropped(mode, bad):
    """All replicas skip it; the accumulator starts anew."""
    batch = BATCH.copy()
    batch[3, 1] = bad
    train = trainer("drop_window")
    out = assert_same_bits(run(mode, SHAPE, train, START, batch))
    want = np.zeros(8, np.float32)
    want[7] = -BATCH[:, 4:].mean()
    np.testing.assert_array_equal(out["updates"], want)
    assert (out["scale"], out["skipped"], out["dropped"]) == (4.0, 1, 0)


@pytest.mark.parametrize("mode", ["jit", "checked"])
def test_a_window_without_a_good_micro_batch_is_skipped(mode):
    batch = BATCH.copy()
    batch[:, :4] = np.nan
    train = trainer("drop_micro_batch", opt=optax.adam(0.5))
    out = assert_same_bits(run(mode, SHAPE, train, START, batch))
    np.testing.assert_array_equal(out["updates"][:7], np.zeros(7))
    # Adam's first step is the learning rate, as if the first window had not been.
    np.testing.assert_allclose(out["updates"][7], -0.5, rtol=1e-5)
    replicas = 1 if mode == "jit" else 8
    assert (out["scale"], out["skipped"]) == (4.0, 1)
    assert out["dropped"] == 4 * replicas


@pytest.mark.parametrize("policy", POLICIES)
def test_skipped_updates_leave_every_bit(policy):
    """A micro-step that only adds up returns -0.0, which keeps a parameter of -0.0."""
    tx = accumulate_gradients(optax.sgd(1.0), 2, on_overflow=policy)
    params = jnp.array([-0.0, 1.0])
    updates, state = tx.update(jnp.array([3.0, 3.0]), tx.init(params), params)
    kept = optax.apply_updates(params, updates)
    assert np.asarray(kept).tobytes() == np.asarray(params).tobytes()
    assert state.micro_step == 1


def entry_and_rest(text: str) -> tuple[str, str]:
    """The entry computation of a compiled program, and all others."""
    start = text.index("\nENTRY ")
    end = text.index("\n}", start)
    return text[start:end], text[:start] + text[end:]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tail", [False, True])
def test_D14_only_the_branch_communicates(policy, tail):
    def step(params, state, x):
        tx = accumulate_gradients(
            npu_optimizer(
                optax.adam(0.1),
                DynamicLossScale(1.0),
                is_distributed=True,
                is_loss_scale=True,
                is_tailing_optimization=tail,
                axis_name=AXES,
                num_packs=2,
            ),
            4,
            axis_name=AXES,
            on_overflow=policy,
        )
        if state is None:
            return tx.init(params)
        grads = jax.grad(lambda p: jnp.sum(p["w"] * x) + jnp.sum(p["v"] * x))(
            optax_npu.local_params(params, AXES)
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(300), "v": jnp.ones((4, 5))}
    mesh = mesh_of(SHAPE)
    init = lambda params: step(params, None, None)
    like = jax.eval_shape(
        jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False),
        params,
    )
    specs = optax_npu.accumulation_specs(like, AXES)
    init = jax.jit(jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs))
    mapped = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), specs, P(AXES)), out_specs=(P(), specs)
        )
    )
    state = init(params)
    program = mapped.lower(params, state, jnp.arange(8.0)).compile()
    entry, branches = entry_and_rest(program.as_text())
    found = re.compile(r" (all-reduce|reduce-scatter|all-gather|all-to-all)\(")
    assert found.findall(entry) == []
    assert len(found.findall(branches)) >= 3
    # Between calls the accumulators stay apart, replica by replica.
    for i in range(3):
        params, state = program(params, state, jnp.arange(8.0))
        total = np.asarray(state.local.total["w"])
        np.testing.assert_array_equal(total[:, 0], (i + 1) * np.arange(8.0))
    np.testing.assert_array_equal(params["w"], np.ones(300))
    params, state = program(params, state, jnp.arange(8.0))
    np.testing.assert_allclose(params["w"], np.full(300, 0.9), rtol=1e-5)
    assert not np.asarray(state.local.total["w"]).any()
    assert state.micro_step == 0


def test_sums_are_float32_and_unscaled():
    """2048 + 1 + 1 + 1 in float16 stays 2048."""
    tx = accumulate_gradients(
        optax_npu.chain(optax_npu.npu_loss_scale(4.0), optax.sgd(1.0)), 4
    )
    params = {"w": jnp.zeros(1)}
    state = tx.init(params)
    for micro in (2048.0, 1.0, 1.0, 1.0):
        grads = {"w": jnp.array([4 * micro], jnp.float16)}
        updates, state = tx.update(grads, state, params)
    assert state.local.total["w"].dtype == jnp.float32
    np.testing.assert_array_equal(updates["w"], [-2051 / 4])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_dtypes_and_state_are_those_of_the_optimizer(dtype):
    """Half-precision moments stay half-precision: one program, one state type."""
    tx = accumulate_gradients(optax.adam(0.1), 2)
    params = jnp.ones(3, dtype)
    state = tx.init(params)
    step = jax.jit(tx.update)
    for _ in range(4):
        updates, new = step(jnp.full(3, 2, dtype), state, params)
        assert updates.dtype == dtype
        assert jax.eval_shape(lambda: new) == jax.eval_shape(lambda s=state: s)
        state = new
    assert step._cache_size() == 1


def test_the_scale_may_move_between_windows():
    """Each micro-batch is unscaled by the scale that scaled it."""
    tx = accumulate_gradients(
        optax_npu.chain(
            optax_npu.npu_loss_scale(DynamicLossScale(4.0, increment_period=1)),
            optax.sgd(1.0),
        ),
        2,
    )
    params = jnp.zeros(1)
    state = tx.init(params)
    scales, out = [], []
    for _ in range(4):
        scale = optax_npu.get_loss_scale(state)
        updates, state = tx.update(3 * scale[None], state, params)
        scales.append(float(scale))
        out.append(float(updates[0]))
    assert scales == [4, 4, 8, 8]
    assert out == [0, -3, 0, -3]


@pytest.mark.parametrize(
    ("policy", "window", "scale"),
    [("drop_micro_batch", -4.0, 4.0), ("drop_window", 0.0, 4.0)],
)
def test_an_outside_flag_counts_for_its_micro_batch(policy, window, scale):
    tx = accumulate_gradients(
        optax_npu.chain(
            optax_npu.npu_loss_scale(DynamicLossScale(8.0)), optax.sgd(1.0)
        ),
        2,
        on_overflow=policy,
    )
    params = jnp.zeros(1)
    state = tx.init(params)
    flags = [True, False, False, False]
    out = []
    for flag, grad in zip(flags, (2.0, 4.0, 6.0, 8.0), strict=True):
        grads = grad * optax_npu.get_loss_scale(state)[None]
        updates, state = tx.update(grads, state, params, found_inf=flag)
        out.append(float(updates[0]))
    assert out == [0, window, 0, -7.0]
    assert optax_npu.get_loss_scale(state) == scale


def test_without_a_loss_scale_bad_micro_batches_are_dropped_too():
    tx = accumulate_gradients(optax.adam(0.5), 2)
    params = jnp.zeros(1)
    state = tx.init(params)
    out = []
    for grad in (jnp.nan, 2.0, jnp.inf, jnp.nan, 1.0, 1.0):
        updates, state = tx.update(jnp.array([grad]), state, params)
        out.append(float(updates[0]))
    adam = optax.adam(0.5)
    first, plain = adam.update(jnp.array([2.0]), adam.init(params), params)
    second, _ = adam.update(jnp.array([1.0]), plain, params)
    np.testing.assert_allclose(out, [0, first[0], 0, 0, 0, second[0]], rtol=1e-6)
    assert optax.tree.get(state.inner, "count") == 2
    assert state.dropped == 3


def test_F15_the_accumulator_recovers_where_multi_steps_does_not():
    """The eight steps that leave optax.MultiSteps at nan for ever."""
    grads = [jnp.array([g]) for g in (1.0, jnp.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]

    def updates_of(tx):
        state, out = tx.init(jnp.zeros(1)), []
        for grad in grads:
            updates, state = tx.update(grad, state, jnp.zeros(1))
            out.append(float(updates[0]))
        return out

    theirs = updates_of(optax.MultiSteps(optax.sgd(1.0), 2))
    assert np.isnan(theirs[-1])
    ours = updates_of(accumulate_gradients(optax.sgd(1.0), 2))
    assert ours == [0, -1, 0, -1, 0, -1, 0, -1]


def test_other_leaves_pass_and_extra_arguments_arrive():
    seen = []

    def update(updates, state, params=None, *, value=None, **extra):
        seen.append((value, sorted(extra)))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = accumulate_gradients(inner, 2)
    params = {
        "w": jnp.ones(2),
        "c": jnp.ones(1, jnp.complex64),
        "n": jnp.arange(3),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": jnp.zeros((0, 3)),
    }
    grads = params | {"n": np.zeros(3, jax.dtypes.float0), "c": params["c"] * 2j}
    state = tx.init(params)
    update = jax.jit(
        lambda g, s, v: tx.update(g | {"n": grads["n"]}, s, params, value=v)
    )
    without = {k: v for k, v in grads.items() if k != "n"}
    for value in (1.0, 2.0):
        out, state = update(without, state, value)
    np.testing.assert_array_equal(out["w"], np.ones(2))
    np.testing.assert_array_equal(out["c"], [2j])
    assert out["none"] is None
    assert out["empty"].shape == (0, 3)
    assert seen
    assert all(extra == [] for _, extra in seen)


def test_one_micro_batch_per_window_is_the_optimizer():
    tx = accumulate_gradients(optax.adam(0.1), 1)
    params = jnp.ones(3)
    state, plain = tx.init(params), optax.adam(0.1).init(params)
    for grad in (1.0, -2.0, 0.5):
        grads = jnp.full(3, grad)
        ours, state = tx.update(grads, state, params)
        theirs, plain = optax.adam(0.1).update(grads, plain, params)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_model_parallel_shards_drop_a_micro_batch_together():
    mesh = mesh_named(("data", "model"), (4, 2))

    def train(params, batch):
        tx = accumulate_gradients(
            npu_optimizer(
                optax.sgd(1.0),
                DynamicLossScale(8.0),
                is_distributed=True,
                is_loss_scale=True,
                axis_name="data",
                agreement_axes="model",
            ),
            2,
            axis_name="data",
            agreement_axes="model",
        )
        here = (lax.axis_index("data") == 1) & (lax.axis_index("model") == 1)

        def one(carry, x):
            params, state = carry
            bad = here & (x == 1)  # the second micro-batch, on one shard of four
            grads = jnp.where(bad, jnp.nan, params * 0 + x) * 8
            grads = optax_npu.local_params(grads, "data")
            updates, state = tx.update(grads, state, params)
            return (params + updates, state), None

        state = tx.init(params)
        (params, state), _ = lax.scan(one, (params, state), batch)
        return params, state.dropped

    params, dropped = jax.jit(
        jax.shard_map(
            train,
            mesh=mesh,
            in_specs=(P("model"), P()),
            out_specs=(P("model"), P()),
            check_vma=False,
        )
    )(jnp.zeros(2), jnp.arange(2.0))
    # Four zeros and three good ones, on both shards.
    np.testing.assert_allclose(params, np.full(2, -3 / 7), rtol=1e-6)
    assert dropped == 1


# Bad input


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        ((optax.sgd(1.0), 0), {}, ValueError, "every_k=0"),
        ((optax.sgd(1.0), 2.0), {}, TypeError, "every_k=2.0"),
        ((optax.sgd(1.0), True), {}, TypeError, "every_k=True"),
        ((optax.sgd(1.0), 2), {"on_overflow": "stop"}, ValueError, "'drop_window'"),
        ((optax.sgd(1.0), 2), {"axis_name": ("a", "a")}, ValueError, "more than once"),
        ((optax.sgd, 2), {}, TypeError, "tx is a function"),
        ((optax.MultiSteps(optax.sgd(1.0), 2), 2), {}, TypeError, "MultiSteps"),
    ],
)
def test_B72_bad_arguments(args, options, error, match):
    with pytest.raises(error, match=match):
        accumulate_gradients(*args, **options)


def test_axis_name_is_needed_in_a_mapped_function():
    tx = accumulate_gradients(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=r"\['data'\], but axis_name is missing"):
        jax.pmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")(jnp.ones(8))


def test_gradients_that_are_summed_already_are_refused():
    tx = accumulate_gradients(optax.sgd(1.0), 2, axis_name=AXES)

    def step(x):
        return tx.update(x, tx.init(x), x)[0]

    with pytest.raises(ValueError, match="scaled_value_and_grad"):
        jax.shard_map(step, mesh=mesh_of(SHAPE), in_specs=P(), out_specs=P())(
            jnp.ones(3)
        )


def test_a_loss_scale_that_cannot_be_moved_without_a_step():
    inner = optax.chain(optax_npu.npu_loss_scale(8.0), optax.sgd(1.0))
    params = jnp.zeros(1)
    tx = accumulate_gradients(inner, 2)
    with pytest.raises(TypeError, match=r"npu_optimizer.*or on_overflow='drop_window'"):
        tx.update(params, tx.init(params), params)
    tx = accumulate_gradients(inner, 2, on_overflow="drop_window")
    tx.update(params, tx.init(params), params)
