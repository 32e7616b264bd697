"""Piper's stages one by one: the plain way, for options of every kind and for checking what was found.

``piper_stages`` has the model, and computes the same for all pairs of ideals at once where options are alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np

from planner.formats.piper import Instance, Option
from planner.peers.ideals import Ints, Lattice, bits_of
from planner.peers.piper_room import Floats, Machine


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a plan.

    Attributes:
        nodes: indices of its layers, ascending.
        replicas: its data degree.
        degree: its tensor degree.
        options: of each of ``nodes``, an index into the layer's options of that degree.
    """

    nodes: tuple[int, ...]
    replicas: int
    degree: int
    options: tuple[int, ...]


def value_of(instance: Instance, machine: Machine, stages: Sequence[Stage]) -> float:
    """Time per micro-batch of a plan; infinite if it does not fit the devices or their memory, or is no plan."""
    done = [node for stage in stages for node in stage.nodes]
    at = {node: number for number, stage in enumerate(stages) for node in stage.nodes}
    is_plan = (
        sorted(done) == list(range(len(instance.nodes)))
        and all(at[src] <= at[dst] for src, dst, _ in instance.edges)
        and all(instance.micro_batches % stage.replicas == 0 for stage in stages)
        and sum(stage.replicas * stage.degree for stage in stages) <= machine.devices
        and sum(stage.replicas for stage in stages) <= instance.micro_batches
    )
    if not is_plan:
        return inf
    behind, slowest = 0, 0.0
    for stage in reversed(stages):
        behind += stage.replicas
        chosen = [instance.nodes[n].options[stage.degree][o] for n, o in zip(stage.nodes, stage.options, strict=True)]
        in_flight = ceil(behind / stage.replicas)
        if sum(o.bytes_per_in_flight * in_flight + o.fixed_bytes for o in chosen) > machine.memory_bytes * (1 + 1e-12):
            return inf
        inside = frozenset(stage.nodes)
        pairs = zip(stage.nodes, chosen, strict=True)
        slowest = max(slowest, sum(_time(instance, machine, inside, n, o, stage.replicas) for n, o in pairs))
    return slowest


def choose_options(
    instance: Instance, machine: Machine, nodes: Iterable[int], degree: int, replicas: int, in_flight: int
) -> tuple[tuple[int, ...], float] | None:
    """Options of a stage's layers by the public code's rule, and their time; None if none fit.

    Layers of two options or fewer are switched in the order of time for each byte saved; more options are compared
    again after each switch, and no more is counted as saved than must be.
    """
    listed = sorted(nodes)
    inside = frozenset(listed)
    options = [instance.nodes[node].options[degree] for node in listed]
    times = [
        [_time(instance, machine, inside, n, o, replicas) for o in each]
        for n, each in zip(listed, options, strict=True)
    ]
    sizes = [[o.bytes_per_in_flight * in_flight + o.fixed_bytes for o in each] for each in options]
    chosen = [min(range(len(each)), key=each.__getitem__) for each in times]
    excess = sum(size[o] for size, o in zip(sizes, chosen, strict=True)) - machine.memory_bytes
    simple = all(len(each) <= 2 for each in options)
    while excess > 1e-6:
        best: tuple[float, int, int] | None = None
        for k, size in enumerate(sizes):
            for o in range(len(size)):
                saved = size[chosen[k]] - size[o]
                if saved > 1e-9:
                    counted = saved if simple else min(saved, excess)
                    switch = ((times[k][o] - times[k][chosen[k]]) / counted, k, o)
                    best = switch if best is None or switch < best else best
        if best is None:
            return None
        _, k, o = best
        excess -= sizes[k][chosen[k]] - sizes[k][o]
        chosen[k] = o
    return tuple(chosen), sum(time[o] for time, o in zip(times, chosen, strict=True))


@dataclass(frozen=True, slots=True)
class PlainPairs:
    """As :class:`planner.peers.piper_stages.Pairs`, each stage by itself: slow, and for any options."""

    instance: Instance
    machine: Machine
    degree: int
    below: Ints
    sets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, instance: Instance, machine: Machine, lattice: Lattice, degree: int, above: int) -> PlainPairs:
        """The stages that end in one ideal."""
        usable = sum(1 << node for node, each in enumerate(instance.nodes) if degree in each.options)
        bits = lattice.bits[above]
        below = [
            index
            for index in range(above)
            if not lattice.bits[index] & ~bits and not bits & ~lattice.bits[index] & ~usable
        ]
        sets = tuple(tuple(bits_of(bits & ~lattice.bits[index])) for index in below)
        return cls(instance, machine, degree, np.array(below, dtype=np.intp), sets)

    def fastest(self, replicas: int) -> Floats:
        """Time of each stage if the fastest options fit."""
        return np.array([self._one(nodes, replicas, None) for nodes in self.sets])

    def times(self, kept: Ints, replicas: int, in_flight: Ints) -> Floats:
        """``[pair, n]``: time of the stages ``kept`` with ``in_flight[n]`` micro-batches in flight."""
        table = np.full((len(kept), len(in_flight)), inf)
        for row, index in enumerate(kept.tolist()):
            known = {y: self._one(self.sets[index], replicas, y) for y in set(in_flight.tolist())}
            table[row] = [known[y] for y in in_flight.tolist()]
        return table

    def _one(self, nodes: tuple[int, ...], replicas: int, in_flight: int | None) -> float:
        machine = self.machine if in_flight else self.machine.with_endless_memory()
        found = choose_options(self.instance, machine, nodes, self.degree, replicas, in_flight or 1)
        return inf if found is None else found[1]


def _time(
    instance: Instance, machine: Machine, inside: frozenset[int], node: int, option: Option, replicas: int
) -> float:
    """What a layer adds to its stage's time per micro-batch."""
    moved_bytes = 0.0
    for src, dst, size in instance.edges:
        if dst == node and src not in inside:
            moved_bytes += 2 * (size + option.sync_forward_bytes[src])
        if src == node and dst not in inside:
            moved_bytes += 2 * (size + option.sync_backward_bytes[dst])
    resync_bytes = 4 * (replicas - 1) * option.parameter_bytes / instance.micro_batches
    return (option.time_per_sample + (moved_bytes + resync_bytes) / machine.bandwidth_bytes_per_s) / replicas
