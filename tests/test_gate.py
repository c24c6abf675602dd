# SPDX-License-Identifier: Apache-2.0
"""A step that overflowed changes nothing but the loss-scale state."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_npu
from optax_npu import (
    DynamicLossScale,
    FixedLossScale,
    FixedLossScaleManager,
    npu_loss_scale,
    skip_on_overflow,
)
from tests._steps import (
    INF,
    NAN,
    assert_same_bits,
    count_of,
    run,
    scale_of,
    steps,
    vec,
    without_loss_scale,
)


def wrap(inner, loss_scale=1.0):
    return optax_npu.chain(npu_loss_scale(loss_scale), inner)


def decay_mask(params):
    return optax_npu.exclude_from_weight_decay("bias")(params)


OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1, mask=decay_mask),
    "lamb": lambda: optax.lamb(0.1, weight_decay=0.1, mask=decay_mask),
    "sgd_momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "clip_by_value": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1, 0.9)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 10)
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "bias": False}),
    "partition": lambda: optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {"w": "a", "bias": "b"}
    ),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.adam(0.1)),
}


def random_gradients(n, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
            "bias": jnp.asarray(rng.normal(size=3), jnp.float32),
        }
        for _ in range(n)
    ]


PARAMS = {"w": jnp.ones((4, 3)), "bias": jnp.full(3, -0.0)}
BAD = [
    {"w": jnp.full((4, 3), NAN), "bias": jnp.ones(3)},
    {"w": jnp.ones((4, 3)), "bias": vec(1.0, -INF, 1.0)},
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_good_and_bad_steps_end_where_the_good_ones_alone_do(name):
    good = random_gradients(6)
    mixed = [BAD[0], *good[:2], BAD[1], BAD[0], *good[2:5], BAD[1], good[5]]
    _, params, state = run(wrap(OPTIMIZERS[name]()), PARAMS, good)
    _, params2, state2 = run(wrap(OPTIMIZERS[name]()), PARAMS, mixed)
    assert_same_bits(params2, params)
    assert_same_bits(without_loss_scale(state2), without_loss_scale(state))
    assert int(state2[0].skipped_steps) == 4


@pytest.mark.parametrize("name", ["adam", "lamb", "sgd_momentum", "lion"])
def test_all_spellings_give_one_trajectory(name):
    inner, rule = OPTIMIZERS[name], DynamicLossScale(8.0, increment_period=3)
    grads = random_gradients(14, seed=1)
    for i in (0, 3, 4, 9, 13):
        grads[i] = BAD[i % 2]
    spellings = {
        "chain": optax_npu.chain(npu_loss_scale(rule), inner()),
        "skip": skip_on_overflow(optax.chain(npu_loss_scale(rule), inner())),
        "optimizer": optax_npu.npu_loss_scale_optimizer(inner(), rule),
        "named": skip_on_overflow(
            optax.named_chain(("scale", npu_loss_scale(rule)), ("inner", inner()))
        ),
        "npu": optax_npu.npu_optimizer(inner(), rule, is_loss_scale=True),
    }
    expected = None
    for label, tx in spellings.items():
        updates, params, state = run(tx, PARAMS, grads)
        numbers = (updates, params, optax_npu.loss_scale_metrics(state))
        expected = expected or numbers
        try:
            assert_same_bits(numbers, expected)
        except AssertionError as error:
            raise AssertionError(label) from error


@pytest.mark.parametrize("guarded", [True, False])
def test_apply_gradients_is_update_and_apply(guarded):
    rule = DynamicLossScale(8.0, increment_period=3)
    grads = random_gradients(10, seed=2)
    grads[2], grads[7] = BAD
    tx = optax.chain(npu_loss_scale(rule), optax.lamb(0.1))
    tx = skip_on_overflow(tx) if guarded else tx
    expected = list(steps(skip_on_overflow(tx), PARAMS, grads, jit=False))
    params, state = PARAMS, tx.init(PARAMS)
    step = jax.jit(functools.partial(optax_npu.apply_gradients, tx))
    for g, (_, eager, eager_state) in zip(grads, expected, strict=True):
        skipped = not bool(jnp.isfinite(g["bias"].sum() + g["w"].sum()))
        before = without_loss_scale((params, state))
        params, state = step(params, g, state)
        if skipped:
            assert_same_bits(without_loss_scale((params, state)), before)
        # XLA may round the last product and sum once instead of twice.
        chex.assert_trees_all_close(params, eager, rtol=2e-6, atol=1e-8)
        assert_same_bits(state[0], eager_state[0])
    params, state = PARAMS, tx.init(PARAMS)
    for g in grads:  # not compiled, the numbers are the same to the last bit
        params, state = optax_npu.apply_gradients(tx, params, g, state)
    assert_same_bits((params, state), expected[-1][1:])


def test_apply_gradients_without_a_loss_scale_is_the_plain_step():
    tx = optax.adam(0.1)
    params, state = optax_npu.apply_gradients(
        tx, PARAMS, random_gradients(1)[0], tx.init(PARAMS)
    )
    assert count_of(state) == 1
    assert not np.array_equal(params["w"], PARAMS["w"])


def test_B05_two_hundred_nan_steps_and_still_no_bad_update():
    tx = wrap(optax.sgd(1.0), DynamicLossScale(2.0**15))
    params = jnp.zeros(1)
    grads = jnp.concatenate([jnp.full((200, 1), NAN), jnp.full((1, 1), 3.0)])

    def body(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), updates

    (params, state), updates = jax.jit(
        lambda p: jax.lax.scan(body, (p, tx.init(p)), grads)
    )(params)
    assert not np.any(updates[:200])
    assert float(updates[200, 0]) == float(params[0]) == -3.0
    assert scale_of(state) == 1.0
    assert int(state[0].good_steps) == 1
    assert int(state[0].skipped_steps) == 200


@pytest.mark.parametrize(
    ("inner", "bad"),
    [
        (lambda: optax.chain(optax.clip(1.0), optax.sgd(1.0)), INF),
        (lambda: optax.lion(1.0), INF),
        (lambda: optax.sign_sgd(1.0), INF),
        (lambda: optax.chain(optax.zero_nans(), optax.sgd(1.0)), NAN),
    ],
    ids=["clip", "lion", "sign", "zero_nans"],
)
def test_B17_nothing_behind_the_test_hides_an_overflow(inner, bad):
    tx = wrap(inner(), DynamicLossScale(4.0))
    params = jnp.zeros(2)
    before = tx.init(params)
    updates, _, after = run(tx, params, [vec(bad, 1.0)])
    assert not np.any(updates[0])
    assert scale_of(after) == 2.0
    assert_same_bits(without_loss_scale(after), without_loss_scale(before))


def test_B11_fixed_scale_with_and_without_the_check():
    params = jnp.zeros(2)
    checked = wrap(optax.sgd(1.0, 0.9), FixedLossScaleManager(128.0))
    before = checked.init(params)
    updates, _, after = run(checked, params, [vec(INF, 128.0)])
    np.testing.assert_array_equal(updates[0], [0.0, 0.0])
    assert scale_of(after) == 128.0
    assert_same_bits(without_loss_scale(after), without_loss_scale(before))
    for unchecked in (
        FixedLossScaleManager(128.0, enable_overflow_check=False),
        FixedLossScale(128.0),
    ):
        updates, _, _ = run(wrap(optax.sgd(1.0), unchecked), params, [vec(INF, 128.0)])
        assert not np.isfinite(updates[0][0])
        assert float(updates[0][1]) == -1.0


def test_B27_skipping_is_not_a_zero_gradient():
    updates, _, _ = run(
        wrap(optax.sgd(1.0, momentum=0.9)), vec(0.0), [vec(1.0), vec(INF), vec(1.0)]
    )
    assert [float(u[0]) for u in updates] == pytest.approx([-1.0, 0.0, -1.9], abs=1e-7)
    g1, g2 = vec(0.3, -0.2), vec(0.1, 0.7)
    adamw = optax.adamw(0.1, weight_decay=0.1)
    # Not compiled, because XLA may contract a product and a sum differently when
    # other code stands around them.
    (*_, (_, bare, bare_state)) = steps(adamw, jnp.ones(2), [g1, g2], jit=False)
    (*_, (_, ours, state)) = steps(
        wrap(adamw), jnp.ones(2), [g1, vec(INF, 1.0), g2], jit=False
    )
    assert_same_bits(ours, bare)
    assert_same_bits(state[1], bare_state)
    assert count_of(state) == 2


@pytest.mark.parametrize(
    "inner",
    [
        optax.adamw(0.1, weight_decay=0.1),
        optax.lamb(0.1, weight_decay=0.1),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    ],
    ids=["adamw", "lamb", "decay_sgd"],
)
def test_B28_no_weight_decay_on_a_skipped_step(inner):
    tx = wrap(inner)
    before = tx.init(vec(10.0))
    updates, params, state = run(tx, vec(10.0), [vec(NAN)])
    assert float(params[0]) == 10.0
    assert float(updates[0][0]) == 0.0
    assert_same_bits(without_loss_scale(state), without_loss_scale(before))


def test_B29_a_schedule_inside_waits_and_one_outside_does_not():
    def schedule(count):
        return -(count + 1.0)

    grads = [vec(1.0), vec(INF), vec(1.0), vec(1.0)]
    inside = wrap(optax.scale_by_schedule(schedule))
    updates, _, state = run(inside, vec(0.0), grads)
    assert [float(u[0]) for u in updates] == [-1, 0, -2, -3]
    assert count_of(state) == 3
    outside = optax.chain(wrap(optax.identity()), optax.scale_by_schedule(schedule))
    updates, _, state = run(outside, vec(0.0), grads)
    assert [float(u[0]) for u in updates] == [-1, 0, -3, -4]
    assert count_of(state) == 4


@pytest.mark.parametrize("rule", [DynamicLossScale(1.0), 1.0], ids=["floor", "fixed"])
def test_B30_the_verdict_is_in_the_state(rule):
    seen = [
        optax_npu.loss_scale_metrics(state)
        for _, _, state in steps(
            wrap(optax.sgd(1.0), rule), vec(0.0), [vec(1.0), vec(NAN), vec(1.0)]
        )
    ]
    assert [bool(m["applied"]) for m in seen] == [True, False, True]
    assert [float(m["loss_scale"]) for m in seen] == [1.0, 1.0, 1.0]
    assert int(seen[-1]["skipped_steps"]) == 1
    assert [int(m["consecutive_skips"]) for m in seen] == [0, 1, 0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "lamb"])
def test_B32_update_dtypes_are_those_of_the_bare_optimizer(name, dtype):
    inner = {
        "sgd": optax.sgd(0.1),
        "momentum": optax.sgd(0.1, momentum=0.9),
        "adam": optax.adam(0.1),
        "adamw": optax.adamw(0.1),
        "lamb": optax.lamb(0.1),
    }[name]
    params = jnp.ones(2)
    grads = [vec(2.0, 1.0, dtype=dtype), vec(INF, 1.0, dtype=dtype)]
    # float16 comes back in float32: its own range would flush what the scale saved.
    bare = grads[0].astype(jnp.float32) if dtype == jnp.float16 else grads[0]
    expected, _ = inner.update(bare, inner.init(params), params)
    updates, _, _ = run(wrap(inner, DynamicLossScale(1.0)), params, grads)
    assert updates[0].dtype == updates[1].dtype == expected.dtype
    assert not np.any(updates[1])


def test_bfloat16_parameters_with_float32_gradients():
    params = jnp.ones(2, jnp.bfloat16)
    tx = wrap(optax.sgd(0.5))
    updates, after, _ = run(tx, params, [vec(1.0, 2.0), vec(INF, 1.0)])
    assert updates[0].dtype == updates[1].dtype == jnp.float32
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after.astype(jnp.float32), [0.5, 0.0])


def test_B35_accumulation_inside_recovers():
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    updates, _, _ = run(wrap(inner), vec(0.0), [vec(INF), vec(2.0), vec(4.0)])
    assert [float(u[0]) for u in updates] == [0.0, 0.0, -3.0]


@pytest.mark.parametrize("read", ["get_loss_scale", "loss_scale_metrics"])
def test_B35_accumulation_outside_is_refused_with_the_fix(read):
    tx = optax.MultiSteps(wrap(optax.sgd(1.0)), 2)
    with pytest.raises(ValueError, match=r"(?s)MultiSteps.*chain\(npu_loss_scale\(\)"):
        getattr(optax_npu, read)(tx.init(vec(0.0)))


def test_apply_if_finite_outside_is_refused_with_the_fix():
    tx = optax.apply_if_finite(wrap(optax.sgd(1.0)), 3)
    with pytest.raises(ValueError, match=r"apply_if_finite.*Leave"):
        optax_npu.scale_loss(jnp.float32(1.0), tx.init(vec(0.0)))


def test_apply_if_finite_inside_is_harmless():
    tx = wrap(optax.apply_if_finite(optax.sgd(1.0), 3))
    updates, _, state = run(tx, vec(0.0), [vec(INF)] * 5 + [vec(1.0)])
    assert [float(u[0]) for u in updates] == [0.0] * 5 + [-1.0]
    assert int(optax.tree.get(state, "total_notfinite")) == 0


def test_B36_extra_arguments_reach_the_inner_optimizer():
    plateau = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
    tx = wrap(plateau)
    ((updates, _, state),) = steps(tx, vec(0.0), [vec(1.0)], value=jnp.float32(2.0))
    assert float(updates[0]) == -1.0
    before = without_loss_scale(state)
    ((updates, _, state),) = steps(
        tx, vec(0.0), [vec(INF)], state, value=jnp.float32(INF)
    )
    assert float(updates[0]) == 0.0
    assert_same_bits(without_loss_scale(state), before)
    ((updates, _, _),) = steps(
        wrap(optax.sgd(1.0)), vec(0.0), [vec(1.0)], value=jnp.float32(2.0)
    )
    assert float(updates[0]) == -1.0


def test_extra_arguments_may_be_functions():
    tx = wrap(optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)))
    params = vec(1.0, 2.0)

    def loss(p):
        return jnp.sum(p**2)

    updates, _ = jax.jit(
        lambda p, s: tx.update(
            jax.grad(loss)(p),
            s,
            p,
            value=loss(p),
            grad=jax.grad(loss)(p),
            value_fn=loss,
        )
    )(params, tx.init(params))
    assert bool(jnp.all(updates < 0))


def test_B38_members_of_a_vmap_skip_by_themselves():
    tx = wrap(optax.adam(0.1), DynamicLossScale(1024.0))
    params = jnp.zeros((3, 2))
    grads = jnp.asarray([[1.0, 2.0], [INF, 1.0], [3.0, 4.0]])
    state = jax.vmap(tx.init)(params)
    updates, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
    np.testing.assert_array_equal(state[0].loss_scale, [1024.0, 512.0, 1024.0])
    np.testing.assert_array_equal(optax.tree.get(state, "count"), [1, 0, 1])
    assert not np.any(updates[1])
    for i in (0, 2):
        alone, _ = tx.update(grads[i], tx.init(params[i]), params[i])
        np.testing.assert_allclose(updates[i], alone, rtol=2e-7)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))


def test_B40_eager_jit_disable_jit_and_scan_agree():
    inner = optax.adam(0.1)
    tx = wrap(inner, DynamicLossScale(8.0, increment_period=2))
    pattern = "FFNFNNFFFNFF"
    grads = jnp.asarray([[NAN if c == "N" else 1.0, -1.0] for c in pattern])
    params = jnp.zeros(2)

    def loop(tx, grads, wrapped=lambda step: step):
        def step(carry, g):
            params, state = carry
            scale = 1.0 if tx is inner else optax_npu.get_loss_scale(state)
            updates, state = tx.update(g * scale, state, params)
            return (optax.apply_updates(params, updates), state), None

        if wrapped is jax.lax.scan:
            return jax.jit(
                lambda: jax.lax.scan(step, (params, tx.init(params)), grads)[0]
            )()
        carry = (params, tx.init(params))
        for g in grads:
            carry, _ = wrapped(step)(carry, g)
        return carry

    with jax.disable_jit():
        plain = loop(tx, grads)
        # Adam's own bias correction takes another path under disable_jit (38 ULP),
        # so this trajectory is compared with the bare optimizer's.
        bare, _ = loop(inner, jnp.full((8, 2), jnp.asarray([1.0, -1.0])))
    np.testing.assert_allclose(plain[0], bare, rtol=1e-6)
    eager, *compiled = (
        loop(tx, grads, w) for w in (lambda f: f, jax.jit, jax.lax.scan)
    )
    for p, s in (eager, *compiled):
        np.testing.assert_array_max_ulp(p, eager[0], maxulp=1)
        assert_same_bits(s[0], plain[1][0])
        assert count_of(s) == count_of(plain[1]) == 8


@pytest.mark.parametrize("loss_scale", ["dynamic", 4.0, None])
def test_B44_types_are_stable_and_one_trace_is_enough(loss_scale):
    tx = wrap(optax.adam(0.1), loss_scale)
    params = {"w": jnp.ones(2)}

    traces = []

    @jax.jit
    def update(g, s, p):
        traces.append(1)
        return tx.update(g, s, p)

    state = tx.init(params)
    for _ in range(4):
        _, state = update({"w": vec(1.0, INF)}, state, params)
    assert len(traces) == 1

    def types(x):
        return jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), x)

    fresh = jax.eval_shape(tx.init, params)
    _, after = jax.eval_shape(tx.update, params, fresh, params)
    assert types(fresh) == types(after)
    assert not any(a.weak_type for a in jax.tree.leaves(after))


def test_B45_everything_can_be_donated():
    tx = wrap(optax.adam(0.1), DynamicLossScale(8.0))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(step, donate_argnums=(0, 1))
    plain = jax.jit(step)
    ours = (jnp.ones(3), tx.init(jnp.ones(3)))
    theirs = (jnp.ones(3), tx.init(jnp.ones(3)))
    for g in (vec(8.0, 1.0, 2.0), vec(INF, 1.0, 1.0), vec(1.0, 1.0, 1.0)):
        ours, theirs = donating(*ours, g), plain(*theirs, g)
    assert_same_bits(ours, theirs)
    leaves = jax.tree.leaves(tx.init(jnp.ones(3)))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_B47_everything_can_be_built_inside_jit():
    def build():
        return wrap(optax.adam(0.1), DynamicLossScale(8.0))

    params = vec(1.0)
    assert isinstance(hash(build()), int)
    jitted = jax.jit(build().init)(params)
    assert_same_bits(jitted, build().init(params))

    @jax.jit
    def whole(p):
        tx = build()
        return tx.update(p, tx.init(p), p)[0]

    updates, _ = build().update(params, build().init(params), params)
    np.testing.assert_array_max_ulp(whole(params), updates, maxulp=1)


def test_B73_one_device_updates_once():
    updates, _, _ = run(wrap(optax.sgd(1.0, 0.9)), vec(0.0), [vec(1.0)] * 2)
    assert [float(u[0]) for u in updates] == pytest.approx([-1.0, -1.9])
    _, _, state = run(wrap(optax.adam(0.1)), vec(0.0), [vec(1.0)])
    assert count_of(state) == 1


def test_B75_injected_hyperparameters_wait():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda c: c + 1.0)
    tx = wrap(inner)
    seen = []
    for updates, _, state in steps(
        tx, vec(0.0), [vec(1.0), vec(INF), vec(1.0), vec(1.0)]
    ):
        rate = state[1].hyperparams["learning_rate"]
        seen.append((float(updates[0]), float(rate)))
    assert seen == [(-1.0, 1.0), (0.0, 1.0), (-2.0, 2.0), (-3.0, 3.0)]

    tx = wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    params = jnp.zeros(1, jnp.bfloat16)
    state = tx.init(params)
    state[1].hyperparams["learning_rate"] = jnp.asarray(0.5, jnp.bfloat16)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    for g, expected in ((vec(INF), 0.0), (vec(1.0), -0.5)):
        ((updates, _, state),) = steps(tx, params, [g], state)
        assert float(updates[0]) == expected
        assert float(state[1].hyperparams["learning_rate"]) == 0.5
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes


def test_the_scale_itself_can_be_injected():
    tx = skip_on_overflow(
        optax.chain(
            optax.inject_hyperparams(npu_loss_scale)(loss_scale=4.0), optax.sgd(1.0)
        )
    )
    updates, _, state = run(tx, vec(0.0), [vec(4.0), vec(INF)])
    assert [float(u[0]) for u in updates] == [-1.0, 0.0]
    assert scale_of(state) == 4.0


def test_B74_the_step_count_counts_applied_steps():
    tx = wrap(optax.adam(0.1))
    grads = [vec(NAN if c == "N" else 1.0) for c in "FNNFF"]
    _, _, state = run(tx, vec(0.0), grads)
    assert count_of(state) == 3


def test_the_loss_scale_may_sit_anywhere():
    inner = optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1, 0.9)}, {"w": "a", "bias": "b"}
    )
    tx = skip_on_overflow(
        optax.chain(optax.identity(), optax.chain(npu_loss_scale(2.0), inner))
    )
    before = tx.init(PARAMS)
    _, params, after = run(tx, PARAMS, [BAD[1]])
    assert_same_bits(params, PARAMS)
    assert_same_bits(without_loss_scale(after), without_loss_scale(before))


def test_members_before_the_loss_scale_are_held_too():
    tx = optax_npu.chain(optax.trace(0.9), npu_loss_scale(2.0), optax.sgd(1.0))
    before = tx.init(vec(0.0))
    _, _, after = run(tx, vec(0.0), [vec(INF)])
    assert_same_bits(without_loss_scale(after), without_loss_scale(before))


def test_random_state_is_held():
    tx = wrap(optax.chain(optax.add_noise(1.0, 0.5, jax.random.key(3)), optax.sgd(1.0)))
    before = tx.init(vec(0.0))
    _, _, after = run(tx, vec(0.0), [vec(INF)])
    assert_same_bits(without_loss_scale(after), without_loss_scale(before))


def test_keep_if_applied_follows_the_gate():
    tx = wrap(optax.sgd(1.0))
    new, old = (
        {"mean": vec(NAN), "n": jnp.int32(2)},
        {"mean": vec(0.5), "n": jnp.int32(1)},
    )
    (_, _, good), (_, _, bad) = steps(tx, vec(0.0), [vec(1.0), vec(NAN)])
    assert_same_bits(optax_npu.keep_if_applied(good, new, old), new)
    assert_same_bits(optax_npu.keep_if_applied(bad, new, old), old)


def test_update_can_be_differentiated():
    tx = wrap(optax.sgd(0.5), 2.0)

    def after(g):
        updates, _ = tx.update(g, tx.init(g), g)
        return jnp.sum(updates)

    np.testing.assert_array_equal(jax.grad(after)(vec(2.0, 4.0)), [-0.25, -0.25])


def test_two_loss_scales_are_refused():
    tx = optax_npu.chain(npu_loss_scale(2.0), npu_loss_scale(2.0), optax.sgd(1.0))
    with pytest.raises(ValueError, match="holds 2 loss-scale states"):
        tx.update(vec(1.0), tx.init(vec(0.0)), vec(0.0))


def test_what_is_no_transformation_is_refused():
    with pytest.raises(TypeError, match=r"MultiSteps.*gradient_transformation\(\)"):
        skip_on_overflow(optax.MultiSteps(optax.sgd(1.0), 2))


def test_a_missing_params_argument_keeps_the_inner_error():
    tx = wrap(optax.lamb(0.1))
    with pytest.raises(ValueError, match="params"):
        tx.update(vec(1.0), tx.init(vec(0.0)))


def test_without_a_loss_scale_chain_is_optax_chain():
    tx, plain = optax_npu.chain(optax.adam(0.1)), optax.chain(optax.adam(0.1))
    params = vec(1.0)
    ours, theirs = (t.update(vec(NAN), t.init(params), params) for t in (tx, plain))
    assert_same_bits(ours, theirs)
