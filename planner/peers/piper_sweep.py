"""Piper's dynamic program over (ideal of what is behind, sum of data degrees).

One sweep takes the ideals by growing size, and for each the stages that begin there, by tensor degree and data degree.
By the sum ``s`` of data degrees (at most) it finds

* :meth:`Sweep.smallest`: the smallest largest time, where there is one tensor degree so that ``s`` gives the devices;
* :meth:`Sweep.fewest`: the fewest devices for stages that all take at most ``limit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from planner.formats.piper import Instance
from planner.peers.ideals import Lattice
from planner.peers.piper_plain import PlainPairs
from planner.peers.piper_room import Floats, Machine, Room
from planner.peers.piper_stages import Pairs, StageCosts, are_alike

_CELLS = 16_000_000
"""Numbers of the tables of stages held at once."""

Combine = Callable[[Floats, Floats, int], Floats]
"""From the states behind stages, their times, and the devices of each, to the states in front of them."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage: ideal ``above`` minus ideal ``below`` (indices), with its degrees and its time."""

    below: int
    above: int
    replicas: int
    degree: int
    time: float


@dataclass(slots=True, eq=False)
class Sweep:
    """An instance made ready.

    Attributes:
        degrees: tensor degrees that may be used, ascending.
        below: stages that take as long or longer are not looked at.
        fractional: switch options in part, for a bound.
        room: what each stage must leave for the others.
        replicas: data degrees that may be used, ascending.
    """

    instance: Instance
    machine: Machine
    lattice: Lattice
    degrees: tuple[int, ...]
    out_of_time: Callable[[], bool]
    below: float = inf
    fractional: bool = False
    room: Room = field(init=False)
    replicas: tuple[int, ...] = field(init=False)
    _costs: tuple[StageCosts, ...] = field(init=False, default=())
    _tables: tuple[Pairs, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.room = Room.of(self.instance, self.machine, self.lattice, self.below, self.degrees)
        largest = int(self.room.most.max())
        self.replicas = self.machine.replicas(self.instance.micro_batches, largest)
        if are_alike(self.instance):
            self._costs = tuple(StageCosts.of(self.instance, self.machine, self.lattice, d) for d in self.degrees)

    def smallest(self) -> tuple[Cut, ...] | None:
        """Stages of the smallest largest time, in order; None if there are none below ``below``.

        Only for one tensor degree.

        Raises:
            TimeoutError: there was no time.
        """

        def slower(behind: Floats, taken: Floats, devices: int) -> Floats:
            return np.maximum(behind, taken)

        states = self._states(slower)
        return self._cuts(states, slower) if states[-1, -1] < self.below else None

    def fewest(self, limit: float) -> tuple[tuple[Cut, ...] | None, float]:
        """Stages that take at most ``limit`` and fit the devices, in order, and the least time above it.

        Raises:
            TimeoutError: there was no time.
        """
        least = inf

        def used(behind: Floats, taken: Floats, devices: int) -> Floats:
            nonlocal least
            within = taken <= limit
            least = min(least, float(np.min(taken, where=~within, initial=inf)))
            return np.where(within, behind + devices, inf)

        states = self._states(used)
        return (self._cuts(states, used) if states[-1, -1] <= self.machine.devices else None), least

    def _states(self, combine: Combine) -> Floats:
        states = np.full((len(self.lattice.bits), int(self.room.most.max()) + 1), inf)
        states[0] = 0.0
        for above in range(1, len(self.lattice.bits)):
            if self.out_of_time():
                raise TimeoutError
            row, most = states[above], int(self.room.most[above])
            for pairs, d in self._ways(above):
                kept = np.flatnonzero(pairs.fastest(d) < self.below)
                if d > most or not len(kept):
                    continue
                taken = pairs.times(kept, d, -(-np.arange(d, most + 1) // d))
                behind = states[pairs.below[kept], : most + 1 - d]
                states_here = combine(behind, taken, d * pairs.degree).min(axis=0)
                np.minimum(row[d : most + 1], states_here, out=row[d : most + 1])
            np.minimum.accumulate(row, out=row)
        return states

    def _cuts(self, states: Floats, combine: Combine) -> tuple[Cut, ...]:
        """The stages of the best state, by looking for those that give it."""
        cuts: list[Cut] = []
        at, s = len(states) - 1, states.shape[1] - 1
        while at:
            s = int(np.searchsorted(-states[at], -states[at, s]))  # the smallest sum with this state
            for pairs, d in self._ways(at, alone=True):
                if d > s:
                    continue
                every = np.arange(len(pairs.below))
                taken = pairs.times(every, d, np.array([-(-s // d)]))
                found = combine(states[pairs.below, s - d][:, None], taken, d * pairs.degree)[:, 0]
                if len(found) and found.min() <= states[at, s]:
                    best = int(found.argmin())
                    cuts.append(Cut(int(pairs.below[best]), at, d, pairs.degree, float(taken[best, 0])))
                    break
            at, s = cuts[-1].below, s - cuts[-1].replicas
        return tuple(cuts)

    def _ways(self, above: int, alone: bool = False) -> Iterator[tuple[Pairs | PlainPairs, int]]:
        """The stages that begin in an ideal, by tensor degree and data degree; ``alone``: not the next ones too."""
        for pairs in self._pairs(above, alone):
            for d in self.replicas:
                if d * pairs.degree <= self.machine.devices and len(pairs.below):
                    yield pairs, d

    def _pairs(self, above: int, alone: bool) -> list[Pairs | PlainPairs]:
        if not self._costs:
            return [PlainPairs.of(self.instance, self.machine, self.lattice, d, above) for d in self.degrees]
        if not self._tables or above not in self._tables[0].ends:
            cells = 1 if alone else _CELLS / len(self.degrees)
            self._tables = tuple(costs.pairs(self.room, above, cells, self.fractional) for costs in self._costs)
            ends = min((table.ends for table in self._tables), key=len)
            self._tables = tuple(replace(table, ends=ends) for table in self._tables)
        return [table.of(above) for table in self._tables]
