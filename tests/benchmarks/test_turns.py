from __future__ import annotations

import gc

from benchmarks.turns import WARM_UP, by_turns, medians, turns


def test_each_has_a_turn_in_each_round_in_changing_order() -> None:
    between: list[int] = []
    order = list(turns("ab", 2, 1, between=lambda: between.append(0)))
    assert order == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert len(between) == 3
    assert by_turns(3, {"a": lambda: 1, "b": lambda: 2}) == {"a": [1, 1, 1], "b": [2, 2, 2]}


def test_medians_leave_out_what_warms_up_and_what_is_waited_for() -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds
        assert not gc.isenabled()

    lasts = iter([100.0] * WARM_UP + [1.0, 2.0, 9.0])
    sides = {"a": lambda: spend(next(lasts)), "b": lambda: spend(3.0)}
    (found,) = medians(sides, 3, lambda: spend(50.0), (lambda: now,))
    assert found == {"a": 2.0, "b": 3.0}
    assert gc.isenabled()
