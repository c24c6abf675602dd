# SPDX-License-Identifier: Apache-2.0
"""Devices that are not there: compile for H100s or TPU slices on any machine.

    mesh = mesh_of(h100(nodes=2), nodes=2)
    compiled = jax.jit(step).lower(...).compile()
    print(optax_npu.schedule_report(compiled))

The compilers ship as wheels for Linux on x86-64 (scripts/install.sh); no driver
and no device is needed. What comes out cannot run here, but it is the scheduled program
that would.
"""

import os
from typing import Any

# Read when the plugins are first loaded. They don't overrule what you have set.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

# What the compiler asks of a GPU: NVIDIA's figures for the H100 SXM, 80 GB.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3350000000000
  l2_cache_size: 52428800
  device_memory_size: 85899345920
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 9 }
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# Choosing among kernels needs the device; everything else does not.
H100_OPTIONS = {"xla_gpu_autotune_level": 0}


def h100(nodes: int = 2, devices: int = 8) -> list[Any]:
    """H100s of `nodes` hosts with `devices` each, host by host."""
    found = topologies.get_topology_desc(
        "h100", platform="cuda", target_config=H100, topology=f"1x{nodes}x{devices}"
    ).devices
    return sorted(found, key=lambda device: (device.process_index, device.id))


def v5e(slices: int = 2, shape: str = "2x4") -> list[Any]:
    """TPU v5e chips of `slices` slices, slice by slice."""
    found = topologies.get_topology_desc(
        platform="tpu", topology_name=f"v5e:{shape}", num_slices=slices
    ).devices
    return sorted(found, key=lambda device: (device.slice_index, device.id))


def mesh_of(devices: list[Any], nodes: int = 2) -> Mesh:
    """A mesh whose rows are the nodes."""
    return Mesh(np.array(devices).reshape(nodes, -1), ("node", "device"))


def compile_for(step: Any, mesh: Mesh, *args: Any) -> Any:
    """Compiles a jitted function for the devices of a mesh.

    Args:
      step: What `jax.jit` returned.
      mesh: Its devices.
      *args: Shapes with shardings (`jax.ShapeDtypeStruct`).

    Returns:
      The compiled function: to be read, not to be called.
    """
    gpu = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return step.lower(*args).compile(H100_OPTIONS if gpu else None)


def shapes(tree: Any, mesh: Mesh, spec: Any) -> Any:
    """The shapes of a tree, sharded over a mesh."""
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )
