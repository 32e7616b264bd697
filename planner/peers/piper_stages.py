"""What a stage costs in Piper's model, for all pairs of ideals at once.

Tarnawski, Narayanan, Phanishayee, "Piper", NeurIPS 2021, section 4.  A stage S on ``d`` replicas of ``t`` devices each
takes, per micro-batch of the batch's N,

    ( sum of time + ( crossing bytes + 4 (d - 1) parameter bytes / N ) / bandwidth ) / d

where every edge over the border of S counts twice its bytes and the option's for moving tensors, and it needs the sum
of ``a y + b`` bytes on each device, with ``y = ceil(s / d)`` for ``s`` the data degrees of this stage and all behind
it: the micro-batches in flight.  Each layer takes one of its options of degree ``t``.  Which ones is a knapsack; as in
the public code (``algo.cpp``) the fastest are taken where they fit, else layers are switched to their other option,
those first that cost least time for each byte, until they fit.  Switching the last one in part only is never slower
than the best choice: the bound.

Ideals hold what comes *behind*: a layer comes with its readers.  Every quantity of a stage is one of J minus one of I,
also "what the first q layers of that order save", so that q is found by halving for all pairs at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from planner.formats.piper import Instance, Option
from planner.peers.ideals import Ints, Lattice
from planner.peers.piper_room import Floats, Machine, Room, devices_for

_ENOUGH_BYTES = 1e-6

_CHUNK = 256
"""Ideals whose stages are found at once."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Stages that may be formed, J minus I, with what they cost at one tensor degree.

    Attributes:
        degree: the tensor degree.
        ends: the J whose stages these are.
        below, above: index of I and of J; sorted by J.
        time, crossing_bytes, parameter_bytes: of the fastest options.
        extra: ``[pair, y]``, time of switching options so that ``y`` micro-batches in flight fit; infinite if none do.
    """

    micro_batches: int
    machine: Machine
    degree: int
    ends: range
    below: Ints
    above: Ints
    time: Floats
    crossing_bytes: Floats
    parameter_bytes: Floats
    extra: Floats

    def of(self, above: int) -> Pairs:
        """The pairs of one J."""
        first, last = np.searchsorted(self.above, [above, above + 1])
        part = slice(int(first), int(last))
        return replace(
            self,
            ends=range(above, above + 1),
            below=self.below[part],
            above=self.above[part],
            time=self.time[part],
            crossing_bytes=self.crossing_bytes[part],
            parameter_bytes=self.parameter_bytes[part],
            extra=self.extra[part],
        )

    def fastest(self, replicas: int) -> Floats:
        """Time per micro-batch of each stage on ``replicas`` if the fastest options fit."""
        moved_bytes = self.crossing_bytes + 4 * (replicas - 1) * self.parameter_bytes / self.micro_batches
        return (self.time + moved_bytes / self.machine.bandwidth_bytes_per_s) / replicas

    def times(self, kept: Ints, replicas: int, in_flight: Ints) -> Floats:
        """``[pair, n]``: time of the stages ``kept`` with ``in_flight[n]`` micro-batches in flight."""
        found: Floats = self.fastest(replicas)[kept][:, None] + self.extra[kept[:, None], in_flight] / replicas
        return found


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Costs of stages at one tensor degree, by ideal.

    Attributes:
        missing: by ideal, layers without an option of this degree.
        time, parameter_bytes, fast: by ideal; sums over the fastest options (``fast``: a and b).
        switch: by layer, (time, a, b) that its other option adds; zeros if it has none.
    """

    micro_batches: int
    machine: Machine
    degree: int
    missing: Floats
    time: Floats
    parameter_bytes: Floats
    fast: Floats
    switch: Floats
    inside: Floats
    _incoming: Floats
    _outgoing: Floats
    _divided: Floats
    _divided_cost: Floats

    @classmethod
    def of(cls, instance: Instance, machine: Machine, lattice: Lattice, degree: int) -> StageCosts:
        """The sums over every ideal of ``lattice``; see :func:`are_alike`."""
        inside = lattice.members(len(instance.nodes)).astype(np.float64)
        choices = [fast_and_other(node.options.get(degree, ())) for node in instance.nodes]
        table = np.array([_row(fast) for fast, _ in choices])
        switch = np.array(
            [(0.0, 0.0, 0.0) if other is None or fast is None else _difference(fast, other) for fast, other in choices]
        )
        sums = inside @ table
        sources = np.array([src for src, _, _ in instance.edges], dtype=np.intp)
        targets = np.array([dst for _, dst, _ in instance.edges], dtype=np.intp)
        into, out = _edge_bytes(instance, [fast for fast, _ in choices])
        divided = inside[:, targets] * (1 - inside[:, sources])
        return cls(
            micro_batches=instance.micro_batches,
            machine=machine,
            degree=degree,
            missing=sums[:, 4],
            time=sums[:, 0],
            parameter_bytes=sums[:, 1],
            fast=sums[:, 2:4],
            switch=switch,
            inside=inside,
            _incoming=divided @ into,
            _outgoing=divided @ out,
            _divided=divided,
            _divided_cost=into + out,
        )

    def pairs(self, room: Room, first: int, most_cells: float = inf, fractional: bool = False) -> Pairs:
        """The stages that end in ideal ``first``, the next one, and so on until there are ``most_cells`` numbers.

        Args:
            room: what stages must leave for others; ``Pairs.extra`` is infinite beyond.
            fractional: switch the last layer in part only.
        """
        found: list[tuple[Ints, Ints, Floats]] = []
        count, last, most = 0, first, int(room.most.max())
        while last < len(self.inside) and count * (most + 1) < most_cells:
            found.append(self._stages(room, last, min(last + _CHUNK, len(self.inside))))
            count += len(found[-1][0])
            last += _CHUNK
        below, above, crossing = (np.concatenate(parts) for parts in zip(*found, strict=True))
        time = self.time[above] - self.time[below]
        in_flight = room.in_flight(below, above, np.maximum(1, devices_for(time, room.below)), self.degree)
        return Pairs(
            self.micro_batches,
            self.machine,
            self.degree,
            range(first, min(last, len(self.inside))),
            below,
            above,
            time,
            crossing_bytes=crossing,
            parameter_bytes=self.parameter_bytes[above] - self.parameter_bytes[below],
            extra=self._extra(below, above, *in_flight, most, fractional),
        )

    def _stages(self, room: Room, first: int, last: int) -> tuple[Ints, Ints, Floats]:
        """(below, above, bytes over the border) of each stage that ends in an ideal from ``first`` to ``last``."""
        block = slice(first, last)
        inside = self.inside.astype(np.float32)  # counts are exact
        nested = (inside[:last] @ (1 - inside[block].T)) == 0
        nested &= self.missing[:last, None] == self.missing[block]
        nested[np.arange(first, last), np.arange(last - first)] = False
        above, below = np.nonzero(nested.T)
        own = np.maximum(1, devices_for(self.time[block][above] - self.time[below], room.below)) * self.degree
        fits = room.behind[below] + own + room.front[block][above] <= room.devices
        below, above = below[fits], above[fits]
        shared = (self._divided[block] * self._divided_cost) @ self._divided[:last].T
        crossing = self._incoming[block][above] + self._outgoing[below] - shared[above, below]
        return below, above + first, crossing

    def _extra(self, below: Ints, above: Ints, fewest: Ints, largest: Ints, most: int, fractional: bool) -> Floats:
        """See ``Pairs.extra``; each pair is asked for ``fewest`` to ``largest`` in flight."""
        extra = np.full((len(below), most + 1), inf)
        a, b = (self.fast[above] - self.fast[below]).T
        left = np.arange(len(below))
        for y in range(1, most + 1):
            left = left[largest[left] >= y]
            asked = left[fewest[left] <= y]
            need = a[asked] * y + b[asked] - self.machine.memory_bytes
            extra[asked[need <= 0], y] = 0.0
            tight, need = asked[need > 0], need[need > 0]
            if len(tight):
                found = self._switched(y, need, below[tight], above[tight], fractional)
                extra[tight, y] = found
                largest[tight[found == inf]] = y  # more in flight fit even less
        # A choice for more in flight also serves for fewer, and the rule of thumb may find a better one there.
        reversed_columns = extra[:, ::-1]
        np.minimum.accumulate(reversed_columns, axis=1, out=reversed_columns)
        return extra

    def _switched(self, y: int, need: Floats, below: Ints, above: Ints, fractional: bool) -> Floats:
        """Time of switching layers, the cheapest byte first, until ``need`` bytes are saved."""
        time, saved = self.switch[:, 0], -(self.switch[:, 1] * y + self.switch[:, 2])
        useful = np.flatnonzero(saved > 1e-9)
        order = useful[np.argsort(time[useful] / saved[useful], kind="stable")]
        member = self.inside[:, order]
        zero = np.zeros((len(member), 1))
        savings = np.concatenate((zero, np.cumsum(member * saved[order], axis=1)), axis=1)
        times = np.concatenate((zero, np.cumsum(member * time[order], axis=1)), axis=1)
        low, high = np.zeros(len(need), dtype=np.intp), np.full(len(need), len(order), dtype=np.intp)
        enough = savings[above, high] - savings[below, high] >= need - _ENOUGH_BYTES
        while (low < high).any():
            middle = (low + high) // 2
            done = savings[above, middle] - savings[below, middle] >= need - _ENOUGH_BYTES
            low, high = np.where(done, low, middle + 1), np.where(done, middle, high)
        high = np.minimum(high, len(order))
        found = times[above, high] - times[below, high]
        if fractional and len(order):
            last = np.maximum(high - 1, 0)
            over = savings[above, high] - savings[below, high] - need
            found -= np.maximum(over, 0.0) * time[order[last]] / saved[order[last]]
        return np.where(enough, found, inf)


def are_alike(instance: Instance) -> bool:
    """Whether layers have at most two options of a degree, which differ in time and memory alone."""
    for node in instance.nodes:
        for options in node.options.values():
            first = options[0]
            if len(options) > 2 or any(
                option.parameter_bytes != first.parameter_bytes
                or option.sync_forward_bytes != first.sync_forward_bytes
                or option.sync_backward_bytes != first.sync_backward_bytes
                for option in options
            ):
                return False
    return True


def fast_and_other(options: Sequence[Option]) -> tuple[Option | None, Option | None]:
    """The fastest option, and the other one if there is one."""
    if not options:
        return None, None
    fast = min(options, key=lambda option: option.time_per_sample)
    return fast, next((option for option in options if option is not fast), None)


def _row(fast: Option | None) -> tuple[float, ...]:
    if fast is None:
        return (0.0, 0.0, 0.0, 0.0, 1.0)
    return (fast.time_per_sample, fast.parameter_bytes, fast.bytes_per_in_flight, fast.fixed_bytes, 0.0)


def _difference(fast: Option, other: Option) -> tuple[float, float, float]:
    return (
        other.time_per_sample - fast.time_per_sample,
        other.bytes_per_in_flight - fast.bytes_per_in_flight,
        other.fixed_bytes - fast.fixed_bytes,
    )


def _edge_bytes(instance: Instance, fast: Sequence[Option | None]) -> tuple[Floats, Floats]:
    """By edge, what it costs a stage that it leads into, and one that it leads out of."""
    into, out = [], []
    for src, dst, size in instance.edges:
        reader, writer = fast[dst], fast[src]
        into.append(2 * (size + (reader.sync_forward_bytes[src] if reader else 0.0)))
        out.append(2 * (size + (writer.sync_backward_bytes[dst] if writer else 0.0)))
    return np.array(into), np.array(out)
