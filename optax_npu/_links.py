# SPDX-License-Identifier: Apache-2.0
"""Links and chips: the figures that the cost model needs, with presets.

Peaks are the makers' published ones: NVIDIA's H100 SXM data sheet (TF32 494.7, bfloat16
989.4 TFLOP/s without sparsity, 3.35 TB/s, NVLink 450 GB/s each way), Google's TPU v5e
page (197 TFLOP/s bfloat16, 819 GB/s, ICI 400 GB/s both ways together, two 100 Gb/s
cards per host of 8 chips), Huawei's Ascend 910 at Hot Chips 2019 (256 TFLOP/s float16,
three HCCS links of 240 Gb/s, 100 Gb/s RoCE). Efficiencies and latencies are typical
values.
"""

from dataclasses import dataclass


def _lookup(known: dict, name: str, what: str):
    if name in known:
        return known[name]
    raise ValueError(
        f"{what}={name!r} is no preset; there are {sorted(known)}. For other hardware"
        f" give your own figures: {'Links' if what == 'links' else 'Chip'}(...)."
    )


def _require(condition: bool, name: str, value: object, need: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r}, but must be {need}.")


@dataclass(frozen=True)
class Links:
    """What connects the devices.

    Attributes:
      name: For printing.
      intra_bandwidth: Bytes per second that one device sends inside its node.
      inter_bandwidth: Bytes per second of one network card.
      nics_per_node: Network cards of a node; `None` for one per device.
      intra_latency: Seconds per message inside a node.
      inter_latency: Seconds per message between nodes.

    `Links.preset` knows ``"h100_ib"`` (NVLink; one 400 Gb/s card per device),
    ``"h100_shared_nic"`` (one 100 Gb/s card per node), ``"v5e_dcn"`` (ICI; two
    100 Gb/s cards per host), ``"ascend910_roce"`` (HCCS, one 100 Gb/s card per device:
    published link rates) and ``"cpu"``. Latencies, and 300 of NVLink's 450 GB/s, are
    typical values, not promises of a maker.

    Example:
      >>> slow = Links("two cards", 300e9, 12.5e9, nics_per_node=2)
      >>> slow.cards(8)
      2
      >>> Links.preset("h100_ib").cards(8)
      8
    """

    name: str
    intra_bandwidth: float
    inter_bandwidth: float
    nics_per_node: int | None = None
    intra_latency: float = 2e-6
    inter_latency: float = 6e-6

    def __post_init__(self):
        for key in ("intra_bandwidth", "inter_bandwidth"):
            _require(
                getattr(self, key) > 0, key, getattr(self, key), "positive, in B/s"
            )
        for key in ("intra_latency", "inter_latency"):
            _require(getattr(self, key) >= 0, key, getattr(self, key), "seconds, >= 0")
        cards = self.nics_per_node
        _require(cards is None or cards >= 1, "nics_per_node", cards, "at least 1")

    @classmethod
    def preset(cls, name: "str | Links") -> "Links":
        """A published set of links by its name; links pass through."""
        return name if isinstance(name, Links) else _lookup(_LINKS, name, "links")

    def cards(self, devices: int) -> int:
        """Network cards of a node that `devices` devices of it can keep busy."""
        return min(self.nics_per_node or devices, devices)


@dataclass(frozen=True)
class Chip:
    """What computes.

    Attributes:
      name: For printing.
      flops_f32: Operations per second of a float32 matrix product at JAX's default
        precision (TF32 on NVIDIA, one bfloat16 pass on TPU).
      flops_16bit: The same for bfloat16 and float16.
      memory_bandwidth: Bytes per second of the device memory.
      matmul_efficiency: Share of the peak that matrix products reach.
      memory_efficiency: Share of the bandwidth that fusions reach.
      launch_seconds: Fixed cost of one kernel.

    `Chip.preset` knows ``"h100"``, ``"v5e"``, ``"ascend910"`` (published peaks) and
    ``"cpu"``.

    Example:
      >>> import optax_npu
      >>> chip = optax_npu.Chip("half an H100", 247e12, 495e12, 1.675e12)
      >>> round(1e3 * chip.memory_seconds(3e9), 2)  # ms to move 3 GB
      1.99
    """

    name: str
    flops_f32: float
    flops_16bit: float
    memory_bandwidth: float
    matmul_efficiency: float = 0.6
    memory_efficiency: float = 0.9
    launch_seconds: float = 1.5e-6

    def __post_init__(self):
        for key in ("flops_f32", "flops_16bit", "memory_bandwidth"):
            _require(getattr(self, key) > 0, key, getattr(self, key), "positive")
        for key in ("matmul_efficiency", "memory_efficiency"):
            value = getattr(self, key)
            _require(0 < value <= 1, key, value, "a share between 0 and 1")

    @classmethod
    def preset(cls, name: "str | Chip") -> "Chip":
        """A published chip by its name; chips pass through."""
        return name if isinstance(name, Chip) else _lookup(_CHIPS, name, "chip")

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Time of matrix products whose result has an HLO element type."""
        short = dtype in ("bf16", "f16") or dtype.startswith(("f8", "s8", "u8"))
        peak = self.flops_16bit if short else self.flops_f32
        return flops / (peak * self.matmul_efficiency)

    def memory_seconds(self, nbytes: float) -> float:
        """Time to move bytes from and to the device memory."""
        return nbytes / (self.memory_bandwidth * self.memory_efficiency)


_LINKS = {
    "h100_ib": Links("H100, 8 x 400 Gb/s InfiniBand", 300e9, 50e9),
    "h100_shared_nic": Links(
        "H100, one shared 100 Gb/s card", 300e9, 12.5e9, 1, inter_latency=15e-6
    ),
    "v5e_dcn": Links("TPU v5e, 2 x 100 Gb/s per host", 200e9, 12.5e9, 2, 1e-6, 20e-6),
    "ascend910_roce": Links("Ascend 910, 8 x 100 Gb/s RoCE", 90e9, 12.5e9),
    "cpu": Links("processes on one machine", 5e9, 1e9, 1, 20e-6, 50e-6),
}
_CHIPS = {
    "h100": Chip("H100 SXM", 494.7e12, 989.4e12, 3.35e12),
    "v5e": Chip("TPU v5e", 197e12, 197e12, 819e9),
    "ascend910": Chip("Ascend 910", 256e12, 256e12, 1.2e12),
    "cpu": Chip("CPU core", 5e10, 5e10, 1e10),
}
