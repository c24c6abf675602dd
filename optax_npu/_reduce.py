# SPDX-License-Identifier: Apache-2.0
"""Stage 3, the engine: a tree through its buckets, the buckets through the levels.

The same numbers in every mode: under `pmap`, under `shard_map` with types tracked
(`check_vma=True`) or not, on any mesh, with any plan of buckets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_npu import _tailing
from optax_npu._axes import ResolvedAxes
from optax_npu._collectives import (
    Numbers,
    Stage,
    finish,
    narrow,
    run_stage,
    stages_of,
)
from optax_npu._compat import cast_varying, varying_axes
from optax_npu._packets import Packet, pack, unpack
from optax_npu._packing import bucket_plan
from optax_npu._plan import BucketPlan, Piece
from optax_npu._replication import Replication, replication_of, report
from optax_npu._settings import (
    Integers,
    OnReplicated,
    ReduceOp,
    Settings,
    check_settings,
)
from optax_npu._trees import (
    PyTree,
    compute_dtype,
    is_inexact,
    is_integer,
    path_name,
    real_dtype,
)


def reduce_tree(
    tree: PyTree,
    axes: ResolvedAxes,
    *,
    plan: BucketPlan | None = None,
    op: ReduceOp | str = ReduceOp.MEAN,
    reduce_dtype: Any = None,
    inter_node_dtype: Any = None,
    fence: bool | _tailing.Order = False,
    before_last: Callable[[jax.Array | None], Any] | None = None,
    keep_wide: bool = False,
    on_replicated: OnReplicated = "summed",
    integers: Integers = "refuse",
    divide: bool = True,
) -> tuple[PyTree, Any]:
    """Reduces the leaves of `tree` over `axes`, bucket by bucket.

    Args:
      tree: Local values of this replica. ``None``, masked nodes, booleans, float0 and
        PRNG keys pass untouched.
      axes: See ``resolve_axes``.
      plan: The buckets, by default one per dtype. Results do not depend on it.
      op: Sum or mean.
      reduce_dtype: Accumulate in it; by default at least float32.
      inter_node_dtype: What crosses between nodes is rounded to it.
      fence: Whether each collective waits for the result of the same stage of the
        previous bucket, so that no compiler merges or reorders them. ``True`` is
        ``"auto"``, see `_tailing`.
      before_last: ``before_last(prev)`` is called once, before the first collective
        of the last bucket. It may emit one small collective on an input fenced by
        ``fence(x, prev)``; `prev` is the newest result of the previous bucket's first
        stage, or `None` (one bucket, or no fence). What it returns, an array or a tree
        whose first leaf depends on that collective, holds back the last bucket.
      keep_wide: Leaves narrower than the accumulation dtype stay in it.
      on_replicated: What a leaf is that does not vary over some of the axes (only
        known where types are tracked): ``"summed"`` over them already, with a warning;
        ``"equal"`` on them, as in ``lax.psum``; or an ``"error"``.
      integers: Whether a mean of integers is refused, or they pass untouched.
      divide: Whether a mean is divided here. ``False`` leaves the sum, and the caller
        divides by ``axes.size``, e.g. together with the loss scale: one pass less over
        every gradient, for sums that are known not to overflow.

    Returns:
      The reduced tree, typed as replicated over `axes` where types are tracked, equal
      bit for bit on all replicas; and what `before_last` returned.
    """
    settings = check_settings(
        None, op, reduce_dtype, inter_node_dtype, keep_wide, on_replicated, integers
    )
    order = fence if isinstance(fence, str) else ("auto" if fence else "none")
    order = _tailing.check_order(order)
    found = jax.tree_util.tree_leaves_with_path(tree)
    paths = [path_name(path) for path, _ in found]
    leaves = [_as_array(leaf) for _, leaf in found]
    if plan is None:
        plan = bucket_plan(tree)
    states = [
        replication_of(leaf, raw, axes, settings)
        for leaf, (_, raw) in zip(leaves, found, strict=True)
    ]
    _check_plan(plan, leaves, states)
    report(states, paths, axes, settings)
    packets = _packets(plan, leaves, states, axes, settings, divide)
    parts, extra = _run(packets, leaves, order, before_last)
    out = [
        _assemble(leaf, parts.get(i), states[i], axes) for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), out), extra


def _as_array(leaf: Any) -> Any:
    number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return jnp.asarray(leaf) if number or is_inexact(leaf) or is_integer(leaf) else leaf


def _check_plan(
    plan: BucketPlan, leaves: Sequence[Any], states: Sequence[Replication]
) -> None:
    """Every leaf that is reduced has its place in the plan."""
    count = len(plan.leaves)
    wrong = [
        spec.path
        for spec, leaf, state in zip(plan.leaves, leaves, states, strict=False)
        if spec.shape != np.shape(leaf) or (state.reduced and spec.dtype is None)
    ]
    if wrong or count != len(leaves):
        where = repr(wrong[0]) if wrong else f"leaf {min(count, len(leaves))}"
        raise ValueError(
            f"The bucket plan is for {count} leaves, the tree has {len(leaves)}; the"
            f" first difference is at {where}. Plan the tree that is reduced:"
            " bucket_plan(params, ...)."
        )


def _packets(
    plan: BucketPlan,
    leaves: Sequence[Any],
    states: Sequence[Replication],
    axes: ResolvedAxes,
    settings: Settings,
    divide: bool,
) -> list[Packet]:
    packets = []
    for bucket in plan.buckets:
        alike: dict[Any, list[Piece]] = {}
        for piece in bucket.pieces:
            leaf, state = leaves[piece.leaf], states[piece.leaf]
            if state.reduced:
                key = (leaf.dtype, varying_axes(leaf), state)
                alike.setdefault(key, []).append(piece)
        for (dtype, _, state), pieces in alike.items():
            numbers = _numbers(dtype, state, axes, settings, divide)
            mine = axes.only(state.over)
            stages = stages_of(mine, numbers.wire)
            packets.append(Packet(tuple(pieces), mine, stages, numbers))
    return packets


def _numbers(
    dtype: Any,
    state: Replication,
    axes: ResolvedAxes,
    settings: Settings,
    divide: bool,
) -> Numbers:
    equal = state.constant or settings.on_replicated == "equal"
    factor = state.missing if equal else 1
    mean = settings.op is ReduceOp.MEAN
    if not jnp.issubdtype(dtype, jnp.inexact):
        if mean:
            raise TypeError(
                f"The mean of {jnp.dtype(dtype).name} values is refused: it would be"
                " rounded, or change the dtype. Use op='sum', or cast them to float32."
            )
        return Numbers(dtype, None, dtype, False, factor=factor)
    own = real_dtype(dtype)
    acc = settings.reduce_dtype or real_dtype(compute_dtype(dtype))
    wire = settings.inter_node_dtype
    wire = wire if wire is not None and wire.itemsize < acc.itemsize else None
    wide = settings.keep_wide and acc.itemsize > own.itemsize
    divisor = axes.size // (state.missing if equal else 1)
    return Numbers(acc, wire, acc if wide else own, mean and divide, divisor, factor)


class _Queues:
    """The newest results per stage, so that each stage has an order of its own."""

    def __init__(self, order: _tailing.Order):
        self.order: _tailing.Order = order
        self.results: dict[Any, list[jax.Array]] = {}

    def newest(self, key: Any, x: jax.Array | None = None) -> jax.Array | None:
        """The newest result of a stage that `x` can wait for."""
        if self.order == "none":
            return None
        for result in reversed(self.results.get(key, [])):
            if x is None or _tailing.can_follow(x, result):
                return result
        return None

    def add(self, key: Any, result: jax.Array) -> None:
        self.results.setdefault(key, []).append(result)


def _run(
    packets: Sequence[Packet],
    leaves: Sequence[Any],
    order: _tailing.Order,
    before_last: Callable[[jax.Array | None], Any] | None,
) -> tuple[dict[int, list[tuple[int, jax.Array]]], Any]:
    """Per leaf its reduced pieces with their starts; and `before_last`'s result."""
    queues = _Queues(order)
    extra = None
    travelling = [packet for packet in packets if packet.stages]
    parts: dict[int, list[tuple[int, jax.Array]]] = {}
    if before_last is not None and not travelling:
        extra = before_last(None)
    for packet in packets:
        if before_last is not None and travelling and packet is travelling[-1]:
            first = packet.stages[0].key
            extra = before_last(queues.newest(first))
            for token in jax.tree.leaves(extra)[:1]:
                queues.add(first, token)
        with jax.named_scope("optax_npu/all_reduce"):
            reduced = _run_packet(packet, leaves, queues)
        for piece, values in zip(packet.pieces, reduced, strict=True):
            parts.setdefault(piece.leaf, []).append((piece.start, values))
    return parts, extra


def _run_packet(
    packet: Packet, leaves: Sequence[Any], queues: _Queues
) -> list[jax.Array]:
    """The values of the pieces, reduced, in the dtype of the result."""
    numbers, stages = packet.numbers, packet.stages
    x = pack(packet, leaves)
    last_sum = max((i for i, s in enumerate(stages) if s.kind != "gather"), default=-1)
    if last_sum < 0:
        x = finish(x, stages, numbers)
    for i, stage in enumerate(stages):
        place = _place(stage, stages)
        x = _tailing.fence(x, queues.newest(stage.key, x), queues.order, place)
        x = run_stage(x, stage, numbers)
        queues.add(stage.key, x)
        if i == last_sum:
            x = narrow(finish(x, stages, numbers), stages, numbers)
    return unpack(x, packet, leaves)


def _place(stage: Stage, stages: Sequence[Stage]) -> _tailing.Place:
    if len({other.level for other in stages}) == 1:
        return "flat"
    return "between" if stage.level.between_nodes else "inside"


def _assemble(
    leaf: Any,
    parts: list[tuple[int, jax.Array]] | None,
    state: Replication,
    axes: ResolvedAxes,
) -> Any:
    if parts:
        pieces = [values for _, values in sorted(parts, key=lambda part: part[0])]
        whole = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)
        return whole.reshape(leaf.shape)
    if not state.reduced:
        return leaf
    # No elements: a fresh array, typed as reduced.
    rest = tuple(varying_axes(leaf) - set(axes.names))
    return cast_varying(jnp.zeros(leaf.shape, leaf.dtype), rest)
