from __future__ import annotations

from math import inf

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import search_progress
from halopipe.planning import solve as planning
from halopipe.planning.problem import make_problem
from halopipe.terminal import console
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import Progress, SearchProgress
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(3)
PLAN = plan_of(PROFILE, chain_decision(PROFILE))


class Clock:
    """Stands in for ``time``: goes on when told to."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_a_search_shows_best_bound_and_gap_every_ten_seconds_off_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    monkeypatch.delenv("RANK", raising=False)

    def solve(problem: Problem, name: str, show: Progress) -> Plan:
        for second in range(1, 31):
            clock.now_s = second
            best_s = inf if second < 15 else 0.4
            show(SearchProgress(best_s, 0.3, best_s / 0.3 - 1, 10 * second, float(second)))
        return PLAN

    monkeypatch.setattr(planning, "solve", solve)
    assert search_progress.solve(make_problem(PROFILE), "best-first") is PLAN
    assert capsys.readouterr().err.splitlines() == [
        "searching 17 %: no plan yet, bound 300 ms, 100 simulated (10.0 s, at most 50.0 s left)",
        "searching 33 %: best 400 ms, gap 33 %, bound 300 ms, 200 simulated (20.0 s, at most 40.0 s left)",
        "searching 50 %: best 400 ms, gap 33 %, bound 300 ms, 300 simulated (30.0 s, at most 30.0 s left)",
    ]
