# SPDX-License-Identifier: Apache-2.0
"""Which leaves take part, and which pass untouched.

Floating and complex arrays take part in detection, reduction and unscaling.
Integers, booleans, float0, PRNG keys, `None` and masked nodes pass through.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a floating (float8 included) or complex array or scalar."""
    if isinstance(leaf, bool | int) or leaf is None:
        return False
    if isinstance(leaf, float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return False
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def is_integer(leaf: Any) -> bool:
    """Whether a leaf is an integer array (bool, float0 and keys are not)."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or dtype == jax.dtypes.float0:
        return False
    return not jnp.issubdtype(dtype, jax.dtypes.prng_key) and bool(
        jnp.issubdtype(dtype, jnp.integer)
    )


def inexact_leaves(tree: PyTree) -> list[jax.Array]:
    """The floating and complex leaves that hold at least one element."""
    return [x for x in jax.tree.leaves(tree) if is_inexact(x) and np.size(x)]


def map_inexact(fun: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """`jax.tree.map` over floating and complex leaves; the others stay as they are."""
    return jax.tree.map(lambda x, *xs: fun(x, *xs) if is_inexact(x) else x, tree, *rest)


def real_dtype(dtype: Any) -> np.dtype:
    """The floating dtype of one component: float32 for complex64."""
    return jnp.finfo(dtype).dtype


def compute_dtype(dtype: Any) -> np.dtype:
    """The dtype to compute in: at least float32; float64 and complex are kept."""
    if jnp.dtype(dtype).itemsize < 4:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def path_name(path: Any) -> str:
    """A key path as one readable name: `encoder/layer_0/LayerNorm/scale`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
