# SPDX-License-Identifier: Apache-2.0
"""What is scheduled between the start and the done of a collective."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optax_npu._hlo import Module
from optax_npu._hlo_collectives import Collective, carried, is_continuation
from optax_npu._hlo_work import is_free, traffic
from optax_npu._roles import MODEL, OPTIMIZER


@dataclass(frozen=True)
class Beside:
    """Lines of each role between start and done.

    Attributes:
      model: Lines of the forward and backward pass.
      optimizer: Lines of optimizer work.
      other: The rest: checks, packing, counters.
      optimizer_bytes: Bytes that the optimizer lines write.
      names: The lines, in scheduled order.
    """

    model: int = 0
    optimizer: int = 0
    other: int = 0
    optimizer_bytes: int = 0
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.model} model"] if self.model else []
        if self.optimizer:
            parts.append(
                f"{self.optimizer} optimizer ({self.optimizer_bytes / 1e6:.1f} MB)"
            )
        parts += [f"{self.other} other"] if self.other else []
        return ", ".join(parts) or "nothing"


def work_beside(
    module: Module, collectives: Sequence[Collective], roles: Mapping[str, str]
) -> dict[str, Beside]:
    """For each collective, by name, the work between its start and its done."""
    lines = module.computations[module.entry]
    body = {line.name: line for line in lines}
    work = [
        (position, line.name, roles.get(line.name, "other"))
        for position, line in enumerate(lines)
        if not is_free(line)
        and (carried(module, line) is None or is_continuation(module, line))
    ]
    result = {}
    for collective in collectives:
        inside = [
            (name, role)
            for position, name, role in work
            if collective.start < position < collective.done
        ]
        updates = [name for name, role in inside if role == OPTIMIZER]
        models = sum(role == MODEL for _, role in inside)
        result[collective.name] = Beside(
            model=models,
            optimizer=len(updates),
            other=len(inside) - models - len(updates),
            optimizer_bytes=sum(traffic(module, name, body)[1] for name in updates),
            names=tuple(name for name, _ in inside),
        )
    return result
