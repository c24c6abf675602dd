# SPDX-License-Identifier: Apache-2.0
"""Eight simulated CPU devices for every test."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
