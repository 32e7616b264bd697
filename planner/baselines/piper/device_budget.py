"""The devices of a Piper plan, and what a stage must leave of them for the stages behind it and in front of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.baselines.common.ideals import Bools, Ints, Lattice
from planner.baselines.piper.format import Instance

Floats = NDArray[np.float64]

_MANY = 1e9
"""More devices than there are."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan may use: ``devices`` alike, each with its memory and its bandwidth to the outside.

    Attributes:
        most_replicas: of a stage.
    """

    devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    most_replicas: int = sys.maxsize

    def with_endless_memory(self) -> Machine:
        """The same, where everything fits."""
        return replace(self, memory_bytes=inf)

    def replicas(self, micro_batches: int, most: int) -> tuple[int, ...]:
        """Data degrees up to ``most`` that may be used, ascending: those that divide the micro-batches of a batch."""
        return tuple(d for d in range(1, min(most, self.most_replicas) + 1) if micro_batches % d == 0)


@dataclass(frozen=True, slots=True)
class Room:
    """What is left for a stage if every stage is to take less than ``below``.

    Attributes:
        largest_degree: of tensors, on any stage.
        behind, front: by ideal, devices that the layers in it need at least, and the others.
        most: by ideal, the most that the data degrees of the stages in it can sum up to.
    """

    devices: int
    below: float
    largest_degree: int
    behind: Ints
    front: Ints
    most: Ints

    @classmethod
    def of(cls, instance: Instance, machine: Machine, lattice: Lattice, below: float, degrees: Sequence[int]) -> Room:
        """Work, with the bytes over an ideal's border, over what a device does in ``below``; bytes over its memory."""
        inside = lattice.members(len(instance.nodes)).astype(np.float64)
        behind = inside @ np.array(least_work(instance))
        front = behind[-1] - behind
        if instance.edges:
            sources, targets = [src for src, _, _ in instance.edges], [dst for _, dst, _ in instance.edges]
            crossing = 2 * np.array([size for _, _, size in instance.edges]) / machine.bandwidth_bytes_per_s
            cut = (inside[:, targets] * (1 - inside[:, sources])) @ crossing
            behind, front = behind + cut, front + cut
        held = inside @ np.array(_least_bytes(instance))
        stages = [devices_for(part, max(machine.memory_bytes, 1e-9)) for part in (held, held[-1] - held)]
        needed = [np.maximum(devices_for(a, below), b) for a, b in zip((behind, front), stages, strict=True)]
        most = np.minimum(instance.micro_batches, np.maximum(0, machine.devices - needed[1]) // degrees[0])
        return cls(machine.devices, below, degrees[-1], needed[0], needed[1], most)

    def in_flight(self, below: Ints, above: Ints, replicas: Ints, degree: int) -> tuple[Ints, Ints]:
        """The fewest and the most micro-batches in flight of stages on ``replicas`` or more."""
        most_replicas = np.maximum(1, (self.devices - self.behind[below] - self.front[above]) // degree)
        behind = -(-self.behind[below] // self.largest_degree)
        return 1 - (-behind // most_replicas), -(-self.most[above] // replicas)

    @property
    def hopeful(self) -> Bools:
        """Whether a plan may be cut at an ideal."""
        found: Bools = self.behind + self.front <= self.devices
        found[[0, -1]] = True
        return found


def devices_for(work: Floats, below: float) -> Ints:
    """Devices that do ``work`` in ``below`` or less, at least."""
    if not 0 < below < inf:
        return np.zeros(len(work), dtype=np.intp)
    return np.ceil(np.minimum(work / below, _MANY) * (1 - 1e-9)).astype(np.intp)


def least_work(instance: Instance) -> list[float]:
    """Of each layer, its time summed over devices, at the tensor degree where that is least."""
    return [
        min(t * option.time_per_sample for t, options in node.options.items() for option in options)
        for node in instance.nodes
    ]


def _least_bytes(instance: Instance) -> list[float]:
    """Of each layer, what it takes with one micro-batch in flight, in its leanest option."""
    return [
        min(option.bytes_per_in_flight + option.fixed_bytes for options in node.options.values() for option in options)
        for node in instance.nodes
    ]
