"""Piper's search: a plan quickly, then only the ideals at which a better one could be cut.

A first plan comes from one topological order alone.  Behind an ideal J lie layers whose work, with the bytes over its
border, takes some devices at least if every stage is to take less than that plan's largest time; so does what lies in
front of it.  Ideals where both together are more than there are cannot be cut at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.formats.piper import Instance
from planner.peers import piper_equal
from planner.peers.ideals import Bools, Ideals, Lattice, chain_of, lattice_of
from planner.peers.piper_room import Machine, Room, least_work
from planner.peers.piper_sweep import Cut, Sweep

SAME = 1e-9
"""Times that differ by less, as a fraction, are one time."""

_MOST_IDEALS = 40_000
"""As many as the public code allows; beyond, stages follow one another in one topological order."""

_FEW = 3
"""Up to so many times the ideals of a chain, all are looked at at once."""

_ANY_TIME = 1e300
"""More than any stage takes; an infinite time means that a stage does not fit."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Stages in order, as differences of the lattice's ideals."""

    lattice: Lattice
    cuts: tuple[Cut, ...]

    @property
    def value(self) -> float:
        """The largest time of a stage."""
        return max(cut.time for cut in self.cuts)


def search(
    instance: Instance, machine: Machine, high: float, out_of_time: Callable[[], bool], fractional: bool = False
) -> tuple[Cuts | None, float]:
    """The best plan, None if none is better than ``high``, and the bound that is proved.

    Args:
        fractional: layers may switch their options in part: then only the bound is of use.
    """
    reads: list[list[int]] = [[] for _ in instance.nodes]
    for src, dst, _ in instance.edges:
        reads[dst].append(src)
    chain = chain_of(piper_equal.depth_first(instance)[::-1])
    lattice = lattice_of(Ideals.of(reads), _MOST_IDEALS)
    lattices = [chain] if lattice is None else [lattice]
    if lattice is not None and len(lattice.bits) > _FEW * len(chain.bits):
        lattices = [chain, lattice]
    degrees = sorted({t for node in instance.nodes for t in node.options if t <= machine.devices})
    best: Cuts | None = None
    try:
        for each in lattices if degrees else []:
            kept = _kept(each, Room.of(instance, machine, each, high, degrees).hopeful)
            best, high = _on_lattice(instance, machine, kept, degrees, best, high, out_of_time, fractional)
    except TimeoutError:
        return best, min(high, _work_bound(instance, machine))
    return best, high if lattice is not None else min(high, _work_bound(instance, machine))


def _on_lattice(
    instance: Instance,
    machine: Machine,
    lattice: Lattice,
    degrees: Sequence[int],
    best: Cuts | None,
    high: float,
    out_of_time: Callable[[], bool],
    fractional: bool,
) -> tuple[Cuts | None, float]:
    """A better plan than ``best`` whose stages end in ideals of ``lattice``, and its value; else both as they are."""

    def sweep(of: Sequence[int]) -> Sweep:
        return Sweep(instance, machine, lattice, tuple(of), out_of_time, high, fractional)

    for degree in degrees:
        found = sweep([degree]).smallest()
        if found:
            best = Cuts(lattice, found)
            high = best.value
    return _halve(sweep(degrees), best, _work_bound(instance, machine), high) if len(degrees) > 1 else (best, high)


def _halve(sweep: Sweep, best: Cuts | None, low: float, high: float) -> tuple[Cuts | None, float]:
    """Better stages than ``best``, between a bound and what is known, by asking what is possible in less time."""
    step = 0
    while low < high * (1 - SAME):
        just_below = step % 4 == 0
        limit = _ANY_TIME if high == inf else high * (1 - SAME) if just_below else (low + high) / 2
        found, least = sweep.fewest(limit)
        step += 1
        if found:
            best = Cuts(sweep.lattice, found)
            high = best.value
        else:
            low = min(high, least)
    return best, high


def _kept(lattice: Lattice, kept: Bools) -> Lattice:
    """The lattice with those ideals alone; its steps, which nobody asks for, are left out."""
    nothing = np.zeros(0, dtype=np.intp)
    return Lattice(tuple(bits for bits, keep in zip(lattice.bits, kept, strict=True) if keep), nothing, nothing)


def _work_bound(instance: Instance, machine: Machine) -> float:
    """All work over all devices."""
    return sum(least_work(instance)) / machine.devices
