"""Groups of devices near known ones, for searches that have no proof in time.

Given       what each stage of some plans has of each pool of devices
Climb       to the neighbour whose best cuts take least by the closed form of ``hybrids``, at any size of micro-batches
            and under any schedule, until none takes less                                              ``_climb``
Neighbours  a stage gives one device of a pool, or half of what it has there, to a stage at most two places away; an
            idle one joins a stage; a stage becomes two; two become one, or change places             ``neighbours``
Of all that were met those of least time are bounded by ``leaf_bound``; of these the best are simulated  ``promising``

The closed form is no bound, and flat where one stage or network card takes longest: so many are bounded and simulated,
and plans of several numbers of stages among them.  How many is counted; nothing is looked at twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from planner.costs.candidate import Candidate
from planner.ir.errors import IllegalProgramError, MissingMeasurementError
from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.hybrids import Hybrid, HybridSpace, balancing_s, most_promising
from planner.solvers.budget import Budget
from planner.solvers.candidates.evaluate import Evaluation, Evaluator

_BOUNDED, _SIMULATED = 48, 12  # of what was met, and of these
_CLIMBING = 0.6  # of the budget
_REACH = 2  # places between stages that give and take

StageCounts = tuple[Counts, ...]
"""Devices of each stage, by pool."""


@dataclass(slots=True, eq=False)
class GroupSearch:
    """Pipelines on any groups, each with its best cuts.

    Attributes:
        spaces: one for each way to cut the batch.
    """

    evaluator: Evaluator
    spaces: Sequence[HybridSpace]
    _best: dict[StageCounts, tuple[Hybrid, HybridSpace] | None] = field(init=False, default_factory=dict)
    _looked_at: set[Candidate] = field(init=False, default_factory=set)

    def promising(self, starts: Iterable[StageCounts], within: Budget) -> list[Evaluation]:
        """The best plans that climbs from ``starts`` meet and that fit, the best first."""
        climbing = within.part(_CLIMBING * within.left_s)
        for start in starts:
            self._climb(start, climbing)
        met = sorted(filter(None, self._best.values()), key=lambda one: one[0].step_s)
        plans: list[Evaluation] = []
        for hybrid in most_promising(met[:_BOUNDED], within)[:_SIMULATED]:
            plans += self._simulated(hybrid.candidate(), within)
        return sorted(plans, key=lambda plan: plan.step_s)

    def counts_of(self, candidate: Candidate) -> StageCounts:
        """The devices of each stage of a plan."""
        pools = [frozenset(pool.ranks) for pool in self.spaces[0].prices.pools]
        return tuple(tuple(len(ranks & set(group)) for ranks in pools) for group in candidate.groups)

    def _simulated(self, candidate: Candidate, within: Budget) -> Iterator[Evaluation]:
        evaluator = self.evaluator
        if candidate in self._looked_at or evaluator.unmet(candidate) or not evaluator.has_time_for(candidate, within):
            return
        self._looked_at.add(candidate)
        try:
            evaluation = evaluator.evaluate(candidate)
        except (MissingMeasurementError, IllegalProgramError):
            return
        if evaluation.fits:
            yield evaluation

    def _climb(self, start: StageCounts, within: Budget) -> None:
        now, now_s = start, self._least_s(start, within)
        while True:
            around = {other: self._least_s(other, within) for other in self._neighbours(now) if not within.is_over}
            nearest = min(around, key=lambda other: around[other], default=now)
            if nearest == now or around[nearest] >= now_s:
                return
            now, now_s = nearest, around[nearest]

    def _neighbours(self, stages: StageCounts) -> Iterator[StageCounts]:
        pools, freedom = self.spaces[0].prices.pools, self.spaces[0].prices.freedom
        for other in dict.fromkeys(neighbours(stages, [len(pool.ranks) for pool in pools])):
            if not freedom.max_stages or len(other) <= freedom.max_stages:
                yield other

    def _least_s(self, stages: StageCounts, within: Budget) -> float:
        """What the best pipeline on such groups takes by the closed form; infinity where there is none."""
        if stages not in self._best:
            within.spend(sum(balancing_s(space, len(stages)) for space in self.spaces))
            hybrids = [(hybrid, space) for space in self.spaces for hybrid in space.on(stages)]
            self._best[stages] = min(hybrids, key=lambda one: one[0].step_s, default=None)
        best = self._best[stages]
        return best[0].step_s if best is not None else float("inf")


def neighbours(stages: StageCounts, devices: Sequence[int]) -> Iterator[StageCounts]:
    """Groups that are one step away, some of them twice.

    Args:
        devices: by pool.
    """
    for at, counts in enumerate(stages):
        for taker in range(max(0, at - _REACH), min(len(stages), at + _REACH + 1)):
            for part in _parts(counts) if taker != at else ():
                changed = list(stages)
                changed[at], changed[taker] = _less(counts, part), _more(stages[taker], part)
                yield tuple(changed)
        for part in _parts(counts):
            yield (*stages[:at], part, _less(counts, part), *stages[at + 1 :])
            yield (*stages[:at], _less(counts, part), part, *stages[at + 1 :])
        for pool, count in enumerate(devices):
            if sum(stage[pool] for stage in stages) < count:
                yield (*stages[:at], _more(counts, _one(pool, len(devices))), *stages[at + 1 :])
    for at, (before, behind) in enumerate(pairwise(stages)):
        yield (*stages[:at], _more(before, behind), *stages[at + 2 :])
        if before != behind:
            yield (*stages[:at], behind, before, *stages[at + 2 :])


def _parts(counts: Counts) -> Iterator[Counts]:
    """What a stage may part with: a device of a pool, half of those there, all of them, half of everything."""
    total, parts = sum(counts), []
    for pool, count in enumerate(counts):
        parts += [tuple(share * (n == pool) for n in range(len(counts))) for share in {1, count // 2, count} if count]
    parts.append(tuple(count // 2 for count in counts))
    yield from (part for part in dict.fromkeys(parts) if 0 < sum(part) < total)


def _one(pool: int, pools: int) -> Counts:
    return tuple(int(number == pool) for number in range(pools))


def _more(counts: Counts, others: Counts) -> Counts:
    return tuple(a + b for a, b in zip(counts, others, strict=True))


def _less(counts: Counts, others: Counts) -> Counts:
    return tuple(a - b for a, b in zip(counts, others, strict=True))
