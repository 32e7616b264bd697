"""The next batch, told while this one is trained on: by a run's own feed, and by a script's loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from halopipe.data.ahead import UNTOLD, AheadSource, Announced, Upcoming
from halopipe.data.sources import Position
from halopipe.training.session import Execution
from planner.ir.errors import StageFailedError
from planner.ir.graph import SAMPLE, TensorSpec
from planner.ir.plan import Plan
from runtime.pipeline.microbatches import Batch, InputSpecs
from runtime.sparse.preparing import Preparing
from tests.halopipe import cloudy
from tests.halopipe.cloudy import Clouds
from tests.halopipe.training.sessions import together


class Numbers:
    """A feed of three batches."""

    agreement = None

    def __init__(self) -> None:
        self.position = Position(0, 0, 0)

    def take(self) -> object | None:
        if self.position.batches == 3:
            return None
        self.position = self.position.after(0, 1)
        return self.position.batches


def test_each_batch_is_told_once_before_it_is_needed_and_the_position_is_that_of_the_one_given() -> None:
    told: list[object] = []
    feed = AheadSource(Numbers(), told.append)  # type: ignore[arg-type]
    seen = []
    while (batch := feed.take()) is not None:
        seen.append((batch, feed.position.batches, list(told)))
    assert seen == [(1, 1, [1, 2]), (2, 2, [1, 2, 3]), (3, 3, [1, 2, 3])]
    assert feed.take() is None


def test_a_loop_is_given_each_batch_when_the_next_one_is_known() -> None:
    upcoming, asked, seen = Upcoming(True), list[int](), list[object]()

    def batches() -> Iterator[int]:
        for number in range(3):
            asked.append(number)
            yield number

    for batch in upcoming.ahead(batches()):
        seen.append((batch, list(asked), upcoming.take(), upcoming.take()))
    assert seen == [(0, [0, 1], (1,), ()), (1, [0, 1, 2], (2,), ()), (2, [0, 1, 2], (), ())]
    assert list(upcoming.ahead([])) == []
    assert list(upcoming.ahead([None])) == [None]


def test_a_plan_that_prepares_nothing_ahead_is_given_batches_as_they_come() -> None:
    upcoming, asked = Upcoming(False), iter(range(3))
    for batch in upcoming.ahead(asked):
        assert upcoming.take() == ()
        if batch == 1:
            break
    assert next(asked) == 2


@pytest.mark.parametrize("warns", [True, False])
def test_a_loop_that_tells_nothing_hears_once_what_it_loses(warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    upcoming = Upcoming(True, warns)
    for _ in range(4):
        assert upcoming.take() == ()
    assert [record[2] for record in caplog.record_tuples] == [UNTOLD] * warns
    told = Upcoming(True)
    for _ in told.ahead("ab"):
        told.take()
        told.take()
    assert len(caplog.records) == warns


INPUTS = InputSpecs(
    {"x": TensorSpec((SAMPLE, "dim1"), (4, 2), "float32"), "y": TensorSpec((SAMPLE,), (4,), "int64")}, 4
)


def pair(first: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    x = torch.arange(8, dtype=dtype).view(4, 2)
    x[0, 0] = first
    return (x,), (torch.arange(4),)


def test_what_was_announced_is_recognised_by_all_its_numbers_and_once() -> None:
    announced, item = Announced(), pair()
    batch = announced.announce(item, INPUTS, (2, 2))
    assert announced.recognised(pair()) is batch
    assert announced.recognised(pair()) is None
    announced.announce(item, INPUTS, (2, 2))
    item[0][0][0, 0] = 9.0  # what is prepared is a copy
    assert announced.recognised(item) is None
    nan, halves = pair(float("nan")), [pair(), pair()]
    for told, came in ((pair(), pair(1.0)), (pair(), pair(dtype=torch.float64)), (pair(), halves), (nan, nan)):
        announced.announce(told, INPUTS, (2, 2))
        assert announced.recognised(came) is None
    batch = announced.announce(halves, INPUTS, (4, 4))
    assert announced.recognised([pair(), pair()]) is batch


AHEAD = {"cuts": [], "ranks": [(0, 1)]}


def prepares(plan: Plan, is_ahead: bool = True) -> Plan:
    return replace(plan, decision=replace(plan.decision, prepares_next_step=is_ahead))


def clouds_of(first: int, fault: str = "") -> tuple[tuple[Tensor, ...], Tensor]:
    (coordinates, features, counts), targets = default_collate(
        [Clouds(per_site=True, fault=fault)[first + n] for n in range(4)]
    )
    return (coordinates, features.double(), counts), targets


def losses(execution: Execution, is_told: bool, changed: bool = False) -> list[float]:
    """Of a script's own loop over four batches."""
    batches = [clouds_of(first) for first in range(4)]
    found = []
    for batch in execution.ahead(batches) if is_told else batches:
        if changed:
            batch[0][1].mul_(2)
        found.append(execution.step(batch))
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of all ranks: batches that were begun, and those that were told ahead."""
    found: list[str] = []
    own, expect = Preparing._new, Preparing.expect

    def new(self: Preparing, raw: Batch) -> object:
        found.append("begun")
        return own(self, raw)

    def expected(self: Preparing, raw: Batch, rank: int) -> None:
        found.append("told")
        expect(self, raw, rank)

    monkeypatch.setattr(Preparing, "_new", new)
    monkeypatch.setattr(Preparing, "expect", expected)
    return found


@pytest.mark.parametrize("changed", [False, True])
def test_a_scripts_loop_has_the_next_batch_prepared_and_gets_the_same_bits(
    changed: bool, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plan = cloudy.plan(**AHEAD)
    expected = together(plan, lambda execution: losses(execution, True, changed))
    assert "told" not in calls
    calls.clear()
    assert together(prepares(plan), lambda execution: losses(execution, True, changed)) == expected
    begun = 4 + 3 * changed  # by each rank; what was changed since it was told is begun anew
    assert (calls.count("told"), calls.count("begun")) == (2 * 3, 2 * begun)
    assert UNTOLD not in caplog.text
    calls.clear()
    assert together(prepares(plan), lambda execution: losses(execution, False, changed)) == expected
    assert (calls.count("told"), calls.count("begun")) == (0, 2 * 4)
    assert caplog.text.count(UNTOLD) == 1


def test_clouds_that_no_network_takes_are_refused_at_their_own_step() -> None:
    def run(execution: Execution) -> list[object]:
        found: list[object] = []
        for batch in execution.ahead([clouds_of(0), clouds_of(0, "nan")]):
            if found:
                with pytest.raises(StageFailedError, match="NaN or infinite"):
                    execution.step(batch)
            else:
                found.append(execution.step(batch))
        return found

    ((loss,),) = together(prepares(cloudy.plan(cuts=[])), run)
    assert loss > 0
