# SPDX-License-Identifier: Apache-2.0
"""One packet through the levels: scatter inwards, all-reduce on top, gather outwards.

Two levels take three stages: a reduce-scatter in the node, an all-reduce of each
device's share between nodes, an all-gather in the node. More levels nest.

**Numbers.** Sums are accumulated in `acc`. A mean divides *before* each level by the
next power of two, which is exact, and at the end by what is missing to the true number,
which is 1 for powers of two. So the sum never exceeds the largest input, and a mean of
finite values is finite. What crosses between nodes may be rounded to `wire`; it is
added up in `acc` all the same.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_npu._axes import Level, ResolvedAxes
from optax_npu._compat import all_gather_replicated

# TPU tiles have 128 lanes; there, a flat buffer would turn a reduce-scatter into an
# all-reduce.
LANES = 128
PIECE_BYTES, MAX_PIECES = 256 * 1024, 16


class Numbers(NamedTuple):
    """The dtypes and the division of one packet.

    Attributes:
      acc: The real dtype that sums are accumulated in.
      wire: The dtype between nodes, or `None` for `acc`.
      out: The real dtype of the result.
      mean: Whether to divide by powers of two on the way.
      divisor: What a mean divides by in the end.
      factor: What a sum is multiplied by in the end.
    """

    acc: np.dtype
    wire: np.dtype | None
    out: np.dtype
    mean: bool
    divisor: int = 1
    factor: int = 1


class Stage(NamedTuple):
    """One collective of a packet; stages with equal keys share links."""

    kind: Literal["scatter", "reduce", "gather"]
    level: Level
    wired: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Packets queue up for a stage with the same key."""
        return (self.kind, self.level.names, self.level.groups)


def stages_of(axes: ResolvedAxes, wire: Any) -> list[Stage]:
    """The collectives that reduce over `axes`, in order."""
    if not axes.levels:
        return []
    top, *inner = axes.levels

    def stage(kind: Any, level: Level) -> Stage:
        return Stage(kind, level, wire is not None and level.between_nodes)

    scatters = [stage("scatter", level) for level in reversed(inner)]
    gathers = [stage("gather", level) for level in inner]
    if stage("reduce", top).wired:
        middle = [stage("scatter", top), stage("gather", top)]
    else:
        middle = [stage("reduce", top)]
    return [*scatters, *middle, *gathers]


def parts_of(stages: list[Stage]) -> int:
    """Into how many shares the stages cut a packet; 1 if it stays whole."""
    return math.prod(stage.level.size for stage in stages if stage.kind == "scatter")


def shape_for(size: int, parts: int) -> tuple[int, int]:
    """Rows and lanes that hold `size` elements and whose rows `parts` divides."""
    if size < LANES * parts:
        return parts, -(-size // parts)
    return -(-size // (LANES * parts)) * parts, LANES


def power_of_two(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()


def run_stage(x: jax.Array, stage: Stage, numbers: Numbers) -> jax.Array:
    """One collective, with the division that belongs before it."""
    level = stage.level
    if stage.kind == "gather":
        return _gather(x, level)
    divided = power_of_two(level.size) if numbers.mean else 1
    if stage.wired:
        received = _exchange(x.astype(numbers.wire), level).astype(numbers.acc)
        return jnp.sum(_times(received, 1 / divided), axis=0)
    x = _times(x, 1 / divided)
    if stage.kind == "reduce":
        return lax.psum(x, **level.collective)
    return _reduce_scatter(x, level)


def finish(x: jax.Array, stages: list[Stage], numbers: Numbers) -> jax.Array:
    """The division that is left, after the last sum."""
    if not numbers.mean:
        return _times(x, numbers.factor)
    sums = [s.level.size for s in stages if s.kind != "gather"]
    done = math.prod(power_of_two(size) for size in sums)
    return _divide(x, numbers.divisor / done)


def narrow(x: jax.Array, stages: list[Stage], numbers: Numbers) -> jax.Array:
    """The cast before the gathers: no more bytes than the result needs."""
    if any(stage.wired for stage in stages):
        return x.astype(numbers.wire)
    if 1 < numbers.out.itemsize < x.dtype.itemsize:
        return x.astype(numbers.out)
    return x


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _divide(x: jax.Array, ratio: float) -> jax.Array:
    """`x / ratio`, rounded once; `ratio` has few bits.

    By a power of two it is a product. Else the divisor must not look constant to the
    compiler, which would multiply by a rounded reciprocal: the mean of equal integers
    would no longer be that integer, and the largest finite number would become inf.
    """
    if math.frexp(ratio)[0] == 0.5:
        return _times(x, 1 / ratio)
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    divisor = jnp.where(jnp.isnan(wide), 1, ratio).astype(wide.dtype)
    return (wide / divisor).astype(x.dtype)


def _reduce_scatter(x: jax.Array, level: Level) -> jax.Array:
    """Sums over the level; replica i keeps the i-th share of the rows."""

    def native(x: jax.Array) -> jax.Array:
        return lax.psum_scatter(x, scatter_dimension=0, tiled=True, **level.collective)

    if not jax.distributed.is_initialized():
        return native(x)

    def by_exchange(x: jax.Array) -> jax.Array:
        # Gloo, which takes over as soon as jax.distributed is initialised, has returned
        # wrong sums for shares of several MiB (jax#40830). An exchange moves the same
        # bytes.
        return jnp.sum(_exchange(x, level), axis=0).astype(x.dtype)

    return lax.platform_dependent(x, cpu=by_exchange, default=native)


def _exchange(x: jax.Array, level: Level) -> jax.Array:
    """Share i of every replica, stacked, on replica i: (replicas, rows, lanes)."""

    def move(x: jax.Array) -> jax.Array:
        return lax.all_to_all(
            x, split_axis=0, concat_axis=0, tiled=True, **level.collective
        )

    def in_pieces(x: jax.Array) -> jax.Array:
        pieces = _pieces(x.reshape(level.size, -1))
        return jnp.concatenate([move(p) for p in pieces], axis=1).reshape(x.shape)

    moved = _moved(_for_links(level, move, in_pieces), x)
    return moved.reshape(level.size, -1, *x.shape[1:])


def _gather(x: jax.Array, level: Level) -> jax.Array:
    """The shares of all replicas, concatenated; equal on all of them."""

    def move(x: jax.Array) -> jax.Array:
        return all_gather_replicated(x, axis=0, tiled=True, **level.collective)

    def in_pieces(x: jax.Array) -> jax.Array:
        whole = jnp.concatenate([move(p) for p in _pieces(x.reshape(1, -1))], axis=1)
        return whole.reshape(-1, *x.shape[1:])

    return _moved(_for_links(level, move, in_pieces), x)


def _for_links(
    level: Level,
    move: Callable[[jax.Array], jax.Array],
    in_pieces: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
    """Gloo between nodes sends and receives a large message one after the other.

    Pieces keep both directions of a slow link busy.
    """
    if not (level.between_nodes and jax.distributed.is_initialized()):
        return move
    return lambda x: lax.platform_dependent(x, cpu=in_pieces, default=move)


def _pieces(shares: jax.Array) -> list[jax.Array]:
    """(replicas, elements) in a few pieces of at least `PIECE_BYTES`."""
    count = shares.size * shares.dtype.itemsize // PIECE_BYTES
    return jnp.array_split(shares, min(max(count, 1), MAX_PIECES), axis=1)


def _moved(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Moves values that are not computed with; narrow ones as plain bits.

    XLA on CPU would send bfloat16 as float32.
    """
    if x.dtype.itemsize >= 4:
        return move(x)
    bits = jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16

    @jax.custom_jvp
    def moved(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(
            move(lax.bitcast_convert_type(x, bits)), x.dtype
        )

    @moved.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return moved(*primals), move(*tangents)

    return moved(x)
