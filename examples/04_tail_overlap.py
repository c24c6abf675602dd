# SPDX-License-Identifier: Apache-2.0
# %% [markdown]
# # What hides behind the last all-reduce, on chips that are not here
#
# Two nodes of eight H100s, or two slices of eight TPU v5e chips, train BERT. Does the
# optimizer run while gradients are still on the wire? The compiler decides, and its
# decision can be read on any machine: compile ahead of time for devices that are not
# there (`pip install 'optax-npu[aot,plot]'`), and read the schedule.
#
#     python examples/04_tail_overlap.py [--layers 4 --hidden 512] [--target h100]

# %%
import argparse
import importlib.util
import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from aot import compile_for, h100, mesh_of, shapes, v5e
from bert.data import Batch
from bert.options import Options
from bert.train import State, make_model, make_optimizer, make_step
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optax_npu

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("runs/tail_overlap"))
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--target", nargs="+", default=["h100", "v5e"])
args, _ = parser.parse_known_args()

# %% [markdown]
# ## The step
#
# The training step of `bert_pretrain.py --distributed --tailing`, unchanged: LAMB
# inside `npu_optimizer`, float16 matrix products, a dynamic loss scale. Only shapes go
# in.

# %%
options = Options(
    layers=args.layers,
    hidden=args.hidden,
    heads=8,
    vocab_size=8192,
    length=128,
    batch_size=16 * 16,
    distributed=True,
    tailing=True,
)


def compiled_step(mesh: Mesh):
    """Compiles the step for the devices of a mesh."""
    model, tx = make_model(options), make_optimizer(options)
    tokens = jax.ShapeDtypeStruct((options.batch_size, options.length), jnp.int32)
    some = jax.ShapeDtypeStruct((options.batch_size, 16), jnp.int32)

    def init(key):
        one = jnp.zeros((1, options.length), jnp.int32)
        params = model.init(key, one, one[:, :1])["params"]
        return params, tx.init(params)

    state = jax.eval_shape(init, jax.random.key(0))
    step = make_step(model, tx, mesh)
    batch = Batch(*shapes([tokens, some, some], mesh, P(mesh.axis_names)))
    return compile_for(step, mesh, State(*shapes(state, mesh, P())), batch)


# %% [markdown]
# ## Both machines
#
# `schedule_report` lists every collective: how large, over which links, what the
# compiler put beside it. Order and bytes are facts. Times are an estimate from a stated
# cost model; give your own `links` and `chip`.

# %%
machines = {"h100": ("jax_cuda12_plugin", h100), "v5e": ("libtpu", v5e)}
for name in args.target:
    wheel, devices = machines[name]
    if importlib.util.find_spec(wheel) is None:
        print(f"{name}: skipped, the compiler ({wheel}) is not installed")
        continue
    report = optax_npu.schedule_report(compiled_step(mesh_of(devices())))
    print(f"\n{name}\n{report}")
    args.out.mkdir(parents=True, exist_ok=True)
    report.plot(args.out / f"{name}.svg")
    print(f"timeline: {args.out / f'{name}.svg'}")

# %% [markdown]
# ## What to do with it
#
# * `assert_tail_overlap(compiled, min_share=0.8)` in your own tests keeps it that way.
# * `tail_lint` tells in advance which part of an optimizer is a barrier.
# * `explain` says whether two levels pay on your links, and how large the last bucket
#   should be.

# %%
import optax

params = {"dense": jnp.zeros((1024, 1024)), "bias": jnp.zeros(1024)}
clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3))
for finding in optax_npu.tail_lint(clipped, params):
    print(finding)
print(optax_npu.explain([25_000_000] * 4, (2, 8), "h100_shared_nic"))
