"""Costs of layers with parameters on chip and without, and which of the two a rank pays.

    parameters on chip    t* = max(F / peak, (Q - P) / memory bandwidth, P / on-chip bandwidth)     the device's kind
    off chip              t* = max(F / peak, Q / memory bandwidth)                                  :func:`off_chip`

for F operations of a pass of a layer, Q bytes that it moves, and of these P of parameters
(:mod:`planner.costs.layers.roofline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.costs.layers.roofline import LayerWork
from planner.costs.stages.action_costs import StageCosts, parameters_used
from planner.ir.cluster import DeviceSpec


def off_chip(kind: str) -> str:
    """The kind under which a profile has the costs of a device with two memories whose parameters are in the larger."""
    return f"{kind}, weights off chip"


def kinds(device: DeviceSpec, devices: Sequence[DeviceSpec]) -> dict[str, DeviceSpec]:
    """By kind, the device as it reads its parameters, where one of its kind among ``devices`` has such a memory."""
    if not any(each.on_chip_bytes for each in devices if each.kind == device.kind):
        return {}
    near, far = (replace(device, on_chip_bytes=size) for size in (max(1, device.on_chip_bytes), 0))
    return {device.kind: near, off_chip(device.kind): far}


def read_on_chip(work: LayerWork, device: DeviceSpec) -> tuple[int, float]:
    """Bytes that a pass reads on chip, and the least seconds for them."""
    num_bytes = work.parameter_bytes * (device.on_chip_bytes > 0)
    per_s = device.on_chip_bytes_per_s
    return num_bytes, num_bytes / per_s if per_s else 0.0


def on_chip_bytes(costs: StageCosts, rank: int) -> int:
    """Parameters, gradients and optimiser state of the rank where they fit into its on-chip memory; else 0.

    Layers with layouts of their own have theirs in the larger memory.
    """
    room = costs.cost_model.cluster.devices[rank].on_chip_bytes
    mine = [stage for stage in costs.stages if rank in stage.ranks] if room else []
    if not mine or any(stage.laid_out for stage in mine):
        return 0
    parameters = sum(parameters_used(stage, rank) for stage in mine)
    state = costs.state_bytes(rank)
    num_bytes = parameters * (2 if costs.trains else 1) + state
    return num_bytes if num_bytes <= room else 0
