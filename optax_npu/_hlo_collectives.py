# SPDX-License-Identifier: Apache-2.0
"""The collectives of a compiled program, whatever the backend calls them.

============================  ====================================================
CPU, and GPU when synchronous  `all-reduce`, `reduce-scatter`, `all-gather`, …
GPU                           `all-reduce-start` … `all-reduce-done`, `async-start`
TPU, one slice                the same, and *async collective fusions*: a start, fusions
                              that compute and move a piece each, a done
TPU, several slices           `send`/`recv` pairs of the multi-slice runtime
============================  ====================================================

Each becomes one `Collective` with the two lines between which it is in flight.
"""

import re
from dataclasses import dataclass, replace

from optax_npu._hlo import Array, Instruction, Module
from optax_npu._hlo_work import CONTROL, trips
from optax_npu._replica_groups import replica_groups

KINDS = (
    "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast", "send", "recv",
)  # fmt: skip
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target="\{([\d,]+)\}')


@dataclass(frozen=True)
class Collective:
    """One collective.

    Attributes:
      name: The line that starts it.
      result: The line that holds the result.
      kind: `all-reduce`, `reduce-scatter`, `all-gather`, …; `send-recv` for a plain
        transfer.
      start: Position of the first line in the schedule.
      done: Position of the line after which the result is there.
      bytes: Payload of one device: the whole vector, not the share that is sent.
      array: Type and shape of the largest array.
      groups: The groups of devices that exchange data.
      slices: TPU slices that exchange data; 1 inside a slice.
      is_async: Whether other work can run between start and done.
      inside: The loop or branch it is part of, or an empty string.
      count: How often it runs in a step.
    """

    name: str
    result: str
    kind: str
    start: int
    done: int
    bytes: int
    array: Array
    groups: tuple[tuple[int, ...], ...]
    slices: int = 1
    is_async: bool = False
    inside: str = ""
    count: int = 1

    @property
    def is_float(self) -> bool:
        """Whether it carries floating or complex values, not a flag or an index."""
        return self.array.dtype[0] in "fbc"

    @property
    def is_scalar(self) -> bool:
        """Whether it carries single numbers only; TPU pads one to a row of lanes."""
        return self.array.size <= 1 or self.array.dims == (1, 1, 128)


def base_kind(opcode: str) -> str:
    """`all-reduce` for `all-reduce-start` and `all-reduce-done`."""
    return opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")


def carried(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that a line is, starts, continues or ends; None for others."""
    if instruction.opcode in CONTROL:
        return None
    if base_kind(instruction.opcode) in KINDS:
        return instruction
    if instruction.opcode == "fusion" or instruction.opcode.startswith("async-"):
        for inner in module.inside(instruction):
            if base_kind(inner.opcode) in KINDS:
                return inner
    return None


def is_continuation(module: Module, instruction: Instruction) -> bool:
    """Whether a fusion computes while it moves a piece of a collective (TPU)."""
    return (
        instruction.opcode == "fusion"
        and any("async_collective_fusion" in name for name in instruction.called)
        and carried(module, instruction) is not None
    )


def find_collectives(module: Module) -> list[Collective]:
    """Every collective of a step, in the order in which they start."""
    lines = module.computations[module.entry]
    found: list[Collective] = []
    started: dict[str, int] = {}
    answers: dict[str, list[str]] = {}
    for receive, send in links(module).items():
        answers.setdefault(send, []).append(receive)
    for position, line in enumerate(lines):
        if line.opcode in CONTROL:
            found += _nested(module, line, position)
        elif (inner := carried(module, line)) is not None:
            _visit(module, lines, position, inner, found, started)
            for receive in answers.get(line.name, ()):
                started[receive] = started[line.name]
    return sorted(found, key=lambda c: c.start)


def links(module: Module) -> dict[str, str]:
    """Data flow that the text hides: `recv` by the `send` it answers."""
    lines = module.computations[module.entry]
    sends = {_channel(line): line.name for line in lines if line.opcode == "send"}
    return {
        line.name: sends[_channel(line)]
        for line in lines
        if line.opcode == "recv" and _channel(line) in sends
    }


def _visit(
    module: Module,
    lines: tuple[Instruction, ...],
    position: int,
    inner: Instruction,
    found: list[Collective],
    started: dict[str, int],
) -> None:
    """Opens a collective, closes one, or carries an open one on."""
    line = lines[position]
    if line.opcode in ("send-done", "recv"):
        return
    if line.opcode.endswith("-done") or _fusion_role(module, line) == "done":
        index = _origin(lines, line, started)
        if index is not None:
            payload = max(found[index].bytes, line.bytes)
            found[index] = replace(
                found[index], done=position, result=line.name, bytes=payload
            )
    elif is_continuation(module, line):
        index = _origin(lines, line, started)
        if index is not None:
            started[line.name] = index
    else:
        found.append(_open(module, lines, position, inner))
        if found[-1].is_async:
            started[line.name] = len(found) - 1


def _open(
    module: Module, lines: tuple[Instruction, ...], position: int, inner: Instruction
) -> Collective:
    line = lines[position]
    kind = base_kind(inner.opcode)
    slices, groups = 1, replica_groups(inner, module.num_devices)
    if kind == "send":
        transfer, target = (p.search(line.attributes) for p in (_TRANSFER, _TARGET))
        kind = transfer[1].lower().replace("_", "-") if transfer else "send-recv"
        slices = len(target[1].split(",")) if target else 1
        groups = (
            [[device] for device in range(module.num_devices)] if target else groups
        )
    if any(name.startswith("all-reduce-scatter") for name in line.called):
        kind = "reduce-scatter"
    operands = [other for other in lines if other.name in line.operands]
    payload = sum(other.bytes for other in operands)
    if not line.opcode.endswith("-start") and line.opcode != "send":
        payload = max(payload, line.bytes if line.opcode != "fusion" else 0)
    arrays = [array for other in operands for array in other.arrays] or inner.arrays
    return Collective(
        name=line.name,
        result=line.name,
        kind=kind,
        start=position,
        done=position,
        bytes=payload,
        array=max(arrays, key=lambda array: array.bytes, default=Array("f32", ())),
        groups=tuple(tuple(group) for group in groups),
        slices=slices,
        is_async=line.opcode == "send"
        or line.opcode.endswith("-start")
        or _fusion_role(module, line) == "start",
    )


def _fusion_role(module: Module, line: Instruction) -> str:
    """`start` or `done` for the ends of an async collective fusion, else empty."""
    if line.opcode != "fusion":
        return ""
    for inner in module.inside(line):
        if found := re.search(r'"AsyncCollective(Start|Done)"', inner.attributes):
            return found[1].lower()
    return ""


def _origin(
    lines: tuple[Instruction, ...], line: Instruction, started: dict[str, int]
) -> int | None:
    """The collective that a done or a continuation belongs to."""
    by_name = {other.name: other for other in lines}
    for operand in line.operands:
        name = operand
        while name in by_name and name not in started:
            source = by_name[name]
            if source.opcode not in ("get-tuple-element", "bitcast"):
                break
            name = source.operands[0]
        if name in started:
            return started[name]
    return None


def _channel(line: Instruction) -> str:
    """What a `send` and its `recv` have in common."""
    if line.operands and line.operands[-1].startswith("after-all"):
        return line.operands[-1]
    return line.attribute("channel_id") or line.name


def _nested(module: Module, outer: Instruction, position: int) -> list[Collective]:
    """The collectives of a loop or branch: in flight nowhere else."""
    found = []
    for name in outer.called:
        lines = module.computations.get(name, ())
        for index, line in enumerate(lines):
            if line.opcode in CONTROL:
                found += _nested(module, line, position)
            elif line.opcode.endswith("-done") or line.opcode == "recv":
                continue
            elif (inner := carried(module, line)) is not None:
                found.append(_open(module, lines, index, inner))
    count = trips(outer)
    return [
        replace(
            collective,
            start=position,
            done=position,
            is_async=False,
            inside=outer.name,
            result=outer.name,
            count=collective.count * count,
        )
        for collective in found
    ]
