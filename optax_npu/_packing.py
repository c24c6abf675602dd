# SPDX-License-Identifier: Apache-2.0
"""Stage 2: cutting the gradients into buckets.

A bucket is a packet of gradients of one dtype that one collective reduces. Buckets
stand in the order in which the backward pass produces the gradients: the first can
travel while the rest is still computed, and the last, which nothing hides, should be
small. Results never depend on the plan.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from optax_npu import _split
from optax_npu._plan import Bucket, BucketPlan, LeafSpec, Piece
from optax_npu._split import MIB, Segments
from optax_npu._trees import PyTree, is_inexact, is_integer, path_name

Split = Sequence[int] | Sequence[float] | str | None


def bucket_plan(
    tree: PyTree,
    split: Split = None,
    num_packs: int = 1,
    bucket_bytes: int | None = None,
    order: Sequence[int] | Sequence[str] | None = None,
    *,
    replicas: int = 1,
) -> BucketPlan:
    """Plans which leaf is reduced in which bucket.

    Floating, complex and integer leaves take part; others, and leaves without
    elements, are left out. No bucket mixes dtypes, so a segment of several dtypes
    becomes several buckets.

    Args:
      tree: Gradients, parameters, or their ``jax.eval_shape``.
      split: How to cut, in the order of reduction:

        * whole numbers, the last gradient of each segment: ``[20, 100, 159]``
          (Ascend's ``set_split_strategy_by_idx``);
        * percentages of the bytes: ``[60.0, 20.0, 20.0]`` (``..._by_size``). Whole
          numbers do where they cannot be taken for indices;
        * a preset: ``"ascend"`` (96.54 % and 3.46 %), ``"tf_packs"`` (equal packs that
          cut through tensors), ``"tf_bytes"`` (packs larger than `bucket_bytes`),
          ``"ddp"`` (1 MiB, then 25 MiB), ``"megatron"`` (40 million elements, or 1
          million per replica), ``"horovod"`` (at most 128 MiB).
      num_packs: Without `split`: how many segments of about equal bytes, tensors kept
        whole. 0: no packing, every leaf on its own.
      bucket_bytes: A segment is closed once it holds this many bytes; the limit of the
        presets ``"ddp"``, ``"horovod"`` and ``"tf_bytes"``.
      order: The order in which the backward pass produces the leaves, as positions or
        as path names (``"encoder/kernel"``) of all of them: see ``backward_order``. By
        default the reverse of the tree order.
      replicas: Number of data-parallel replicas (``"megatron"`` needs it).

    Returns:
      The plan.

    Raises:
      ValueError: Negative `num_packs`; indices out of order; percentages that do not
        add to 100; a list that could be either; an unknown preset; an `order` that is
        not a permutation of the leaves; options that exclude each other.
      TypeError: A number is not a whole number.

    Example:
      >>> import jax.numpy as jnp, optax_npu
      >>> params = {"a": jnp.zeros(100), "b": jnp.zeros(4), "c": jnp.zeros(60)}
      >>> print(optax_npu.bucket_plan(params, num_packs=2))
      BucketPlan 0743e1983d1b3bdf: 2 buckets
        0: 256 bytes (39.0 %) float32, 2 leaves: c ... b
        1: 400 bytes (61.0 %) float32, 1 leaf: a

    References:
      Ascend's gradient segmentation; ``num_packs`` of TensorFlow's
      ``HierarchicalCopyAllReduce``; the buckets of PyTorch DDP, Megatron and Horovod.
    """
    num_packs = check_num_packs(num_packs)
    found = jax.tree_util.tree_leaves_with_path(tree)
    leaves = tuple(_leaf_spec(path_name(path), leaf) for path, leaf in found)
    positions = _check_order(order, [leaf.path for leaf in leaves])
    taking = [i for i in positions if leaves[i].dtype is not None and leaves[i].size]
    if split == "tf_packs":
        buckets = _element_buckets(leaves, taking, max(num_packs, 1))
    else:
        rule = _Rule(split, num_packs, bucket_bytes, replicas)
        buckets = _whole_buckets(leaves, taking, rule)
    return BucketPlan(leaves, tuple(buckets), positions)


def check_num_packs(value: Any) -> int:
    """TensorFlow's `num_packs`: a whole number, at least 0."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"num_packs={value!r} is a {type(value).__name__}, but a whole number is"
            " needed: 0 (no packing), 1 (one bucket per dtype) or more."
        )
    if value < 0:
        raise ValueError(
            f"num_packs={value} is negative: use 0 for no packing, 1 for one bucket per"
            " dtype, or more."
        )
    return int(value)


def _leaf_spec(path: str, leaf: Any) -> LeafSpec:
    shape = tuple(np.shape(leaf))
    number = isinstance(leaf, int) and not isinstance(leaf, bool)
    if number or is_inexact(leaf) or is_integer(leaf):
        dtype = getattr(leaf, "dtype", None)
        return LeafSpec(
            path, shape, np.dtype(dtype or jax.numpy.result_type(leaf)).name
        )
    return LeafSpec(path, shape, None)


def _check_order(
    order: Sequence[int] | Sequence[str] | None, paths: Sequence[str]
) -> tuple[int, ...]:
    if order is None:
        return tuple(reversed(range(len(paths))))
    where = {path: i for i, path in enumerate(paths)}
    positions = tuple(where.get(x, -1) if isinstance(x, str) else int(x) for x in order)
    if sorted(positions) != list(range(len(paths))):
        raise ValueError(
            f"order={list(order)!r} is not a permutation of the {len(paths)} leaves"
            f" {list(paths)[:8]}{' ...' if len(paths) > 8 else ''}. Name every leaf"
            " once, or take it from optax_npu.backward_order(loss_fn, params, batch)."
        )
    return positions


class _Rule(NamedTuple):
    """The options that say how to cut."""

    split: Split
    num_packs: int
    bucket_bytes: int | None
    replicas: int


def _whole_buckets(
    leaves: Sequence[LeafSpec], taking: Sequence[int], rule: _Rule
) -> list[Bucket]:
    """Buckets that keep leaves whole."""
    dtypes = [cast(str, leaves[i].dtype) for i in taking]
    counts = [leaves[i].size for i in taking]
    nbytes = [n * np.dtype(d).itemsize for n, d in zip(counts, dtypes, strict=True)]
    parts: Segments = []
    for segment in _segments(rule, nbytes, counts, dtypes) if taking else []:
        by_dtype: dict[str, list[int]] = {}
        for i in segment:
            by_dtype.setdefault(dtypes[i], []).append(i)
        parts.extend(by_dtype.values())
    # A bucket can leave as soon as its last gradient is there.
    parts.sort(key=lambda part: part[-1])
    return [
        Bucket(dtypes[part[0]], tuple(Piece(taking[i], 0, counts[i]) for i in part))
        for part in parts
    ]


def _segments(
    rule: _Rule, nbytes: list[int], counts: list[int], dtypes: list[str]
) -> Segments:
    split, num_packs, limit, replicas = rule
    if limit is not None and limit <= 0:
        raise ValueError(f"bucket_bytes={limit}, but a bucket holds at least 1 byte.")
    if isinstance(split, str):
        return _preset(split, nbytes, counts, dtypes, limit, replicas)
    if split is not None:
        if limit is not None:
            raise ValueError(
                "split and bucket_bytes both say where to cut: give one of them."
            )
        return _split.by_last_index(len(nbytes), _last_indices(list(split), nbytes))
    if limit is not None:
        return _split.close_when_full(nbytes, dtypes, limit)
    if num_packs == 0:
        return [[i] for i in range(len(nbytes))]
    return _split.even_packs(nbytes, num_packs)


def _preset(
    name: str,
    nbytes: list[int],
    counts: list[int],
    dtypes: list[str],
    limit: int | None,
    replicas: int,
) -> Segments:
    if name == "ascend":
        return _split.by_last_index(len(nbytes), _split.ascend_default(nbytes))
    if name == "ddp":
        first = None if limit else MIB
        return _split.close_when_full(nbytes, dtypes, limit or 25 * MIB, first=first)
    if name == "megatron":
        elements = max(40_000_000, 1_000_000 * replicas)
        return _split.close_when_full(counts, dtypes, elements)
    if name == "horovod":
        return _split.never_exceed(nbytes, dtypes, limit or 128 * MIB)
    if name == "tf_bytes":
        if limit is None:
            raise ValueError('split="tf_bytes" needs bucket_bytes, e.g. 32 * 2**20.')
        return _split.close_when_full(nbytes, dtypes, limit, inclusive=False)
    raise ValueError(
        f"split={name!r} is not a preset. Presets: 'ascend', 'ddp', 'horovod',"
        " 'megatron', 'tf_bytes', 'tf_packs'."
    )


def _last_indices(split: list[Any], nbytes: Sequence[int]) -> list[int]:
    """The last position of every segment, from indices or percentages."""
    count = len(nbytes)
    whole = all(isinstance(x, int | np.integer) for x in split)
    rising = all(a < b for a, b in itertools.pairwise(split))
    indices = (
        whole and bool(split) and rising and split[-1] == count - 1 and split[0] >= 0
    )
    percent = (
        bool(split)
        and abs(sum(split) - 100) < 1e-6
        and all(0 < x <= 100 for x in split)
    )
    if indices and percent and len(split) > 1:
        raise ValueError(
            f"split={split} could be the last indices of {count} gradients, or"
            " percentages. Write percentages as floats, e.g."
            f" {[float(x) for x in split]}; to cut there by index, use bucket_plan(...,"
            " bucket_bytes=...) or another list."
        )
    if indices:
        return [int(x) for x in split]
    if percent:
        return _split.by_percent(nbytes, split)
    raise ValueError(
        f"split={split!r} fits neither meaning. Indices must rise and end at"
        f" {count - 1}, the last of the {count} gradients that take part; percentages"
        f" must be positive and add to 100 (these add to {sum(split):g})."
    )


def _element_buckets(
    leaves: Sequence[LeafSpec], taking: Sequence[int], packs: int
) -> list[Bucket]:
    """TensorFlow's packs: per dtype, equal numbers of elements, cut through leaves."""
    buckets = []
    for dtype in dict.fromkeys(cast(str, leaves[i].dtype) for i in taking):
        mine = [i for i in taking if leaves[i].dtype == dtype]
        sizes = _split.element_packs(sum(leaves[i].size for i in mine), packs)
        edges = list(itertools.accumulate(sizes, initial=0))
        start = 0
        pieces: list[list[Piece]] = [[] for _ in sizes]
        for i in mine:
            stop = start + leaves[i].size
            for pack, (a, b) in enumerate(itertools.pairwise(edges)):
                low, high = max(a, start), min(b, stop)
                if low < high:
                    pieces[pack].append(Piece(i, low - start, high - start))
            start = stop
        buckets += [Bucket(dtype, tuple(p)) for p in pieces if p]
    return buckets
