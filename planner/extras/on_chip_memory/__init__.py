"""Devices with a second memory, beside the multipliers (block RAM of an FPGA: :class:`planner.ir.cluster.DeviceSpec`).

It has the parameters, their gradients and the optimiser's state where all of those that the device holds fit.  So there
are two kinds of costs of such a device: its own, with parameters read on chip, and :func:`.costs.off_chip`.

Modules:

    costs   Costs of layers with parameters on chip and without, and which of the two a rank pays
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.planner_extra import PlannerExtra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.costs.layers.roofline import LayerWork
    from planner.costs.stages.action_costs import StageCosts
    from planner.ir.cluster import DeviceSpec


class OnChipMemory(PlannerExtra):
    """A second memory of a device."""

    def kinds_of(self, device: DeviceSpec, devices: Sequence[DeviceSpec]) -> Mapping[str, DeviceSpec]:
        from planner.extras.on_chip_memory.costs import kinds

        return kinds(device, devices)

    def read_beside(self, work: LayerWork, device: DeviceSpec) -> tuple[int, float]:
        from planner.extras.on_chip_memory.costs import read_on_chip

        return read_on_chip(work, device)

    def main_memory_kind(self, kind: str) -> str:
        from planner.extras.on_chip_memory.costs import off_chip

        return off_chip(kind)

    def bytes_beside(self, costs: StageCosts, rank: int) -> int:
        from planner.extras.on_chip_memory.costs import on_chip_bytes

        return on_chip_bytes(costs, rank)


EXTRA = OnChipMemory()
