# SPDX-License-Identifier: Apache-2.0
"""Field trials that belong to no single module: loss, checkpoint, frameworks."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import optax_npu
from tests import _modes
from tests._steps import INF, as_bytes, vec


@functools.cache
def compiled(tx: Any) -> Any:
    """A step with a gradient that is multiplied by the scale at hand."""

    def step(gradient: Any, params: Any, state: Any) -> tuple[Any, Any, Any]:
        grads = gradient * optax_npu.get_loss_scale(state)
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    return jax.jit(step)


def scaled(tx: Any, gradients: list[float], params: Any, state: Any) -> Any:
    """(updates, params, state) after each step."""
    done = []
    for gradient in gradients:
        updates, params, state = compiled(tx)(vec(gradient), params, state)
        done.append((updates, params, state))
    return done


# B10


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_B10_reading_the_scale_ticks_nothing(wrap):
    rule = optax_npu.DynamicLossScale(8.0, increment_period=3)
    tx = optax_npu.chain(optax_npu.npu_loss_scale(rule), optax.sgd(1.0))
    params = vec(0.0)
    state = tx.init(params)

    @wrap
    def step(state):
        read = [optax_npu.scale_loss(jnp.float32(i), state) for i in range(5)]
        read += [optax_npu.get_loss_scale(state) for _ in range(5)]
        _, state = tx.update(vec(1.0), state, params)
        return jnp.stack(read), state

    for good, scale, now in ((1, 8.0, 8.0), (2, 8.0, 8.0), (0, 16.0, 8.0)):
        read, state = step(state)
        assert read.tolist() == [0.0, now, 2 * now, 3 * now, 4 * now, *[now] * 5]
        metrics = optax_npu.loss_scale_metrics(state)
        assert (metrics["good_steps"], metrics["loss_scale"]) == (good, scale)


# B15


def test_B15_a_float16_loss_at_a_scale_that_float16_cannot_hold():
    rule = optax_npu.DynamicLossScale(2.0**16)
    tx = optax_npu.chain(optax_npu.npu_loss_scale(rule), optax.sgd(1.0))

    def loss_fn(w):
        loss = w.astype(jnp.float16) * jnp.float16(1e-3)
        assert loss.dtype == jnp.float16
        return loss

    w = jnp.float32(1.0)
    state = tx.init(w)
    assert optax_npu.scale_loss(loss_fn(w), state).dtype == jnp.float32

    @jax.jit
    def step(w, state):
        _, grad = optax_npu.scaled_value_and_grad(loss_fn, state)(w)
        return tx.update(grad, state, w)

    updates, state = step(w, state)
    assert (float(updates), float(optax_npu.get_loss_scale(state))) == (0.0, 32768.0)
    updates, state = step(w, state)
    assert float(updates) == -0.0010004043579101562


# B42

GRADIENTS = [1.0, 2.0, INF, 3.0, 4.0, 5.0, 6.0]
TX: Any = optax_npu.npu_optimizer(
    optax.adam(0.1),
    optax_npu.DynamicLossScale(8.0, increment_period=3),
    is_loss_scale=True,
)


def saved_as_pickle(state: Any, fresh: Any, folder: Any) -> Any:
    del fresh, folder
    return pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state)))


def saved_by_flax(state: Any, fresh: Any, folder: Any) -> Any:
    from flax import serialization

    del folder
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    return jax.tree.map(np.asarray, restored)


def saved_by_orbax(state: Any, fresh: Any, folder: Any) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.eval_shape(lambda: fresh))


@pytest.mark.parametrize(
    ("save", "stops"),
    [(saved_as_pickle, range(1, 7)), (saved_by_flax, [3]), (saved_by_orbax, [3])],
)
def test_B42_a_restored_run_goes_on_bit_for_bit(save, stops, tmp_path):
    params = vec(0.0)
    straight = scaled(TX, GRADIENTS, params, TX.init(params))
    assert [bool(s.scaling.found_inf) for _, _, s in straight] == [
        gradient == INF for gradient in GRADIENTS
    ]
    assert float(straight[-1][2].scaling.loss_scale) == 8.0  # 8, 4, then 8 again
    for stop in stops:
        _, params, state = straight[stop - 1]
        restored = save(state, TX.init(params), tmp_path)
        assert as_bytes(restored) == as_bytes(state)
        rest = scaled(TX, GRADIENTS[stop:], params, restored)
        assert as_bytes(rest) == as_bytes(straight[stop:])


def test_B74_the_restored_step_count_is_that_of_applied_steps():
    params = vec(0.0)
    done = scaled(TX, [0.0, INF, INF, 1.0, 0.0], params, TX.init(params))
    state = saved_by_flax(done[-1][2], TX.init(params), None)
    assert int(optax.tree.get(state, "count")) == 3


# B46


def test_B46_the_whole_optimizer_replicated_as_in_flax():
    from flax import jax_utils

    def make(**where: Any) -> Any:
        rule = optax_npu.DynamicLossScale(4.0, increment_period=1)
        is_distributed = bool(where)
        return optax_npu.npu_optimizer(
            optax.adam(0.1), rule, is_distributed, is_loss_scale=True, **where
        )

    tx, params = make(axis_name="data"), jnp.zeros(3)
    grads = 4.0 * jnp.arange(24.0).reshape(8, 3)
    state = jax_utils.replicate(tx.init(params))
    assert all(x.shape[0] == 8 for x in jax.tree.leaves(state))
    step = jax.pmap(lambda g, s: tx.update(g, s, params)[1], axis_name="data")
    ours = jax_utils.unreplicate(step(grads, state))

    both = make(axis_name=_modes.AXES)
    sharded = jax.shard_map(
        lambda g, s: both.update(g[0], s, params)[1],
        mesh=_modes.mesh_of((2, 4)),
        in_specs=(PartitionSpec(_modes.AXES), PartitionSpec()),
        out_specs=PartitionSpec(),
    )(grads, both.init(params))

    alone = make()
    _, single = alone.update(jnp.mean(grads, axis=0), alone.init(params), params)
    assert as_bytes(ours) == as_bytes(single)
    assert as_bytes(sharded) == as_bytes(single)
    assert float(single.scaling.loss_scale) == 8.0


# B47


def test_B47_static_field_of_a_flax_train_state():
    from flax.training.train_state import TrainState

    tx = optax_npu.chain(optax_npu.npu_loss_scale(2.0), optax.sgd(1.0))
    state: Any = TrainState.create(apply_fn=None, params={"w": vec(0.0)}, tx=tx)
    step = jax.jit(lambda state, w: state.apply_gradients(grads={"w": w}))
    for _ in range(2):
        state = step(state, vec(2.0))
        state = step(state, vec(INF))
    assert state.params["w"].tolist() == [-2.0]


def test_B47_inside_a_flax_nnx_optimizer():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(vec(0.0))

    model = Model()
    tx = optax_npu.chain(optax_npu.npu_loss_scale(2.0), optax.sgd(1.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return optax_npu.scale_loss(jnp.sum(model.w[...] * x), optimizer.opt_state)

        optimizer.update(model, nnx.grad(loss_fn)(model))

    for x in (1.0, INF, 1.0):
        step(model, optimizer, vec(x))
    assert model.w[...].tolist() == [-2.0]
    metrics = optax_npu.loss_scale_metrics(optimizer.opt_state)
    assert int(metrics["skipped_steps"][...]) == 1


# B64


@pytest.mark.parametrize("mode", _modes.MAPPED_MODES)
def test_B64_the_recipe_for_unequal_numbers_of_valid_items(mode):
    """Differentiate the sum divided by the global count, and reduce with `sum`."""
    sums, counts = jnp.arange(8.0), jnp.array([1.0, 2, 3, 4, 1, 2, 3, 4])

    def step(w, batch, how):
        tx = optax_npu.npu_optimizer(
            optax.sgd(1.0), 4.0, True, True, op="sum", **how.reduce_over
        )
        count = jax.lax.psum(batch[1], how.axis_name)
        loss = lambda w: w * batch[0] / count
        state = tx.init(w)
        grad_fn = optax_npu.scaled_value_and_grad(loss, state, axis_name=how.axis_name)
        return tx.update(grad_fn(w)[1], state, w)[0]

    out = _modes.run(mode, (2, 4), step, jnp.float32(0), (sums, counts))
    update = _modes.assert_same_bits(out)
    np.testing.assert_allclose(update, -1.4, rtol=2e-7)  # eight rounded quotients


# B72

WRONG: Any = "adam"


@pytest.mark.parametrize(
    ("build", "error", "names"),
    [
        (
            lambda: optax_npu.hierarchical_all_reduce("data", op="avg"),
            ValueError,
            "avg",
        ),
        (
            lambda: optax_npu.hierarchical_all_reduce("data", num_packs=True),
            TypeError,
            "num_packs=True",
        ),
        (
            lambda: optax_npu.npu_optimizer(
                optax.sgd(1.0), is_distributed=True, axis_name="data", num_packs=-1
            ),
            ValueError,
            "num_packs=-1",
        ),
        (lambda: optax_npu.npu_optimizer(WRONG), TypeError, "opt is a str"),
        (lambda: optax_npu.chain(optax.sgd), TypeError, r"transforms\[0\]"),
        (lambda: optax_npu.skip_on_overflow(WRONG), TypeError, "tx is a str"),
        (lambda: optax_npu.accumulate_gradients(WRONG, 2), TypeError, "tx is a str"),
        (lambda: optax_npu.npu_loss_scale(0.5), ValueError, "0.5"),
        (lambda: optax_npu.npu_loss_scale("torch"), ValueError, "loss_scale_preset"),
    ],
)
def test_B72_nonsense_is_refused_by_the_factory(build, error, names):
    with pytest.raises(error, match=names):
        build()


OTHERS = {
    "chain": lambda tx: optax_npu.chain(optax_npu.npu_loss_scale(), tx),
    "npu_optimizer": lambda tx: optax_npu.npu_optimizer(tx, 2.0, is_loss_scale=True),
    "accumulate": lambda tx: optax_npu.accumulate_gradients(tx, 2),
    "bare": lambda tx: tx,
}


@pytest.mark.parametrize("restored", [None, [{"loss_scale": 1.0}, [{"count": 1}]]])
@pytest.mark.parametrize("name", ["chain", "npu_optimizer", "accumulate"])
def test_B72_a_state_of_another_optimizer_is_refused(name, restored):
    tx = OTHERS[name](optax.sgd(1.0))
    params = vec(0.0)
    states = [
        make(optax.sgd(1.0)).init(params) for n, make in OTHERS.items() if n != name
    ]
    for state in [restored, *states]:
        with pytest.raises((TypeError, ValueError), match="state"):
            jax.jit(tx.update)(params, state, params)
