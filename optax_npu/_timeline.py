# SPDX-License-Identifier: Apache-2.0
"""Plays a schedule against a clock.

One lane computes, line by line, in scheduled order. A collective that the compiler
made asynchronous takes its links from its start on and only holds up the compute lane
at its done; a synchronous one holds it up at once. Links inside nodes and between
nodes are one lane each: two collectives share no lane only if they share no links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optax_npu._cost import collective_seconds
from optax_npu._hlo import Module
from optax_npu._hlo_collectives import Collective, carried, is_continuation
from optax_npu._hlo_work import CONTROL, flops, is_free, traffic
from optax_npu._links import Chip, Links

COMPUTE, INSIDE, BETWEEN = "compute", "links in the node", "links between nodes"


@dataclass(frozen=True)
class Segment:
    """A stretch of one lane: seconds from the start of the step."""

    lane: str
    start: float
    end: float
    name: str
    role: str


@dataclass(frozen=True)
class Timeline:
    """An estimate of one step.

    Attributes:
      segments: What each lane does, in order.
      seconds: Duration of the step.
      begin: Seconds at which each collective takes its links, by name.
      end: Seconds at which it ends.
      exposed: Seconds for which the compute lane waits for it.
    """

    segments: tuple[Segment, ...]
    seconds: float
    begin: dict[str, float]
    end: dict[str, float]
    exposed: dict[str, float]


class _Clock:
    """The lanes while they are being filled."""

    def __init__(self):
        self.now = 0.0
        self.free = {INSIDE: 0.0, BETWEEN: 0.0}
        self.segments: list[Segment] = []
        self.begin: dict[str, float] = {}
        self.end: dict[str, float] = {}
        self.exposed: dict[str, float] = {}

    def compute(self, seconds: float, name: str, role: str) -> None:
        if seconds:
            self.segments.append(
                Segment(COMPUTE, self.now, self.now + seconds, name, role)
            )
        self.now += seconds

    def send(self, name: str, role: str, lanes: list[str], seconds: float) -> None:
        begin = max([self.now, *(self.free[lane] for lane in lanes)])
        self.begin.setdefault(name, begin)
        self.end[name] = begin + seconds
        for lane in lanes:
            self.free[lane] = begin + seconds
            self.segments.append(Segment(lane, begin, begin + seconds, name, role))

    def wait(self, name: str) -> None:
        wait = max(0.0, self.end.get(name, 0.0) - self.now)
        self.exposed[name] = self.exposed.get(name, 0.0) + wait
        self.now += wait


def play(
    module: Module,
    collectives: Sequence[Collective],
    spread: Mapping[str, tuple[int, int]],
    roles: Mapping[str, str],
    chip: Chip,
    links: Links,
    node: int,
) -> Timeline:
    """Estimates the course of a step.

    Args:
      module: The program.
      collectives: Its collectives.
      spread: For each of them the nodes of a group, and the members on one node.
      roles: What each line is for; passed on to the segments.
      chip: What computes.
      links: What connects.
      node: Devices of a node.

    Returns:
      The timeline.
    """
    lines = module.computations[module.entry]
    body = {line.name: line for line in lines}
    starts: dict[int, list[Collective]] = {}
    dones: dict[int, list[Collective]] = {}
    for collective in collectives:
        starts.setdefault(collective.start, []).append(collective)
        dones.setdefault(collective.done, []).append(collective)
    clock = _Clock()
    for position, line in enumerate(lines):
        moves = carried(module, line) is not None
        if not is_free(line) and (not moves or is_continuation(module, line)):
            seconds = compute_seconds(module, line.name, body, chip)
            clock.compute(seconds, line.name, roles.get(line.name, "other"))
        for collective in starts.get(position, ()):
            nodes, members = spread[collective.name]
            size, kind = collective.bytes, collective.kind
            seconds = collective_seconds(kind, size, nodes, members, links, node)
            lanes = [INSIDE] * (members > 1) + [BETWEEN] * (nodes > 1)
            role = roles.get(collective.name, "other")
            clock.send(collective.name, role, lanes, seconds * collective.count)
        for collective in dones.get(position, ()):
            clock.wait(collective.name)
    last = max([clock.now, *clock.end.values()])
    return Timeline(tuple(clock.segments), last, clock.begin, clock.end, clock.exposed)


def compute_seconds(module: Module, name: str, body: dict, chip: Chip) -> float:
    """Time of one line: the slower of its products and its memory traffic."""
    line = body[name]
    products = sum(
        chip.matmul_seconds(number, dtype)
        for dtype, number in flops(module, line).items()
    )
    memory = chip.memory_seconds(sum(traffic(module, name, body)))
    launch = 0.0 if line.opcode in CONTROL else chip.launch_seconds
    return max(products, memory) + launch
