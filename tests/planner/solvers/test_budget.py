"""What a search may spend: wholes end by the clock, parts by counted work."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.solvers import budget
from planner.solvers.budget import Budget, OutOfTimeError, check_time, part_of_current, under


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(budget, "now_s", clock)
    return clock


def test_a_whole_ends_by_the_clock_and_not_by_work(clock: Clock) -> None:
    whole = Budget(5.0)
    whole.spend(20.0)
    assert not whole.is_over
    assert whole.left_s == 0.0
    clock.now_s += 5.1
    assert whole.is_over


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
    assert part.allows(0.4)  # 4 seconds by the clock for one of work: 4 more are kept for the reserve
    assert not part.allows(0.6)
    assert whole.allows(1.4)


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
