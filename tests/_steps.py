# SPDX-License-Identifier: Apache-2.0
"""Small helpers to step an optimizer and to compare trees bit for bit."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_npu

INF = float("inf")
NAN = float("nan")
F32 = jnp.float32


def vec(*values: Any, dtype: Any = F32) -> jax.Array:
    return jnp.asarray(values, dtype)


def steps(
    tx: Any,
    params: Any,
    grads: Iterable[Any],
    state: Any = None,
    *,
    jit: bool = True,
    **extra: Any,
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (updates, params, state) after each step."""
    state = tx.init(params) if state is None else state

    def step(g: Any, s: Any, p: Any, e: Any) -> tuple[Any, Any, Any]:
        updates, s = tx.update(g, s, p, **e)
        return updates, optax.apply_updates(p, updates), s

    step = jax.jit(step) if jit else step
    for g in grads:
        updates, params, state = step(g, state, params, extra)
        yield updates, params, state


def run(tx: Any, params: Any, grads: Iterable[Any]) -> tuple[list[Any], Any, Any]:
    """All updates, the last parameters and the last state."""
    done = list(steps(tx, params, grads))
    return [u for u, _, _ in done], done[-1][1], done[-1][2]


def as_bytes(tree: Any) -> list[tuple[Any, ...]]:
    """Every leaf as (path, dtype, shape, bytes)."""
    out = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        x = np.asarray(leaf)
        name = jax.tree_util.keystr(path)
        out.append((name, str(x.dtype), x.shape, x.tobytes()))
    return out


def assert_same_bits(actual: Any, expected: Any) -> None:
    for a, e in zip(as_bytes(actual), as_bytes(expected), strict=True):
        assert a == e, f"{a[0]}: differs"


def without_loss_scale(state: Any) -> Any:
    """The state with its LossScaleState removed."""

    def is_ls(x: Any) -> bool:
        return isinstance(x, optax_npu.LossScaleState)

    return jax.tree.map(lambda x: None if is_ls(x) else x, state, is_leaf=is_ls)


def scale_of(state: Any) -> float:
    return float(optax_npu.get_loss_scale(state))


def count_of(state: Any) -> int:
    return int(optax.tree.get(state, "count"))
