# SPDX-License-Identifier: Apache-2.0
"""Sums and means over several processes against plain arithmetic.

Every value is an integer or a half, so every result is exact whatever the order.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optax_npu

AXES = ("node", "device")
# 16 MiB of float32: the share of one of two devices is 8 MiB, where Gloo's own
# reduce-scatter has returned wrong sums (jax#40830).
BIG = 4 * 2**20
SMALL = {
    "scalar": ((), np.float32),
    "odd": ((1003,), np.float32),
    "rows": ((6, 128), np.float32),
    "half": ((77,), np.float16),
    "empty": ((0, 3), np.float32),
}


def base(xp: Any, i: int, shape: tuple[int, ...]) -> Any:
    """Integers below 100, different in every leaf; in JAX or in NumPy."""
    size = int(np.prod(shape))
    return ((xp.arange(size) * 7 + 13 * i) % 97).reshape(shape)


class Reduction(NamedTuple):
    """How a tree is reduced; integers take part in sums only."""

    reduce: Callable[[Any], Any]
    op: str
    check_vma: bool
    big: bool = False

    @property
    def leaves(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the tree."""
        leaves = dict(SMALL)
        if self.op == "sum":
            leaves["int"] = (130,), np.int32
        if self.big:
            leaves["big"] = (BIG,), np.float32
        return leaves

    def local_tree(self) -> dict[str, jax.Array]:
        """Replica r holds the base plus r."""
        r = lax.axis_index(AXES)
        return {
            name: (base(jnp, i, shape) + r).astype(dtype)
            for i, (name, (shape, dtype)) in enumerate(self.leaves.items())
        }

    def expected(self, replicas: int) -> dict[str, np.ndarray]:
        """The reduced tree in plain arithmetic."""
        out = {}
        for i, (name, (shape, dtype)) in enumerate(self.leaves.items()):
            total = replicas * base(np, i, shape) + replicas * (replicas - 1) // 2
            out[name] = (total if self.op == "sum" else total / replicas).astype(dtype)
        return out

    def compiled(self, mesh: Mesh) -> Any:
        """The program that makes the tree and reduces it."""
        step = jax.shard_map(
            lambda: self.reduce(self.local_tree()),
            mesh=mesh,
            in_specs=(),
            out_specs=P(),
            check_vma=self.check_vma,
        )
        return jax.jit(step).lower().compile()


REDUCTIONS = {
    "psum checked": Reduction(
        lambda t: optax_npu.hierarchical_psum(t, AXES), "sum", True, big=True
    ),
    "psum unchecked, in buckets": Reduction(
        lambda t: optax_npu.hierarchical_psum(t, AXES, num_packs=3), "sum", False
    ),
    "pmean checked, bfloat16 between nodes": Reduction(
        lambda t: optax_npu.hierarchical_pmean(t, AXES, inter_node_dtype=jnp.bfloat16),
        "mean",
        True,
        big=True,
    ),
    "pmean unchecked, flat": Reduction(
        lambda t: optax_npu.hierarchical_pmean(t, (AXES,)), "mean", False
    ),
}


def check_mesh(mesh: Mesh) -> None:
    rows = [{d.process_index for d in row} for row in mesh.devices]
    assert rows == [{i} for i in range(jax.process_count())], rows
    assert mesh.devices.shape == (jax.process_count(), jax.local_device_count())


def check_reductions(mesh: Mesh) -> None:
    for name, reduction in REDUCTIONS.items():
        program = reduction.compiled(mesh)
        assert "reduce-scatter" not in program.as_text(), name  # jax#40830
        wanted = reduction.expected(mesh.size)
        for key, leaf in program().items():
            want = wanted[key]
            for shard in leaf.addressable_shards:
                got = np.asarray(shard.data)
                assert got.dtype == want.dtype, (name, key)
                np.testing.assert_array_equal(got, want, err_msg=f"{name}: {key}")


def check_pmap(mesh: Mesh) -> None:
    """One axis over all devices, cut into nodes by index groups."""
    local = jax.local_device_count()
    first = jax.process_index() * local
    x = np.arange(first, first + local, dtype=np.float32)[:, None] + np.arange(5.0)
    mean = jax.pmap(
        lambda x: optax_npu.hierarchical_pmean(x, "data", devices_per_node=local),
        axis_name="data",
    )(x.astype(np.float32))
    want = np.arange(5.0) + (mesh.size - 1) / 2
    for shard in mean.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data)[0], want)


def check_drift(mesh: Mesh) -> None:
    """One replica differs: every process says which one, and is healed."""

    def drifted(heal: bool) -> Any:
        def local() -> jax.Array:
            mine = lax.axis_index(AXES) == mesh.size - 1
            x = jnp.where(mine, 2.0, 1.0) * jnp.ones(3)
            return optax_npu.broadcast_from(x, AXES) if heal else x

        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
        )()

    healed = drifted(heal=True)
    optax_npu.assert_replicas_equal({"w": healed})
    np.testing.assert_array_equal(np.asarray(healed.addressable_data(0)), np.ones(3))
    last = f"'node': {mesh.shape['node'] - 1}, 'device': {mesh.shape['device'] - 1}"
    with pytest.raises(AssertionError, match=f"leaf 'w' differ.*{last}"):
        optax_npu.assert_replicas_equal({"w": drifted(heal=False)})


def run(out: Path) -> None:
    """All checks; writes which ones were passed."""
    mesh = optax_npu.two_level_mesh()
    passed = []
    for check in (check_mesh, check_reductions, check_pmap, check_drift):
        check(mesh)
        passed.append(check.__name__)
    (out / f"passed{jax.process_index()}.json").write_text(json.dumps(passed))
