# SPDX-License-Identifier: Apache-2.0
"""`schedule_report`: what the compiler really does while gradients are in flight.

The order of Python lines decides nothing; the *scheduled* program does. It can be read
without the hardware: `jax.jit(step).lower(...).compile().as_text()` on CPU, or compiled
ahead of time for H100s or TPU slices on a laptop.
"""

from typing import Any

from optax_npu._cost import bytes_between_nodes
from optax_npu._hlo import Module, parse_module
from optax_npu._hlo_collectives import Collective, find_collectives
from optax_npu._links import Chip, Links
from optax_npu._placement import nodes_of_devices, platform_of, spread_over_nodes
from optax_npu._report import CollectiveRow, ScheduleReport
from optax_npu._roles import Roles, find_roles
from optax_npu._timeline import Timeline, play
from optax_npu._work_beside import Beside, work_beside

_DEFAULTS = {
    "gpu": ("h100", "h100_ib"),
    "tpu": ("v5e", "v5e_dcn"),
    "cpu": ("cpu", "cpu"),
}


def schedule_report(
    compiled: Any,
    *,
    devices_per_node: int | None = None,
    chip: Chip | str | None = None,
    links: Links | str | None = None,
) -> ScheduleReport:
    """Reads a compiled training step: what overlaps with what.

    Facts (order, bytes, levels, shares) come from the text; times come from the stated
    cost model and are estimates. Works on CPU, GPU and TPU, also on programs compiled
    ahead of time for devices that are not there.

    Args:
      compiled: What ``jax.jit(step).lower(...).compile()`` returns, or its text.
      devices_per_node: Devices of a node, numbered row by row as in
        `two_level_mesh`. By default read from the devices of `compiled` (process, or
        slice on TPU); a text alone is taken for one node.
      chip: The chip of the estimate, or the name of a preset; by default H100, TPU
        v5e or a CPU core, by the kind of program.
      links: The links of the estimate, likewise.

    Returns:
      A `ScheduleReport`.

    Raises:
      ValueError: If the text is not a scheduled program, or if devices and
        `devices_per_node` don't fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = jax.jit(lambda p, g: p - 0.1 * g)
      >>> x = jnp.ones(8)
      >>> report = schedule_report(step.lower(x, x).compile())
      >>> report.rows, report.share, report.exposed_seconds
      ((), 0.0, 0.0)
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = parse_module(text)
    if not module.is_scheduled:
        raise ValueError(
            "compiled must be a scheduled program, but its header has no"
            " is_scheduled=true. Give the result of .compile(), not of .lower(): only"
            " the compiled program says what runs beside what."
        )
    platform = platform_of(text)
    default_chip, default_links = _DEFAULTS[platform]
    collectives = find_collectives(module)
    nodes = nodes_of_devices(compiled, module, devices_per_node)
    per_node = max(nodes.count(node) for node in set(nodes))
    spread = {c.name: spread_over_nodes(c, nodes) for c in collectives}
    roles = find_roles(module, collectives)
    chip, links = (
        Chip.preset(chip or default_chip),
        Links.preset(links or default_links),
    )
    timeline = play(module, collectives, spread, roles.role, chip, links, per_node)
    beside = work_beside(module, collectives, roles.role)
    rows = tuple(
        _row(c, spread[c.name], roles, beside[c.name], timeline) for c in collectives
    )
    hidden = _hidden_bytes(module, roles)
    entering = [c for c in roles.gradients if c.name in roles.entering]
    return ScheduleReport(
        name=module.name,
        rows=rows,
        optimizer_bytes=roles.optimizer_bytes,
        hidden_bytes=hidden,
        entering=len(entering),
        entering_in_backward=sum(c.start < roles.backward_end for c in entering),
        elementwise_traffic=roles.elementwise_traffic,
        bytes_between_nodes=sum(
            c.count * bytes_between_nodes(c.kind, c.bytes, *spread[c.name], per_node)
            for c in collectives
        ),
        barrier=roles.barrier,
        step_seconds=timeline.seconds,
        exposed_seconds=sum(timeline.exposed.values(), 0.0),
        devices_per_node=per_node,
        num_devices=module.num_devices,
        chip=chip,
        links=links,
        timeline=timeline,
    )


class TailOverlapError(AssertionError):
    """Updates wait for the last gradient; `report` holds the `ScheduleReport`."""

    def __init__(self, message: str, report: ScheduleReport):
        super().__init__(message)
        self.report = report


def assert_tail_overlap(
    compiled: Any,
    *,
    min_share: float = 0.5,
    min_in_backward: int = 0,
    max_exposed_seconds: float | None = None,
    **options: Any,
) -> ScheduleReport:
    """Asserts that the optimizer runs while the last gradients are in flight.

    For your own tests: one line keeps a change of the model, of the optimizer or of the
    compiler from silently moving every update behind the last all-reduce.

    Args:
      compiled: As in `schedule_report`.
      min_share: Smallest share of the optimizer's bytes that must be written before the
        last gradient collective ends. With K equal buckets, (K-1)/K is the most.
      min_in_backward: Smallest number of reductions that must start before the backward
        pass ends. K-1 of K buckets is the most.
      max_exposed_seconds: Largest estimated wait for communication.
      **options: `devices_per_node`, `chip`, `links`, as in `schedule_report`.

    Returns:
      The report.

    Raises:
      TailOverlapError: An `AssertionError` that names what is missed and carries the
        report.

    Example:
      >>> import jax, jax.numpy as jnp, optax_npu
      >>> step = jax.jit(lambda p, g: p - 0.1 * g)
      >>> compiled = step.lower(jnp.ones(8), jnp.ones(8)).compile()
      >>> try:
      ...     optax_npu.assert_tail_overlap(compiled)
      ... except optax_npu.TailOverlapError as error:
      ...     print(str(error).split(":")[0])
      there is no gradient collective
    """
    report = schedule_report(compiled, **options)
    missed = []
    if not report.gradient_rows:
        missed.append(
            "there is no gradient collective: the step was compiled for one device, or"
            " nothing in it reduces gradients"
        )
    if report.share < min_share:
        missed.append(
            f"{100 * report.share:.1f} % of the optimizer's bytes are written before"
            f" the last gradient collective ends, expected {100 * min_share:.1f} %"
        )
    if report.entering_in_backward < min_in_backward:
        missed.append(
            f"{report.entering_in_backward} reductions start before the backward pass"
            f" ends, expected {min_in_backward}"
        )
    if max_exposed_seconds is not None and report.exposed_seconds > max_exposed_seconds:
        missed.append(
            f"the chip waits {report.exposed_seconds:.6f} s for communication, allowed"
            f" {max_exposed_seconds:.6f} s"
        )
    if missed:
        raise TailOverlapError("; ".join(missed) + "\n" + report.summary(), report)
    return report


def _row(
    collective: Collective,
    spread: tuple[int, int],
    roles: Roles,
    beside: Beside,
    timeline: Timeline,
) -> CollectiveRow:
    nodes, members = spread
    levels = {(False, False): "none", (False, True): "intra", (True, False): "inter"}
    return CollectiveRow(
        name=collective.name,
        kind=collective.kind,
        bytes=collective.bytes,
        dtype=collective.array.dtype,
        level=levels.get((nodes > 1, members > 1), "both"),
        group_size=nodes * members,
        is_gradient=collective in roles.gradients,
        is_async=collective.is_async,
        in_backward=collective.start < roles.backward_end,
        beside=beside,
        count=collective.count,
        inside=collective.inside,
        start=timeline.begin[collective.name],
        end=timeline.end[collective.name],
        exposed=timeline.exposed[collective.name],
    )


def _hidden_bytes(module: Module, roles: Roles) -> int:
    before = {
        line.name for line in module.computations[module.entry][: roles.last_done]
    }
    if roles.last_done < 0:
        return 0
    return sum(size for name, size in roles.optimizer.items() if name in before)
