# SPDX-License-Identifier: Apache-2.0
"""Where to cut a sequence of gradients into segments: the rules, as plain Python.

Every rule takes the sizes of the gradients in the order in which they are reduced and
returns segments: lists of positions, in order, none of them empty.
"""

import itertools
from collections.abc import Sequence

MIB = 2**20
# Ascend's default: all but the last 3.46 % of the bytes go first.
ASCEND_FIRST_PERCENT = 96.54
_SAME = 1e-6

Segments = list[list[int]]


def by_last_index(count: int, last: Sequence[int]) -> Segments:
    """Segments that end at given positions (Ascend ``set_split_strategy_by_idx``)."""
    starts = [0, *(i + 1 for i in last[:-1])]
    return [
        list(range(a, b + 1)) for a, b in zip(starts, last, strict=True) if a < count
    ]


def by_percent(sizes: Sequence[float], percent: Sequence[float]) -> list[int]:
    """Last positions of segments of given shares (``set_split_strategy_by_size``).

    A cut falls after the gradient whose cumulative size is near the target; what a
    segment leaves unused, or takes too much, is passed on to the next.
    """
    total = list(itertools.accumulate(sizes))
    last: list[int] = []
    done = carried = 0.0
    for share in percent:
        target = share / 100 * total[-1] + carried
        position = _near(total, target + done)
        if last and position <= last[-1]:
            position = last[-1] + 1
        last.append(position)
        carried = target + done - total[position]
        done = total[position]
        if position == len(total) - 1:
            return last
    return [*last, len(total) - 1]


def ascend_default(sizes: Sequence[float]) -> list[int]:
    """Last positions of Ascend's two segments; of one if the second would be empty."""
    total = list(itertools.accumulate(sizes))
    first = _near(total, ASCEND_FIRST_PERCENT / 100 * total[-1])
    return [first] if first == len(total) - 1 else [first, len(total) - 1]


def _near(total: Sequence[float], target: float) -> int:
    """The position whose cumulative size is near `target`, as Ascend finds it.

    A binary search; of the position it probed last and the one before, the nearer. If
    the last probe lies below the target that is not always the nearest of all.
    """
    low, high, probe = 0, len(total) - 1, 0
    while low <= high:
        probe = (low + high) // 2
        if abs(total[probe] - target) < _SAME:
            return probe
        low, high = (low, probe - 1) if total[probe] > target else (probe + 1, high)
    if probe == 0:
        return 0
    before = target - total[probe - 1]
    return probe - 1 if before <= total[probe] - target else probe


def even_packs(sizes: Sequence[float], packs: int) -> Segments:
    """At most `packs` segments of about equal size that keep gradients whole."""
    total = sum(sizes)
    segments: Segments = [[] for _ in range(packs)]
    seen = 0.0
    for i, size in enumerate(sizes):
        pack = int((seen + size / 2) * packs / total) if total else 0
        segments[min(pack, packs - 1)].append(i)
        seen += size
    return [s for s in segments if s]


def element_packs(count: int, packs: int) -> list[int]:
    """Elements per pack in TensorFlow: equal, the last one takes the rest."""
    size = count // packs
    return [size] * (packs - 1) + [count - size * (packs - 1)]


def close_when_full(
    sizes: Sequence[float],
    kinds: Sequence[str],
    limit: float,
    *,
    first: float | None = None,
    inclusive: bool = True,
) -> Segments:
    """One open segment per kind, closed once it holds the limit.

    Args:
      sizes: Size of every gradient.
      kinds: Gradients of different kinds (dtypes) do not share a segment.
      limit: The size at which a segment is closed; the last gradient may overshoot.
      first: Another limit for the first segment that is closed.
      inclusive: Closed when it reaches the limit; else when it exceeds it.
    """
    segments: Segments = []
    open_: dict[str, list[int]] = {}
    held: dict[str, float] = {}
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        open_.setdefault(kind, []).append(i)
        held[kind] = held.get(kind, 0) + size
        bound = limit if first is None or segments else first
        if held[kind] >= bound if inclusive else held[kind] > bound:
            segments.append(open_.pop(kind))
            del held[kind]
    return segments + list(open_.values())


def never_exceed(
    sizes: Sequence[float], kinds: Sequence[str], limit: float
) -> Segments:
    """One open segment per kind that never exceeds the limit (Horovod's fusion).

    A gradient larger than the limit is a segment of its own.
    """
    segments: Segments = []
    open_: dict[str, list[int]] = {}
    held: dict[str, float] = {}
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        if kind in open_ and held[kind] + size > limit:
            segments.append(open_.pop(kind))
            del held[kind]
        open_.setdefault(kind, []).append(i)
        held[kind] = held.get(kind, 0) + size
    return segments + list(open_.values())
