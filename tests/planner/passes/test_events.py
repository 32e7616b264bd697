"""The rules that everybody shares who takes a program step by step."""

from __future__ import annotations

import random

import pytest

from planner.ir.schedule import COMPUTE, Action, Op, Pipeline, StageGraph, dependencies
from planner.passes.events import NOT_YET, RankRows, in_order
from planner.schedules import names, schedule, traits
from tests.planner.random_programs import random_pipeline


class Ranks(RankRows):
    """Four ranks that note who was woken."""

    def __init__(self) -> None:
        super().__init__(4)
        self.woken: list[tuple[int, float]] = []

    def wake(self, rank: int, at: float) -> None:
        self.woken.append((rank, at))


def test_the_last_rank_to_come_begins_what_several_do_and_wakes_the_others_once() -> None:
    ranks = Ranks()
    assert [ranks.meet("sum", rank, 3, at) for rank, at in ((2, 5.0), (0, 1.0))] == [NOT_YET, NOT_YET]
    assert ranks.woken == []
    assert ranks.meet("sum", 3, 3, 4.0) == 5.0  # whoever comes last in time, not in order
    assert ranks.woken == [(2, 4.0), (0, 4.0)]
    assert ranks.meet("sum", 2, 3, 9.0) == 5.0
    assert len(ranks.woken) == 2
    assert ranks.meet("other sum", 3, 3, 4.0) == NOT_YET


@pytest.mark.parametrize("name", [name for name in names() if traits(name).stages_per_position == 1])
def test_all_actions_come_after_what_they_depend_on(name: str) -> None:
    pipeline = random_pipeline(random.Random(name), name, StageGraph.chain(3, 5), ())
    rows = schedule(name)(pipeline).rows
    order = in_order([[action for action in row if action.op in COMPUTE] for row in rows], pipeline)
    assert order is not None
    place = {(action.stage, action.op, action.microbatch): number for number, action in enumerate(order)}
    assert len(place) == sum(action.op in COMPUTE for row in rows for action in row)
    for number, action in enumerate(order):
        for group in dependencies(action, pipeline.stages):
            before = [place[key] for a in group if (key := (a.stage, a.op, a.microbatch)) in place]
            assert not before or max(before) < number


def test_rows_that_wait_for_one_another_have_no_order() -> None:
    rows = [[Action(0, Op.FORWARD, 0), Action(0, Op.BACKWARD, 0), Action(0, Op.FORWARD, 1), Action(0, Op.BACKWARD, 1)]]
    rows += [[Action(1, Op.FORWARD, m) for m in range(2)] + [Action(1, Op.BACKWARD, m) for m in range(2)]]
    assert in_order(rows, Pipeline(StageGraph.chain(2, 2))) is None
