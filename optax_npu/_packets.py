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


def _is_one_leaf(packet: Packet, leaves: Sequence[Any]) -> bool:
    """Whether the packet is one real leaf that needs no packing."""
    (first, *rest) = packet.pieces
    leaf = leaves[first.leaf]
    whole = not rest and first.size == leaf.size and not jnp.iscomplexobj(leaf)
    return whole and parts_of(packet.stages) == 1


def pack(packet: Packet, leaves: Sequence[Any]) -> jax.Array:
    acc = packet.numbers.acc
    if _is_one_leaf(packet, leaves):
        return leaves[packet.pieces[0].leaf].astype(acc)
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
    out = packet.numbers.out
    if _is_one_leaf(packet, leaves):
        return [x.reshape(-1).astype(out)]
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
