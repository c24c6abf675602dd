# SPDX-License-Identifier: Apache-2.0
"""What each line of a compiled step is for: model, gradient collective, optimizer.

The text does not say; the data flow does. A collective of floating-point arrays is a
*gradient collective* if no matrix product of the model comes after it (the others are
tensor parallelism, batch statistics, gathered parameters). *Optimizer work* depends on
a gradient collective and leads to none. The *backward pass* ends with the last matrix
product that differentiation put there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from optax_npu._hlo import Instruction, Module
from optax_npu._hlo_collectives import Collective, carried, is_continuation, links
from optax_npu._hlo_work import has_matmul, is_free, traffic
from optax_npu._sources import Frame, describe

MODEL, OPTIMIZER, GRADIENT, OTHER = "model", "optimizer", "gradient", "other"


class Flow:
    """The data flow of an entry computation."""

    def __init__(self, module: Module):
        self.lines = module.computations[module.entry]
        self.position = {line.name: i for i, line in enumerate(self.lines)}
        hidden = links(module)
        self.reads = {
            line.name: (
                *line.operands,
                *(hidden[n] for n in [line.name] if n in hidden),
            )
            for line in self.lines
        }
        self.readers: dict[str, list[str]] = {line.name: [] for line in self.lines}
        for name, operands in self.reads.items():
            for operand in operands:
                if operand in self.readers:
                    self.readers[operand].append(name)

    def after(
        self, seeds: Iterable[str], stop: frozenset[str] = frozenset()
    ) -> set[str]:
        """The seeds and all that depends on them; `stop` lines are not passed."""
        return _reach(seeds, self.readers, stop)

    def before(
        self, seeds: Iterable[str], stop: frozenset[str] = frozenset()
    ) -> set[str]:
        """The seeds and all that they depend on; `stop` lines are not passed."""
        return _reach(seeds, self.reads, stop)


def _reach(
    seeds: Iterable[str],
    edges: Mapping[str, Sequence[str]],
    stop: frozenset[str] = frozenset(),
) -> set[str]:
    reached, stack = set(), list(seeds)
    while stack:
        name = stack.pop()
        if name in reached or name not in edges:
            continue
        reached.add(name)
        if name not in stop:
            stack.extend(edges[name])
    return reached


@dataclass(frozen=True)
class Roles:
    """Who is who in a step.

    Attributes:
      gradients: The gradient collectives, in the order in which they start.
      entering: Names of those that take local gradients (not a later stage).
      backward_end: Position of the last matrix product of the model; without any, of
        the last line of the model that leads to a gradient collective; -1 if none.
      last_done: Position at which the last gradient collective is done; -1 if none.
      optimizer: Bytes written by each line of optimizer work.
      role: Name of a line or collective to its role.
      barrier: What makes every update wait for every gradient; empty if nothing.
      elementwise_traffic: Bytes moved by all lines without a matrix product.
    """

    gradients: tuple[Collective, ...]
    entering: frozenset[str]
    backward_end: int
    last_done: int
    optimizer: dict[str, int]
    role: dict[str, str]
    barrier: str
    elementwise_traffic: int

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that all optimizer work writes."""
        return sum(self.optimizer.values())


def find_roles(module: Module, collectives: Sequence[Collective]) -> Roles:
    """Tells model, gradients and optimizer of a step apart."""
    flow = Flow(module)
    body = {line.name: line for line in flow.lines}
    model, anchors = _model(module, flow)
    upstream = flow.before(anchors)
    gradients = tuple(
        c
        for c in collectives
        if c.is_float and not c.is_scalar and c.result not in upstream
    )
    inner = {c.result for c in gradients}
    wire = {
        line.name
        for line in flow.lines
        if carried(module, line) is not None and not is_continuation(module, line)
    }
    leading = flow.before(c.name for c in gradients)
    work = {
        name: traffic(module, name, body)
        for name, line in body.items()
        if not is_free(line) and name not in wire
    }
    optimizer = {
        name: work[name][1]
        for name in flow.after(inner) - inner - leading
        if name in work
    }
    last = max((c.done for c in gradients), default=-1)
    role = {name: MODEL for name in model} | dict.fromkeys(optimizer, OPTIMIZER)
    role |= {c.name: GRADIENT for c in gradients}
    sums = {n: sum(w) for n, w in work.items() if not has_matmul(module, body[n])}
    return Roles(
        gradients=gradients,
        entering=_entering(flow, gradients, frozenset(inner), anchors),
        backward_end=max(
            (flow.position[name] for name in anchors or model & leading), default=-1
        ),
        last_done=last,
        optimizer=optimizer,
        role=role,
        barrier=_barrier(module, flow, gradients, optimizer),
        elementwise_traffic=sum(sums.values()),
    )


def _model(module: Module, flow: Flow) -> tuple[set[str], set[str]]:
    """Lines made by differentiation, and the matrix products among them."""
    traced = {line.name for line in flow.lines if _differentiated(module, line)}
    products = {line.name for line in flow.lines if has_matmul(module, line)}
    return (traced, products & traced) if traced else (products, products)


def _differentiated(module: Module, line: Instruction) -> bool:
    return any("jvp(" in inner.attributes for inner in module.inside(line))


def _entering(
    flow: Flow,
    gradients: Sequence[Collective],
    results: frozenset[str],
    anchors: set[str],
) -> frozenset[str]:
    """The collectives that local gradients reach without passing another one."""
    sources = anchors or {
        line.name for line in flow.lines if line.opcode == "parameter"
    }
    names = set()
    for collective in gradients:
        reads = flow.reads.get(collective.name, ())
        if flow.before(reads, stop=results) & sources:
            names.add(collective.name)
    return frozenset(names)


def _barrier(
    module: Module,
    flow: Flow,
    gradients: Sequence[Collective],
    optimizer: dict[str, int],
) -> str:
    """Names the line that joins all gradients in front of all final updates."""
    seeds = _arrivals(flow, gradients, optimizer)
    final = {name: optimizer[name] for name in _final(flow) & optimizer.keys()}
    if len(seeds) < 2 or not any(final.values()):
        return ""
    every = (1 << len(seeds)) - 1
    reduced = {c.result for c in gradients}
    needs: dict[str, int] = {}
    for line in flow.lines:
        needs[line.name] = seeds.get(line.name, 0)
        # A fence orders collectives; it is not a reason for an update to wait.
        for operand in () if line.name in reduced else flow.reads[line.name]:
            needs[line.name] |= needs.get(operand, 0)
    waiting = sum(size for name, size in final.items() if needs[name] == every)
    if waiting < 0.99 * sum(final.values()):
        return ""
    joins = [name for name in optimizer if needs[name] == every]
    join = flow.lines[min(flow.position[name] for name in joins)]
    return describe(_joining_stack(module, join, needs, every))


def _final(flow: Flow) -> set[str]:
    """The lines whose results are results of the step."""
    root = next((line.name for line in flow.lines if line.is_root), "")
    work = frozenset(line.name for line in flow.lines if not is_free(line))
    return set(flow.before([root], stop=work))


def _joining_stack(
    module: Module, join: Instruction, needs: Mapping[str, int], every: int
) -> tuple[Frame, ...]:
    """The Python stack of the operation, inside a line, that has all bits first."""
    inner = module.computations.get(join.called[0], ()) if join.called else ()
    bits: dict[str, int] = {}
    for line in inner:
        if line.opcode == "parameter" and line.literal.isdigit():
            bits[line.name] = needs.get(join.operands[int(line.literal)], 0)
        else:
            bits[line.name] = 0
            for operand in line.operands:
                bits[line.name] |= bits.get(operand, 0)
        complete = line.opcode != "parameter" and bits[line.name] == every
        if complete and module.source(line):
            return module.source(line)
    stacks = [module.source(line) for line in module.inside(join)]
    return next((stack for stack in stacks if stack), ())


def _arrivals(
    flow: Flow, gradients: Sequence[Collective], optimizer: Mapping[str, int]
) -> dict[str, int]:
    """One bit for each array in which gradients arrive at the optimizer."""
    others = frozenset(c.name for c in gradients)
    names: list[str] = []
    for collective in gradients:
        readers = [
            flow.lines[flow.position[n]] for n in flow.readers[collective.result]
        ]
        parts = [r.name for r in readers if r.opcode == "get-tuple-element"]
        for name in parts or [collective.result]:
            if flow.after(flow.readers[name], stop=others) & optimizer.keys():
                names.append(name)
    return {name: 1 << bit for bit, name in enumerate(names)}
