"""Hosts of GPUs: what they keep for these in their memory, and what it takes to get there.

    copy        bytes of one direction over the PCIe link of each device, at :data:`COPIED` of its rate
    Adam        on the host: float32 weights and two moments read and written, gradients read, weights written, at
                :data:`UPDATED` of the rate of the host's memory, which its devices share
    state       all weights come from there before each pass of a block, and gradients go there (FSDP2's CPU offload)
    optimiser   gradients down, Adam, weights up, each beside the others: the longest counts (Ren et al. 2021,
                ZeRO-Offload, arXiv 2101.06840, section 4.2)

Figures are of the hosts of named clusters alone; where nobody states them nothing is kept there.  Two devices may share
a switch's way to the processor: the range says so, and no prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.extras.catalogue.listing import link
from planner.extras.kernels.estimates import DATASHEET, Estimate
from planner.extras.transformers.memory import MASTER_BYTES, WEIGHT_BYTES
from planner.ir.errors import UsageError

COPIES = "copies to the host"
UPDATE = "optimiser on the host"
COPIED = 0.8
"""Of a link's rate, what copies of pinned memory reach: packets have headers, of which the rate knows nothing."""
UPDATED = 0.5
"""Of the memory's rate: 1 to 10 billion weights in 0.22 to 2.57 s on a host of 256 GB/s (Ren et al. 2021, table 4)."""
KEPT = 0.8
"""Of a host's memory, what its devices may fill; the rest is the system's and the input's."""
_LOW = 0.75
_HIGH = 2.0


@dataclass(frozen=True, slots=True)
class HostSide:
    """A host.

    Attributes:
        link: of the catalogue, of each device to it.
        memory_bytes: of the host.
        memory_bytes_per_s: of all its processors together.
        source: of these figures.
    """

    link: str
    memory_bytes: float
    memory_bytes_per_s: float
    source: str

    def copied(self, num_bytes: float) -> Estimate:
        """Between a device and its host, one way."""
        return _by_data_sheet(num_bytes / (COPIED * link(self.link).bandwidth_bytes_per_s.value))

    def updated(self, weights: float, gradient_bytes: int, per_host: int) -> Estimate:
        """A step of Adam for so many weights of a device, with their gradients on the way there and themselves back."""
        copies = (self.copied(weights * size) for size in (gradient_bytes, WEIGHT_BYTES))
        return max(self.adam(weights, gradient_bytes, per_host), *copies, key=lambda estimate: estimate.seconds)

    def adam(self, weights: float, gradient_bytes: int, per_host: int) -> Estimate:
        """A step of it alone."""
        num_bytes = weights * (2 * MASTER_BYTES + gradient_bytes + WEIGHT_BYTES)
        return _by_data_sheet(num_bytes / (UPDATED * self.memory_bytes_per_s / per_host))

    def room_bytes(self, per_host: int) -> float:
        """What each of its devices may keep there."""
        return KEPT * self.memory_bytes / per_host


def _by_data_sheet(seconds: float) -> Estimate:
    return Estimate(seconds, seconds * _LOW, seconds * _HIGH, DATASHEET)


def known_host(cluster: str, host: HostSide | None) -> HostSide:
    """The host of a cluster of that name.

    Raises:
        UsageError: nothing is known of it.
    """
    if host is None:
        raise UsageError(
            f"nothing says how much the hosts of {cluster} keep for their devices, and how fast",
            ["--offload needs their memory, its rate, and their links to the devices"],
            ["leave --offload out", *(f"--on {name}" for name in HOSTS)],
        )
    return host


_DDR4_3200_BYTES_PER_S = 8 * 25.6e9
_DDR5_4800_BYTES_PER_S = 8 * 38.4e9
_DDR5_5600_BYTES_PER_S = 8 * 44.8e9
"""Of a processor with 8 channels."""

HOSTS: Mapping[str, HostSide] = {
    "a100-dgx": HostSide(
        "PCIe-4-x16",
        2e12,
        2 * _DDR4_3200_BYTES_PER_S,
        "mlcommons/inference_results_v3.0, closed/NVIDIA/systems/DGX-A100_A100-SXM-80GBx8_TRT.json: 2 TB, two EPYC "
        "7742 (8 channels of DDR4-3200 each); the link is A100's",
    ),
    "h100-dgx": HostSide(
        "PCIe-5-x16",
        2e12,
        2 * _DDR5_4800_BYTES_PER_S,
        "mlcommons/inference_results_v4.1, closed/NVIDIA/systems/DGX-H100_H100-SXM-80GBx8_TRT.json: 2 TB, two Xeon "
        "Platinum 8480C (8 channels of DDR5-4800 each), PCIe Gen5 x16, 504 GB/s for eight devices",
    ),
    "b200-dgx": HostSide(
        "PCIe-5-x16",
        1.8e12,
        2 * _DDR5_5600_BYTES_PER_S,
        "mlcommons/inference_results_v6.0, closed/Nebius/systems/nebius_b200_n1.json, an HGX B200: 1.8 TB, two Xeon "
        "Platinum 8580 (8 channels of DDR5-5600 each), PCIe Gen5 x16",
    ),
}
"""By the name of the cluster (:func:`planner.extras.transformers.cluster.clusters`)."""
