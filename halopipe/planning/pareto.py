"""The Pareto front of step time and memory: the best step under each memory limit, every point a plan.

Epsilon-constraint: solve with no limit, then with one just below the fullest rank of the plan found, and so on until
nothing fits.  A point that another beats in both is dropped (a solver may return any of equally fast plans), so that
what is left is the front exactly, as far as every search ended with a proof.  With a number of points, the limit halves
the widest gap of memory in turn instead of going down step by step.  Then several processes look at what comes next as
well; which plans are kept does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from halopipe.planning import solve
from halopipe.planning.compare import proof_text
from halopipe.planning.jobs import Jobs
from halopipe.planning.options import DEFAULT_SOLVER
from halopipe.planning.searched_space import space
from halopipe.terminal import tables, units
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import MEMORY, THROUGHPUT, Problem
from planner.solvers.budget import Budget, now_s, part_of_current, under

if TYPE_CHECKING:
    import pandas as pd

_ROUNDING = 1e-9
_FEW = 3
_FINER = 4
_UNKNOWN_SEARCHES = 3  # a search takes a third of what is left, where nobody knows how many there will be

Show = Callable[[int, int, str], None]
"""Called with (points found, points wanted or 0, the search that comes next)."""


@dataclass(frozen=True, slots=True)
class Front:
    """Plans that no other beats in both step and memory, the fastest first.

    Attributes:
        complete: whether every plan of the front is here, and proven.
    """

    plans: tuple[Plan, ...]
    complete: bool

    def __str__(self) -> str:
        return self.render()

    def frame(self) -> pd.DataFrame:
        """A pandas frame, a row a plan; columns are the JSON keys."""
        import pandas as pd

        return pd.DataFrame(self.data()["points"]).set_index("point")

    def data(self) -> dict[str, Any]:
        """Plain data for JSON; ``peak_bytes`` of a point is the least limit that its plan obeys."""
        points = [
            {
                "point": number,
                "step_s": plan.prediction.step_s,
                "samples_per_s": plan.prediction.samples_per_s,
                "slower": self._slower(plan),
                "peak_bytes": plan.prediction.peak_bytes,
                "num_stages": len(plan.decision.stages),
                "num_ranks": len(plan.decision.used_ranks),
                "schedule": f"{plan.decision.schedule} {units.micro_batches(plan.decision.micro_batches)}",
                "recompute": any(stage.recompute or stage.recomputed for stage in plan.decision.stages),
                "status": plan.search.status,
                "bound_s": plan.search.bound_s,
            }
            for number, plan in enumerate(self.plans, start=1)
        ]
        return {"complete": self.complete, "points": points}

    def _slower(self, plan: Plan) -> float:
        per_s = plan.prediction.samples_per_s
        return self.plans[0].prediction.samples_per_s / per_s - 1 if per_s else 0.0

    def render(self) -> str:
        """A table of memory limits and the best step under each."""
        cells = [
            [
                str(row["point"]),
                units.size(row["peak_bytes"]),
                units.seconds(row["step_s"]),
                "best" if row["slower"] == 0 else units.signed_percent(row["slower"]),
                str(row["num_stages"]),
                row["schedule"],
                "yes" if row["recompute"] else "no",
                proof_text(plan.search),
            ]
            for row, plan in zip(self.data()["points"], self.plans, strict=True)
        ]
        table = tables.table(["", "memory", "step", "slower", "stages", "schedule", "recompute", "search"], cells)
        best_of = f"the whole front, proven of: {space(self.plans[0])}"
        whole = best_of if self.complete else "not the whole front, or not all of it proven"
        return f"Step against memory of the fullest rank ({whole})\n{table}"


def front(
    problem: Problem,
    num_points: int = 0,
    solver: str = DEFAULT_SOLVER,
    show: Show | None = None,
    jobs: int = 1,
) -> Front:
    """The Pareto front of a problem.

    Args:
        num_points: about how many plans to look for; 0: all there are.  The problem's time limit is for all searches
            together.
        jobs: processes that share out the searches for a number of plans.  Of all plans each search begins where the
            one before ended, in one process.

    Raises:
        InfeasibleError: nothing fits at all.
    """
    with Jobs(jobs) as processes:
        search = _FrontSearch(
            replace(problem, objective=THROUGHPUT, confidence=0.0), solver, show, num_points, processes
        )
        if num_points > 1:
            search.begin((0, THROUGHPUT), (0, MEMORY))
        fastest = search.under(0)
        if fastest is None or num_points == 1:
            return Front(tuple(search.plans), False)
        if num_points:
            search.spread(fastest)
        else:
            search.down(fastest)
    plans = _undominated(search.plans)
    return Front(plans, search.exhausted and all(plan.search.status == "proven" for plan in plans))


@dataclass(slots=True)
class _FrontSearch:
    """The searches of one front; ``exhausted`` once every limit's best plan is known."""

    problem: Problem
    solver: str
    show: Show | None
    wanted: int
    processes: Jobs
    plans: list[Plan] = field(default_factory=list)
    exhausted: bool = False
    budget: Budget = field(init=False)
    _begun: dict[tuple[int, str], Callable[[], Plan]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.budget = part_of_current(self.problem.time_limit_s)

    def begin(self, *questions: tuple[int, str]) -> None:
        """Lets processes that are free begin to search, under limits and objectives that are asked for soon."""
        for limit_bytes, objective in questions[: self.processes.number]:
            if (limit_bytes, objective) not in self._begun:
                asked = self._asked(limit_bytes, objective, self.budget.limit_s / self.wanted)
                ends_s = now_s() + self.budget.clock_s
                self._begun[limit_bytes, objective] = self.processes.submit(_ended_at, ends_s, asked, self.solver)

    def _asked(self, limit_bytes: int, objective: str, within_s: float) -> Problem:
        limits = [limit for limit in (limit_bytes, self.problem.memory_bytes) if limit]
        return replace(self.problem, memory_bytes=min(limits, default=0), objective=objective, time_limit_s=within_s)

    def under(self, limit_bytes: int, objective: str = THROUGHPUT) -> Plan | None:
        """The best plan under a limit (0: none); None if the search was stopped by hand.  Raises if nothing fits."""
        if self.show is not None:
            below = f"below {units.size(limit_bytes)}" if limit_bytes else "without a limit"
            self.show(len(self.plans), self.wanted, below)
        try:
            if self.wanted:
                self.begin((limit_bytes, objective))
                plan = self._begun[limit_bytes, objective]()
            else:
                with under(self.budget):
                    within_s = self.budget.left_s / _UNKNOWN_SEARCHES
                    plan = solve.solve(self._asked(limit_bytes, objective, within_s), self.solver)
        except KeyboardInterrupt:
            if not self.plans:
                raise
            return None
        self.plans.append(plan)
        return None if plan.search.status == "stopped" else plan

    def down(self, plan: Plan | None) -> None:
        """From ``plan`` downward until nothing fits: to the byte, or in strides where only some points are wanted."""
        stride = max(1, plan.prediction.peak_bytes // self.wanted) if plan is not None and self.wanted else 1
        while plan is not None and not self._enough():
            try:
                plan = self.under(max(1, plan.prediction.peak_bytes - stride))
            except InfeasibleError:
                if stride == 1:
                    self.exhausted = not self.wanted
                    return
                stride = max(1, stride // _FINER)

    def spread(self, fastest: Plan) -> None:
        """The leanest plan, then what halves the widest gap between limits whose best plans are known."""
        leanest = self.under(0, MEMORY)
        if leanest is None or leanest.prediction.peak_bytes >= fastest.prediction.peak_bytes:
            self.down(fastest if leanest is not None else None)
            return
        gaps = [
            (leanest.prediction.peak_bytes, fastest.prediction.peak_bytes)
        ]  # limit with its best plan known; peak of the next plan
        self.begin((leanest.prediction.peak_bytes, THROUGHPUT), (sum(gaps[0]) // 2, THROUGHPUT))
        best = self.under(leanest.prediction.peak_bytes)
        while best is not None and gaps and not self._enough():
            gaps.sort(key=lambda gap: gap[0] - gap[1])  # the widest first
            lacking = self.wanted - len(_undominated(self.plans))
            self.begin(*((sum(gap) // 2, THROUGHPUT) for gap in gaps[:lacking]))
            low, high = gaps.pop(0)
            middle = (low + high) // 2
            best = self.under(middle)
            if best is not None:
                between = [(low, best.prediction.peak_bytes), (middle, high)]
                gaps += [(start, stop) for start, stop in between if stop - start > 1]
        self.exhausted = not gaps

    def _enough(self) -> bool:
        """Whether time is up, or there are as many plans as are wanted, or twice as many searches and a few."""
        if self.budget.is_over:
            return True
        return bool(self.wanted) and (
            len(_undominated(self.plans)) >= self.wanted or len(self.plans) >= 2 * self.wanted + _FEW
        )


def _ended_at(ends_s: float, asked: Problem, solver: str) -> Plan:
    """The plan of a search that ends at a time of the clock, which all processes of a machine share."""
    with under(Budget(max(0.0, ends_s - now_s()))):
        return solve.solve(asked, solver)


def _undominated(plans: list[Plan]) -> tuple[Plan, ...]:
    """The fastest first; a plan stays if no other is as fast and as lean."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.prediction.step_s, plan.prediction.peak_bytes)):
        faster = [other for other in kept if other.prediction.step_s <= plan.prediction.step_s * (1 + _ROUNDING)]
        if all(other.prediction.peak_bytes > plan.prediction.peak_bytes for other in faster):
            kept.append(plan)
    return tuple(kept)
