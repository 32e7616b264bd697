"""The PipeDream-2BW-like planner that Piper's tables compare with: equally many layers in each stage.

Layers in topological order, any number of stages (the last ones have one layer more where it does not come out even),
one data degree for all stages, tensor degree 1, and either the first or the last option of every layer: recomputation
everywhere or nowhere (``runPipeDream2BWPlannerNonTransformer`` in the public code).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from planner.formats.piper import Instance, Option
from planner.peers.piper_plain import Stage
from planner.peers.piper_room import Floats, Machine


def best(instance: Instance, machine: Machine) -> tuple[Stage, ...] | None:
    """The best such plan, stages in order; None if none fits."""
    if any(1 not in node.options for node in instance.nodes):
        return None
    order = depth_first(instance)
    found: tuple[float, int, int, int] = (inf, 0, 0, 0)
    for choice in (0, -1):
        options = [node.options[1][choice] for node in instance.nodes]
        for num_stages in range(1, min(machine.devices, instance.micro_batches) + 1):
            for time, replicas in _times(instance, machine, options, order, num_stages):
                found = min(found, (time, choice, num_stages, replicas), key=lambda each: each[0])
    value, choice, num_stages, replicas = found
    if value == inf:
        return None
    stages = []
    for first, last in pairwise(_bounds(len(order), num_stages)):
        nodes = tuple(sorted(order[first:last]))
        picked = tuple(len(instance.nodes[node].options[1]) - 1 if choice else 0 for node in nodes)
        stages.append(Stage(nodes, replicas, 1, picked))
    return tuple(stages)


def depth_first(instance: Instance) -> tuple[int, ...]:
    """The public code's topological order: of the layers that are ready, one that became so last."""
    readers: list[list[int]] = [[] for _ in instance.nodes]
    missing = [0] * len(instance.nodes)
    for src, dst, _ in instance.edges:
        readers[src].append(dst)
        missing[dst] += 1
    ready = [node for node, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        order.append(ready.pop())
        for dst in readers[order[-1]]:
            missing[dst] -= 1
            if not missing[dst]:
                ready.append(dst)
    return tuple(order)


def _bounds(num_layers: int, num_stages: int) -> list[int]:
    each, larger = divmod(num_layers, num_stages)
    return [0, *accumulate(each + (stage >= num_stages - larger) for stage in range(num_stages))]


def _times(
    instance: Instance, machine: Machine, options: Sequence[Option], order: Sequence[int], num_stages: int
) -> list[tuple[float, int]]:
    """(time per micro-batch, data degree) of every plan of so many stages that fits."""
    stage_of = np.empty(len(order), dtype=np.intp)
    for stage, (first, last) in enumerate(pairwise(_bounds(len(order), num_stages))):
        stage_of[list(order[first:last])] = stage

    def by_stage(numbers: Sequence[float]) -> Floats:
        return np.bincount(stage_of, weights=numbers, minlength=num_stages).astype(np.float64)

    in_flight = num_stages - np.arange(num_stages)
    held = by_stage([option.bytes_per_in_flight for option in options]) * in_flight
    if (held + by_stage([option.fixed_bytes for option in options]) > machine.memory_bytes).any():
        return []
    moved = np.zeros(num_stages)
    for src, dst, size in instance.edges:
        if stage_of[src] != stage_of[dst]:
            moved[stage_of[dst]] += 2 * (size + options[dst].sync_forward_bytes[src])
            moved[stage_of[src]] += 2 * (size + options[src].sync_backward_bytes[dst])
    time = by_stage([option.time_per_sample for option in options])
    parameter_bytes = by_stage([option.parameter_bytes for option in options])
    found = []
    most = min(machine.devices, instance.micro_batches) // num_stages
    for d in machine.replicas(instance.micro_batches, most):
        moved_bytes = moved + 4 * (d - 1) * parameter_bytes / instance.micro_batches
        found.append((float((time + moved_bytes / machine.bandwidth_bytes_per_s).max()) / d, d))
    return found
