# SPDX-License-Identifier: Apache-2.0
"""The step whose schedule is compared: 8 equal dense layers, float32, data parallel.

Each builder returns `(step, init)`. `step(params, state, x, y)` runs in a mapped
function over the axes ("node", "device") or one axis "data"; the loss is the mean
over the local batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optax_npu
from examples.aot import compile_for, shapes

LAYERS, WIDTH, BATCH = 8, 2048, 256
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "lamb": optax.lamb(1e-3, weight_decay=0.01),
}
Builder = Callable[[Any, tuple[str, ...]], tuple[Any, Any]]


def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for k in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{k}"])
    return jnp.mean((x - y) ** 2)


def no_loss_scale(opt: Any, axes: tuple[str, ...]) -> tuple[Any, Any]:
    """What to reach: no loss scaling at all, one psum per gradient."""

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grads = lax.pmean(grads, axes)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    return step, opt.init


def usual_recipe(opt: Any, axes: tuple[str, ...]) -> tuple[Any, Any]:
    """Reduce everything, test it, select: as in the public examples."""

    def init(params: Any) -> Any:
        return opt.init(params), jnp.float32(2.0**15), jnp.int32(0)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        inner, scale, good = state
        loss, grads = jax.value_and_grad(lambda *a: loss_fn(*a) * scale)(params, x, y)
        grads = jax.tree.map(lambda g: g / scale, lax.pmean(grads, axes))
        finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        ok = jnp.all(jnp.stack(finite))
        updates, new_inner = opt.update(grads, inner, params)
        new_params = optax.apply_updates(params, updates)
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
        grown = jnp.where(good + 1 >= 2000, scale * 2, scale)
        scale = jnp.where(ok, grown, scale / 2)
        good = jnp.where(ok & (good + 1 < 2000), good + 1, 0)
        state = (keep(new_inner, inner), scale, good)
        return keep(new_params, params), state, loss[None]

    return step, init


def ours(opt: Any, axes: tuple[str, ...]) -> tuple[Any, Any]:
    """`npu_optimizer` with everything on; two levels if there are two axes."""
    tx = optax_npu.npu_optimizer(
        opt,
        optax_npu.DynamicLossScale(),
        is_distributed=True,
        is_loss_scale=True,
        is_tailing_optimization=True,
        axis_name=axes if len(axes) > 1 else axes[0],
    )

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grad = optax_npu.scaled_value_and_grad(loss_fn, state, axis_name=axes)
        loss, grads = grad(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    return step, tx.init


def compile_step(builder: Builder, opt: Any, mesh: Mesh) -> Any:
    """Compiles a step for the devices of a mesh, which need not be there."""
    axes = tuple(mesh.axis_names)
    step, init = builder(opt, axes)
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = {f"layer_{k}": weight for k in range(LAYERS)}
    state = jax.eval_shape(init, params)
    x = jax.ShapeDtypeStruct((mesh.size * BATCH, WIDTH), jnp.float32)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P(axes), P(axes)),
        out_specs=(P(), P(), P(axes)),
        check_vma=False,
    )
    batch = shapes(x, mesh, P(axes))
    return compile_for(
        jax.jit(mapped, donate_argnums=(0, 1)),
        mesh,
        shapes(params, mesh, P()),
        shapes(state, mesh, P()),
        batch,
        batch,
    )
