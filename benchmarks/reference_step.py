# SPDX-License-Identifier: Apache-2.0
"""The steps whose schedules are compared: data parallel, float32 gradients.

`dense()` is 8 equal dense layers; `bert()` is the main job's model. A builder returns
`(step, init)`; `step(params, state, batch)` runs in a mapped function over the axes
("node", "device") or one axis "data", and the loss is the mean over the local batch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optax_npu
from examples.aot import compile_for, shapes
from examples.bert.data import Batch
from examples.bert.model import Bert, BertConfig
from examples.bert.model import loss_fn as bert_loss

OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "lamb": optax.lamb(1e-3, weight_decay=0.01),
}
Loss = Callable[[Any, Any], jax.Array]
Builder = Callable[[Loss, Any, tuple[str, ...]], tuple[Any, Any]]


class Model(NamedTuple):
    """A loss of parameters and a local batch, and the shapes of both."""

    loss: Loss
    params: Any
    batch: Callable[[int], Any]


def dense(layers: int = 8, width: int = 2048, rows: int = 256) -> Model:
    """Equal layers of `width` x `width`, tanh; `rows` examples on each device."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        for k in range(layers):
            x = jnp.tanh(x @ params[f"layer_{k}"])
        return jnp.mean((x - y) ** 2)

    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return Model(
        loss,
        {f"layer_{k}": weight for k in range(layers)},
        lambda devices: (_f32(devices * rows, width), _f32(devices * rows, width)),
    )


def bert(
    layers: int = 4, hidden: int = 512, rows: int = 16, length: int = 128
) -> Model:
    """The main job's BERT with float16 products: tree order is not backward order."""
    model = Bert(BertConfig(8192, length, layers, hidden, heads=hidden // 64))
    one = jnp.zeros((1, length), jnp.int32)
    init = lambda key: model.init(key, one, one[:, :1])["params"]

    def batch(devices: int) -> Batch:
        shape = lambda n: jax.ShapeDtypeStruct((devices * rows, n), jnp.int32)
        return Batch(*(shape(n) for n in (length, 20, 20)))

    params = jax.eval_shape(init, jax.random.key(0))
    return Model(functools.partial(bert_loss, model), params, batch)


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def no_loss_scale(loss_fn: Loss, opt: Any, axes: tuple[str, ...]) -> tuple[Any, Any]:
    """What to reach: no loss scaling at all, one psum per gradient."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        grads = lax.pmean(grads, axes)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    return step, opt.init


def usual_recipe(loss_fn: Loss, opt: Any, axes: tuple[str, ...]) -> tuple[Any, Any]:
    """Reduce everything, test it, select: as in the public examples."""

    def init(params: Any) -> Any:
        return opt.init(params), jnp.float32(2.0**15), jnp.int32(0)

    def step(params: Any, state: Any, batch: Any) -> Any:
        inner, scale, good = state
        scaled = lambda params, batch: loss_fn(params, batch) * scale
        loss, grads = jax.value_and_grad(scaled)(params, batch)
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


def ours(loss_fn: Loss, opt: Any, axes: tuple[str, ...]) -> tuple[Any, Any]:
    """`npu_optimizer` with everything on; two levels if there are two axes."""
    tx = optax_npu.npu_optimizer(
        opt,
        optax_npu.DynamicLossScale(),
        is_distributed=True,
        is_loss_scale=True,
        is_tailing_optimization=True,
        axis_name=axes if len(axes) > 1 else axes[0],
    )

    def step(params: Any, state: Any, batch: Any) -> Any:
        grad = optax_npu.scaled_value_and_grad(loss_fn, state, axis_name=axes)
        loss, grads = grad(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss[None]

    return step, tx.init


def compile_step(model: Model, builder: Builder, opt: Any, mesh: Mesh) -> Any:
    """Compiles a step for the devices of a mesh, which need not be there."""
    axes = tuple(mesh.axis_names)
    step, init = builder(model.loss, opt, axes)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P(axes)),
        out_specs=(P(), P(), P(axes)),
        check_vma=False,
    )
    return compile_for(
        jax.jit(mapped, donate_argnums=(0, 1)),
        mesh,
        shapes(model.params, mesh, P()),
        shapes(jax.eval_shape(init, model.params), mesh, P()),
        shapes(model.batch(mesh.size), mesh, P(axes)),
    )
