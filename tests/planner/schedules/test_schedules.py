"""Every schedule: legal on any DAG, as its picture says, and as long as published event simulations say."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from planner.ir.errors import UnknownNameError
from planner.ir.schedule import Action, Edge, Op, Pipeline, Schedule, StageGraph, dependencies
from planner.schedules import names, schedule

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "schedules.csv"
CHECKED = ("1f1b", "gpipe")


def rows_of(name: str) -> list[dict[str, str]]:
    with REFERENCE.open(newline="", encoding="utf-8") as stream:
        return [row for row in csv.DictReader(stream) if row["schedule"] == name]


def run(order: Schedule, stages: StageGraph, costs: dict[Op, float], transfer_s: float) -> dict[Action, float]:
    """When each action ends, if every stage has its own device and messages take ``transfer_s``."""
    end: dict[Action, float] = {}
    free, at = [0.0] * stages.num_stages, [0] * stages.num_stages
    while any(at[s] < len(row) for s, row in enumerate(order.rows)):
        before = list(at)
        for s, row in enumerate(order.rows):
            while at[s] < len(row):
                needs = [[a for a in alternatives if a in end] for alternatives in dependencies(row[at[s]], stages)]
                if not all(needs):
                    break
                ready = max((end[a] + (transfer_s if a.stage != s else 0.0) for need in needs for a in need), default=0)
                end[row[at[s]]] = free[s] = max(free[s], ready) + costs[row[at[s]].op]
                at[s] += 1
        assert at != before, "deadlock"
    return end


def in_flight(row: tuple[Action, ...]) -> int:
    """The most micro-batches that are between forward and backward at once."""
    count = most = 0
    for action in row:
        count += {Op.FORWARD: 1, Op.BACKWARD: -1, Op.BACKWARD_WEIGHT: -1}.get(action.op, 0)
        most = max(most, count)
    return most


def random_stages(rng: random.Random) -> StageGraph:
    """A DAG in which every stage but the last is read by a later one."""
    num_stages = rng.randint(1, 6)
    pairs = {(s, rng.randint(s + 1, num_stages - 1)) for s in range(num_stages - 1)}
    pairs |= {(s, t) for s in range(num_stages) for t in range(s + 1, num_stages) if rng.random() < 0.3}
    return StageGraph(num_stages, rng.randint(1, 7), tuple(Edge(s, t, ()) for s, t in sorted(pairs)))


def pictures(name: str) -> Iterator[str]:
    module = __import__(schedule(name).__module__, fromlist=["__doc__"])
    yield from (line.strip() for line in (module.__doc__ or "").splitlines() if "F0 " in line)


def test_the_registry_has_the_published_names() -> None:
    assert set(CHECKED) <= set(names())
    with pytest.raises(UnknownNameError, match="no schedule '1f2b'"):
        schedule("1f2b")


@pytest.mark.parametrize("name", names())
def test_the_picture_in_the_docstring_is_what_the_schedule_does(name: str) -> None:
    drawn = list(pictures(name))
    num_microbatches = sum("F" in text for text in drawn[0].split())
    order = schedule(name)(Pipeline(StageGraph.chain(len(drawn), num_microbatches)))
    assert [" ".join(map(str, row)) for row in order.rows] == drawn


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", range(40))
def test_every_dag_is_run_to_its_end_with_every_action_once(name: str, seed: int) -> None:
    stages = random_stages(random.Random(seed))
    order = schedule(name)(Pipeline(stages))
    end = run(order, stages, dict.fromkeys(Op, 1.0), 0.5)
    assert len(end) == 2 * stages.num_stages * stages.num_microbatches == sum(map(len, order.rows))
    assert all(action.stage == s for s, row in enumerate(order.rows) for action in row)


@pytest.mark.parametrize("name", CHECKED)
def test_times_and_activations_are_the_references(name: str) -> None:
    reference = rows_of(name)
    assert len(reference) > 100
    for row in reference:
        num_stages, num_microbatches = int(row["stages"]), int(row["microbatches"])
        stages = StageGraph.chain(num_stages, num_microbatches)
        order = schedule(name)(Pipeline(stages))
        costs = {Op.FORWARD: float(row["F"]), Op.BACKWARD: float(row["I"]) + float(row["W"])}
        end = run(order, stages, costs, float(Fraction(row["c"])))
        assert max(end.values()) == pytest.approx(float(row["iter_time"])), row
        assert [in_flight(r) for r in order.rows] == [float(n) for n in row["peak_act_per_rank"].split()], row


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_1f1b_keeps_no_more_than_the_stages_downstream(num_stages: int, num_microbatches: int) -> None:
    order = schedule("1f1b")(Pipeline(StageGraph.chain(num_stages, num_microbatches)))
    assert [in_flight(row) for row in order.rows] == [min(num_microbatches, num_stages - s) for s in range(num_stages)]


def test_1f1b_warms_up_by_the_longest_path() -> None:
    branches = StageGraph(5, 9, tuple(Edge(s, t, ()) for s, t in ((0, 1), (1, 2), (2, 4), (0, 3), (3, 4))))
    assert [in_flight(row) for row in schedule("1f1b")(Pipeline(branches)).rows] == [4, 3, 2, 2, 1]
