"""Like stages: balanced as an exhaustive search would; placed on whole hosts; within what is asked for."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from benchmarks.scale import scale_profile
from planner.costs.cost_model import CostModel
from planner.ir.problem import Problem
from planner.solvers.best_first.graph_cuts import cuts_of
from planner.solvers.best_first.like_stages import ColumnDevices, LikeStages, balanced_places, placed
from planner.solvers.best_first.priced_groups import Freedom, GroupPrices
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import DevicePool, micro_batches, pools

HOSTS = tuple(DevicePool("fast", (f"n{h}",), 1, tuple(range(4 * h, 4 * h + 4))) for h in range(4))


@pytest.mark.parametrize(
    ("columns", "stages"),
    [
        ([ColumnDevices((8,)), ColumnDevices((8,))], ((4, 4, 0, 0), (0, 0, 4, 4))),
        ([ColumnDevices((16,), 2)], ((2, 2, 2, 2), (2, 2, 2, 2))),
        ([ColumnDevices((3,)), ColumnDevices((4,)), ColumnDevices((1,))], ((3, 0, 0, 0), (0, 4, 0, 0), (1, 0, 0, 0))),
        ([ColumnDevices((16,)), ColumnDevices((1,))], None),
    ],
)
def test_columns_are_on_whole_hosts_and_blocks_share_them(columns: list[ColumnDevices], stages: object) -> None:
    assert placed(columns, HOSTS) == stages


def test_the_largest_cost_of_a_stage_is_as_small_as_of_any_cuts() -> None:
    draw = random.Random(1)
    for _ in range(50):
        last = draw.randint(2, 7)
        stages = draw.randint(1, 4)
        costs = [np.array([[draw.random() for _ in range(last + 1)] for _ in range(last + 1)]) for _ in range(stages)]
        every = [(0, *inner, last) for inner in combinations(range(1, last), stages - 1)]
        worst = [max(costs[s][a, b] for s, (a, b) in enumerate(pairwise(cuts))) for cuts in every]
        found = balanced_places(costs)
        if not every:
            assert found is None
        else:
            assert found is not None
            assert max(costs[s][a, b] for s, (a, b) in enumerate(pairwise(found))) == min(worst)


def a_space(problem: Problem, micro_batch: int) -> LikeStages:
    cost_model = CostModel(problem.profile)
    freedom = Freedom.of(problem)
    batches = micro_batches(problem, micro_batch)
    return LikeStages(
        GroupPrices(problem, cost_model, pools(problem), cuts_of(cost_model), batches, freedom), Budget(60.0)
    )


@pytest.mark.parametrize("asked", [{"max_stages": 2}, {"max_stages": 1}, {"allow": ()}, {"recompute": "always"}])
def test_pipelines_of_like_stages_are_as_asked_for(asked: dict[str, object]) -> None:
    problem = Problem(scale_profile(12, 16), 64, **{"confidence": 0.0, **asked})  # type: ignore[arg-type]  # fields by name
    space = a_space(problem, 8)
    pipelines = space.pipelines
    assert pipelines
    for counts in (placed(pipeline.columns, space.prices.pools) for pipeline in pipelines):
        assert counts is not None
        assert len(counts) <= (problem.max_stages or 16)
        assert all(sum(own) == 1 for own in counts) or problem.allow
        assert (np.sum(counts, axis=0) <= [len(pool.ranks) for pool in space.prices.pools]).all()


def test_of_like_stages_there_are_as_many_as_devices_allow_and_each_kind_comes_first() -> None:
    space = a_space(Problem(scale_profile(12, 16, 2), 64, confidence=0.0), 8)
    first_kinds = set[int]()
    several = [pipeline for pipeline in space.pipelines if len({column.devices for column in pipeline.columns}) > 1]
    for pipeline in several:
        devices = [column.devices for column in pipeline.columns]
        alike = dict.fromkeys(devices)
        assert len(alike) == 2  # of one kind all alike
        assert [*dict.fromkeys(each.index(max(each)) for each in devices)] in ([0, 1], [1, 0])
        for column in alike:
            kind = column.index(max(column))
            assert devices.count(column) == 8 // column[kind]
        first_kinds.add(devices[0].index(max(devices[0])))
    assert first_kinds == {0, 1}


def test_the_first_stage_of_a_block_ends_where_its_part_of_the_work_is_done() -> None:
    space = a_space(Problem(chain_profile(12, 4, loss_s=1e-3), 64), 8)
    work_s = space._work_s[space.chain]
    for stages, ends in space._parts.items():
        for first, last in combinations(range(len(work_s)), 2):
            part_s = work_s[first] + (work_s[last] - work_s[first]) / stages
            expected = next((place for place, before_s in enumerate(work_s) if before_s >= part_s), len(work_s) - 1)
            assert ends[first, last] == expected
