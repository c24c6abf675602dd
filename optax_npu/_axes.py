# SPDX-License-Identifier: Apache-2.0
"""The axes to reduce over: one argument, checked before tracing and looked up within.

Links inside a node are fast, links between nodes are slow. Everything that reduces
takes one argument, `axis_name`, that says along which axes, slowest links first:

====================================  =============================================
``("node", "device")``                a pair of mesh axes: two levels
``(("pod", "node"), "device")``       the same, one level made of two axes
``"data"``, ``devices_per_node=8``    one `pmap` axis, cut into nodes of 8
``"data"``                            one axis: a flat reduction
====================================  =============================================

Its form is checked in the factory (`axis_spec`); sizes, and whether the axes are bound,
when the program is traced (`resolve_axes`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from optax_npu._compat import AxisName, bound_axes, require_bound, tracks_varying


@dataclasses.dataclass(frozen=True)
class AxisSpec:
    """The checked form of an `axis_name` argument; known before tracing.

    Attributes:
      levels: Axis names per level, slowest links first.
      devices_per_node: How to cut the only axis into nodes, or `None`.
    """

    levels: tuple[tuple[AxisName, ...], ...]
    devices_per_node: int | None = None

    @property
    def names(self) -> tuple[AxisName, ...]:
        """All axis names, slowest links first."""
        return tuple(name for level in self.levels for name in level)

    @property
    def has_nodes(self) -> bool:
        """Whether the spec tells links between nodes from links within."""
        return len(self.levels) > 1 or self.devices_per_node is not None


def axis_spec(axis_name: Any, devices_per_node: int | None = None) -> AxisSpec:
    """Checks the form of an `axis_name` argument; see the module docstring.

    Raises:
      ValueError: No axis, an axis named twice, or `devices_per_node` with a pair.
      TypeError: A name is not hashable.
    """
    if axis_name is None:
        raise ValueError(
            "axis_name is missing: name the mapped axes to reduce over, slowest links"
            ' first, e.g. axis_name=("node", "device"), or axis_name="data".'
        )
    entries = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    levels = tuple(tuple(_flat_names(entry)) for entry in entries)
    spec = AxisSpec(levels)
    if not spec.names or not all(levels):
        raise ValueError(
            f"axis_name={axis_name!r} names no axis"
            f"{' in one of its levels' if spec.names else ''} (bound axes:"
            f" {_bound_text()}). Give at least one, e.g. axis_name="
            '("node", "device"); without any, leave the reduction out.'
        )
    twice = [name for name, n in Counter(spec.names).items() if n > 1]
    if twice:
        raise ValueError(
            f"axis_name={axis_name!r} names {twice[0]!r} more than once (bound axes:"
            f" {_bound_text()}). Each axis is reduced once: name it once."
        )
    if devices_per_node is None:
        return spec
    size = check_devices_per_node(devices_per_node)
    if len(spec.names) > 1:
        raise ValueError(
            f"devices_per_node={size} together with the axes {axis_name!r}: several"
            " axes already say what a node is. Leave devices_per_node out, or give one"
            " pmap axis."
        )
    return AxisSpec(levels, size)


def _flat_names(entry: Any) -> Iterable[AxisName]:
    if isinstance(entry, tuple | list):
        for part in entry:
            yield from _flat_names(part)
    elif isinstance(entry, Hashable) and entry is not None:
        yield entry
    else:
        raise TypeError(
            f"An axis name must be hashable, e.g. a string; got {entry!r} of type"
            f" {type(entry).__name__}."
        )


def _bound_text() -> str:
    return str(list(bound_axes())) if bound_axes() else "none"


@dataclasses.dataclass(frozen=True)
class Level:
    """One level of links.

    Attributes:
      names: Its axes.
      sizes: Their sizes.
      between_nodes: Whether its links are the slow ones.
      groups: Index groups of the one axis that holds all levels (`pmap`), or `None`.
    """

    names: tuple[AxisName, ...]
    sizes: tuple[int, ...]
    between_nodes: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def size(self) -> int:
        """How many replicas take part in one collective of this level."""
        return len(self.groups[0]) if self.groups else math.prod(self.sizes)

    @property
    def collective(self) -> dict[str, Any]:
        """The arguments that every collective of this level takes."""
        name = self.names[0] if len(self.names) == 1 else self.names
        if self.groups is None:
            return {"axis_name": name}
        return {
            "axis_name": name,
            "axis_index_groups": [list(group) for group in self.groups],
        }


@dataclasses.dataclass(frozen=True)
class ResolvedAxes:
    """Axes with their sizes, inside the mapped function.

    Attributes:
      levels: The levels that hold more than one replica, slowest links first. Where
        types are tracked, axes of size 1 ride along with another level.
      names: All axes.
      size: The number of replicas along all of them.
      typed: Whether types tell varying values from replicated ones
        (``shard_map(check_vma=True)``).
    """

    levels: tuple[Level, ...]
    names: tuple[AxisName, ...]
    size: int
    typed: bool

    def only(self, names: Iterable[AxisName]) -> "ResolvedAxes":
        """The same, restricted to some of the axes."""
        kept = frozenset(names)
        if kept >= frozenset(self.names):
            return self
        levels = []
        for level in self.levels:
            pairs = [
                p for p in zip(level.names, level.sizes, strict=True) if p[0] in kept
            ]
            if pairs:
                chosen, sizes = zip(*pairs, strict=True)
                levels.append(Level(chosen, sizes, level.between_nodes))
        rest = tuple(n for n in self.names if n in kept)
        size = math.prod(level.size for level in levels)
        return ResolvedAxes(_without_ones(levels, self.typed), rest, size, self.typed)

    def flat(self) -> "ResolvedAxes":
        """The same replicas, reduced at one level."""
        if len(self.levels) < 2:
            return self
        if self.levels[0].groups:
            whole = Level(self.levels[0].names, (self.size,))
        else:
            names = tuple(n for level in self.levels for n in level.names)
            sizes = tuple(s for level in self.levels for s in level.sizes)
            whole = Level(names, sizes)
        return ResolvedAxes((whole,), self.names, self.size, self.typed)


def resolve_axes(spec: AxisSpec) -> ResolvedAxes:
    """Looks up the axes of `spec`; call it inside the mapped function.

    Raises:
      ValueError: An axis is not bound, `devices_per_node` does not divide it, or
        index groups are asked for where JAX has none.
    """
    require_bound(spec.names)
    sizes = {name: int(jax.lax.axis_size(name)) for name in spec.names}
    total = math.prod(sizes.values())
    typed = any(tracks_varying(name) for name in spec.names)
    if spec.devices_per_node is not None:
        levels = _index_groups(spec, total, typed)
    else:
        last = len(spec.levels) - 1
        levels = [
            Level(level, tuple(sizes[n] for n in level), between_nodes=i < last)
            for i, level in enumerate(spec.levels)
        ]
    axes = ResolvedAxes(_without_ones(levels, typed), spec.names, total, typed)
    # The axis of a `vmap` has no links, and no collectives in groups.
    return axes if set(spec.names) <= set(bound_axes()) else axes.flat()


def _index_groups(spec: AxisSpec, total: int, typed: bool) -> list[Level]:
    """One `pmap` axis as two levels."""
    (name,), inner = spec.names, spec.devices_per_node
    assert inner is not None
    check_divisible(total, inner, f"replicas of axis {name!r}")
    outer = total // inner
    if inner == 1 or outer == 1:
        return [Level((name,), (total,), between_nodes=inner == 1)]
    if typed:
        raise ValueError(
            f"devices_per_node={inner} cuts axis {name!r} into index groups, which JAX"
            " does not have under shard_map(check_vma=True). Use a mesh with two axes:"
            f" mesh = optax_npu.two_level_mesh(devices_per_node={inner}) and"
            ' axis_name=("node", "device").'
        )
    nodes = tuple(tuple(range(n * inner, (n + 1) * inner)) for n in range(outer))
    rails = tuple(tuple(range(d, total, inner)) for d in range(inner))
    return [
        Level((name,), (total,), between_nodes=True, groups=rails),
        Level((name,), (total,), groups=nodes),
    ]


def _without_ones(levels: Sequence[Level], typed: bool) -> tuple[Level, ...]:
    """Without levels of one replica.

    A collective over one replica does nothing, but still runs. Where types are
    tracked it is the only way to say that a value no longer varies, so those axes
    join the outermost level that is reduced anyway.
    """
    real = [level for level in levels if level.size > 1]
    if not typed:
        return tuple(real)
    ones = [level for level in levels if level.size == 1]
    host = real[0] if real else Level((), (), ones[0].between_nodes if ones else False)
    names = host.names + tuple(n for level in ones for n in level.names)
    sizes = host.sizes + tuple(s for level in ones for s in level.sizes)
    if not names:
        return ()
    merged = Level(names, sizes, host.between_nodes, host.groups)
    return (merged, *real[1:])


def check_devices_per_node(value: Any) -> int:
    """A number of devices: a whole number from 1 on."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"devices_per_node={value!r} is a {type(value).__name__}, but a whole"
            " number of devices is needed, e.g. devices_per_node=8."
        )
    if value < 1:
        raise ValueError(f"devices_per_node={value}, but a node has at least 1 device.")
    return int(value)


def check_divisible(total: int, devices_per_node: int, what: str) -> None:
    """All nodes are full."""
    if total % devices_per_node:
        fitting = [d for d in range(1, total + 1) if total % d == 0]
        raise ValueError(
            f"devices_per_node={devices_per_node} does not divide the {total} {what}:"
            f" the last node would be smaller. Fitting sizes: {fitting}."
        )
