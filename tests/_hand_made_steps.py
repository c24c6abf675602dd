# SPDX-License-Identifier: Apache-2.0
"""Loss-scaled steps with a fence, by hand: one right, the others wrong on purpose.

The verdict travels just before the last bucket (`"before last"`), before all of them
(`"first"`), behind all of them (`"last"`), or is taken from the reduced gradients
(`"after"`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.reference_step import Builder, Loss


def hand_made(verdict: str) -> Builder:
    def build(loss_fn: Loss, opt: Any, axes: tuple[str, ...]) -> tuple[Any, Any]:
        return functools.partial(_step, loss_fn, opt, axes, verdict), opt.init

    return build


def _after(x: jax.Array, previous: jax.Array | None) -> jax.Array:
    return x if previous is None else lax.optimization_barrier((x, previous))[0]


def _step(
    loss_fn: Loss,
    opt: Any,
    axes: tuple[str, ...],
    verdict: str,
    params: Any,
    state: Any,
    batch: Any,
) -> Any:
    scale = 1024.0
    scaled = lambda params, batch: loss_fn(params, batch) * scale
    loss, grads = jax.value_and_grad(scaled)(params, batch)
    names = sorted(grads, reverse=True)
    bad = {name: ~jnp.all(jnp.isfinite(grads[name])) for name in names}
    for name in names:  # both outputs in use: the check stands before the all-reduce
        grads[name], bad[name] = lax.optimization_barrier((grads[name], bad[name]))
    flag = functools.reduce(jnp.logical_or, bad.values()).astype(jnp.int32)
    votes, previous, reduced = None, None, {}
    if verdict == "first":
        votes = previous = lax.psum(flag, axes)
    for name in names:
        if verdict == "before last" and name == names[-1]:
            votes = previous = lax.psum(_after(flag, previous), axes)
        reduced[name] = previous = lax.psum(_after(grads[name], previous), axes)
    if verdict == "last":
        votes = lax.psum(_after(flag, previous), axes)
    if verdict == "after":
        checks = [jnp.all(jnp.isfinite(g)) for g in reduced.values()]
        votes = 1 - functools.reduce(jnp.logical_and, checks)
    assert votes is not None
    ok = votes == 0
    grads = jax.tree.map(lambda g: g / (scale * lax.psum(1, axes)), reduced)
    updates, new_state = opt.update(grads, state, params)
    state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new_state, state)
    updates = jax.tree.map(lambda u: jnp.where(ok, u, 0), updates)
    return optax.apply_updates(params, updates), state, loss[None]
