# SPDX-License-Identifier: Apache-2.0
"""One function, run in every mode in which gradients come about.

`run` takes a step function ``step(shared, batch, how)``:

* `shared` is equal on all replicas: parameters, optimizer state;
* `batch` is this replica's share, or under plain `jit` the whole batch, with the
  replicas along its first axis;
* `how` says what to reduce over: ``how.reduce_over`` are the keyword arguments of
  everything that takes an `axis_name`, or `None` under plain `jit`.

It returns the outputs of all replicas as NumPy trees.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

AXES = ("node", "device")
MAPPED_MODES = ("pmap", "unchecked", "checked")
MODES = ("jit", *MAPPED_MODES)
SHAPES = ((1, 8), (2, 4), (4, 2), (8, 1), (3, 2))


class How(NamedTuple):
    """What a step function has to know about its mode."""

    mode: str
    shape: tuple[int, int]

    @property
    def reduce_over(self) -> dict[str, Any] | None:
        """Keyword arguments that name the axes to reduce over."""
        if self.mode == "jit":
            return None
        if self.mode == "pmap":
            return {"axis_name": "data", "devices_per_node": self.shape[1]}
        return {"axis_name": AXES}

    @property
    def axis_name(self) -> Any:
        """All axes, for what takes no index groups."""
        return {"jit": None, "pmap": "data"}.get(self.mode, AXES)

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.shape[0] * self.shape[1]


@functools.cache
def mesh_named(names: tuple[str, ...], shape: tuple[int, ...]) -> Mesh:
    """A mesh of the first devices."""
    return Mesh(np.array(jax.devices()[: math.prod(shape)]).reshape(shape), names)


def mesh_of(shape: tuple[int, int]) -> Mesh:
    """A mesh of nodes and devices."""
    return mesh_named(AXES, shape)


def mapped(
    mode: str, shape: tuple[int, int], step: Callable[..., Any]
) -> Callable[[Any, Any], Any]:
    """The compiled ``(shared, batch) -> output`` of a mode."""
    how = How(mode, shape)
    if mode == "jit":
        return jax.jit(lambda shared, batch: step(shared, batch, how))
    if mode == "pmap":
        return jax.pmap(
            lambda shared, batch: step(shared, batch, how),
            axis_name="data",
            in_axes=(None, 0),
            devices=jax.devices()[: how.replicas],
        )

    def local(shared: Any, batch: Any) -> Any:
        return step(shared, jax.tree.map(lambda x: x[0], batch), how)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh_of(shape),
            in_specs=(PartitionSpec(), PartitionSpec(AXES)),
            out_specs=PartitionSpec(),
            check_vma=mode == "checked",
        )
    )


def run(
    mode: str, shape: tuple[int, int], step: Callable[..., Any], shared: Any, batch: Any
) -> list[Any]:
    """The outputs of all replicas; under plain `jit` there is one."""
    out = mapped(mode, shape, step)(shared, batch)
    return replicas_of(out, mode, shape[0] * shape[1])


def replicas_of(out: Any, mode: str, count: int) -> list[Any]:
    """The output of every replica, from what the mode returned."""
    if mode == "jit":
        return [jax.tree.map(np.asarray, out)]
    if mode == "pmap":
        host = jax.tree.map(np.asarray, out)
        return [jax.tree.map(lambda x, i=i: x[i], host) for i in range(count)]
    return [
        jax.tree.map(lambda x, i=i: np.asarray(x.addressable_shards[i].data), out)
        for i in range(count)
    ]


def assert_same_bits(replicas: list[Any]) -> Any:
    """All replicas are equal bit for bit; returns one."""
    first, *others = replicas
    for other in others:
        jax.tree.map(_same_bits, first, other)
    return first


def _same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def indices(shape: tuple[int, int]) -> jax.Array:
    """A batch that tells every replica its number."""
    return jnp.arange(shape[0] * shape[1], dtype=jnp.int32)
