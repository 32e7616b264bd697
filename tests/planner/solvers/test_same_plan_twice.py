"""The same problem has the same plan, byte for byte, however fast the clock runs while it is searched."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.ir.codec import dumps
from planner.ir.problem import AUTO, MEMORY, Problem
from planner.ir.profile import Profile
from planner.solvers import budget, solver
from planner.solvers.budget import Budget
from tests.planner.networks import plain, priced
from tests.planner.solvers.clocks import Ticking, by_clock

EVERYTHING = ("sample", "spatial", "channel")


def unlike(num_layers: int = 10, speeds: Sequence[float] = (1.0, 1.0, 0.6, 0.6)) -> Profile:
    draw = random.Random(5)
    return chain_profile(
        num_layers,
        len(speeds),
        forward_s=[draw.uniform(1e-3, 4e-3) for _ in range(num_layers)],
        backward_s=[draw.uniform(2e-3, 8e-3) for _ in range(num_layers)],
        parameter_bytes=[draw.randrange(1 << 14, 1 << 20) for _ in range(num_layers)],
        activation_bytes=[draw.randrange(1 << 10, 1 << 18) for _ in range(num_layers)],
        speeds=speeds,
        bandwidth_bytes_per_s=1e9,
        sizes=(1, 2, 4, 8),
        skips=[(1, 3)],
    )


def image() -> Profile:
    made = plain(samples=4, height=24, filters=(8, 8, 8))
    return priced(*made, speeds=(1.0,) * 4, latency_s=1e-6, bandwidth_bytes_per_s=1e10, sizes=(1, 2, 4))


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "unlike devices": lambda: Problem(unlike(8), 8),
    "after hints": lambda: Problem(unlike(12), 16, time_limit_s=0.05, recompute=AUTO),
    "least memory": lambda: Problem(unlike(3, (1.0, 0.6)), 2, objective=MEMORY),
    "a stream": lambda: Problem(unlike(3, (1.0, 0.6)), 2, schedules=("forward",)),
    "layouts": lambda: Problem(image(), 4, allow=EVERYTHING),
    "layouts in little time": lambda: Problem(image(), 8, allow=EVERYTHING, time_limit_s=0.1),
    "a plan without ties": lambda: Problem(unlike(6), 16, confidence=0.8),
    "an integer program": lambda: Problem(unlike(4), 4),
}
SOLVERS = {"an integer program": "span-ilp"}


def planned(name: str, clock: Callable[[], float]) -> str:
    """The plan as its file, by such a clock."""
    with by_clock(clock):
        return dumps(solver(SOLVERS.get(name, "best-first"))(PROBLEMS[name](), None))


@pytest.mark.cases(len(PROBLEMS))
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_plan_is_the_same_whatever_the_clock_says_meanwhile(name: str) -> None:
    """Once it hardly moves, once the search takes a good part of its limit."""
    slow = Ticking(1e-12)
    first = planned(name, slow)
    fast = Ticking(0.4 * PROBLEMS[name]().time_limit_s / slow.num_asked)
    assert planned(name, fast) == first


def test_a_plan_is_the_same_in_another_process() -> None:
    """There texts have other hashes, and the clock is slow or fast."""
    prints = [other_process(step_s, hash_seed) for step_s, hash_seed in ((1e-12, "1"), (1e-7, "2"))]
    assert prints[0] == prints[1] == f"{digest(1e-9)}\n"


def other_process(step_s: float, hash_seed: str) -> str:
    script = f"from tests.planner.solvers.test_same_plan_twice import digest; print(digest({step_s}))"
    command, home = [sys.executable, "-c", script], Path(__file__).parents[3]
    surroundings = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(home)}
    return subprocess.run(command, env=surroundings, cwd=home, check=True, capture_output=True, text=True).stdout


def digest(step_s: float) -> str:
    """Of some plans."""
    names = ("unlike devices", "after hints", "layouts")
    return hashlib.sha256("".join(planned(name, Ticking(step_s)) for name in names).encode()).hexdigest()


@pytest.mark.parametrize("limit_s", [0.0, 1e-3, 5e-2])
@pytest.mark.parametrize("name", ["unlike devices", "layouts", "least memory", "a stream"])
def test_a_plan_comes_back_however_early_time_is_up(name: str, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "now_s", Ticking(1e-5))
    problem = PROBLEMS[name]()
    plan = solver("best-first")(replace(problem, time_limit_s=limit_s), None)
    assert plan.prediction.step_s > 0
    assert plan.search.bound_s <= plan.prediction.step_s


def test_little_is_done_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on with the work that is counted: nothing large is begun that the limit does not allow."""
    done: list[Budget] = []

    def clock() -> float:
        return done[0].work_s if done else 0.0

    monkeypatch.setattr(budget, "now_s", clock)
    whole = Budget(0.5)
    done.append(whole)
    with budget.under(whole):
        solver("best-first")(Problem(unlike(40), 64, time_limit_s=0.5), None)
    assert whole.work_s <= 0.5 * 1.1
