"""Schedules of token slices: legal, free of deadlock, and as fast as formulas say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from planner import schedules
from planner.extras.token_slices.order import can_slice
from planner.ir.errors import IllegalProgramError, UsageError
from planner.ir.schedule import Action, Op, Pipeline, Schedule, StageGraph, dependencies
from planner.passes import validate
from planner.schedules import schedule
from tests.planner.schedules.simulated import Simulated, lowered, uniform

SLICEABLE = [name for name in schedules.names() if can_slice(name)]


def pipeline(stages: int, micro_batches: int, slices: int) -> Pipeline:
    return Pipeline(replace(StageGraph.chain(stages, micro_batches * slices), parts=slices))


def text(order: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in order.rows]


def test_the_pictures_in_the_docstrings_are_what_is_made() -> None:
    assert text(schedule("gpipe")(pipeline(2, 2, 2))) == [
        "0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2",
        "1F0 1F1 1F2 1F3 1B1 1B0 1B3 1B2",
    ]
    assert text(schedule("1f1b")(pipeline(2, 2, 2))) == [
        "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2",
        "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2",
    ]


@pytest.mark.parametrize("name", SLICEABLE)
def test_slices_of_any_number_are_ordered_legally_and_end_under_rendezvous(name: str) -> None:
    for stages, batches, slices in product((1, 2, 4), (1, 2, 5), (2, 3, 7)):
        validate(lowered(pipeline(stages, batches, slices), name), held_sends=True)


def test_a_slice_waits_for_the_one_before_and_goes_back_behind_the_one_after() -> None:
    stages = pipeline(2, 2, 3).stages
    needs = [dependencies(Action(0, Op.FORWARD, m), stages) for m in range(6)]
    before = [frozenset({Action(0, Op.FORWARD, m - 1)}) in found for m, found in enumerate(needs)]
    assert before == [False, True, True, False, True, True]
    back = [dependencies(Action(1, Op.BACKWARD, m), stages) for m in range(6)]
    after = [any(Action(1, Op.BACKWARD, m + 1) in group for group in found) for m, found in enumerate(back)]
    assert after == [True, True, False, True, True, False]


@pytest.mark.parametrize(("first", "second"), [("0F0", "0F1"), ("0B1", "0B0")])
def test_slices_in_another_order_are_illegal(first: str, second: str) -> None:
    order = schedule("gpipe")(pipeline(1, 1, 2))
    swapped = {Action.parse(first): Action.parse(second), Action.parse(second): Action.parse(first)}
    rows = tuple(tuple(swapped.get(action, action) for action in row) for row in order.rows)
    with pytest.raises(IllegalProgramError, match="before"):
        validate(lowered(pipeline(1, 1, 2), Schedule(rows)))


@pytest.mark.parametrize("slices", [1, 2, 4, 8])
def test_gpipe_of_equal_slices_takes_as_long_as_of_as_many_micro_batches(slices: int) -> None:
    p = 4
    batches = 2
    program = lowered(pipeline(p, batches, slices), "gpipe")
    ran = Simulated.of(program).run(uniform(1 / slices, 1 / slices, 0.0), 0.0)
    assert ran.step == pytest.approx(2 * (batches * slices + p - 1) / slices)


@pytest.mark.parametrize("name", [name for name in schedules.names() if not can_slice(name)])
def test_other_schedules_refuse_slices_and_name_some_that_do_not(name: str) -> None:
    with pytest.raises(UsageError, match="cannot order token slices") as refused:
        schedule(name)(pipeline(2, 2, 2))
    assert "--schedule gpipe" in refused.value.remedies
