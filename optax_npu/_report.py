# SPDX-License-Identifier: Apache-2.0
"""The result of `schedule_report`: rows, a summary, a picture."""

from dataclasses import dataclass, field
from typing import Any

from optax_npu._links import Chip, Links
from optax_npu._plot import plot_timeline
from optax_npu._timeline import Timeline
from optax_npu._work_beside import Beside


@dataclass(frozen=True)
class CollectiveRow:
    """One collective of a step.

    Attributes:
      name: The line that starts it in the compiled text.
      kind: ``"all-reduce"``, ``"reduce-scatter"``, ``"all-gather"``, …
      bytes: The whole vector of one device.
      dtype: Element type on the wire, as HLO spells it: ``"f32"``, ``"s32"``, …
      level: ``"intra"`` inside nodes, ``"inter"`` between them, ``"both"``, or
        ``"none"`` for a group of one.
      group_size: Devices of a group.
      is_gradient: Whether it carries gradients; the others are flags, losses, model
        parallelism.
      is_async: Whether the compiler lets other work run beside it.
      in_backward: Whether it starts before the last matrix product of the model.
      beside: What is scheduled between its start and its done.
      count: How often it runs in a step (loops).
      inside: The loop or branch around it, or an empty string.
      start: Estimated seconds at which it takes its links.
      end: Estimated seconds at which it ends.
      exposed: Estimated seconds for which the chip waits for it.
    """

    name: str
    kind: str
    bytes: int
    dtype: str
    level: str
    group_size: int
    is_gradient: bool
    is_async: bool
    in_backward: bool
    beside: Beside
    count: int
    inside: str
    start: float
    end: float
    exposed: float


@dataclass(frozen=True)
class ScheduleReport:
    """What `schedule_report` found; print it, or plot it.

    Attributes:
      name: The jitted function.
      rows: One `CollectiveRow` for each collective, in the order in which they start.
      optimizer_bytes: Bytes that optimizer work writes (parameters, moments, and
        whatever is materialised on the way).
      hidden_bytes: Those of them that are written by lines scheduled before the last
        gradient collective is done.
      entering: Gradient collectives that take local gradients: the first stage of a
        two-level reduction, or the whole of a flat one.
      entering_in_backward: Those of them that start before the backward pass ends.
      elementwise_traffic: Bytes read and written by everything but matrix products
        and collectives: the price of extra passes over the gradients.
      bytes_between_nodes: Bytes that one node sends to other nodes in a step.
      barrier: What makes every update wait for every gradient (`clip_by_global_norm`,
        a finite check after the reduction); empty if nothing does.
      step_seconds: Estimated duration.
      exposed_seconds: Estimated time for which the chip waits for communication.
      devices_per_node: Devices of a node.
      num_devices: Devices of the program (of one slice on multi-slice TPU).
      chip: The chip of the estimate.
      links: The links of the estimate.
      timeline: The estimate in full.
    """

    name: str
    rows: tuple[CollectiveRow, ...]
    optimizer_bytes: int
    hidden_bytes: int
    entering: int
    entering_in_backward: int
    elementwise_traffic: int
    bytes_between_nodes: float
    barrier: str
    step_seconds: float
    exposed_seconds: float
    devices_per_node: int
    num_devices: int
    chip: Chip
    links: Links
    timeline: Timeline = field(repr=False)

    @property
    def share(self) -> float:
        """Share of `optimizer_bytes` that does not wait for the last gradient.

        0 where there is no optimizer work or no gradient collective at all.
        """
        return self.hidden_bytes / self.optimizer_bytes if self.optimizer_bytes else 0.0

    @property
    def gradient_rows(self) -> tuple[CollectiveRow, ...]:
        """The rows that carry gradients."""
        return tuple(row for row in self.rows if row.is_gradient)

    def summary(self, max_rows: int = 40) -> str:
        """The report as text.

        Args:
          max_rows: Of more collectives than that, only the first and last are listed.
        """
        rows = [_line(row) for row in self.rows]
        if len(rows) > max_rows:
            half = max_rows // 2
            skipped = f"  ... {len(rows) - 2 * half} more ..."
            rows = [*rows[:half], skipped, *rows[len(rows) - half :]]
        lines = [
            f"{self.name}: {self.num_devices} devices, {self.devices_per_node} per"
            f" node; {len(self.rows)} collectives, {len(self.gradient_rows)} (*) of"
            " gradients",
            "  collective       level  group        MB type   start     end exposed"
            "  beside it",
        ]
        lines += rows
        lines += [
            f"optimizer: {100 * self.share:.1f} % of"
            f" {self.optimizer_bytes / 1e6:.1f} MB written before the last gradient"
            " collective ends",
            f"backward pass: {self.entering_in_backward} of {self.entering} reductions"
            " start before it ends",
            f"elementwise traffic: {self.elementwise_traffic / 1e6:.1f} MB",
            f"out of each node: {self.bytes_between_nodes / 1e6:.1f} MB per step",
            f"estimate ({self.chip.name}; {self.links.name}): step"
            f" {1e3 * self.step_seconds:.3f} ms, waiting for communication"
            f" {1e3 * self.exposed_seconds:.3f} ms",
        ]
        if self.barrier:
            lines.append(
                f"barrier: every update waits for every gradient, because of"
                f" {self.barrier}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()

    def plot(self, path: Any = None) -> Any:
        """Draws the timeline: one lane each for compute and for the links.

        Args:
          path: Where to write the picture; the ending decides the format. `None`
            writes nothing.

        Returns:
          The matplotlib figure.

        Raises:
          ImportError: Without matplotlib (``pip install 'optax-npu[plot]'``).
        """
        title = (
            f"{self.name}: {100 * self.share:.1f} % of the optimizer runs before the"
            f" last gradient is there; {1e3 * self.step_seconds:.2f} ms, of which"
            f" {1e3 * self.exposed_seconds:.2f} ms waiting ({self.links.name})"
        )
        return plot_timeline(self.timeline, title, path)


def _line(row: CollectiveRow) -> str:
    mark = "*" if row.is_gradient else " "
    times = "x" + str(row.count) if row.count > 1 else ""
    return (
        f"{mark} {row.kind + times:<16} {row.level:<6} {row.group_size:>5}"
        f" {row.bytes / 1e6:9.3f} {row.dtype:<5}"
        f" {1e3 * row.start:7.3f} {1e3 * row.end:7.3f} {1e3 * row.exposed:7.3f}"
        f"  {row.beside}"
    )
