# SPDX-License-Identifier: Apache-2.0
"""How much work one line of a compiled program is: operations and bytes.

Good enough for an estimate, and honest about what it leaves out. A fusion is charged
for what it reads and writes, not for what happens inside; a slice of a large buffer
is charged for the slice; copies that only prefetch are free, because the instruction
that uses them is charged for reading. Loops count their trips where XLA knows them.
"""

import math
import re

from optax_npu._hlo import Instruction, Module

# Nothing is computed and nothing moves, or a prefetch that its user is charged for.
FREE = frozenset(
    [
        "parameter",
        "constant",
        "iota",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "partition-id",
        "replica-id",
        "copy-start",
        "copy-done",
        "slice-start",
        "slice-done",
    ]
)
CONTROL = frozenset(["while", "conditional", "call"])
# Inside a fusion that computes while it moves a piece of a collective.
_ON_THE_WAY = frozenset(["all-gather", "all-reduce", "reduce-scatter", "all-to-all"])
_SLICES = frozenset(["slice", "dynamic-slice", "gather"])
_FREE_CALLS = re.compile(
    r'custom_call_target="(ConcatBitcast|AllocateBuffer|Sharding)"'
)
_GEMM = re.compile(r'custom_call_target="[^"]*(gemm|matmul|conv)[^"]*"', re.IGNORECASE)


def is_free(instruction: Instruction) -> bool:
    """Whether the line costs no time of its own."""
    return instruction.opcode in FREE or (
        instruction.opcode == "custom-call"
        and _FREE_CALLS.search(instruction.attributes) is not None
    )


def is_matmul(instruction: Instruction) -> bool:
    """Whether this very line (not what it calls) multiplies matrices or convolves."""
    return instruction.opcode in ("dot", "convolution") or (
        instruction.opcode == "custom-call"
        and _GEMM.search(instruction.attributes) is not None
    )


def has_matmul(module: Module, instruction: Instruction) -> bool:
    """Whether the line or anything that it calls is a matrix product."""
    return any(is_matmul(inner) for inner in module.inside(instruction))


def trips(instruction: Instruction) -> int:
    """How often the body of a loop runs; 1 where the compiler does not say."""
    found = re.search(r"known_trip_count\W+n\W+(\d+)", instruction.attributes)
    return int(found[1]) if found and instruction.opcode == "while" else 1


def flops(module: Module, instruction: Instruction) -> dict[str, float]:
    """Operations of the matrix products in a line, by element type of the result."""
    total: dict[str, float] = {}
    for name in [None, *instruction.called]:
        body = (instruction,) if name is None else module.computations.get(name, ())
        shapes = {other.name: other for other in body}
        for inner in body:
            found: dict[str, float] = {}
            if is_matmul(inner) and inner.arrays:
                found = {inner.arrays[0].dtype: _product_flops(inner, shapes)}
            elif name is not None and inner.called:
                found = flops(module, inner)
            for dtype, number in found.items():
                total[dtype] = total.get(dtype, 0.0) + number * trips(instruction)
    return total


def _product_flops(product: Instruction, body: dict[str, Instruction]) -> float:
    """2 x M x N x K, from the sizes of the operands and the result."""
    known = [body[name].arrays[:1] for name in product.operands if name in body]
    operands = [arrays[0] for arrays in known if arrays]
    out = max(product.arrays, key=lambda array: array.size)
    if len(operands) < 2 or not out.size:
        return 0.0
    left, right = operands[:2]
    if product.opcode == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", product.attributes)
        features = right.dims[labels[1].index("o")] if labels else 1
        return 2.0 * out.size * right.size / max(1, features)
    contracted = re.search(r"lhs_contracting_dim\w*\W+([\d,]+)", product.attributes)
    if contracted:
        axes = [int(axis) for axis in contracted[1].split(",") if axis]
        return 2.0 * out.size * math.prod(left.dims[axis] for axis in axes)
    return 2.0 * out.size * math.sqrt(left.size * right.size / out.size)


def traffic(module: Module, name: str, body: dict[str, Instruction]) -> tuple[int, int]:
    """Bytes that a line reads and writes.

    Args:
      module: The program.
      name: The line.
      body: The lines of its computation by name.

    Returns:
      Bytes read and bytes written.
    """
    instruction = body[name]
    if instruction.opcode in CONTROL:
        return _control_traffic(module, instruction)
    operands = [body[operand] for operand in instruction.operands if operand in body]
    inner = (
        module.computations.get(instruction.called[0], ())
        if (instruction.opcode == "fusion" and instruction.called)
        else ()
    )
    if instruction.opcode in _SLICES:
        return instruction.bytes, instruction.bytes
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
        return operands[1].bytes, operands[1].bytes
    if not inner:
        return sum({o.name: o.bytes for o in operands}.values()), instruction.bytes
    read = {o.name: 0 for o in operands}
    parameters = [i for i in inner if i.opcode == "parameter"]
    for operand, parameter in zip(operands, _in_order(parameters), strict=False):
        read[operand.name] += _read_bytes(parameter, inner)
    for operand in operands:
        read[operand.name] = min(read[operand.name], operand.bytes)
    return sum(read.values()), _written_bytes(instruction, inner)


def _in_order(parameters: list[Instruction]) -> list[Instruction]:
    return sorted(parameters, key=lambda p: int(p.literal) if p.literal else 0)


def _read_bytes(parameter: Instruction, inner: tuple[Instruction, ...]) -> int:
    """What a fusion reads of one operand: only the slices, if only slices are used."""
    names, read = {parameter.name}, 0
    for user in inner:
        if not names & set(user.operands):
            continue
        if user.opcode == "bitcast":
            names.add(user.name)
        elif user.opcode in _SLICES:
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] in names:
            pass  # written in place
        elif user.opcode != "tuple" and user.opcode not in _ON_THE_WAY:
            return parameter.bytes
    return read


def _written_bytes(fusion: Instruction, inner: tuple[Instruction, ...]) -> int:
    """What a fusion writes: only the update, if its result is updated in place."""
    body = {i.name: i for i in inner}
    root = next((i for i in inner if i.is_root), None)
    results = (
        [body[o] for o in root.operands]
        if root and root.opcode == "tuple"
        else ([root] if root else [])
    )
    total = 0
    for result in results:
        while result.opcode == "bitcast" and result.operands[0] in body:
            result = body[result.operands[0]]
        if result.opcode == "dynamic-update-slice" and len(result.operands) > 1:
            total += body[result.operands[1]].bytes
        elif result.opcode != "parameter" and result.opcode not in _ON_THE_WAY:
            total += result.bytes
    return total if results else fusion.bytes


def _control_traffic(module: Module, outer: Instruction) -> tuple[int, int]:
    """A loop: its body times its trips. A branch: the dearest one."""
    totals = []
    for name in outer.called:
        body = {i.name: i for i in module.computations.get(name, ())}
        parts = [traffic(module, n, body) for n, i in body.items() if not is_free(i)]
        totals.append((sum(r for r, _ in parts), sum(w for _, w in parts)))
    if not totals:
        return 0, 0
    if outer.opcode == "conditional":
        return max(totals, key=sum)
    count = trips(outer)
    return count * sum(r for r, _ in totals), count * sum(w for _, w in totals)
