# SPDX-License-Identifier: Apache-2.0
"""Leaves into one buffer, and out of it again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_npu._axes import ResolvedAxes
from optax_npu._collectives import Numbers, Stage, parts_of, shape_for
from optax_npu._compat import cast_varying, varying_axes
from optax_npu._plan import Piece


class Packet(NamedTuple):
    """One bucket, or the part of it whose leaves are reduced alike."""

    pieces: tuple[Piece, ...]
    axes: ResolvedAxes
    stages: list[Stage]
    numbers: Numbers


def _alone(packet: Packet, leaves: Sequence[Any]) -> jax.Array | None:
    """The one real leaf of the packet, if it needs no copy to travel."""
    (first, *rest) = packet.pieces
    leaf = leaves[first.leaf]
    if rest or first.size != leaf.size or jnp.iscomplexobj(leaf):
        return None
    parts = parts_of(packet.stages)
    if parts == 1 or (leaf.ndim > 1 and leaf.shape[0] % parts == 0):
        return leaf
    rows, lanes = shape_for(leaf.size, parts)
    return leaf.reshape(rows, lanes) if rows * lanes == leaf.size else None


def pack(packet: Packet, leaves: Sequence[Any]) -> jax.Array:
    """The buffer of a packet: the leaf itself, or rows × lanes with padding."""
    acc = packet.numbers.acc
    alone = _alone(packet, leaves)
    if alone is not None:
        return alone.astype(acc)
    flat: list[jax.Array] = []
    for piece in packet.pieces:
        values = leaves[piece.leaf].reshape(-1)[piece.start : piece.stop]
        real = (values.real, values.imag) if jnp.iscomplexobj(values) else (values,)
        flat += [part.astype(acc) for part in real]
    parts = parts_of(packet.stages)
    size = sum(part.size for part in flat)
    if parts == 1:
        return jnp.concatenate(flat)
    shape = shape_for(size, parts)
    padding = cast_varying(
        jnp.zeros(shape[0] * shape[1] - size, acc), tuple(varying_axes(flat[0]))
    )
    return jnp.concatenate([*flat, padding]).reshape(shape)


def unpack(x: jax.Array, packet: Packet, leaves: Sequence[Any]) -> list[jax.Array]:
    """The values of the pieces, out of the reduced buffer of `pack`."""
    out = packet.numbers.out
    if _alone(packet, leaves) is not None:
        return [x.astype(out)]
    x = x.reshape(-1)
    values, start = [], 0
    for piece in packet.pieces:
        if jnp.iscomplexobj(leaves[piece.leaf]):
            middle, stop = start + piece.size, start + 2 * piece.size
            real, imag = x[start:middle].astype(out), x[middle:stop].astype(out)
            values.append(jax.lax.complex(real, imag))
        else:
            stop = start + piece.size
            values.append(x[start:stop].astype(out))
        start = stop
    return values
