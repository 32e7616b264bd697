"""Orders of stages that do not depend on one another: all that make a difference are looked at, and no other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import pytest

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.graph import Graph, producer
from planner.ir.problem import Problem
from planner.schedules import names, traits
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.stage_orders import in_every_order
from tests.planner.solvers.instances import asked_of_branches

ONE_A_POSITION = [name for name in names() if traits(name).stages_per_position == 1 and traits(name).trains]


def a_layer_a_stage(seed: int, schedule: str) -> tuple[Problem, Candidate] | None:
    """Stages of one layer each, on a device each; the last has what is left.  None where there are few devices."""
    problem = asked_of_branches(seed)
    graph = problem.profile.graph
    ranks = problem.ranks
    if len(ranks) < 3:
        return None
    draw = random.Random(seed)
    stage_of = tuple(min(stage, len(ranks) - 1) for stage in range(len(graph.layers)))
    windows = tuple(draw.randint(1, 3) for _ in ranks) if traits(schedule).windowed else ()
    groups = tuple((rank,) for rank in draw.sample(ranks, len(ranks)))
    candidate = Candidate(stage_of, groups, ((1,),) * len(ranks), (1,) * 3, schedule, windows)
    return replace(problem, global_batch=3, micro_batch_sizes=(1,)), candidate


def renumbered(graph: Graph, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with its stages in every topological order."""
    index = {layer.name: number for number, layer in enumerate(graph.layers)}
    for order in permutations(range(candidate.num_stages)):
        stage_of = tuple(order.index(stage) for stage in candidate.stage_of)
        reads = [(index[producer(v)], n) for n, layer in enumerate(graph.layers) for v in layer.inputs if v in index]
        if all(stage_of[maker] <= stage_of[reader] for maker, reader in reads):
            groups = tuple(candidate.groups[stage] for stage in order)
            windows = tuple(candidate.windows[stage] for stage in order) if candidate.windows else ()
            yield replace(candidate, stage_of=stage_of, groups=groups, windows=windows)


@pytest.mark.parametrize("schedule", ONE_A_POSITION)
@pytest.mark.parametrize("seed", range(40))
def test_a_step_in_any_order_is_that_of_one_that_is_looked_at(schedule: str, seed: int) -> None:
    if (made := a_layer_a_stage(seed, schedule)) is None:
        return
    problem, candidate = made
    graph = problem.profile.graph
    evaluator = Evaluator(problem, CostModel(problem.profile))

    def steps(candidates: Iterator[Candidate]) -> set[str]:
        return {f"{evaluator.evaluate(one).step_s:.9e}" for one in candidates}

    assert steps(in_every_order(graph, candidate)) == steps(renumbered(graph, candidate))


def test_stages_that_no_other_has_to_do_with_both_of_are_in_one_order() -> None:
    problem = asked_of_branches(0)
    first, *_, loss = problem.profile.graph.layers
    read = {"l0": "x", "l1": "l0", "l2": "l1", "l3": "x", "l4": "l3", "l5": "l4"}
    layers = [replace(first, name=name, inputs=(value,), parameters=()) for name, value in read.items()]
    graph = replace(problem.profile.graph, layers=(*layers, replace(loss, inputs=("l2", "l5", "y"))))
    each = Candidate((0, 1, 2, 3, 4, 5, 6), tuple((rank,) for rank in range(7)), ((1,),) * 7, (1,), "1f1b")
    orders = [one.stage_of for one in in_every_order(graph, each)]
    assert len(orders) == 2  # of the loss's receives
    assert orders[0][2] < orders[0][5]
    assert orders[1][5] < orders[1][2]
    timed = replace(each, schedule="1f1b-2bp-fill")
    assert len([*in_every_order(graph, timed)]) == 20  # of two towers of three: 6 over 3
