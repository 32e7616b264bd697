"""Bounds never lie above what the simulator says, on every plan of random small problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.network import transfer_s
from planner.costs.stage import PriceBook
from planner.ir.cluster import Link
from planner.ir.problem import Problem
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.space import cut_positions, micro_batch_sizes, micro_batches, pools, schedule_names
from planner.solvers.search.blocks import cuts_worth_trying
from planner.solvers.search.frontier import Node, expand
from planner.solvers.search.groups import least_link, pieces
from planner.solvers.search.incumbents import mixed_replicas, replica_candidate
from planner.solvers.search.refine import refined_bound_s
from planner.solvers.search.start import bounds_of, stretches_of
from planner.solvers.search.suffix import Suffixes
from planner.solvers.search.windows import Window, most_in_flight, windows
from tests.planner.factories import chain_profile
from tests.planner.solvers.instances import branching_problem, random_problem


def pipelines(evaluator: Evaluator) -> Iterator[tuple[list[float], Node]]:
    """Every complete pipeline, with the bounds of its prefixes."""
    problem = evaluator.problem
    stretches = stretches_of(evaluator, cut_positions(problem.profile.graph))
    for size in micro_batch_sizes(problem, evaluator.book):
        ways = bounds_of(evaluator, stretches, pools(problem), micro_batches(problem, size))
        pending = [([0.0], Node.root(Suffixes(bounds))) for bounds in ways]
        while pending:
            path, node = pending.pop()
            expansion = expand(node, 0)
            for position in range(len(expansion)):
                found = ([*path, float(expansion.bound_s[position])], expansion.child(position))
                if found[1].is_complete:
                    yield found
                else:
                    pending.append(found)


@pytest.mark.parametrize("make", [random_problem, branching_problem], ids=["chains", "branches"])
@pytest.mark.parametrize("seed", range(200, 220))
def test_no_bound_lies_above_the_simulated_step(seed: int, make: Callable[[int], Problem]) -> None:
    problem = make(seed)
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    for path, node in pipelines(evaluator):
        found = evaluator.evaluate(node.candidate())
        if found.fits:
            assert max(*path, refined_bound_s(node)) <= found.step_s * (1 + 1e-9)


def test_a_branch_that_reads_the_input_need_not_wait() -> None:
    profile = chain_profile(4, 4, forward_s=(10e-3, 1e-4, 10e-3, 1e-4), bandwidth_bytes_per_s=1e12)
    l0, l1, l2, l3, loss = profile.graph.layers
    branched = (l0, l1, replace(l2, inputs=("x",)), replace(l3, kind="opaque", inputs=("l1", "l2")), loss)
    profile = replace(profile, graph=replace(profile.graph, layers=branched))
    evaluator = Evaluator(Problem(profile, 2, micro_batch_sizes=(2,)), PriceBook(profile))
    seen = 0
    for path, node in pipelines(evaluator):
        found = evaluator.evaluate(node.candidate())
        assert max(*path, refined_bound_s(node)) <= found.step_s * (1 + 1e-9), node.cuts
        seen += node.cuts == (0, 1, 2, 3, 5)
    assert seen == 2


@pytest.mark.parametrize("seed", range(200, 220))
def test_no_step_is_shorter_than_the_capacity_of_all_devices(seed: int) -> None:
    problem = random_problem(seed)
    evaluator = Evaluator(problem, PriceBook(problem.profile))
    for _, node in pipelines(evaluator):
        found = evaluator.evaluate(node.candidate())
        assert node.bounds.capacity_s() <= found.step_s * (1 + 1e-9)


def test_bounds_are_close_where_nothing_disturbs() -> None:
    profile = chain_profile(4, 2, forward_s=(1e-3, 3e-3, 2e-3, 2e-3), activation_bytes=4, latency_s=1e-4)
    problem = random_problem(0)
    problem = replace(problem, profile=profile, global_batch=4, schedules=("1f1b",), micro_batch_sizes=(1, 2))
    evaluator = Evaluator(problem, PriceBook(profile))
    ratios = [
        max(*path, refined_bound_s(node)) / evaluator.evaluate(node.candidate()).step_s
        for path, node in pipelines(evaluator)
        if len(node.groups) == 2
    ]
    assert min(ratios) > 0.97


@pytest.mark.parametrize("seed", range(25))
def test_replicas_on_unlike_devices_take_at_least_their_bound(seed: int) -> None:
    problem = random_problem(seed)
    book = PriceBook(problem.profile)
    evaluator = Evaluator(problem, book)
    for found in mixed_replicas(problem, book, pools(problem), micro_batch_sizes(problem, book)):
        seen = evaluator.evaluate(replica_candidate(problem, found, schedule_names(problem)[0]))
        assert found.bound_s <= seen.step_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("source", "destination", "expected"),
    [((4,), (4,), (4, 4)), ((2, 2), (4,), (2, 2)), ((4,), (2, 2), (2, 2)), ((2, 2, 2), (3, 3), (2, 1))],
)
def test_a_message_between_groups_has_at_least_so_many_samples(
    source: tuple[int, ...], destination: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert pieces(source, destination, (sum(source),)) == expected


def test_a_table_that_falls_is_flattened_from_behind() -> None:
    link = Link(0.0, 1.0, ((10, 5.0), (100, 2.0), (1000, 8.0)))
    sizes = np.array([10.0, 50.0, 100.0, 500.0, 1000.0])
    assert (transfer_s(least_link(link), sizes) <= transfer_s(link, sizes) + 1e-12).all()
    assert (np.diff(transfer_s(least_link(link), sizes)) >= 0).all()


def test_schedules_are_known_by_what_they_keep_and_by_their_windows() -> None:
    assert [most_in_flight("gpipe", depth, 4) for depth in (1, 2, 3)] == [4, 4, 4]
    assert [most_in_flight("1f1b", depth, 4) for depth in (1, 2, 3, 9)] == [1, 2, 3, 4]
    assert windows("1f1b", 3, 5) == (Window(3, 3), Window(2, 2), Window(1, 1))
    assert windows("gpipe", 2, 5) == (Window(5, 5), Window(5, 5))


def test_layers_that_cost_nothing_stay_with_the_layer_before() -> None:
    profile = chain_profile(
        4,
        forward_s=(1e-3, 0.0, 1e-3, 1e-3),
        parameter_bytes=(4, 0, 4, 4),
        saved_bytes=(4, 0, 4, 4),
        activation_bytes=(8, 8, 8, 8),
    )
    assert cuts_worth_trying(PriceBook(profile)) == ((0, 2, 3, 4, 5), 1)
    growing = chain_profile(
        4,
        forward_s=(1e-3, 0.0, 1e-3, 1e-3),
        parameter_bytes=(4, 0, 4, 4),
        saved_bytes=(4, 0, 4, 4),
        activation_bytes=(8, 16, 8, 8),
    )
    assert cuts_worth_trying(PriceBook(growing))[1] == 0
