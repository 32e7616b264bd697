"""Plans a few moves away from a known one, for searches that have no proof in time.

A move       a cut goes to one of the next ideals on either side, by work                              ``_shifted``
             a device goes from a stage to the next, or an idle one to a stage; the cut between stays, or moves
                                                                                                    ``_handed_over``
             another schedule, or other windows                                                       ``_reordered``

The first that makes the simulated step shorter is taken, until none does (first improvement).  A move that does not
costs a tenth of a simulation where the lower bound of its step says enough (``Evaluator.evaluate``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.layers.cost_table import Array
from planner.ir.errors import IllegalProgramError, MissingMeasurementError
from planner.schedules import traits
from planner.solvers.best_first.graph_cuts import Flags, GraphCuts
from planner.solvers.best_first.leaf_bound import CAPS, windows_of
from planner.solvers.best_first.priced_groups import Freedom
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
    _may_replicate: bool = field(init=False, repr=False)
    _tried: set[Candidate] = field(init=False, default_factory=set, repr=False)

    def __post_init__(self) -> None:
        cost_model = self.evaluator.cost_model
        kind = cost_model.kind(self.evaluator.problem.ranks[0])
        table = cost_model.tables.at(kind, cost_model.tables.largest_measured(kind))
        self._work = self.cuts.sums(np.diff(table.forward_s + table.backward_s))
        self._number = {_key(members > 0): number for number, members in enumerate(self.cuts.members)}
        self._may_replicate = Freedom.of(self.evaluator.problem).may_replicate

    def improved(self, best: Evaluation, within: Budget) -> Evaluation:
        """The plan that moves from ``best`` lead to."""
        shorter: Evaluation | None = best
        while shorter is not None:
            best, shorter = shorter, next(self._shorter(shorter, within), None)
        return best

    def _shorter(self, best: Evaluation, within: Budget) -> Iterator[Evaluation]:
        chain = self._chain(best.candidate)
        for candidate in self._moves(best.candidate, chain) if chain is not None else ():
            if candidate in self._tried:
                continue
            if within.ends(CALL_S) or not self.evaluator.has_time_for(candidate, within):
                return
            self._tried.add(candidate)
            evaluation = self._evaluated(candidate, best.step_s)
            if evaluation is not None and evaluation.fits and evaluation.step_s < best.step_s * (1 - ROUNDING):
                yield evaluation

    def _evaluated(self, candidate: Candidate, known_s: float) -> Evaluation | None:
        """None where it may not be an answer."""
        evaluator = self.evaluator
        if evaluator.unmet(candidate):
            return None
        try:
            if not stages_usable(evaluator.problem, evaluator.cost_model, candidate):
                return None
            return evaluator.evaluate(candidate, known_s)
        except (MissingMeasurementError, IllegalProgramError):
            return None

    def _chain(self, candidate: Candidate) -> tuple[int, ...] | None:
        """The cuts of a pipeline; None where it is none, or has layouts of its own or cuts that are not among these."""
        if (
            candidate.positions
            or any((*candidate.options, *candidate.blocks, *candidate.spans))
            or candidate.token_slices
        ):
            return None
        stage_of = np.array(candidate.stage_of)
        numbers = [self._number.get(_key(stage_of < stage)) for stage in range(candidate.num_stages + 1)]
        chain = tuple(number for number in numbers if number is not None)
        return chain if len(chain) == len(numbers) else None

    def _moves(self, candidate: Candidate, chain: tuple[int, ...]) -> Iterator[Candidate]:
        for stage in range(1, candidate.num_stages):
            for other in self._shifted(chain, stage):
                yield replace(candidate, stage_of=self.cuts.stage_of(other))
        yield from self._handed_over(candidate, chain)
        yield from self._reordered(candidate)

    def _shifted(self, chain: tuple[int, ...], stage: int) -> Iterator[tuple[int, ...]]:
        """The chain with the cut before ``stage`` at one of the nearest ideals."""
        between = np.flatnonzero(self._inside(chain[stage - 1], chain[stage + 1]))
        further = self._work[between] - self._work[chain[stage]]
        for side in (between[further > 0], between[further < 0]):
            nearest = side[np.argsort(np.abs(self._work[side] - self._work[chain[stage]]), kind="stable")]
            for cut in nearest[:_NEAREST].tolist():
                yield (*chain[:stage], cut, *chain[stage + 1 :])

    def _inside(self, first: int, last: int) -> Flags:
        """The ideals between two."""
        return np.asarray(self.cuts.inside[first] & self.cuts.inside[:, last])

    def _handed_over(self, candidate: Candidate, chain: tuple[int, ...]) -> Iterator[Candidate]:
        if not self._may_replicate:
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
