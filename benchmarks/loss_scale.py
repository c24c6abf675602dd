# SPDX-License-Identifier: Apache-2.0
"""A whole jitted step, gradients given, against what a user would pick instead.

    python -m benchmarks.loss_scale [--quick] [--markdown FILE]

Every row is a ratio to the *same* optimizer without loss scaling, measured in one
process in alternation: the median over rounds of the ratio of medians. Parameters and
optimizer state are donated. Trace and compile times and temporary memory are ratios
and differences to the plain step too.
"""

import argparse
import dataclasses
import gc
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_npu

Step = Callable[..., Any]
LR = 1e-3
SCALE = 2.0**10

OPTIMIZERS = {
    "adam": lambda: optax.adam(LR),
    "lamb": lambda: optax.lamb(LR),
    "sgd+momentum": lambda: optax.sgd(LR, momentum=0.9),
}
TREES = {"20 M in 60 leaves": (20_000_000, 60), "1 M in 2000 leaves": (1_000_000, 2000)}


def plain(inner: Any) -> tuple[Any, Step]:
    """The optimizer alone: gradients cast to float32, no test, no scale."""

    def step(params, state, grads):
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return inner.init, step


def ours_whole(inner: Any) -> tuple[Any, Step]:
    tx = optax_npu.chain(optax_npu.npu_loss_scale(), inner)

    def step(params, state, grads):
        return optax_npu.apply_gradients(tx, params, grads, state)

    return tx.init, step


def ours_chain(inner: Any) -> tuple[Any, Step]:
    tx = optax_npu.chain(optax_npu.npu_loss_scale(), inner)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def flax_dynamic_scale(inner: Any) -> tuple[Any, Step]:
    """The unscale, test and adjustment of `DynamicScale`, then its documented select.

    `DynamicScale` differentiates by itself; a loss that is linear in the parameters
    hands it the given gradients.
    """
    from flax.training.dynamic_scale import DynamicScale

    def step(params, state, grads):
        dynamic_scale, inner_state = state

        def loss(p):
            total = jnp.float32(0)
            for w, g in zip(jax.tree.leaves(p), jax.tree.leaves(grads), strict=True):
                given = jax.lax.stop_gradient(g / dynamic_scale.scale.astype(g.dtype))
                total += jnp.sum(w * given.astype(w.dtype))
            return total

        dynamic_scale, finite, _, unscaled = dynamic_scale.value_and_grad(loss)(params)
        updates, new_state = inner.update(unscaled, inner_state, params)
        new_params = optax.apply_updates(params, updates)
        select = lambda new, old: jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), new, old
        )
        return (
            select(new_params, params),
            (dynamic_scale, select(new_state, inner_state)),
        )

    def init(params):
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(SCALE))
        return scale, inner.init(params)

    return init, step


def jmp_recipe(inner: Any) -> tuple[Any, Step]:
    import jmp

    def step(params, state, grads):
        numbers, inner_state = state  # its own pytree cannot be lowered ahead of time
        scale = jmp.DynamicLossScale(*numbers)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_state = inner.update(grads, inner_state, params)
        new_params = optax.apply_updates(params, updates)
        scale = scale.adjust(finite)
        return jmp.select_tree(finite, new_params, params), (
            (scale.loss_scale, scale.counter),
            jmp.select_tree(finite, new_state, inner_state),
        )

    def init(params):
        return (jnp.float32(SCALE), jnp.int32(0)), inner.init(params)

    return init, step


def mpx_recipe(inner: Any) -> tuple[Any, Step]:
    import mpx

    def step(params, state, grads):
        scale, inner_state = state
        grads = scale.unscale(grads)
        finite = mpx.all_finite(grads)
        params, inner_state = mpx.optimizer_update(
            params, inner, inner_state, grads, finite
        )
        return params, (scale.adjust(finite), inner_state)

    def init(params):
        scale = mpx.DynamicLossScaling(
            loss_scaling=jnp.float32(SCALE), min_loss_scaling=jnp.float32(1)
        )
        return scale, inner.init(params)

    return init, step


def apply_if_finite(inner: Any) -> tuple[Any, Step]:
    """No scale at all, only the guard."""
    tx = optax.apply_if_finite(inner, 100)
    init, step = plain(tx)
    return init, step


PEERS = {
    "plain": plain,
    "ours, apply_gradients": ours_whole,
    "ours, chain + apply_updates": ours_chain,
    "flax DynamicScale + select": flax_dynamic_scale,
    "jmp + select_tree": jmp_recipe,
    "mpx optimizer_update": mpx_recipe,
    "optax.apply_if_finite": apply_if_finite,
}


@dataclasses.dataclass
class Contender:
    compiled: Any
    carry: Any
    build_s: float
    temp_bytes: int
    times: list[float] = dataclasses.field(default_factory=list)

    def run(self, grads: Any, repeats: int) -> None:
        for _ in range(repeats):
            start = time.perf_counter()
            self.carry = jax.block_until_ready(self.compiled(*self.carry, grads))
            self.times.append(time.perf_counter() - start)


def random_tree(size: int, leaves: int, dtype: Any, factor: float) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    n = size // leaves
    return [
        jnp.asarray(rng.normal(size=n).astype(np.float32) * factor, dtype)
        for _ in range(leaves)
    ]


def build(make: Any, inner: Any, size: int, leaves: int, grads: Any) -> Contender:
    params = random_tree(size, leaves, jnp.float32, 1.0)
    init, step = make(inner)
    state = init(params)
    start = time.perf_counter()
    compiled = (
        jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads).compile()
    )
    build_s = time.perf_counter() - start
    temp = compiled.memory_analysis().temp_size_in_bytes
    return Contender(compiled, (params, state), build_s, temp)


def case(
    optimizer: str, tree: str, dtype: Any, rounds: int, repeats: int
) -> list[dict[str, Any]]:
    size, leaves = TREES[tree]
    grads = random_tree(size, leaves, dtype, 1.0)
    rows = []
    contenders: dict[str, Contender] = {}
    for name, make in PEERS.items():
        contenders[name] = build(make, OPTIMIZERS[optimizer](), size, leaves, grads)
        contenders[name].run(grads, 1)
        contenders[name].times.clear()
    for _ in range(rounds):
        for contender in contenders.values():
            contender.run(grads, repeats)
    base = contenders["plain"]
    for name, c in contenders.items():
        per_round = np.median(np.reshape(c.times, (rounds, repeats)), axis=1)
        base_rounds = np.median(np.reshape(base.times, (rounds, repeats)), axis=1)
        rows.append(
            {
                "optimizer": optimizer,
                "tree": tree,
                "gradients": jnp.dtype(dtype).name,
                "step": name,
                "time": float(np.median(per_round / base_rounds)),
                "temp_mib": (c.temp_bytes - base.temp_bytes) / 2**20,
                "build": c.build_s / base.build_s,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]], seconds: float) -> str:
    devices = jax.devices()
    lines = [
        f"JAX {jax.__version__}, Optax {optax.__version__}, Python"
        f" {platform.python_version()}, {devices[0].device_kind}"
        f" ({platform.machine()}, {_cpu_count()} cores),"
        f" {time.strftime('%Y-%m-%d')}, {seconds:.0f} s in all.",
        "",
        "| optimizer | parameters | gradients | step | time / plain"
        " | extra temporaries, MiB | trace + compile / plain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        lines.append(
            f"| {r['optimizer']} | {r['tree']} | {r['gradients']} | {r['step']} |"
            f" {r['time']:.2f} | {r['temp_mib']:.1f} | {r['build']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _cpu_count() -> int:
    import os

    return os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one case, few rounds")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append")
    parser.add_argument("--tree", choices=TREES, action="append")
    parser.add_argument("--dtype", choices=["float32", "float16"], action="append")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    args = parser.parse_args()
    rounds, repeats = (3, 3) if args.quick else (7, 5)
    start, rows = time.perf_counter(), []
    for optimizer in args.optimizer or (["adam"] if args.quick else OPTIMIZERS):
        for tree in args.tree or TREES:
            for dtype in args.dtype or ["float32", "float16"]:
                gc.collect()
                rows += case(optimizer, tree, jnp.dtype(dtype), rounds, repeats)
                print(markdown(rows[-len(PEERS) :], 0).split("\n", 4)[-1], flush=True)
    table = markdown(rows, time.perf_counter() - start)
    print(table)
    if args.markdown:
        args.markdown.write_text(table)


if __name__ == "__main__":
    main()
