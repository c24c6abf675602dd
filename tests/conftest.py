# SPDX-License-Identifier: Apache-2.0
"""Eight simulated CPU devices for every test."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Lets the CUDA compiler load on a machine without a GPU (tests/test_aot.py).
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
