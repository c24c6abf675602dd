# SPDX-License-Identifier: Apache-2.0
"""Stage 1 on arrays large enough for XLA's vectorised reductions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_npu._overflow import local_overflow

SIZES = [1, 4096, 4097, 2**15, 100_003]
DTYPES = [jnp.float32, jnp.float16, jnp.bfloat16]
_overflow = jax.jit(lambda tree: local_overflow(tree, jnp.float32(1.0)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_one_bad_value_is_seen_wherever_it_stands(dtype, size):
    # XLA on CPU drops nan in the minimum and maximum of a float32 array like these.
    good = np.ones(size, dtype)
    assert not _overflow([good])
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        for place in {0, size // 3, size - 1}:
            x = good.copy()
            x[place] = bad
            assert _overflow([x]), (bad, place)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_an_array_of_nothing_else_is_seen(size, bad):
    assert _overflow([np.full(size, bad, np.float32)])
