# SPDX-License-Identifier: Apache-2.0
"""Start equal; find out who drifted. Every bit counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optax_npu import assert_replicas_equal, broadcast_from
from tests._modes import AXES, MAPPED_MODES, assert_same_bits, indices, mesh_of, run


def tree_of(i):
    """Bits that a sum of floats would not keep."""
    odd = jnp.array([-0.0, jnp.nan, 1e-42, jnp.inf])
    return {
        "odd": jnp.where(i == 5, odd, i.astype(jnp.float32)),
        "half": i.astype(jnp.float16),
        "flag": i == 5,
        "small": jnp.full(3, -100, jnp.int8) + i.astype(jnp.int8),
        "complex": jax.lax.complex(i * 1.0, -0.0 * i),
        "empty": jnp.zeros((0, 3)) + i,
        "none": None,
    }


@pytest.mark.parametrize("mode", MAPPED_MODES)
def test_D26_broadcast_copies_every_bit(mode):
    def step(_, i, how):
        key = jax.random.fold_in(jax.random.key(0), i)
        tree = tree_of(i) | {"key": key}
        out = broadcast_from(tree, how.axis_name, root=5)
        return out | {"key": jax.random.key_data(out["key"])}

    out = assert_same_bits(run(mode, (2, 4), step, 0.0, indices((2, 4))))
    want = jax.tree.map(np.asarray, tree_of(jnp.int32(5)))
    want["key"] = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 5))
    for name, value in want.items():
        if value is None:
            assert out[name] is None
        else:
            assert out[name].dtype == value.dtype, name
            assert out[name].tobytes() == np.asarray(value).tobytes(), name


def test_broadcast_of_replicated_values_and_odd_leaves():
    def step(x):
        float0 = np.zeros(2, jax.dtypes.float0)
        out = broadcast_from({"x": x, "f": float0, "n": 3}, AXES, root=7)
        assert out["f"] is float0
        return out["x"], out["n"]

    step = jax.shard_map(step, mesh=mesh_of((2, 4)), in_specs=P(), out_specs=P())
    x, n = step(jnp.arange(3.0))
    np.testing.assert_array_equal(x, np.arange(3.0))
    assert n == 3


@pytest.mark.parametrize("root", [-1, 8])
def test_broadcast_from_nobody(root):
    with pytest.raises(ValueError, match=rf"root={root}.*8 replicas: 0 to 7"):
        jax.vmap(lambda x: broadcast_from(x, "data", root), axis_name="data")(
            jnp.arange(8)
        )


def drifted(bad=6, by=1e-7):
    """Leaf "b/w" is one ulp off on one replica that JAX believes to be equal."""

    def step():
        here = jax.lax.axis_index(AXES) == bad
        same = jnp.ones((2, 3))
        return {"a": same, "b": {"w": jnp.where(here, same + by, same)}}

    return jax.jit(
        jax.shard_map(
            step, mesh=mesh_of((2, 4)), in_specs=(), out_specs=P(), check_vma=False
        )
    )()


@pytest.mark.parametrize("axis_name", [None, AXES, "device"])
def test_D26_names_the_leaf_and_the_replica(axis_name):
    with pytest.raises(AssertionError, match=r"'b/w'.*\{'node': 1, 'device': 2\} from"):
        assert_replicas_equal(drifted(), axis_name)


def test_D26_equal_trees_pass():
    mesh = mesh_of((2, 4))
    everywhere = NamedSharding(mesh, P())
    sharded = NamedSharding(mesh, P("node"))
    tree = {
        "w": jax.device_put(jnp.array([jnp.nan, -0.0]), everywhere),
        "key": jax.device_put(jax.random.key(3), everywhere),
        "shard": jax.device_put(jnp.arange(4.0), sharded),
        "one": jnp.ones(3),
        "host": np.ones(3),
        "none": None,
    }
    assert_replicas_equal(tree)
    assert_replicas_equal({"shard": tree["shard"]}, "device")
    assert_replicas_equal({})


def test_D26_zero_and_minus_zero_differ():
    mesh = mesh_of((2, 4))
    shards = [
        jax.device_put(jnp.full(3, -0.0 if i == 3 else 0.0), device)
        for i, device in enumerate(mesh.devices.flat)
    ]
    array = jax.make_array_from_single_device_arrays(
        (3,), NamedSharding(mesh, P()), shards
    )
    with pytest.raises(AssertionError, match=r"'w'.*\{'node': 0, 'device': 3\}"):
        assert_replicas_equal({"w": array})


def test_D26_stacked_replicas_of_pmap():
    out = jax.pmap(lambda x: x, axis_name="data")(jnp.ones(8).at[3].set(2.0))
    assert_replicas_equal({"w": out})  # JAX does not believe that they are equal
    with pytest.raises(AssertionError, match=r"'w' differ: \{'data': 3\} from the 7"):
        assert_replicas_equal({"w": out}, "data")


def test_D26_bad_use():
    with pytest.raises(TypeError, match="tracer"):
        jax.jit(assert_replicas_equal)(jnp.ones(3))
    with pytest.raises(ValueError, match=r"'data'.*\['node', 'device'\]"):
        assert_replicas_equal(drifted(), "data")
