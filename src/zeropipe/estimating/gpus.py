"""Data sheets of GPUs, and the fraction of each number that is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from zeropipe.errors import ConfigError, short
from zeropipe.sim.costs import Link


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the data sheet that are reached, and the launch time on the CPU.

    The defaults are from one H200 (torch 2.11, layers of Qwen3-8B's size, 4096 and 8192 tokens), see docs/plan.md.
    `launch` is in seconds, per action of a compiled layer.
    """

    matmul: float = 0.70
    attention: float = 0.50
    attention_backward: float = 0.40
    memory: float = 0.65
    link: float = 0.80
    launch: float = 0.8e-3

    def with_values(self, values: Mapping[str, Any]) -> Efficiency:
        """With other values; ConfigError for an unknown name or an invalid value."""
        known = [field.name for field in fields(Efficiency)]
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"efficiency {short(name)}: must be one of {', '.join(known)}")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not (0 <= value <= 1 if name == "launch" else 0 < value <= 1):
                rule = "must be seconds from 0 to 1" if name == "launch" else "must be above 0 and at most 1"
                raise ConfigError(f"efficiency {name}={short(value)}: {rule}")
        return replace(self, **values)


@dataclass(frozen=True)
class Gpu:
    """One GPU: FLOP/s with dense 16-bit matrices, bytes and bytes/s of its memory, bytes/s of a link per direction.

    `float32` is the FLOP/s of float32 matrix products as torch runs them by default.
    """

    name: str
    peak: float
    bandwidth: float
    memory: float
    intra_node: float  # to another GPU of the machine
    inter_node: float  # to a GPU of another machine
    float32: float = 0.0
    host: float = 64e9  # to the memory of the host
    efficiency: Efficiency = Efficiency()

    def peak_of(self, dtype: str) -> float:
        """FLOP/s of matrix products."""
        return self.float32 if dtype == "float32" else self.peak

    @property
    def intra_node_link(self) -> Link:
        """The latency of a send and a receive, and the bandwidth that is reached, inside a machine."""
        return Link(10e-6, self.intra_node * self.efficiency.link)

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s that are reached to the memory of the host, and back."""
        return self.host * self.efficiency.link

    @property
    def inter_node_link(self) -> Link:
        """The same between machines."""
        return Link(20e-6, self.inter_node * self.efficiency.link)


_AMPERE = Efficiency(matmul=0.80, attention=0.60, attention_backward=0.50)

# From the vendors' data sheets. To the host: 16 lanes of PCIe 5, or of PCIe 4 for the older ones.
# Between machines: one 400 Gbit/s port per GPU, 200 Gbit/s for the older ones.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 989.4e12, 4.8e12, 141e9, 450e9, 50e9, 66.9e12),
        Gpu("h100", 989.4e12, 3.35e12, 80e9, 450e9, 50e9, 66.9e12),
        Gpu("h100-pcie", 756e12, 2.0e12, 80e9, 64e9, 50e9, 51.2e12),
        Gpu("h800", 989.4e12, 3.35e12, 80e9, 200e9, 50e9, 66.9e12),
        Gpu("h20", 148e12, 4.0e12, 96e9, 450e9, 50e9, 44e12),
        Gpu("b200", 2250e12, 7.7e12, 180e9, 900e9, 50e9, 75e12),
        Gpu("a100", 312e12, 2.039e12, 80e9, 300e9, 25e9, 19.5e12, 32e9, _AMPERE),
        Gpu("a100-40gb", 312e12, 1.555e12, 40e9, 300e9, 25e9, 19.5e12, 32e9, _AMPERE),
        Gpu("a800", 312e12, 2.039e12, 80e9, 200e9, 25e9, 19.5e12, 32e9, _AMPERE),
        Gpu("l40s", 362e12, 0.864e12, 48e9, 32e9, 25e9, 91.6e12, 32e9),
        Gpu("rtx4090", 165.2e12, 1.008e12, 24e9, 32e9, 12.5e9, 82.6e12, 32e9),
        Gpu("mi300x", 1307.4e12, 5.3e12, 192e9, 64e9, 50e9, 163.4e12, 64e9, Efficiency(matmul=0.5, attention=0.35)),
    )
}


def find_gpu(name: str, efficiency: dict[str, Any] | None = None) -> Gpu:
    """Find a GPU by name; `efficiency` overrides its values."""
    gpu = GPUS.get(str(name).lower())
    if gpu is None:
        raise ConfigError(f"gpu={short(name)}: must be one of {', '.join(GPUS)}")
    if not isinstance(efficiency, Mapping | None):
        raise ConfigError(f"efficiency={short(efficiency)}: must be a table like {{'matmul': 0.6}}")
    return replace(gpu, efficiency=gpu.efficiency.with_values(efficiency or {}))
