"""What a search may spend: counted work, and no more time by the clock; and its plan is the same whatever the clock.

Fast or slow, the same problem has the same plan, byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from benchmarks.scale import scale_profile
from planner.ir.codec import dumps
from planner.ir.errors import InfeasibleError
from planner.ir.problem import AUTO, MEMORY, Problem
from planner.ir.profile import Profile
from planner.solvers import SearchProgress, baselines, budget, names, solver
from planner.solvers.budget import Budget, OutOfTimeError, check_time, part_of_current, under
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from tests.planner.networks import plain, priced
from tests.planner.solvers.clocks import Ticking, by_clock


@pytest.fixture(autouse=True)
def counted_work() -> None:
    """Here clocks matter."""


class Clock:
    """Seconds that pass when they are told to, and a few whenever somebody looks."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(budget, "now_s", clock)
    return clock


def test_a_whole_ends_by_work_and_on_a_slow_machine_by_the_clock(clock: Clock) -> None:
    whole = Budget(5.0)
    slow = Budget(5.0)
    whole.spend(4.9)
    assert not whole.is_over
    whole.spend(0.2)
    assert whole.is_over
    assert whole.left_s == 0.0
    clock.now_s += 4.9
    assert not slow.is_over
    clock.now_s += 0.2
    assert slow.is_over


def test_what_a_whole_keeps_for_its_end_is_kept_of_its_work(clock: Clock) -> None:
    whole = Budget(5.0)
    whole.reserve(2.0)
    assert whole.allows(3.0)
    assert whole.part().allows(3.0)
    assert not whole.allows(3.1)
    assert not whole.part().allows(3.1)


def test_a_part_ends_by_work_however_slow_the_clock(clock: Clock) -> None:
    whole = Budget(100.0)
    part = whole.part(2.0)
    clock.now_s += 50.0
    assert not part.is_over
    assert part.allows(2.0)
    assert not part.allows(2.1)
    whole.spend(2.1)
    assert part.is_over
    assert not whole.is_over


def test_a_part_ends_with_its_whole_and_within_the_part_it_is_of(clock: Clock) -> None:
    whole = Budget(10.0)
    part = whole.part(4.0).part(9.0)
    assert part.limit_s == 4.0
    clock.now_s += 11.0
    assert part.is_over


def test_a_part_may_end_by_the_clock_before_its_whole(clock: Clock) -> None:
    whole = Budget(10.0)
    part = whole.part(until_s=4.0)
    clock.now_s += 3.9
    assert not part.is_over
    clock.now_s += 0.2
    assert part.is_over
    assert part.part(1.0).is_over
    assert not whole.is_over


def test_what_is_kept_in_reserve_is_counted_at_the_pace_of_the_machine(clock: Clock) -> None:
    whole = Budget(10.0)
    part = whole.part(reserve_s=1.0)
    whole.spend(1.0)
    clock.now_s += 4.0
    assert part.allows(0.5)  # 4 seconds by the clock for one of work: 4 more are kept for the reserve
    assert not part.allows(0.6)
    assert whole.allows(1.5)


@pytest.mark.parametrize("ask", [check_time, lambda: part_of_current(1.0).require()])
def test_what_runs_under_a_budget_ends_with_it(clock: Clock, ask: Callable[[], None]) -> None:
    whole = Budget(1.0)
    with under(whole):
        ask()
        clock.now_s += 2.0
        with pytest.raises(OutOfTimeError):
            ask()
    check_time()  # nothing to end


def test_turns_of_loops_end_a_part(clock: Clock) -> None:
    with under(Budget(60.0).part(1e-3)):
        for _ in range(10):
            check_time(0.9e-4)
        check_time(0.9e-4)
        with pytest.raises(OutOfTimeError):
            check_time(0.9e-4)


def test_a_budget_that_is_made_under_another_is_a_part_of_it(clock: Clock) -> None:
    whole = Budget(10.0)
    with under(whole):
        assert part_of_current(10.0) is whole
        part_of_current(3.0).spend(1.0)
    assert whole.work_s == 1.0


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
    "unlike devices": lambda: Problem(unlike(8), 8, confidence=0.0),
    "after hints": lambda: Problem(unlike(12), 16, time_limit_s=0.05, recompute=AUTO, confidence=0.0),
    "least memory": lambda: Problem(unlike(3, (1.0, 0.6)), 2, objective=MEMORY, confidence=0.0),
    "a stream": lambda: Problem(unlike(3, (1.0, 0.6)), 2, schedules=("forward",), confidence=0.0),
    "layouts": lambda: Problem(image(), 4, allow=EVERYTHING, confidence=0.0),
    "layouts in little time": lambda: Problem(image(), 8, allow=EVERYTHING, time_limit_s=0.1, confidence=0.0),
    "a plan without ties": lambda: Problem(unlike(6), 16, confidence=0.8),
    "an integer program": lambda: Problem(unlike(4), 4, confidence=0.0),
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


class Halting:
    """A clock that stands still, but for so many jumps at random moments."""

    def __init__(self, jumps_s: Sequence[float], num_asked: int, seed: int) -> None:
        at = random.Random(seed).sample(range(num_asked), len(jumps_s))
        self.jump_s = dict(zip(at, jumps_s, strict=True))
        self.num_asked = 0
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.jump_s.get(self.num_asked, 0.0)
        self.num_asked += 1
        return self.now_s


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("size", "batch", "limit_s"), [((24, 16, 1), 256, 0.4), ((200, 1024, 2), 1024, 1.0)], ids=["few", "many"]
)
def test_three_searches_that_end_by_their_limit_write_the_same_bytes(
    size: tuple[int, int, int], batch: int, limit_s: float
) -> None:
    """What a machine as fast as the reference may do: it takes no longer than what is counted, here and there."""
    problem = Problem(scale_profile(*size), batch, time_limit_s=limit_s, confidence=0.0)
    texts = set()
    num_asked = 0
    for seed in range(3):
        clock = Halting([limit_s / 8] * 4, num_asked, seed) if num_asked else Ticking(1e-12)
        with by_clock(clock):
            plan = solver("best-first")(problem, None)
        assert plan.search.status == "time limit"
        num_asked = num_asked or clock.num_asked
        texts.add(dumps(plan))
    assert len(texts) == 1


def test_a_plan_is_the_same_in_another_process() -> None:
    """There texts have other hashes, and the clock is faster."""
    assert other_process(1e-7, "2") == f"{digest(1e-12)}\n"


def other_process(step_s: float, hash_seed: str) -> str:
    script = f"from tests.planner.solvers.test_budget import digest; print(digest({step_s}))"
    command = [sys.executable, "-c", script]
    home = Path(__file__).parents[3]
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


def test_the_first_plan_is_told_at_once_and_kept_at_ctrl_c() -> None:
    told: list[SearchProgress] = []

    def stop(at: SearchProgress) -> None:
        told.append(at)
        raise KeyboardInterrupt

    plan = solver("best-first")(Problem(scale_profile(24, 16), 256, confidence=0.0), stop)
    first = told[0]
    assert plan.search.status == "stopped"
    assert (first.num_stages, first.num_devices) == (len(plan.decision.stages), len(plan.decision.used_ranks))
    assert first.best_s == plan.prediction.step_s
    assert 0 < first.bound_s <= first.best_s
    assert first.gap == first.best_s / first.bound_s - 1


def test_little_is_done_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on with the work that is counted: nothing large is begun that the limit does not allow."""
    done: list[Budget] = []

    def clock() -> float:
        return done[0].work_s if done else 0.0

    monkeypatch.setattr(budget, "now_s", clock)
    whole = Budget(0.5)
    done.append(whole)
    with budget.under(whole):
        solver("best-first")(Problem(unlike(40), 64, time_limit_s=0.5, confidence=0.0), None)
    assert whole.work_s <= 0.5 * 1.1


PUBLISHED = tuple(name for name in baselines() if name not in ("one-device", "data-parallel", "even-split", "dryden"))


@pytest.mark.parametrize("name", [name for name in names() if name != "span-ilp"])
@pytest.mark.parametrize("time_limit_s", [0.0, 1.0, 4.0])
def test_every_solver_ends_in_time_with_a_plan(
    name: str, time_limit_s: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes a tenth of a second to simulate, and each look at the clock a little."""
    evaluate = Evaluator.evaluate

    def slowly(self: Evaluator, *arguments: Any, **named: Any) -> Evaluation:
        clock.now_s += 0.1
        return evaluate(self, *arguments, **named)

    monkeypatch.setattr(Evaluator, "evaluate", slowly)
    clock.step_s = 1e-5
    try:
        found = solver(name)(
            Problem(chain_profile(8, 4, memory_bytes=2**40), 48, time_limit_s=time_limit_s, confidence=0.0), None
        )
    except InfeasibleError:
        assert time_limit_s == 0.0
        assert name in PUBLISHED
    else:
        assert found.prediction.step_s < inf
    assert clock.now_s - 100.0 <= 1.1 * time_limit_s + 1.0
