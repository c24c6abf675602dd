# SPDX-License-Identifier: Apache-2.0
"""Reads the text of a compiled program: what XLA really scheduled.

`compiled.as_text()` is the optimised module. On CPU, GPU and TPU its header says
`is_scheduled=true`: the order of the lines *is* the order in which the device
issues the work. This file turns that text into plain data and knows nothing of
training: instructions with operands and bytes, the computations they call, and
the replica groups of collectives in each of the notations XLA prints.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from optax_npu._sources import Frame

_BITS = {
    "pred": 8, "token": 0, "opaque": 0,
    "s2": 2, "s4": 4, "s8": 8, "s16": 16, "s32": 32, "s64": 64,
    "u1": 1, "u2": 2, "u4": 4, "u8": 8, "u16": 16, "u32": 32, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_NAME = re.compile(r"%?([A-Za-z_][\w.\-]*)\s*$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation"
    r"|async_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Array:
    """One array of a shape: its element type and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes in memory, without the padding of a tiled layout."""
        bits = 8 if self.dtype.startswith("f8") else _BITS.get(self.dtype, 32)
        return -(-self.size * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Its name, without the percent sign.
      opcode: `fusion`, `all-reduce-start`, `custom-call`, …
      shape: The text of its result type.
      operands: Names of the instructions it reads, in order.
      attributes: Everything behind the operands, as text.
      literal: The text between the parentheses (the number of a parameter).
      is_root: Whether it is the result of its computation.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str = field(repr=False)
    literal: str = field(repr=False, default="")
    is_root: bool = False

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened, tokens left out."""
        found = _ARRAY.findall(re.sub(r"\{[^{}]*\}", "", self.shape))
        return tuple(
            Array(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
            for dtype, dims in found
            if dtype not in ("token", "opaque")
        )

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls."""
        names = _CALLED.findall(self.attributes)
        for group in _BRANCHES.findall(self.attributes):
            names += [name.strip().lstrip("%") for name in group.split(",")]
        return tuple(names)

    def attribute(self, key: str) -> str | None:
        """The text of one attribute up to the next blank or comma; None if absent."""
        found = re.search(rf'\b{key}"?[=:]"?([^\s,"}}]+)', self.attributes)
        return found[1] if found else None


@dataclass(frozen=True)
class Module:
    """A parsed program.

    Attributes:
      header: The first line.
      computations: Name to its instructions, in scheduled order.
      entry: Name of the computation that runs first.
      frames: Number of a stack frame to the frames, innermost first.
    """

    header: str
    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    frames: dict[int, tuple[Frame, ...]] = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the jitted function, as XLA spells it."""
        name = re.split(r"[ ,]", self.header.removeprefix("HloModule "), maxsplit=1)[0]
        return name.removesuffix("-clone")

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of the lines is the order of issue."""
        return "is_scheduled=true" in self.header

    @property
    def num_devices(self) -> int:
        """Replicas times partitions."""
        counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", self.header)
        return math.prod(int(count) for count in counts)

    def walk(self, name: str) -> Iterator[Instruction]:
        """Every instruction of a computation and of all that it calls."""
        for instruction in self.computations.get(name, ()):
            yield instruction
            for callee in instruction.called:
                yield from self.walk(callee)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction itself, then all that it calls."""
        yield instruction
        for callee in instruction.called:
            yield from self.walk(callee)

    def source(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The Python stack of an instruction, innermost first; empty if unknown."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        return self.frames.get(int(found[1]), ()) if found else ()


def parse_module(text: str) -> Module:
    """Parses the text of an HLO module.

    Args:
      text: What `compiled.as_text()` returns.

    Returns:
      The module.

    Raises:
      ValueError: If the text is not an HLO module.
    """
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("HloModule")), None)
    if header is None:
        raise ValueError(
            "compiled must be the HLO text of a compiled program, but no line starts"
            f" with 'HloModule' (got {text[:60]!r}). Give the object that"
            " jax.jit(f).lower(...).compile() returns, or its .as_text()."
        )
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = current = ""
    body: list[Instruction] = []
    for line in lines:
        if line.startswith("}") and current:
            computations[current] = tuple(body)
            current = ""
        elif not line[:1].isspace() and line.rstrip().endswith("{") and " (" in line:
            words = line.split(" (", 1)[0].split()
            current, body = words[-1].lstrip("%"), []
            entry = current if words[0] == "ENTRY" else entry
        elif current and (instruction := _parse_line(line)) is not None:
            body.append(instruction)
    return Module(
        header, computations, entry or next(iter(computations), ""), _frames(lines)
    )


def _frames(lines: list[str]) -> dict[int, tuple[Frame, ...]]:
    """The stacks from the four tables in front of the computations, if any."""
    tables: dict[str, dict[int, str]] = {}
    rows: dict[int, str] = {}
    for line in lines[1:]:
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables.setdefault(line, {})
        elif found := re.match(r"(\d+) (.+)$", line):
            rows[int(found[1])] = found[2].strip('"')
        elif line:
            break

    def numbers(row: str) -> dict[str, int]:
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}

    files, functions = tables.get("FileNames", {}), tables.get("FunctionNames", {})
    places = {}
    for key, row in tables.get("FileLocations", {}).items():
        n = numbers(row)
        file = files.get(n.get("file_name_id", 0), "")
        function = functions.get(n.get("function_name_id", 0), "")
        places[key] = Frame(function, file, n.get("line", 0))
    stacks: dict[int, tuple[Frame, ...]] = {}
    frames = {key: numbers(row) for key, row in tables.get("StackFrames", {}).items()}
    # XLA numbers parents from one, so that the first frame seems to be its own parent.
    shift = 1 if frames.get(1, {}).get("parent_frame_id") == 1 else 0
    for key, n in frames.items():
        outer = stacks.get(n.get("parent_frame_id", 0) - shift, ())
        here = places.get(n.get("file_location_id", 0))
        stacks[key] = (here, *outer) if here else outer
    return stacks


def _parse_line(line: str) -> Instruction | None:
    left, equals, right = line.strip().partition(" = ")
    if not equals:
        return None
    shape_end = _balanced(right, 0, " ")
    call = right.find("(", shape_end)
    if call < 0:
        return None
    end = _balanced(right, call + 1, ")")
    inside = right[call + 1 : end]
    names = (_NAME.search(part) for part in _split(inside) if "%" in part)
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=right[shape_end + 1 : call].strip(),
        shape=right[:shape_end],
        operands=tuple(found[1] for found in names if found),
        attributes=right[end + 1 :],
        literal=inside if len(inside) < 64 else "",
        is_root=left.startswith("ROOT "),
    )


def _balanced(text: str, start: int, stop: str) -> int:
    """Position of the first `stop` outside all brackets opened after `start`."""
    depth = 0
    for position in range(start, len(text)):
        char = text[position]
        if depth == 0 and char == stop:
            return position
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
    return len(text)


def _split(text: str) -> list[str]:
    """The parts between the commas that stand outside all brackets."""
    parts, start = [], 0
    while start < len(text):
        stop = _balanced(text, start, ",")
        parts.append(text[start:stop])
        start = stop + 1
    return parts
