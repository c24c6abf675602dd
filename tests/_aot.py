# SPDX-License-Identifier: Apache-2.0
"""Compilers for H100 and TPU, or a printed reason why there is none."""

import functools
import importlib.util
from typing import Any

import pytest
from jax.sharding import Mesh

from examples.aot import h100, mesh_of, v5e

_WHEELS = {"h100": ("jax_cuda12_plugin", h100), "v5e": ("libtpu", v5e)}
TARGETS = tuple(_WHEELS)


@functools.cache
def _devices(target: str) -> list[Any]:
    return _WHEELS[target][1]()


def aot_mesh(target: str, axis_names: tuple[str, ...] = ("node", "device")) -> Mesh:
    """2 x 8 devices that are not there; skips where their compiler has no wheel."""
    wheel, _ = _WHEELS[target]
    if importlib.util.find_spec(wheel) is None:
        pytest.skip(
            f"no compiler for {target}: the wheel {wheel} is not installed"
            " (scripts/install.sh does, on Linux on x86-64)"
        )
    mesh = mesh_of(_devices(target))
    if len(axis_names) == 1:
        return Mesh(mesh.devices.reshape(-1), axis_names)
    return mesh
