"""Plans a few moves away from known ones, for searches that have no proof in time.

Single moves                  ``LocalSearch``
    a cut goes to one of the next ideals on either side, by work                                       ``_shifted``
    a device goes from a stage to the next, or an idle one to a stage; the cut between stays, or moves ``_handed_over``
    another schedule, or other windows                                                                 ``_reordered``

Samples of unlike members     ``made_to_fit``, ``with_moved_shares``
    The shares that a search simulates first are the best for a stage by itself (``SharedBound.balanced``), as far as a
    bound of memory allows them. Exactly, a member may hold less; and beside other stages, and with what messages and
    sums of gradients take, their neighbours may be better.  Where there is time, all are looked at (``share_search``).

Of single moves the first that makes the simulated step shorter is taken, until none does (``climbed``).  A move that
does not costs a tenth of a simulation where the lower bound of its step says enough (``Evaluator.evaluate``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.layers.cost_table import Array
from planner.costs.shards.device_mesh import proportional
from planner.ir.problem import SAMPLE_DIMS, Problem
from planner.schedules import traits
from planner.solvers.best_first.graph_cuts import Flags, GraphCuts
from planner.solvers.best_first.leaf_bound import CAPS, windows_of
from planner.solvers.budget import CALL_S, Budget
from planner.solvers.candidates.candidate import group_shares
from planner.solvers.candidates.choose import ROUNDING
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import stages_usable

_NEAREST = 2  # ideals on either side that a cut is shifted to

Groups = Sequence[tuple[int, ...]]


@dataclass(slots=True, eq=False)
class LocalSearch:
    """Moves from plan to plan; none is looked at twice.

    Attributes:
        cuts: the ideals that a cut may be shifted to.
    """

    evaluator: Evaluator
    cuts: GraphCuts
    _work: Array = field(init=False, repr=False)  # of each ideal
    _number: dict[bytes, int] = field(init=False, repr=False)  # of an ideal, by its layers
    _tried: set[Candidate] = field(init=False, default_factory=set, repr=False)

    def __post_init__(self) -> None:
        cost_model = self.evaluator.cost_model
        kind = cost_model.kind(self.evaluator.problem.ranks[0])
        table = cost_model.tables.at(kind, cost_model.tables.largest_measured(kind))
        self._work = self.cuts.sums(np.diff(table.forward_s + table.backward_s))
        self._number = {_key(members > 0): number for number, members in enumerate(self.cuts.members)}

    def improved(self, best: Evaluation, within: Budget) -> Evaluation:
        """The plan that moves from ``best`` lead to."""
        return climbed(self.evaluator, best, self._moves, within, self._tried)

    def _chain(self, candidate: Candidate) -> tuple[int, ...] | None:
        """The cuts of a pipeline; None where it is none, or has layouts of its own or cuts that are not among these."""
        if (
            candidate.positions
            or any((*candidate.options, *candidate.blocks, *candidate.spans))
            or candidate.axis_parts
        ):
            return None
        stage_of = np.array(candidate.stage_of)
        numbers = [self._number.get(_key(stage_of < stage)) for stage in range(candidate.num_stages + 1)]
        chain = tuple(number for number in numbers if number is not None)
        return chain if len(chain) == len(numbers) else None

    def _moves(self, candidate: Candidate) -> Iterator[Candidate]:
        chain = self._chain(candidate)
        if chain is None:
            return
        for stage in range(1, candidate.num_stages):
            for other in self._shifted(chain, stage):
                yield replace(candidate, stage_of=self.cuts.stage_of(other))
        yield from self._handed_over(candidate, chain)
        yield from self._reordered(candidate)

    def _shifted(self, chain: tuple[int, ...], stage: int) -> Iterator[tuple[int, ...]]:
        """The chain with the cut before ``stage`` at one of the nearest ideals."""
        between = np.flatnonzero(self.cuts.inside[chain[stage - 1]] & self.cuts.inside[:, chain[stage + 1]])
        further = self._work[between] - self._work[chain[stage]]
        for side in (between[further > 0], between[further < 0]):
            nearest = side[np.argsort(np.abs(self._work[side] - self._work[chain[stage]]), kind="stable")]
            for cut in nearest[:_NEAREST].tolist():
                yield (*chain[:stage], cut, *chain[stage + 1 :])

    def _handed_over(self, candidate: Candidate, chain: tuple[int, ...]) -> Iterator[Candidate]:
        if SAMPLE_DIMS not in self.evaluator.problem.allow:
            return
        groups = candidate.groups
        for stage in range(candidate.num_stages - 1):
            for giver, taker in ((stage, stage + 1), (stage + 1, stage)):
                if len(groups[giver]) > 1:
                    rank = self._nearest(groups[giver], groups[taker], giver < taker)
                    changed = [tuple(one for one in group if one != rank) for group in groups]
                    changed[taker] = tuple(sorted((*groups[taker], rank)))
                    for other in (chain, *self._shifted(chain, stage + 1)):
                        yield from self._with(candidate, changed, other)
        idle = [rank for rank in self.evaluator.problem.ranks if rank not in set(candidate.used_ranks)]
        for stage, group in enumerate(groups if idle else ()):
            rank = self._nearest(idle, group, is_last=False)
            yield from self._with(candidate, [*groups[:stage], (*group, rank), *groups[stage + 1 :]], chain)

    def _nearest(self, ranks: Sequence[int], group: Sequence[int], is_last: bool) -> int:
        """A rank on a host of ``group`` if there is one, else the last or first."""
        devices = self.evaluator.problem.profile.cluster.devices
        hosts = {devices[rank].host for rank in group}
        near = [rank for rank in ranks if devices[rank].host in hosts] or ranks
        return near[-1] if is_last else near[0]

    def _reordered(self, candidate: Candidate) -> Iterator[Candidate]:
        most = (len(candidate.micro_batches),) * candidate.num_stages
        for schedule in self.evaluator.schedules:
            for cap in CAPS if traits(schedule).windowed else (0,):
                yield replace(candidate, schedule=schedule, windows=windows_of(cap, most))

    def _with(self, candidate: Candidate, groups: Groups, chain: tuple[int, ...]) -> Iterator[Candidate]:
        """The candidate with other groups between other cuts."""
        problem, size = self.evaluator.problem, max(candidate.micro_batches)
        if all(len(ranks) <= size for ranks in groups):
            own = dict(zip(candidate.groups, candidate.shares, strict=True))
            shares = (
                own.get(ranks) or group_shares(problem, self.evaluator.cost_model, ranks, size) for ranks in groups
            )
            stage_of = self.cuts.stage_of(chain)
            yield replace(candidate, stage_of=stage_of, groups=tuple(groups), shares=tuple(shares))


def _key(flags: Flags) -> bytes:
    return np.packbits(flags).tobytes()


def climbed(
    evaluator: Evaluator,
    best: Evaluation,
    neighbours_of: Callable[[Candidate], Iterable[Candidate]],
    within: Budget,
    tried: set[Candidate] | None = None,
) -> Evaluation:
    """The plan that moves from ``best`` lead to, each to the first neighbour that is shorter, as long as there is time.

    Args:
        tried: what is not looked at again; what is joins it.
    """
    shorter: Evaluation | None = best
    while shorter is not None:
        best, shorter = shorter, None
        for candidate in neighbours_of(best.candidate):
            if tried is not None and candidate in tried:
                continue
            if within.ends(CALL_S) or not evaluator.has_time_for(candidate, within):
                break
            if tried is not None:
                tried.add(candidate)
            other = None if evaluator.unmet(candidate) else _evaluated(evaluator, candidate, best.step_s)
            if other is not None and other.fits and other.step_s < best.step_s * (1 - ROUNDING):
                shorter = other
                break
    return best


def _evaluated(evaluator: Evaluator, candidate: Candidate, known_s: float = float("inf")) -> Evaluation | None:
    """None where some share cannot be used, or the candidate not priced."""
    is_usable = stages_usable(evaluator.problem, evaluator.cost_model, candidate)
    return evaluator.tried(candidate, known_s) if is_usable else None


_MOST_MOVES = 12


def made_to_fit(evaluator: Evaluator, candidate: Candidate, evaluation: Evaluation) -> Evaluation:
    """The candidate's evaluation, or that of one with fewer samples where memory is too small, if that may be.

    Members of one kind and memory size get no more than so much of what is too much as fits in proportion; the others
    of the stage share the rest in proportion to what they have.
    """
    devices, full = evaluator.problem.profile.cluster.devices, set[int]()
    for _ in range(_MOST_MOVES):
        rank = evaluation.excess_rank
        if rank is None:
            break
        stage = next(stage for stage, ranks in enumerate(candidate.groups) if rank in ranks)
        ranks, shares = candidate.groups[stage], candidate.shares[stage]
        if not _is_open(evaluator.problem, candidate, stage):
            break
        kinds = [(devices[member].kind, devices[member].memory_bytes) for member in ranks]
        mine, own = kinds[ranks.index(rank)], shares[ranks.index(rank)]
        most = min(own - 1, int(own / evaluator.excess(evaluation)))
        full |= {member for member, kind in zip(ranks, kinds, strict=True) if kind == mine}
        left = [min(share, most) if kind == mine else share for share, kind in zip(shares, kinds, strict=True)]
        takers = [n for n, member in enumerate(ranks) if member not in full]
        if most < 1 or not takers:
            break
        more = proportional(sum(shares) - sum(left), [shares[n] for n in takers])
        for n, extra in zip(takers, more, strict=True):
            left[n] += extra
        candidate = _with_shares(candidate, stage, tuple(left))
        other = _evaluated(evaluator, candidate) if evaluator.has_time_for(candidate) else None
        if other is None:
            break
        evaluation = other
    return evaluation


def with_moved_shares(evaluator: Evaluator, best: Evaluation) -> Evaluation:
    """The plan that moves of a sample lead to, from a member of a stage to one of another kind or memory size."""
    return climbed(evaluator, best, lambda candidate: _moved_shares(evaluator.problem, candidate), evaluator.budget)


def _is_open(problem: Problem, candidate: Candidate, stage: int) -> bool:
    """Whether the stage has shares of samples, and may have others."""
    size = max(candidate.micro_batches)
    if sum(candidate.shares[stage]) != size or candidate.has_own_options(stage):
        return False
    devices = (problem.profile.cluster.devices[rank] for rank in candidate.groups[stage])
    return len({(device.kind, device.memories) for device in devices}) > 1


def _with_shares(candidate: Candidate, stage: int, shares: tuple[int, ...]) -> Candidate:
    return replace(candidate, shares=(*candidate.shares[:stage], shares, *candidate.shares[stage + 1 :]))


def _moved_shares(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """With one sample moved from a member of a stage to one of another kind or memory size.

    None of pipelines in both directions: their proofs are over equal shares.
    """
    if traits(candidate.schedule).bidirectional:
        return
    devices = problem.profile.cluster.devices
    for stage, (ranks, shares) in enumerate(zip(candidate.groups, candidate.shares, strict=True)):
        if not _is_open(problem, candidate, stage):
            continue
        kinds = [(devices[rank].kind, devices[rank].memory_bytes) for rank in ranks]
        one_of_each = {pair: member for member, pair in enumerate(zip(kinds, shares, strict=True))}.values()
        for giver, taker in permutations(one_of_each, 2):
            if kinds[giver] != kinds[taker] and shares[giver] > 1:
                moved = tuple(share + (n == taker) - (n == giver) for n, share in enumerate(shares))
                yield _with_shares(candidate, stage, moved)
