# SPDX-License-Identifier: Apache-2.0
"""Unscaling: which scale, which dtype, which leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_npu
from optax_npu import DynamicLossScale, npu_loss_scale
from tests._steps import INF, NAN, run, scale_of, steps, vec


def sgd(loss_scale, lr=1.0):
    return optax_npu.chain(npu_loss_scale(loss_scale), optax.sgd(lr))


def test_B09_divides_by_the_scale_that_scaled_this_loss():
    tx = sgd(DynamicLossScale(4.0, increment_period=1))
    params, state = vec(0.0), None
    seen = []
    state = tx.init(params)
    for _ in range(3):
        grads = vec(1.0) * optax_npu.get_loss_scale(state)
        ((updates, params, state),) = steps(tx, params, [grads], state)
        seen.append((float(updates[0]), scale_of(state)))
    assert seen == [(-1.0, 8.0), (-1.0, 16.0), (-1.0, 32.0)]


def test_B12_float16_gradients_of_float32_parameters_are_not_flushed():
    grads = jnp.full(3, 2.0**-14, jnp.float16)
    updates, _, _ = run(sgd(DynamicLossScale(2.0**16)), jnp.zeros(3), [grads])
    assert updates[0].dtype == jnp.float32
    np.testing.assert_array_equal(updates[0], np.full(3, -(2.0**-30), np.float32))


def test_float16_gradients_without_parameters_keep_their_dtype():
    tx = npu_loss_scale(4.0)
    updates, _ = tx.update(vec(8.0, dtype=jnp.float16), tx.init(None))
    assert updates.dtype == jnp.float16
    assert float(updates[0]) == 2.0


@pytest.mark.parametrize("exponent", [*range(-126, 128, 11), 126, 127])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_unscaling_is_exact_for_every_power_of_two(exponent, dtype):
    # The reciprocal of 2^127 is subnormal: a plain multiplication gives zero.
    mantissa = 1.0 + 2.0**-7
    result = np.ldexp(mantissa, -exponent // 2)
    grads = jnp.asarray([np.ldexp(result, exponent)], dtype)
    preset = optax_npu.loss_scale_preset(
        "torch", init_scale=2.0**exponent, growth_interval=10
    )
    tx = npu_loss_scale(preset)
    updates, state = jax.jit(tx.update)(grads, tx.init(grads))
    assert float(updates[0]) == float(np.asarray(result).astype(dtype))
    assert not bool(state.found_inf)


def test_B18_clipping_sees_unscaled_gradients():
    tx = optax_npu.chain(
        npu_loss_scale(DynamicLossScale(1024.0)),
        optax.clip_by_global_norm(1.0),
        optax.sgd(1.0),
    )
    updates, _, _ = run(tx, jnp.zeros(2), [1024.0 * vec(0.3, 0.4)])
    np.testing.assert_allclose(updates[0], [-0.3, -0.4], rtol=1e-6)


def test_B20_complex_keeps_its_imaginary_part():
    tx = sgd(DynamicLossScale(8.0))
    params = jnp.zeros(1, jnp.complex64)
    good = vec(8 * (3 + 4j), dtype=jnp.complex64)
    bad = vec(complex(1, INF), dtype=jnp.complex64)
    updates, _, state = run(tx, params, [good, bad])
    assert updates[0].dtype == jnp.complex64
    assert complex(updates[0][0]) == -(3 + 4j)
    assert complex(updates[1][0]) == 0
    assert scale_of(state) == 4.0


@pytest.mark.parametrize("bad", [complex(NAN, 0), complex(0, NAN), complex(-INF, 1)])
def test_complex_overflow_is_seen_in_either_part(bad):
    tx = npu_loss_scale(8.0)
    grads = vec(1, bad, dtype=jnp.complex64)
    _, state = tx.update(grads, tx.init(grads))
    assert bool(state.found_inf)


def test_B21_float0_and_keys_pass_untouched():
    params = {
        "w": jnp.ones(2),
        "n": jnp.arange(3, dtype=jnp.int32),
        "k": jax.random.key(0),
    }
    tx = optax_npu.chain(
        npu_loss_scale(4.0),
        optax.masked(optax.sgd(1.0), {"w": True, "n": False, "k": False}),
    )
    state = tx.init(params)
    _, grads = optax_npu.scaled_value_and_grad(
        lambda p: jnp.sum(p["w"] ** 2), state, allow_int=True
    )(params)
    assert grads["n"].dtype == jax.dtypes.float0
    updates, state = tx.update(grads, state, params)
    np.testing.assert_array_equal(updates["w"], [-2.0, -2.0])
    assert updates["n"].dtype == updates["k"].dtype == jax.dtypes.float0
    assert updates["n"].shape == (3,)
    assert not bool(state[0].found_inf)

    grads["w"] = vec(INF, 1.0)
    updates, state = tx.update(grads, state, params)
    np.testing.assert_array_equal(updates["w"], [0.0, 0.0])
    assert updates["n"].dtype == jax.dtypes.float0
    assert bool(state[0].found_inf)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.bool_])
def test_integers_and_booleans_pass_untouched(dtype):
    tx = npu_loss_scale(4.0)
    grads = {"w": vec(4.0), "n": jnp.ones(3, dtype)}
    updates, _ = tx.update(grads, tx.init(grads))
    assert updates["n"].dtype == dtype
    np.testing.assert_array_equal(updates["n"], np.ones(3, dtype))


def test_B23_zero_size_leaves_and_empty_trees():
    tx = sgd(DynamicLossScale(2.0))
    updates, state = tx.update({}, tx.init({}), {})
    assert updates == {}
    assert int(state[0].good_steps) == 1

    params = {"a": jnp.zeros(0), "b": jnp.zeros((0, 3)), "c": jnp.zeros(2)}
    grads = {"a": jnp.zeros(0), "b": jnp.zeros((0, 3)), "c": vec(2.0, 4.0)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["a"].shape == (0,)
    assert updates["b"].shape == (0, 3)
    np.testing.assert_array_equal(updates["c"], [-1.0, -2.0])
    assert not bool(state[0].found_inf)


@pytest.mark.parametrize("param", [None, "array"])
def test_B24_a_missing_gradient_stays_missing(param):
    params = {"a": jnp.ones(2), "b": None if param is None else jnp.ones(1)}
    tx = sgd(2.0)
    updates, _ = tx.update({"a": vec(2.0, 2.0), "b": None}, tx.init(params), params)
    np.testing.assert_array_equal(updates["a"], [-1.0, -1.0])
    assert updates["b"] is None


def test_B26_float8_gradients():
    tx = sgd(2.0)
    params = jnp.zeros(2)
    grads = vec(4.0, 2.0).astype(jnp.float8_e5m2)
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates, [-2.0, -1.0])

    bad = vec(4.0, NAN).astype(jnp.float8_e4m3fn)  # a format without inf
    updates, state = tx.update(bad, state, params)
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert bool(state[0].found_inf)


def test_B34_x64():
    with jax.enable_x64(True):
        params = jnp.zeros(1, jnp.float32)
        adam = optax_npu.chain(npu_loss_scale(DynamicLossScale(4.0)), optax.adam(0.1))
        before = adam.init(params)
        updates, after = adam.update(jnp.ones(1, jnp.float32), before, params)
        assert updates.dtype == jnp.float32
        assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(
            lambda x: x.dtype, after
        )

        tx = sgd(2.0**10)
        params64 = jnp.zeros(1, jnp.float64)
        grads = jnp.asarray([(1 + 2.0**-40) * 2.0**10], jnp.float64)
        updates, _ = tx.update(grads, tx.init(params64), params64)
        assert updates.dtype == jnp.float64
        assert float(updates[0]) == -(1 + 2.0**-40)

        def body(carry, _):
            params, state = carry
            updates, state = adam.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        jax.lax.scan(body, (params, before), length=3)


def test_a_scale_below_one_may_not_make_a_gradient_overflow():
    # 2^127 is finite; divided by 2^-2 it is not.
    tx = npu_loss_scale(optax_npu.loss_scale_preset("torch", init_scale=0.25))
    grads = vec(2.0**127, 1.0)
    updates, state = tx.update(grads, tx.init(grads))
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert bool(state.found_inf)
    fits = vec(2.0**125, 1.0)
    updates, state = tx.update(fits, tx.init(fits))
    np.testing.assert_array_equal(updates, [2.0**127, 4.0])
    assert not bool(state.found_inf)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("size", [1, 7, 64, 1003])
def test_one_bad_element_is_seen_wherever_it_stands(dtype, value, size):
    tx = npu_loss_scale(1.0)
    places = sorted({0, size // 2, size - 1})
    grads = np.ones((len(places), size), np.float32)
    for row, place in enumerate(places):
        grads[row, place] = value
    update = jax.jit(lambda g: tx.update({"g": g}, tx.init(None))[1].found_inf)
    assert [bool(update(jnp.asarray(g, dtype))) for g in grads] == [True] * len(places)
    largest = jnp.full(size, jnp.finfo(dtype).max, dtype)
    assert not bool(update(largest))
    assert not bool(update(-largest))


@pytest.mark.parametrize("flag", [True, 1, jnp.array(True), jnp.int32(3), np.bool_(1)])
def test_an_outside_flag_is_an_overflow(flag):
    tx = sgd(DynamicLossScale(4.0))
    params = jnp.zeros(1)
    updates, state = tx.update(vec(4.0), tx.init(params), params, found_inf=flag)
    assert float(updates[0]) == 0
    assert scale_of(state) == 2.0
    updates, _ = tx.update(vec(4.0), tx.init(params), params, found_inf=False)
    assert float(updates[0]) == -1.0


def test_an_outside_flag_must_be_a_scalar():
    tx = npu_loss_scale(4.0)
    with pytest.raises(ValueError, match=r"found_inf has shape \(2,\).*scalar"):
        tx.update(vec(1.0), tx.init(None), found_inf=jnp.zeros(2, bool))


def test_zeros_are_neutral_to_the_last_bit():
    tx = sgd(4.0)
    params = vec(-0.0, 0.0, 1.0)
    _, after, _ = run(tx, params, [vec(NAN, 1.0, 1.0)])
    assert after.tobytes() == params.tobytes()


def test_plain_chain_never_lets_a_non_finite_value_through():
    tx = optax.chain(npu_loss_scale(4.0), optax.lamb(0.1, weight_decay=0.1))
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    grads = {"w": jnp.ones((2, 2)), "b": vec(INF, NAN)}
    _, params, state = run(tx, params, [grads] * 5)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((params, state)))


def test_off_neither_divides_nor_gates():
    tx = sgd(None)
    params = jnp.zeros(2)
    updates, _, state = run(tx, params, [vec(8.0, 2.0), vec(INF, 1.0)])
    np.testing.assert_array_equal(updates[0], [-8.0, -2.0])
    np.testing.assert_array_equal(updates[1], [-INF, -1.0])
    on = sgd("dynamic").init(params)
    assert jax.tree.structure(state) == jax.tree.structure(on)


def test_off_restored_from_a_scaled_run_divides_once():
    params = jnp.zeros(1)
    state = sgd(DynamicLossScale(2.0**16)).init(params)
    tx = sgd(None)
    grads = vec(3.0) * optax_npu.get_loss_scale(state)
    updates, state = tx.update(grads, state, params)
    assert float(updates[0]) == -3.0
    assert scale_of(state) == 1.0


@pytest.mark.parametrize("broken", [INF, NAN, 0.0, -4.0])
def test_a_broken_restored_scale_is_repaired(broken):
    tx = sgd(DynamicLossScale(8.0))
    params = jnp.zeros(1)
    state = tx.init(params)
    state = (state[0]._replace(loss_scale=jnp.float32(broken)), *state[1:])
    scale = optax_npu.get_loss_scale(state)
    assert 0 < float(scale) < INF
    updates, _, state = run_from(tx, params, vec(3.0) * scale, state)
    assert float(updates[0]) == -3.0
    assert 0 < scale_of(state) < INF


def run_from(tx, params, grads, state):
    ((updates, params, state),) = steps(tx, params, [grads], state)
    return updates, params, state


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_nan_is_seen_in_arrays_of_every_size(dtype):
    # XLA's minimum and maximum of more than a few thousand elements lose nan on CPU.
    tx = npu_loss_scale(1.0)
    update = jax.jit(lambda g: tx.update(g, tx.init(None))[1].found_inf)
    for sizes in ((5000,), (70_000,), (333_333,), (4096, 4097), (17,) * 40):
        leaves = [np.ones(n, np.float32) for n in sizes]
        for i in {0, len(sizes) // 2, len(sizes) - 1}:
            for place in (0, sizes[i] // 3, sizes[i] - 1):
                leaves[i][place] = NAN
                assert bool(update([jnp.asarray(x, dtype) for x in leaves]))
                leaves[i][place] = 1.0
        assert not bool(update([jnp.asarray(x, dtype) for x in leaves]))
