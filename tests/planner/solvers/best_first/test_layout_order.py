"""Pipelines along the hosts: the least of their kind, on ranks that follow one another."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from planner.costs.cost_model import CostModel
from planner.ir.problem import Problem
from planner.solvers.best_first.layout_bound import GroupTable, TableMaker
from planner.solvers.best_first.ordered_pipelines import OrderedPipelines
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import pools
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import cut_positions
from planner.solvers.layouts.stage import WHOLE
from tests.planner.networks import plain, priced
from tests.planner.solvers.laid_out_plans import EVERYTHING, MADE


def ordered(problem: Problem, size: int) -> OrderedPipelines:
    evaluator = Evaluator(problem, CostModel(problem.profile))
    maker = TableMaker(evaluator, Constraints.of(problem), size, WHOLE, Budget(60.0), 60.0)
    alike = pools(problem)
    tables = {(0, count): maker.table(alike[0].ranks[:count]) for count in range(1, len(alike[0].ranks) + 1)}
    return OrderedPipelines(problem, (alike,), tables, cut_positions(problem.profile.graph), size)


@pytest.mark.parametrize("seed", range(12))
def test_stages_follow_one_another_along_the_hosts_and_each_is_within_one(seed: int) -> None:
    draw = random.Random(seed)
    hosts = draw.choice([("a", "a", "b", "b"), ("a", "b", "c", "d"), ("a", "a", "a", "b", "b", "b")])
    profile = priced(*draw.choice(MADE), speeds=(1.0,) * len(hosts), hosts=hosts, latency_s=1e-6)
    problem = Problem(profile, 8, allow=EVERYTHING, max_stages=draw.choice([0, 2]))
    pipelines = [each for _, each in ordered(problem, draw.choice([1, 2, 4])).by_pace()]
    assert pipelines
    for pipeline in pipelines:
        used = [rank for _, _, ranks, _ in pipeline.stages for rank in ranks]
        assert used == sorted(set(used))
        assert all(len({hosts[rank] for rank in ranks}) == 1 for _, _, ranks, _ in pipeline.stages)
        ends = [0, *(last for _, last, _, _ in pipeline.stages)]
        assert [first for first, _, _, _ in pipeline.stages] == ends[:-1]
        assert ends[-1] == len(profile.graph.layers)
        assert len(pipeline.stages) <= (problem.max_stages or len(hosts))


def every_trip_s(pipelines: OrderedPipelines, num_ranks: int, pace_s: float) -> float:
    """The least F and B of all pipelines whose stages go at a pace, where messages are free: one after another."""
    problem, last = pipelines.problem, pipelines.positions[-1]
    least_s, num_full = math.inf, problem.global_batch // pipelines.size
    for number in range(1, num_ranks + 1):
        for cuts in itertools.combinations(pipelines.positions[1:-1], number - 1):
            for counts in itertools.product(range(1, 3), repeat=number):
                if _hosts_of_two(counts) > num_ranks // 2:
                    continue
                bounds = itertools.pairwise((0, *cuts, last))
                stages = [
                    (table, first, stop)
                    for count, (first, stop) in zip(counts, bounds, strict=True)
                    if isinstance(table := pipelines.tables[0, count], GroupTable)
                ]
                if all(table.step_s[first, stop] <= num_full * pace_s for table, first, stop in stages):
                    least_s = min(least_s, sum(float(table.once_s[first, stop]) for table, first, stop in stages))
    return least_s


def _hosts_of_two(counts: tuple[int, ...]) -> int:
    """How many hosts of two ranks are begun by groups of so many, one after another."""
    used = 0
    for count in counts:
        used += count + (used % 2 if count == 2 else 0)
    return (used + 1) // 2


@pytest.mark.parametrize("seed", range(6))
def test_where_messages_are_free_the_trip_is_the_least_of_all_at_the_pace(seed: int) -> None:
    draw = random.Random(seed)
    made = plain(samples=4, height=draw.choice([16, 32]), filters=draw.choice([(4,), (4, 6)]))
    profile = priced(*made, speeds=(1.0,) * 4, hosts=("a", "a", "b", "b"), latency_s=0.0, bandwidth_bytes_per_s=1e18)
    problem = Problem(profile, 8, allow=EVERYTHING)
    pipelines = ordered(problem, size := draw.choice([1, 2, 4]))
    num_more = problem.global_batch // size - 1
    for num_ranks, pipeline in pipelines.by_pace():
        pace_s = max(float(table.step_s[first, stop]) for first, stop, _, table in pipeline.stages) / (num_more + 1)
        trip_s = pipeline.bound_s - num_more * pace_s
        assert trip_s == pytest.approx(every_trip_s(pipelines, num_ranks, pace_s * (1 + 1e-12)), rel=1e-6)


def test_neighbours_are_on_one_host_where_messages_between_hosts_are_dear() -> None:
    profile = priced(*plain(samples=4, height=32), speeds=(1.0,) * 4, hosts=("a", "a", "b", "b"))
    within, across = profile.cluster.links.values()
    slow = replace(across, latency_s=1.0, points=())
    dear = replace(profile.cluster, links={"within-host": within, "across-hosts": slow})
    problem = Problem(replace(profile, cluster=dear), 4, allow=("sample",))
    for _, pipeline in ordered(problem, 1).by_pace():
        assert len({rank // 2 for _, _, ranks, _ in pipeline.stages for rank in ranks}) == 1
