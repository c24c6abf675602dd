# SPDX-License-Identifier: Apache-2.0
"""Start equal, and find out who drifted."""

import hashlib
from collections import Counter
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_npu._axes import ResolvedAxes, axis_spec, resolve_axes
from optax_npu._checks import is_traced
from optax_npu._compat import AxisName, as_axis_tuple, varying_axes
from optax_npu._trees import PyTree, path_name


def broadcast_from(tree: PyTree, axis_name: Any, root: int = 0) -> PyTree:
    """The values of one replica, on all of them, bit for bit.

    Call it once in a mapped function, on parameters, optimizer state and PRNG keys,
    when replicas may have started differently.

    Args:
      tree: Arrays of any dtype, and PRNG keys. ``None`` and float0 pass.
      axis_name: The mapped axes, as in ``hierarchical_pmean``.
      root: The replica to copy from, counted along the axes, the last one fastest.

    Returns:
      The tree, typed as replicated over the axes. A nan stays the same nan and a -0.0 a
      -0.0: the bits are added up as integers, with zeros from everyone else.

    Raises:
      ValueError: An axis is not bound, or there is no such replica.

    Example:
      >>> import jax, jax.numpy as jnp, optax_npu
      >>> copy = jax.vmap(  # or pmap
      ...     lambda x: optax_npu.broadcast_from(x, "data", root=2), axis_name="data")
      >>> print(copy(jnp.arange(8.0)))
      [2. 2. 2. 2. 2. 2. 2. 2.]

    References:
      ``hvd.broadcast_parameters``; Ascend's broadcast of variables from rank 0.
    """
    axes = resolve_axes(axis_spec(axis_name))
    if not 0 <= root < axes.size:
        raise ValueError(
            f"root={root}, but the axes {list(axes.names)} hold {axes.size} replicas:"
            f" 0 to {axes.size - 1}."
        )
    sizes = [int(lax.axis_size(name)) for name in axes.names]
    place = dict(zip(axes.names, np.unravel_index(root, sizes), strict=True))
    return jax.tree.map(lambda x: _copy(x, axes, place), tree)


def _copy(x: Any, axes: ResolvedAxes, place: dict[AxisName, Any]) -> Any:
    if getattr(x, "dtype", None) == jax.dtypes.float0:
        return x
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _copy(jax.random.key_data(x), axes, place)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.iscomplexobj(x):
        return lax.complex(_copy(x.real, axes, place), _copy(x.imag, axes, place))
    varying = varying_axes(x)
    names = tuple(n for n in axes.names if not axes.typed or n in varying)
    if not names:
        return x
    is_root = jnp.ones((), jnp.bool_)
    for name in names:
        is_root &= lax.axis_index(name) == int(place[name])
    if x.dtype == jnp.bool_:
        return lax.psum(jnp.where(is_root, x, False).astype(jnp.uint8), names) != 0
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, unsigned)
    bits = lax.psum(jnp.where(is_root, bits, 0), names)
    return lax.bitcast_convert_type(bits, x.dtype)


def assert_replicas_equal(tree: PyTree, axis_name: Any = None) -> None:
    """Raises when replicas of a leaf differ in a single bit, and says where.

    For tests, and every few thousand steps in training: JAX believes that an array with
    ``out_specs=P()`` is equal on all devices, and never looks. Outside of mapped
    functions, on arrays that are there; with several processes, call it on all of them.

    Args:
      tree: Arrays. What is not a ``jax.Array`` is not looked at.
      axis_name: The mesh axes, or the ``pmap`` axis, along which the devices' blocks
        must be equal: a name or a tuple. By default wherever JAX believes they are.
        Needed for the results of ``pmap``, whose replicas are stacked.

    Raises:
      AssertionError: Names the first leaf that differs, and the replicas that differ
        from most others.
      TypeError: A leaf is a tracer.
      ValueError: An array has no such mesh axis.

    Example:
      >>> import jax, jax.numpy as jnp, optax_npu
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> everywhere = NamedSharding(optax_npu.two_level_mesh(), P())
      >>> params = jax.device_put({"w": jnp.ones(3)}, everywhere)
      >>> optax_npu.assert_replicas_equal(params)
    """
    names = as_axis_tuple(axis_name)
    found = [
        (path_name(path), _plain(path_name(path), leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, jax.Array)
    ]
    digests = _digests([leaf for _, leaf in found])
    for (path, leaf), by_device in zip(found, digests, strict=True):
        _check_leaf(path, leaf, names, by_device)


def _plain(path: str, leaf: jax.Array) -> jax.Array:
    if is_traced(leaf):
        raise TypeError(
            f"assert_replicas_equal was called on a tracer (leaf {path!r}). Call it"
            " outside of jit, shard_map and pmap, on the arrays that a step returned."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def _digests(leaves: list[jax.Array]) -> list[dict[int, int]]:
    """Per leaf a hash of the block of every device, also of other processes."""
    devices = sorted(d.id for d in jax.local_devices())
    table = np.zeros((len(leaves), len(devices), 2), np.uint32)
    for i, leaf in enumerate(leaves):
        for shard in leaf.addressable_shards:
            data = np.ascontiguousarray(shard.data)
            digest = hashlib.blake2b(data.tobytes(), digest_size=8).digest()
            table[i, devices.index(shard.device.id)] = np.frombuffer(digest, np.uint32)
    ids = np.asarray(devices, np.int32)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        table, ids = multihost_utils.process_allgather((table, ids))
        table = np.concatenate(list(table), axis=1)
        ids = ids.reshape(-1)
    return [
        {int(d): int(a) << 32 | int(b) for d, (a, b) in zip(ids, row, strict=True)}
        for row in table
    ]


def _check_leaf(
    path: str, leaf: jax.Array, names: tuple[AxisName, ...], digests: dict[int, int]
) -> None:
    groups: dict[Hashable, list[tuple[str, int]]] = {}
    for label, key, device in _blocks(path, leaf, names):
        groups.setdefault(key, []).append((label, digests[device]))
    for group in groups.values():
        (usual, count), *_ = Counter(digest for _, digest in group).most_common(1)
        odd = [label for label, digest in group if digest != usual]
        if odd:
            shown = ", ".join(odd[:4]) + (" ..." if len(odd) > 4 else "")
            raise AssertionError(
                f"Replicas of leaf {path!r} differ: {shown} from the {count} others"
                f" (shape {leaf.shape}, {leaf.dtype}). Usual causes: gradients that"
                " were reduced over too few axes, an overflow flag that replicas did"
                " not agree on, parameters or PRNG keys that started differently"
                " (optax_npu.broadcast_from)."
            )


def _blocks(
    path: str, leaf: jax.Array, names: tuple[AxisName, ...]
) -> list[tuple[str, Hashable, int]]:
    """Of every device: its name, a key that it shares with equal blocks, its id."""
    sharding = leaf.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        where = sharding.devices_indices_map(leaf.shape)
        return [(str(d), str(index), d.id) for d, index in where.items()]
    mesh = sharding.mesh
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"axis_name names {missing[0]!r}, but leaf {path!r} lives on a mesh with"
            f" the axes {list(mesh.axis_names)}."
        )
    where = sharding.devices_indices_map(leaf.shape)
    blocks = []
    for place, device in np.ndenumerate(mesh.devices):
        at = dict(zip(mesh.axis_names, map(int, place), strict=True))
        key = (
            tuple(i for name, i in at.items() if name not in names)
            if names
            else str(where[device])
        )
        blocks.append((str(at), key, device.id))
    return blocks
