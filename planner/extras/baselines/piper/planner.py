"""Piper: pipeline, data and tensor parallelism with recomputation, on like devices.

Tarnawski, Narayanan, Phanishayee, "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021, section 5.

    minimise    max over stages of time per micro-batch                                            (``stages``)
    over        a chain of ideals: the layers of each stage; d replicas of t devices for each stage; an option for each
                layer
    subject to  sum of d t <= devices; d divides the micro-batches of a batch                       (:class:`Sweep`)
                memory of each stage, with the data degrees of all stages after it in flight        (``stages``)

The state is (ideal of what is after, devices, sum of data degrees).  With one tensor degree the second follows from
the third, and one sweep over the ideals finds the smallest value.  With several, a sweep finds the fewest devices for
stages that take at most T, and T is halved between what is and what is not possible.

Variants: ``piper``, as above with the public code's rule for the options of a stage's layers, exact among such plans;
``equal``, its equi-partitions (below); ``released``, where the bound is that of any choice of options.

The search takes a plan quickly, then only the ideals at which a better one could be cut.  A first plan comes from one
topological order alone.  Behind an ideal J lie layers whose work, with the bytes over its border, takes some devices at
least if every stage is to take less than that plan's largest time; so does what lies in front of it.  Ideals where both
together are more than there are cannot be cut at.

One sweep of the dynamic program takes the ideals by growing size, and for each the stages that begin there, by tensor
degree and data degree.  By the sum ``s`` of data degrees (at most) it finds

* :meth:`Sweep.smallest`: the smallest largest time, where there is one tensor degree so that ``s`` gives the devices;
* :meth:`Sweep.fewest`: the fewest devices for stages that all take at most ``limit``.

The equi-partitions are those that the paper compares itself with (section 5; "equi" in the public code), as the planner
of PipeDream-2BW has them (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021): equally many
layers in each stage, the last stages having one more where it does not come out even; one data degree and one tensor
degree for all stages; and either the first or the last option of every layer, recomputation everywhere or nowhere.
Layers are in topological order, whatever they are, as in ``runPipeDream2BWPlannerNonTransformer`` of the public code;
its other one, for transformers, divides the blocks alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from planner.extras.baselines.common.answer import OPTIMAL, TIME_LIMIT, Json, RivalAnswer, infeasible
from planner.extras.baselines.common.ideals import Bools, Floats, Ideals, Lattice, chain_of, lattice_of
from planner.extras.baselines.piper.format import Machine, PiperInstance, PiperOption, Room, least_work
from planner.extras.baselines.piper.stages import (
    IdealCosts,
    IdealPairs,
    PiperStage,
    PlainPairs,
    are_alike,
    choose_options,
    value_of,
)
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.graph import bits_of
from planner.solvers.budget import part_of_current

SAME = 1e-9
"""Times that differ by less, as a fraction, are one time."""

_MOST_IDEALS = 40_000
"""As many as the public code allows; beyond, stages follow one another in one topological order."""

_FEW = 3
"""Times the ideals of a chain up to which all are looked at at once."""

_ANY_TIME = 1e300
"""More than any stage takes; an infinite time means that a stage does not fit."""


@dataclass(frozen=True, slots=True)
class LatticeStages:
    """Stages in order, as differences of the lattice's ideals."""

    lattice: Lattice
    cuts: tuple[Cut, ...]

    @property
    def value(self) -> float:
        """The largest time of a stage."""
        return max(cut.time for cut in self.cuts)


def search(
    instance: PiperInstance, machine: Machine, high: float, out_of_time: Callable[[], bool], fractional: bool = False
) -> tuple[LatticeStages | None, float]:
    """The best plan, None if none is better than ``high``, and the bound that is proved.

    Args:
        fractional: layers may switch their options in part: then only the bound is of use.
    """
    reads: list[list[int]] = [[] for _ in instance.nodes]
    for src, dst, _ in instance.edges:
        reads[dst].append(src)
    chain = chain_of(depth_first(instance)[::-1])
    lattice = lattice_of(Ideals.of(reads), _MOST_IDEALS)
    lattices = [chain] if lattice is None else [lattice]
    if lattice is not None and len(lattice.bits) > _FEW * len(chain.bits):
        lattices = [chain, lattice]
    degrees = sorted({t for node in instance.nodes for t in node.options if t <= machine.devices})
    best: LatticeStages | None = None
    try:
        for each in lattices if degrees else []:
            kept = _kept(each, Room.of(instance, machine, each, high, degrees).hopeful)

            def sweep(of: Sequence[int], below: float, lattice: Lattice = kept) -> Sweep:
                return Sweep(instance, machine, lattice, tuple(of), out_of_time, below, fractional)

            best, high = _on_lattice(sweep, degrees, best, high)
    except TimeoutError:
        return best, min(high, _work_bound(instance, machine))
    return best, high if lattice is not None else min(high, _work_bound(instance, machine))


def _on_lattice(
    sweep: Callable[[Sequence[int], float], Sweep], degrees: Sequence[int], best: LatticeStages | None, high: float
) -> tuple[LatticeStages | None, float]:
    """A better plan than ``best`` whose stages end in ideals of one lattice, and its value; else both as they are.

    Args:
        sweep: over the stages of some tensor degrees that take less than a time.
    """
    for degree in degrees:
        of_degree = sweep([degree], high)
        cuts = of_degree.smallest()
        if cuts:
            best = LatticeStages(of_degree.lattice, cuts)
            high = best.value
    if len(degrees) < 2:
        return best, high
    of_all = sweep(degrees, high)
    return _halve(of_all, best, _work_bound(of_all.instance, of_all.machine), high)


def _halve(sweep: Sweep, best: LatticeStages | None, low: float, high: float) -> tuple[LatticeStages | None, float]:
    """Better stages than ``best``, between a bound and what is known, by asking what is possible in less time."""
    step = 0
    while low < high * (1 - SAME):
        just_below = step % 4 == 0
        limit = _ANY_TIME if high == inf else high * (1 - SAME) if just_below else (low + high) / 2
        cuts, least = sweep.fewest(limit)
        step += 1
        if cuts:
            best = LatticeStages(sweep.lattice, cuts)
            high = best.value
        else:
            low = min(high, least)
    return best, high


def _kept(lattice: Lattice, kept: Bools) -> Lattice:
    """The lattice with those ideals alone; its steps, which nobody asks for, are left out."""
    nothing = np.zeros(0, dtype=np.intp)
    return Lattice(tuple(bits for bits, keep in zip(lattice.bits, kept, strict=True) if keep), nothing, nothing)


def _work_bound(instance: PiperInstance, machine: Machine) -> float:
    """All work over all devices."""
    return sum(least_work(instance)) / machine.devices


_CELLS = 16_000_000
"""Numbers of the tables of stages held at once."""

Combine = Callable[[Floats, Floats, int], Floats]
"""From the states after stages, their times, and the devices of each, to the states in front of them."""


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

    instance: PiperInstance
    machine: Machine
    lattice: Lattice
    degrees: tuple[int, ...]
    out_of_time: Callable[[], bool]
    below: float = inf
    fractional: bool = False
    room: Room = field(init=False)
    replicas: tuple[int, ...] = field(init=False)
    _costs: tuple[IdealCosts, ...] = field(init=False, default=())
    _tables: tuple[IdealPairs, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self.room = Room.of(self.instance, self.machine, self.lattice, self.below, self.degrees)
        largest = int(self.room.most.max())
        self.replicas = self.machine.replicas(self.instance.micro_batches, largest)
        if are_alike(self.instance):
            self._costs = tuple(IdealCosts.of(self.instance, self.machine, self.lattice, d) for d in self.degrees)

    def smallest(self) -> tuple[Cut, ...] | None:
        """Stages of the smallest largest time, in order; None if there are none below ``below``.

        Only for one tensor degree.

        Raises:
            TimeoutError: there was no time.
        """

        def slower(after: Floats, times: Floats, devices: int) -> Floats:
            return np.maximum(after, times)

        states = self._states(slower)
        return self._cuts(states, slower) if states[-1, -1] < self.below else None

    def fewest(self, limit: float) -> tuple[tuple[Cut, ...] | None, float]:
        """Stages that take at most ``limit`` and fit the devices, in order, and the least time above it.

        Raises:
            TimeoutError: there was no time.
        """
        least = inf

        def used(after: Floats, times: Floats, devices: int) -> Floats:
            nonlocal least
            within = times <= limit
            least = min(least, float(np.min(times, where=~within, initial=inf)))
            return np.where(within, after + devices, inf)

        states = self._states(used)
        return (self._cuts(states, used) if states[-1, -1] <= self.machine.devices else None), least

    def _states(self, combine: Combine) -> Floats:
        states = np.full((len(self.lattice.bits), int(self.room.most.max()) + 1), inf)
        states[0] = 0.0
        for above in range(1, len(self.lattice.bits)):
            if self.out_of_time():
                raise TimeoutError
            row = states[above]
            most = int(self.room.most[above])
            for pairs, d in self._ways(above):
                kept = np.flatnonzero(pairs.fastest(d) < self.below)
                if d > most or not len(kept):
                    continue
                times = pairs.times(kept, d, -(-np.arange(d, most + 1) // d))
                after = states[pairs.below[kept], : most + 1 - d]
                states_here = combine(after, times, d * pairs.degree).min(axis=0)
                np.minimum(row[d : most + 1], states_here, out=row[d : most + 1])
            np.minimum.accumulate(row, out=row)
        return states

    def _cuts(self, states: Floats, combine: Combine) -> tuple[Cut, ...]:
        """The stages of the best state, by looking for those that give it."""
        cuts: list[Cut] = []
        at = len(states) - 1
        s = states.shape[1] - 1
        while at:
            s = int(np.searchsorted(-states[at], -states[at, s]))  # the smallest sum with this state
            for pairs, d in self._ways(at, alone=True):
                if d > s:
                    continue
                every = np.arange(len(pairs.below))
                times = pairs.times(every, d, np.array([-(-s // d)]))
                values = combine(states[pairs.below, s - d][:, None], times, d * pairs.degree)[:, 0]
                if len(values) and values.min() <= states[at, s]:
                    best = int(values.argmin())
                    cuts.append(Cut(int(pairs.below[best]), at, d, pairs.degree, float(times[best, 0])))
                    break
            at = cuts[-1].below
            s = s - cuts[-1].replicas
        return tuple(cuts)

    def _ways(self, above: int, alone: bool = False) -> Iterator[tuple[IdealPairs | PlainPairs, int]]:
        """The stages that begin in an ideal, by tensor degree and data degree; ``alone``: not the next ones too."""
        for pairs in self._pairs(above, alone):
            for d in self.replicas:
                if d * pairs.degree <= self.machine.devices and len(pairs.below):
                    yield pairs, d

    def _pairs(self, above: int, alone: bool) -> list[IdealPairs | PlainPairs]:
        if not self._costs:
            return [PlainPairs.of(self.instance, self.machine, self.lattice, d, above) for d in self.degrees]
        if not self._tables or above not in self._tables[0].ends:
            cells = 1 if alone else _CELLS / len(self.degrees)
            self._tables = tuple(costs.pairs(self.room, above, cells, self.fractional) for costs in self._costs)
            ends = min((table.ends for table in self._tables), key=len)
            self._tables = tuple(replace(table, ends=ends) for table in self._tables)
        return [table.of(above) for table in self._tables]


def equal_stages(instance: PiperInstance, machine: Machine) -> tuple[PiperStage, ...] | None:
    """The best equi-partition, stages in order; None if none fits."""
    order = depth_first(instance)
    best: tuple[float, int, int, int, int] = (inf, 0, 0, 0, 0)
    degrees = set.intersection(*(set(node.options) for node in instance.nodes))  # that every layer has options of
    for degree, choice in product(sorted(degrees), (0, -1)):
        options = [node.options[degree][choice] for node in instance.nodes]
        for num_stages in range(1, min(machine.devices // degree, instance.micro_batches) + 1):
            most = min(machine.devices // degree, instance.micro_batches) // num_stages
            for time, replicas in _times(instance, machine, options, _stage_of(order, num_stages), most):
                best = min(best, (time, choice, num_stages, replicas, degree), key=lambda each: each[0])
    value, choice, num_stages, replicas, degree = best
    if value == inf:
        return None
    stages = []
    for first, last in pairwise(_bounds(len(order), num_stages)):
        nodes = tuple(sorted(order[first:last]))
        picked = tuple(len(instance.nodes[node].options[degree]) - 1 if choice else 0 for node in nodes)
        stages.append(PiperStage(nodes, replicas, degree, picked))
    return tuple(stages)


def depth_first(instance: PiperInstance) -> tuple[int, ...]:
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


def _stage_of(order: Sequence[int], num_stages: int) -> NDArray[np.intp]:
    """By layer."""
    stage_of = np.empty(len(order), dtype=np.intp)
    for stage, (first, last) in enumerate(pairwise(_bounds(len(order), num_stages))):
        stage_of[list(order[first:last])] = stage
    return stage_of


def _times(
    instance: PiperInstance, machine: Machine, options: Sequence[PiperOption], stage_of: NDArray[np.intp], most: int
) -> list[tuple[float, int]]:
    """(time per micro-batch, data degree up to ``most``) of every plan of these stages that fits."""
    num_stages = int(stage_of.max()) + 1

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
    plans = []
    for d in machine.replicas(instance.micro_batches, most):
        moved_bytes = moved + 4 * (d - 1) * parameter_bytes / instance.micro_batches
        plans.append((float((time + moved_bytes / machine.bandwidth_bytes_per_s).max()) / d, d))
    return plans


VARIANTS = ("piper", "equal", "released")


def solve(
    instance: PiperInstance,
    *,
    variant: str = "piper",
    most_replicas: int = sys.maxsize,
    time_limit_s: float = 60.0,
) -> RivalAnswer:
    """The smallest time per micro-batch, in the unit of the file.

    Args:
        variant: one of ``VARIANTS``.
        most_replicas: of a stage.
        time_limit_s: then the best so far is returned, with the bound that is proved.

    Raises:
        UsageError: no devices, no memory or no bandwidth.
        UnknownNameError: there is no such variant.
    """
    machine = Machine(instance.devices, instance.memory_bytes, instance.bandwidth_bytes_per_s, most_replicas)
    if min(machine.devices, most_replicas) < 1 or machine.memory_bytes < 0 or not machine.bandwidth_bytes_per_s > 0:
        shown = f"{machine.devices} devices, {machine.memory_bytes:g} bytes, {machine.bandwidth_bytes_per_s:g} bytes/s"
        raise UsageError("nothing to plan for", [shown], ["give at least one device, and a bandwidth above 0"])
    if variant not in VARIANTS:
        raise UnknownNameError(f"no variant {variant!r}", [f"known: {', '.join(VARIANTS)}"])
    out_of_time = part_of_current(time_limit_s).ends
    equal = equal_stages(instance, machine)
    if variant == "equal":
        return _answer(instance, machine, equal, value_of(instance, machine, equal) if equal else inf)
    start = value_of(instance, machine, equal) if equal else inf
    cuts, bound = search(instance, machine, start, out_of_time)
    stages = _stages(instance, machine, cuts) if cuts else equal
    if variant == "released" and stages:
        upper = value_of(instance, machine, stages)
        bound = min(bound, search(instance, machine, upper, out_of_time, fractional=True)[1])
    return _answer(instance, machine, stages, bound)


def _stages(instance: PiperInstance, machine: Machine, cuts: LatticeStages) -> tuple[PiperStage, ...]:
    """With the options of each layer.

    A rule of thumb may do better for more micro-batches in flight than there are: that choice is then taken.
    """
    stages = []
    in_flight_replicas = sum(cut.replicas for cut in cuts.cuts)
    for cut in cuts.cuts:
        nodes = tuple(bits_of(cuts.lattice.bits[cut.above] & ~cuts.lattice.bits[cut.below]))
        in_flight = ceil(in_flight_replicas / cut.replicas)
        in_flight_replicas -= cut.replicas
        while True:
            chosen = choose_options(instance, machine, nodes, cut.degree, cut.replicas, in_flight)
            if chosen is None or chosen[1] <= cut.time * (1 + SAME):
                break
            in_flight += 1
        if chosen is None:
            raise ArithmeticError(f"the options of {len(nodes)} layers do not take {cut.time} as found before")
        stages.append(PiperStage(nodes, cut.replicas, cut.degree, chosen[0]))
    return tuple(stages)


def _answer(
    instance: PiperInstance, machine: Machine, stages: Sequence[PiperStage] | None, bound: float
) -> RivalAnswer:
    """With the value summed afresh."""
    if stages is None:
        return infeasible() if bound == inf else RivalAnswer(inf, bound, TIME_LIMIT)
    value = value_of(instance, machine, stages)
    proved = value <= bound * (1 + 2 * SAME)
    return RivalAnswer(value, value if proved else bound, OPTIMAL if proved else TIME_LIMIT, _plan(instance, stages))


def _plan(instance: PiperInstance, stages: Sequence[PiperStage]) -> Mapping[str, Json]:
    """Stages in order, with the ids of their layers, and the layers of each that do not take their first option."""
    listed: list[Json] = []
    for stage in stages:
        options = {
            str(instance.nodes[node].number): instance.nodes[node].options[stage.degree][option].name
            for node, option in zip(stage.nodes, stage.options, strict=True)
            if option
        }
        listed.append(
            {
                "data_degree": stage.replicas,
                "tensor_degree": stage.degree,
                "nodes": [instance.nodes[node].number for node in stage.nodes],
                "options": {**options},
            }
        )
    return {"stages": listed}
