# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show; benchmarks/gpu.sh runs these where there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_npu
from optax_npu import DynamicLossScale, npu_loss_scale
from tests._steps import INF, NAN, assert_same_bits, without_loss_scale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason="no GPU here: run benchmarks/gpu.sh"
    ),
]


@pytest.mark.parametrize("exponent", [-126, -1, 0, 15, 24, 126, 127])
def test_unscaling_is_exact_for_powers_of_two(exponent):
    tx = npu_loss_scale(optax_npu.loss_scale_preset("torch", init_scale=2.0**exponent))
    result = np.ldexp(1.0 + 2.0**-7, -exponent // 2)
    grads = jnp.asarray([np.ldexp(result, exponent)], jnp.float32)
    updates, _ = jax.jit(tx.update)(grads, tx.init(grads))
    assert float(updates[0]) == float(np.float32(result))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("size", [1, 1003, 70_000, 2_000_000])
def test_one_bad_element_is_seen(dtype, size):
    tx = npu_loss_scale(1.0)
    update = jax.jit(lambda g: tx.update(g, tx.init(None))[1].found_inf)
    for place in {0, size // 2, size - 1}:
        for value in (NAN, INF, -INF):
            grads = np.ones(size, np.float32)
            grads[place] = value
            assert bool(update(jnp.asarray(grads, dtype)))
    assert not bool(update(jnp.ones(size, dtype)))


def test_a_skipped_step_changes_nothing():
    tx = optax_npu.chain(npu_loss_scale(DynamicLossScale(4.0)), optax.lamb(0.1))
    params = {"w": jnp.ones((64, 64)), "b": jnp.full(64, -0.0)}
    state = tx.init(params)
    bad = jax.tree.map(lambda p: p.at[0].set(NAN), params)
    updates, after = jax.jit(tx.update)(bad, state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(without_loss_scale(after), without_loss_scale(state))
    assert float(optax_npu.get_loss_scale(after)) == 2.0
