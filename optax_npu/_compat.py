# SPDX-License-Identifier: Apache-2.0
"""The only file that knows JAX versions.

Everything here answers one of three questions about the function being traced:
which mapped axes are bound, over which of them does a value vary, and how is a
value cast so that it varies (or no longer varies) over an axis.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import lax

AxisName = Hashable
AxisNames = AxisName | tuple[AxisName, ...]


def as_axis_tuple(axis_name: AxisNames | None) -> tuple[AxisName, ...]:
    """The axis names as a flat tuple; `None` is no axis."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def bound_axes() -> tuple[AxisName, ...]:
    """The axes of the enclosing `shard_map` or `pmap` (an enclosing `vmap` hides)."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(mesh.manual_axes)


def is_bound(axis_name: AxisName) -> bool:
    """Whether a collective over `axis_name` can be used here."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def axis_size(axis_names: Sequence[AxisName]) -> int:
    """The number of replicas along bound axes: a Python int."""
    size = 1
    for name in axis_names:
        size *= int(lax.axis_size(name))
    return size


def varying_axes(x: Any) -> frozenset[AxisName]:
    """The axes over which the type of `x` says that it varies.

    Empty for every value under `pmap` and `shard_map(check_vma=False)`: see
    `tracks_varying`.
    """
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def tracks_varying(axis_name: AxisName) -> bool:
    """Whether types tell varying from replicated: `shard_map(check_vma=True)`."""
    return axis_name in varying_axes(lax.axis_index(axis_name))


def cast_varying(x: jax.Array, axis_names: Sequence[AxisName]) -> jax.Array:
    """Types `x` as varying over `axis_names`; moves no data.

    Its transpose is a sum over the axes it added, so differentiating with respect
    to the result gives the *local* gradient.
    """
    missing = tuple(n for n in axis_names if n not in varying_axes(x))
    missing = tuple(n for n in missing if tracks_varying(n))
    return lax.pcast(x, missing, to="varying") if missing else x


def match_varying(x: jax.Array, like: jax.Array) -> jax.Array:
    """Types `x` as varying at least over the axes of `like`; moves no data."""
    return cast_varying(x, sorted(varying_axes(like), key=repr))


def all_gather_replicated(x: jax.Array, axis_name: AxisNames, **kwargs: Any):
    """`lax.all_gather` whose result is typed as replicated where types are tracked."""
    if any(tracks_varying(name) for name in as_axis_tuple(axis_name)):
        kwargs["to"] = "invarying"
    return lax.all_gather(x, axis_name, **kwargs)


def require_bound(axis_names: Sequence[AxisName], argument: str = "axis_name") -> None:
    """Raises a readable error when a mapped axis is used outside its function."""
    missing = [name for name in axis_names if not is_bound(name)]
    if not missing:
        return
    bound = bound_axes()
    raise ValueError(
        f"{argument} names {missing[0]!r}, but no such mapped axis is bound here"
        f" (bound axes: {list(bound) if bound else 'none'}). A collective over it"
        " needs an enclosing jax.shard_map whose mesh has that axis, or"
        f" jax.pmap(..., axis_name={missing[0]!r}). Under plain jax.jit with sharded"
        f" arrays the compiler reduces gradients by itself: leave {argument} out."
    )
