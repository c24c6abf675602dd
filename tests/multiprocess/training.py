# SPDX-License-Identifier: Apache-2.0
"""A small training run, the same on one process and on many.

A two-layer network, LAMB, loss scaling with growth, two buckets with a fence; at
`BAD_STEP` the batch of one replica overflows.
"""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_npu

AXES = ("node", "device")
STEPS = 8
BAD_STEP = 3
ROWS, WIDTH = 4, 16


def optimizer() -> Any:
    return optax_npu.npu_optimizer(
        optax.lamb(1e-2),
        optax_npu.DynamicLossScale(2.0**10, increment_period=3),
        is_distributed=True,
        is_loss_scale=True,
        is_tailing_optimization=True,
        axis_name=AXES,
        num_packs=2,
    )


def initial_params() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"w1": (WIDTH, 32), "b1": (32,), "w2": (32, 1), "b2": (1,)}
    return {
        name: 0.3 * random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def initial_carry() -> Any:
    """Parameters and optimizer state, as a checkpoint holds them."""
    params = initial_params()
    return params, optimizer().init(params)


def batch_of(step: int, replica: int, replicas: int) -> np.ndarray:
    """One replica's inputs; the second to last replica's overflow at `BAD_STEP`."""
    x = np.random.default_rng((step, replica)).standard_normal((ROWS, WIDTH))
    bad = step == BAD_STEP and replica == replicas - 2
    return (x * (1e38 if bad else 1.0)).astype(np.float32)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    error = hidden @ params["w2"] + params["b2"] - jnp.sum(x, axis=1, keepdims=True)
    return jnp.mean(error**2)


def make_step(mesh: Mesh) -> Any:
    tx = optimizer()

    def local(params: Any, state: Any, x: jax.Array) -> Any:
        grad = optax_npu.scaled_value_and_grad(loss_fn, state, axis_name=AXES)
        loss, grads = grad(params, x[0])
        params, state = optax_npu.apply_gradients(tx, params, grads, state)
        return params, state, jax.lax.pmean(loss, AXES)

    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(), P(AXES)), out_specs=(P(), P(), P())
        )
    )


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """Host values that are equal in all processes, on every device."""

    def put(x: Any) -> jax.Array:
        x = np.asarray(x)
        sharding = NamedSharding(mesh, P())
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def global_batch(mesh: Mesh, step: int) -> jax.Array:
    def rows(index: Any) -> np.ndarray:
        replicas = range(*index[0].indices(mesh.size))
        return np.stack([batch_of(step, r, mesh.size) for r in replicas])

    sharding = NamedSharding(mesh, P(AXES))
    shape = (mesh.size, ROWS, WIDTH)
    return jax.make_array_from_callback(shape, sharding, rows)


def host(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)


class Records:
    """Parameters, loss scale and skips after every step."""

    def __init__(self) -> None:
        self.rows: dict[str, np.ndarray] = {}

    def add(self, step: int, params: Any, state: Any, loss: Any) -> None:
        now = {
            **host(params),
            "loss": host(loss),
            "scale": host(state.scaling.loss_scale),
            "skipped": host(state.scaling.skipped_steps),
        }
        self.rows.update({f"{step}/{name}": x for name, x in now.items()})


def train(
    mesh: Mesh,
    checkpoint: Path | None = None,
    die_at: int | None = None,
    victim: int | None = None,
) -> dict[str, np.ndarray]:
    """The records of all steps that were run; goes on from a checkpoint if it is there.

    At step `die_at` process `victim` is killed.
    """
    start, carry = 0, initial_carry()
    if checkpoint is not None and checkpoint.exists():
        start, carry = load(checkpoint, carry)
    params, state = everywhere(mesh, carry)
    step_fn, records = make_step(mesh), Records()
    for step in range(start, STEPS):
        if step == die_at and jax.process_index() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        params, state, loss = step_fn(params, state, global_batch(mesh, step))
        records.add(step, params, state, loss)
        if checkpoint is not None and jax.process_index() == 0:
            save(checkpoint, step + 1, host((params, state)))
    optax_npu.assert_replicas_equal((params, state))
    return records.rows


def save(path: Path, step: int, carry: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part.npz")
    np.savez(part, np.asarray(step), *jax.tree.leaves(carry))
    part.replace(path)


def load(path: Path, like: Any) -> tuple[int, Any]:
    with np.load(path) as data:
        step, *leaves = (data[f"arr_{i}"] for i in range(len(data.files)))
    return int(step), jax.tree.unflatten(jax.tree.structure(like), leaves)


def run(out: Path, die_at: int | None = None, victim: int | None = None) -> None:
    """Trains with this process's share of the devices and writes its records."""
    mesh = optax_npu.two_level_mesh()
    rows: dict[str, Any] = train(mesh, out / "checkpoint.npz", die_at, victim)
    np.savez(out / f"records{jax.process_index()}.npz", **rows)
