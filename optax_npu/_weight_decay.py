# SPDX-License-Identifier: Apache-2.0
"""Which parameters an optimizer decays."""

import re
from collections.abc import Callable

import jax

from optax_npu._trees import PyTree, path_name


def exclude_from_weight_decay(*patterns: str) -> Callable[[PyTree], PyTree]:
    """A mask that leaves parameters out of weight decay by their path names.

    For ``optax.lamb(mask=...)``, ``optax.adamw(mask=...)`` and
    ``optax.add_decayed_weights(mask=...)``. BERT's recipe is
    ``exclude_from_weight_decay("LayerNorm", "layer_norm", "bias")``. In
    ``optax.lamb`` an excluded parameter keeps its trust ratio, as in NVIDIA's BERT;
    TensorFlow Addons and ALBERT drop the ratio there too.

    Args:
      *patterns: Regular expressions, searched for anywhere in a path such as
        ``encoder/layer_0/LayerNorm/scale``. Case matters.

    Returns:
      A function from a parameter tree to a tree of Python bools: True decays.

    Raises:
      TypeError: A pattern is not a string.
      ValueError: A pattern is no regular expression.

    Example:
      >>> import jax.numpy as jnp, optax, optax_npu
      >>> mask = optax_npu.exclude_from_weight_decay("LayerNorm", "bias")
      >>> mask({"dense": {"kernel": jnp.ones(2), "bias": jnp.ones(2)},
      ...       "LayerNorm": {"scale": jnp.ones(2)}})
      {'LayerNorm': {'scale': False}, 'dense': {'bias': False, 'kernel': True}}
      >>> tx = optax.lamb(1e-3, weight_decay=0.01, mask=mask)

    References:
      ``exclude_from_weight_decay`` of google-research/bert's optimizer and of
      ``LAMBOptimizer``; You et al., `Large Batch Optimization for Deep Learning
      <https://arxiv.org/abs/1904.00962>`_.
    """
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"pattern {pattern!r} is a {type(pattern).__name__}, but a string is"
                ' needed: exclude_from_weight_decay("LayerNorm", "bias"), not a list.'
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"pattern {pattern!r} is no regular expression ({error}); escape it"
                f" with re.escape to search for the text itself."
            ) from error

    def mask(params: PyTree) -> PyTree:
        def decays(path, _) -> bool:
            return not any(re.search(p, path_name(path)) for p in patterns)

        return jax.tree_util.tree_map_with_path(decays, params)

    return mask
