"""The table of paces: what every pipeline of its columns says; placed on whole hosts; within what is asked for."""

from __future__ import annotations

import random
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from benchmarks.scale import scale_profile
from planner.costs.cost_model import CostModel
from planner.ir.problem import Problem
from planner.solvers.best_first.graph_cuts import cuts_of
from planner.solvers.best_first.pace_table import (
    MOST_STATES,
    Column,
    Entries,
    PaceTable,
    Places,
    balanced_places,
    placed,
    units_of,
)
from planner.solvers.best_first.priced_groups import Freedom, GroupPrices
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import DevicePool, micro_batches, pools


def a_column(devices: tuple[int, ...], num_places: int, draw: random.Random) -> Column:
    """Of random stages, some of which there are not."""

    def numbers(least: float, most: float) -> np.ndarray:
        return np.array([[draw.uniform(least, most) for _ in range(num_places)] for _ in range(num_places)])

    is_stage = np.triu(numbers(0.0, 1.0) < 0.8, 1)
    return Column(
        places=Places(devices),
        takes=np.array(devices),
        trip_s=numbers(1.0, 4.0),
        pace_s=np.where(is_stage, numbers(0.5, 2.0), np.inf),
        tail_s=numbers(0.0, 1.0),
        window=np.floor(numbers(1.0, 12.0)),
    )


def least_trip_s(columns: list[Column], limits: tuple[int, ...], pace_s: float, num_places: int) -> float:
    """Over every way to cut the chain, and every column for each part."""
    least_s = np.inf
    for inner in (each for n in range(num_places - 1) for each in combinations(range(1, num_places - 1), n)):
        ends = [*pairwise((0, *inner, num_places - 1))]
        for chosen in product(columns, repeat=len(ends)):
            if (sum(column.takes for column in chosen) > np.array(limits)).any():
                continue
            trip_s = 0.0
            for column, end in reversed([*zip(chosen, ends, strict=True)]):
                trip_s += column.trip_s[end]
                if column.pace_s[end] > pace_s or trip_s > column.window[end] * pace_s:
                    trip_s = np.inf
            least_s = min(least_s, trip_s)
    return least_s


@pytest.mark.parametrize("seed", range(40))
def test_the_least_trip_under_a_pace_is_that_of_the_best_of_all_pipelines(seed: int) -> None:
    draw = random.Random(seed)
    num_places, limits = draw.randint(2, 5), draw.choice([(3,), (5,), (2, 3)])
    sizes = [devices for devices in product(*(range(limit + 1) for limit in limits)) if any(devices)]
    columns = [a_column(devices, num_places, draw) for devices in draw.sample(sizes, min(3, len(sizes)))]
    entries = Entries.of(columns, limits, most_pace_s=2.0, num_microbatches=8)
    for pace_s in (0.8, 1.2, 1.6, 2.0):
        expected_s = least_trip_s(columns, limits, pace_s, num_places)
        pipeline = entries.pipeline(pace_s)
        assert (pipeline is None) == np.isinf(expected_s)
        if pipeline is not None:
            assert pipeline.trip_s == pytest.approx(expected_s)


HOSTS = tuple(DevicePool("fast", (f"n{h}",), 1, tuple(range(4 * h, 4 * h + 4))) for h in range(4))


@pytest.mark.parametrize(
    ("columns", "stages"),
    [
        ([Places((8,)), Places((8,))], ((4, 4, 0, 0), (0, 0, 4, 4))),
        ([Places((16,), 2)], ((2, 2, 2, 2), (2, 2, 2, 2))),
        ([Places((3,)), Places((4,)), Places((1,))], ((3, 0, 0, 0), (0, 4, 0, 0), (1, 0, 0, 0))),
        ([Places((16,)), Places((1,))], None),
    ],
)
def test_columns_are_on_whole_hosts_and_blocks_share_them(columns: list[Places], stages: object) -> None:
    assert placed(columns, HOSTS) == stages


@pytest.mark.parametrize("counts", [(1,), (7,), (64,), (1024,), (128, 128), (24, 40, 80), (12, 5)])
def test_devices_are_told_apart_in_parts_of_hosts_or_whole_ones(counts: tuple[int, ...]) -> None:
    units = units_of(counts, 8)
    assert all(8 % unit == 0 or unit % 8 == 0 or unit == count for unit, count in zip(units, counts, strict=True))
    assert np.prod([count // unit + 1 for unit, count in zip(units, counts, strict=True)]) <= MOST_STATES


def test_the_largest_cost_of_a_stage_is_as_small_as_of_any_cuts() -> None:
    draw = random.Random(1)
    for _ in range(50):
        last, stages = draw.randint(2, 7), draw.randint(1, 4)
        costs = [np.array([[draw.random() for _ in range(last + 1)] for _ in range(last + 1)]) for _ in range(stages)]
        every = [(0, *inner, last) for inner in combinations(range(1, last), stages - 1)]
        worst = [max(costs[s][a, b] for s, (a, b) in enumerate(pairwise(cuts))) for cuts in every]
        found = balanced_places(costs)
        if not every:
            assert found is None
        else:
            assert found is not None
            assert max(costs[s][a, b] for s, (a, b) in enumerate(pairwise(found))) == min(worst)


def a_table(problem: Problem, micro_batch: int) -> PaceTable:
    cost_model, freedom = CostModel(problem.profile), Freedom.of(problem)
    batches = micro_batches(problem, micro_batch)
    return PaceTable(
        GroupPrices(problem, cost_model, pools(problem), cuts_of(cost_model), batches, freedom), Budget(60.0)
    )


@pytest.mark.parametrize("asked", [{"max_stages": 2}, {"max_stages": 1}, {"allow": ()}, {"recompute": "always"}])
def test_pipelines_of_the_table_are_as_asked_for(asked: dict[str, object]) -> None:
    problem = Problem(scale_profile(12, 16), 64, **asked)  # type: ignore[arg-type]  # fields by name
    table = a_table(problem, 8)
    pipelines = [*table.pipelines, *table.alike]
    assert pipelines
    for counts in (placed(pipeline.columns, table.prices.pools) for pipeline in pipelines):
        assert counts is not None
        assert len(counts) <= (problem.max_stages or 16)
        assert all(sum(own) == 1 for own in counts) or problem.allow
        assert (np.sum(counts, axis=0) <= [len(pool.ranks) for pool in table.prices.pools]).all()


def test_of_like_stages_there_are_as_many_as_devices_allow_and_each_kind_comes_first() -> None:
    table, first_kinds = a_table(Problem(scale_profile(12, 16, 2), 64), 8), set[int]()
    for pipeline in table.alike:
        devices = [column.devices for column in pipeline.columns]
        alike = dict.fromkeys(devices)
        assert len(alike) == 2  # of one kind all alike
        assert [*dict.fromkeys(each.index(max(each)) for each in devices)] in ([0, 1], [1, 0])
        for column in alike:
            kind = column.index(max(column))
            assert devices.count(column) == 8 // column[kind]
        first_kinds.add(devices[0].index(max(devices[0])))
    assert first_kinds == {0, 1}
