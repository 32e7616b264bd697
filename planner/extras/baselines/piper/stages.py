"""What a stage costs in Piper's model, for all pairs of ideals at once.

Tarnawski, Narayanan, Phanishayee, "Piper", NeurIPS 2021, section 4.  A stage S on ``d`` replicas of ``t`` devices each
takes, per micro-batch of the batch's N,

    ( sum of time + ( crossing bytes + 4 (d - 1) parameter bytes / N ) / bandwidth ) / d

where every edge over the border of S counts twice its bytes and the option's for moving tensors, and it needs the sum
of ``a y + b`` bytes on each device, with ``y = ceil(s / d)`` for ``s`` the data degrees of this stage and all later
it: the micro-batches in flight.  Each layer takes one of its options of degree ``t``.  Which ones is a knapsack; as in
the public code (``algo.cpp``) the fastest are taken where they fit, else layers are switched to their other option,
those first that cost least time for each byte, until they fit.  Switching the last one in part only is never slower
than the best choice: the bound.

Ideals hold what comes *after*: a layer comes with its readers.  Every quantity of a stage is one of J minus one of I,
also "what the first q layers of that order save", so that q is found by halving for all pairs at once.

Stages one by one (:class:`PlainPairs`): the plain way, for options of every kind and for checking what was found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import numpy as np

from planner.extras.baselines.common.ideals import Floats, Ints, Lattice
from planner.extras.baselines.piper.format import Machine, PiperInstance, PiperOption, Room, devices_for
from planner.ir.graph import bits_of

_ENOUGH_BYTES = 1e-6

_CHUNK = 256
"""Ideals whose stages are found at once."""


@dataclass(frozen=True, slots=True)
class IdealPairs:
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

    def of(self, above: int) -> IdealPairs:
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
        seconds: Floats = self.fastest(replicas)[kept][:, None] + self.extra[kept[:, None], in_flight] / replicas
        return seconds


@dataclass(frozen=True, slots=True)
class IdealCosts:
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
    def of(cls, instance: PiperInstance, machine: Machine, lattice: Lattice, degree: int) -> IdealCosts:
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

    def pairs(self, room: Room, first: int, most_cells: float = inf, fractional: bool = False) -> IdealPairs:
        """The stages that end in ideal ``first``, the next one, and so on until there are ``most_cells`` numbers.

        Args:
            room: what stages must leave for others; ``IdealPairs.extra`` is infinite beyond.
            fractional: switch the last layer in part only.
        """
        chunks: list[tuple[Ints, Ints, Floats]] = []
        count = 0
        last = first
        most = int(room.most.max())
        while last < len(self.inside) and count * (most + 1) < most_cells:
            chunks.append(self._stages(room, last, min(last + _CHUNK, len(self.inside))))
            count += len(chunks[-1][0])
            last += _CHUNK
        below, above, crossing = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
        time = self.time[above] - self.time[below]
        in_flight = room.in_flight(below, above, np.maximum(1, devices_for(time, room.below)), self.degree)
        return IdealPairs(
            self.micro_batches,
            self.machine,
            self.degree,
            range(first, min(last, len(self.inside))),
            below,
            above,
            time,
            crossing_bytes=crossing,
            parameter_bytes=self.parameter_bytes[above] - self.parameter_bytes[below],
            extra=self._extra(below, above, in_flight, most, fractional),
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
        fits = room.downstream[below] + own + room.front[block][above] <= room.devices
        below = below[fits]
        above = above[fits]
        shared = (self._divided[block] * self._divided_cost) @ self._divided[:last].T
        crossing = self._incoming[block][above] + self._outgoing[below] - shared[above, below]
        return below, above + first, crossing

    def _extra(self, below: Ints, above: Ints, in_flight: tuple[Ints, Ints], most: int, fractional: bool) -> Floats:
        """See ``IdealPairs.extra``; ``in_flight``: the fewest and the most that each pair is asked for."""
        extra = np.full((len(below), most + 1), inf)
        fewest, largest = in_flight
        a, b = (self.fast[above] - self.fast[below]).T
        left = np.arange(len(below))
        for y in range(1, most + 1):
            left = left[largest[left] >= y]
            asked = left[fewest[left] <= y]
            need = a[asked] * y + b[asked] - self.machine.memory_bytes
            extra[asked[need <= 0], y] = 0.0
            tight = asked[need > 0]
            need = need[need > 0]
            if len(tight):
                switched = self._switched(y, need, below[tight], above[tight], fractional)
                extra[tight, y] = switched
                largest[tight[switched == inf]] = y  # more in flight fit even less
        # A choice for more in flight also serves for fewer, and the rule of thumb may find a better one there.
        reversed_columns = extra[:, ::-1]
        np.minimum.accumulate(reversed_columns, axis=1, out=reversed_columns)
        return extra

    def _switched(self, y: int, need: Floats, below: Ints, above: Ints, fractional: bool) -> Floats:
        """Time of switching layers, the cheapest byte first, until ``need`` bytes are saved."""
        time = self.switch[:, 0]
        saved = -(self.switch[:, 1] * y + self.switch[:, 2])
        useful = np.flatnonzero(saved > 1e-9)
        order = useful[np.argsort(time[useful] / saved[useful], kind="stable")]
        member = self.inside[:, order]
        zero = np.zeros((len(member), 1))
        savings = np.concatenate((zero, np.cumsum(member * saved[order], axis=1)), axis=1)
        times = np.concatenate((zero, np.cumsum(member * time[order], axis=1)), axis=1)
        low = np.zeros(len(need), dtype=np.intp)
        high = np.full(len(need), len(order), dtype=np.intp)
        enough = savings[above, high] - savings[below, high] >= need - _ENOUGH_BYTES
        while (low < high).any():
            middle = (low + high) // 2
            done = savings[above, middle] - savings[below, middle] >= need - _ENOUGH_BYTES
            low = np.where(done, low, middle + 1)
            high = np.where(done, middle, high)
        high = np.minimum(high, len(order))
        extra = times[above, high] - times[below, high]
        if fractional and len(order):
            last = np.maximum(high - 1, 0)
            over = savings[above, high] - savings[below, high] - need
            extra -= np.maximum(over, 0.0) * time[order[last]] / saved[order[last]]
        return np.where(enough, extra, inf)


def are_alike(instance: PiperInstance) -> bool:
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


def fast_and_other(options: Sequence[PiperOption]) -> tuple[PiperOption | None, PiperOption | None]:
    """The fastest option, and the other one if there is one."""
    if not options:
        return None, None
    fast = min(options, key=lambda option: option.time_per_sample)
    return fast, next((option for option in options if option is not fast), None)


def _row(fast: PiperOption | None) -> tuple[float, ...]:
    if fast is None:
        return (0.0, 0.0, 0.0, 0.0, 1.0)
    return (fast.time_per_sample, fast.parameter_bytes, fast.bytes_per_in_flight, fast.fixed_bytes, 0.0)


def _difference(fast: PiperOption, other: PiperOption) -> tuple[float, float, float]:
    return (
        other.time_per_sample - fast.time_per_sample,
        other.bytes_per_in_flight - fast.bytes_per_in_flight,
        other.fixed_bytes - fast.fixed_bytes,
    )


def _edge_bytes(instance: PiperInstance, fast: Sequence[PiperOption | None]) -> tuple[Floats, Floats]:
    """By edge, what it costs a stage that it leads into, and one that it leads out of."""
    into = []
    out = []
    for src, dst, size in instance.edges:
        reader = fast[dst]
        writer = fast[src]
        into.append(2 * (size + (reader.sync_forward_bytes[src] if reader else 0.0)))
        out.append(2 * (size + (writer.sync_backward_bytes[dst] if writer else 0.0)))
    return np.array(into), np.array(out)


@dataclass(frozen=True, slots=True)
class PiperStage:
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


def value_of(instance: PiperInstance, machine: Machine, stages: Sequence[PiperStage]) -> float:
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
    replicas = 0
    slowest = 0.0
    for stage in reversed(stages):
        replicas += stage.replicas
        chosen = [instance.nodes[n].options[stage.degree][o] for n, o in zip(stage.nodes, stage.options, strict=True)]
        in_flight = ceil(replicas / stage.replicas)
        if sum(o.bytes_per_in_flight * in_flight + o.fixed_bytes for o in chosen) > machine.memory_bytes * (1 + 1e-12):
            return inf
        inside = frozenset(stage.nodes)
        pairs = zip(stage.nodes, chosen, strict=True)
        slowest = max(slowest, sum(_time(instance, machine, inside, n, o, stage.replicas) for n, o in pairs))
    return slowest


def choose_options(
    instance: PiperInstance, machine: Machine, nodes: Iterable[int], degree: int, replicas: int, in_flight: int
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
        switches = _switches(times, sizes, chosen, inf if simple else excess)
        best = min(switches, default=None)
        if best is None:
            return None
        _, k, o = best
        excess -= sizes[k][chosen[k]] - sizes[k][o]
        chosen[k] = o
    return tuple(chosen), sum(time[o] for time, o in zip(times, chosen, strict=True))


def _switches(
    times: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]], chosen: Sequence[int], most: float
) -> Iterator[tuple[float, int, int]]:
    """Time for each byte saved, ``most`` at most, by another option of a layer; the layer and the option."""
    for k, size in enumerate(sizes):
        for o in range(len(size)):
            saved = size[chosen[k]] - size[o]
            if saved > 1e-9:
                yield (times[k][o] - times[k][chosen[k]]) / min(saved, most), k, o


@dataclass(frozen=True, slots=True)
class PlainPairs:
    """As :class:`planner.extras.baselines.piper.stages.IdealPairs`, each stage by itself: slow, and for any options."""

    instance: PiperInstance
    machine: Machine
    degree: int
    below: Ints
    sets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, instance: PiperInstance, machine: Machine, lattice: Lattice, degree: int, above: int) -> PlainPairs:
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
            by_depth = {y: self._one(self.sets[index], replicas, y) for y in set(in_flight.tolist())}
            table[row] = [by_depth[y] for y in in_flight.tolist()]
        return table

    def _one(self, nodes: tuple[int, ...], replicas: int, in_flight: int | None) -> float:
        machine = self.machine if in_flight else self.machine.with_endless_memory()
        choice = choose_options(self.instance, machine, nodes, self.degree, replicas, in_flight or 1)
        return inf if choice is None else choice[1]


def _time(
    instance: PiperInstance, machine: Machine, inside: frozenset[int], node: int, option: PiperOption, replicas: int
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
