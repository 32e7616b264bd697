from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.baselines import bapipe, dapple, hpgo, sparsepipe
from planner.extras.baselines.common import as_profile as clusters
from planner.extras.baselines.common.as_profile import as_profile
from planner.extras.baselines.common.problem import block_ends, network, searchable
from planner.extras.baselines.incumbents import promising
from planner.extras.baselines.pipedream import solver as pipedream
from planner.extras.baselines.pipedream.format import read, states_of
from planner.ir.cluster import Cluster
from planner.ir.errors import InfeasibleError
from planner.ir.graph import TensorSpec
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import baselines, solver
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.solvers.instances import branching_problem, random_problem

PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "pipedream"
SOLVERS = {
    "pipedream": pipedream.solve,
    "pipedream-hierarchical": pipedream.solve_hierarchical,
    "sparsepipe": sparsepipe.solve,
    "dapple": dapple.solve,
    "bapipe": bapipe.solve,
}
ROOM = 2**40


def vgg16(cluster: Cluster, **more: object) -> Problem:
    profile = as_profile(read(PROFILES / "vgg16.graph.txt"), cluster, 128, {"fast": 2.0})
    return Problem(profile, 128 * 4, micro_batch_sizes=(32, 128), memory_margin=0.0, **more)  # type: ignore[arg-type]


def groups(plan: Plan) -> list[int]:
    return [len(stage.ranks) for stage in plan.decision.stages]


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("make", [random_problem, branching_problem])
def test_every_plan_passes_the_checker_or_nothing_fits(name: str, make: object) -> None:
    found = 0
    for seed in range(25):
        problem = make(seed)  # type: ignore[operator]
        try:
            plan = SOLVERS[name](problem)
        except InfeasibleError:
            continue
        found += 1
        assert check(plan, problem.profile) == ()
        assert plan.search.status == "heuristic"
        assert plan.search.solver == name
    assert found >= 5


@pytest.mark.parametrize("name", SOLVERS)
def test_published_strategies_are_baselines_and_name_their_paper(name: str) -> None:
    assert name in baselines()
    text = sys.modules[SOLVERS[name].__module__].__doc__ or ""
    assert "et al." in text or "SparsePipe" in text


def test_pipedream_cuts_where_its_programme_does() -> None:
    plan = pipedream.solve(vgg16(clusters.flat(4, 1e9, ROOM)))
    assert groups(plan) == [3, 1]
    assert [stage.ranks for stage in plan.decision.stages] == [(0, 1, 2), (3,)]


def test_levels_replicate_over_hosts() -> None:
    plan = pipedream.solve_hierarchical(vgg16(clusters.hosts(2, 4, 1e10, 1.25e9, ROOM)))
    assert groups(plan) == [4, 1, 1, 1, 1]
    assert plan.decision.stages[0].ranks == (0, 1, 2, 3)
    assert [bool(plan.decision.layers_of(stage)) for stage in range(5)] == [True] * 5


def test_one_host_is_one_level() -> None:
    problem = vgg16(clusters.flat(4, 1e9, ROOM))
    assert pipedream.solve_hierarchical(problem).decision.stages == pipedream.solve(problem).decision.stages


def test_hosts_of_different_sizes_are_named() -> None:
    profile = chain_profile(4, 3, hosts=["n0", "n0", "n1"])
    with pytest.raises(InfeasibleError, match="n0 2, n1 1"):
        pipedream.solve_hierarchical(Problem(profile, 4))


def test_sparsepipe_puts_the_type_with_most_devices_first() -> None:
    plan = sparsepipe.solve(vgg16(clusters.mixed({"gpu": 1, "fast": 3}, 1e9, ROOM)))
    assert all(rank in (1, 2, 3) for rank in plan.decision.stages[0].ranks[:1])
    assert sorted(rank for stage in plan.decision.stages for rank in stage.ranks) == [0, 1, 2, 3]


def test_bapipe_gives_faster_devices_more() -> None:
    profile = chain_profile(
        6, 2, speeds=[1.0, 2.0], activation_bytes=4, parameter_bytes=2**20, bandwidth_bytes_per_s=1e7
    )
    plan = bapipe.solve(Problem(profile, 8, micro_batch_sizes=(2,)))
    assert [len(plan.decision.layers_of(stage)) for stage in (0, 1)] == [2, 5]  # the loss takes no time


def test_dapple_uses_every_device_of_every_host() -> None:
    plan = dapple.solve(vgg16(clusters.hosts(2, 2, 1e10, 1e9, ROOM)))
    assert sorted(rank for stage in plan.decision.stages for rank in stage.ranks) == [0, 1, 2, 3]


def test_layers_that_share_a_parameter_stay_together() -> None:
    profile = chain_profile(5, 2)
    layers = list(profile.graph.layers)
    tied = {**profile.graph.parameters, "tied": TensorSpec(("dim0",), (4,), "float32")}
    for index in (1, 3):
        layers[index] = replace(layers[index], parameters=("tied",))
    profile = replace(profile, graph=replace(profile.graph, layers=tuple(layers), parameters=tied))
    for peer in (pipedream, dapple, bapipe):
        plan = peer.solve(Problem(profile, 4))
        assert check(plan, profile) == ()
        stages = {layer: s for s in range(len(plan.decision.stages)) for layer in plan.decision.layers_of(s)}
        assert stages["l1"] == stages["l2"] == stages["l3"]


def test_no_more_stages_than_the_problem_allows() -> None:
    problem = vgg16(clusters.flat(4, 1e9, ROOM), max_stages=2)
    assert len(pipedream.solve(problem).decision.stages) <= 2
    assert len(dapple.solve(problem).decision.stages) <= 2


def test_a_network_of_many_states_is_planned_as_blocks() -> None:
    problem = vgg16(clusters.flat(4, 1e9, ROOM))
    fine = network(problem, CostModel(problem.profile), "gpu", 32)
    assert block_ends(fine, 4) is None
    few = searchable(fine, 4000)
    assert len(few.graph.nodes) < len(fine.graph.nodes)
    assert few.layers(list(few.members)) == tuple(range(len(problem.profile.graph.layers)))
    assert sum(n.forward_s for n in few.graph.nodes) == pytest.approx(sum(n.forward_s for n in fine.graph.nodes))


def test_dapple_offers_what_its_authors_released() -> None:
    problem = vgg16(clusters.hosts(2, 4, 2.5e10, 1e9, ROOM))
    cost_model = CostModel(problem.profile)
    graph = network(problem, cost_model, "gpu", 128).graph
    machines = hpgo.HpgoMachines(2, 4, 2.5e10, 1e9, 1e9)
    halves = hpgo.Planner(graph, machines, 4, 4).pipelines()[hpgo.HALVES]
    cut = len(states_of(graph).layers(None, halves.ends[0]))
    both = cut, len(problem.profile.graph.layers)
    candidate = Candidate.chain((0, *both), ((0, 1, 2, 3), (4, 5, 6, 7)), ((32,) * 4,) * 2, (128,) * 4, "1f1b-so")
    assert dapple.solve(problem).prediction.step_s <= Evaluator(problem, cost_model).evaluate(candidate).step_s * (
        1 + 1e-9
    )


def test_replicas_are_planned_from_costs_of_one_sample() -> None:
    profile = chain_profile(6, 4, sizes=(1,), parameter_bytes=2**10)
    for name in ("dapple", "pipedream", "sparsepipe", "tarnawski", "piper", "bapipe"):
        plan = solver(name)(Problem(profile, 8), None)
        assert check(plan, profile) == ()


def test_a_planner_without_a_plan_says_why_and_of_what_size() -> None:
    problem = Problem(chain_profile(6, 4), 2)  # replicas on three or four devices have no sample
    with pytest.raises(InfeasibleError, match="no plan at any micro-batch size") as caught:
        sparsepipe.solve(replace(problem, max_stages=1))
    why = "micro-batches of 2: its plan has a stage of 4 devices, some of them without a sample"
    assert why in caught.value.details


@pytest.mark.parametrize(("num_devices", "is_asked"), [(8, False), (16, True)])
def test_a_search_on_many_devices_starts_from_dapples_plans(num_devices: int, is_asked: bool) -> None:
    problem = vgg16(clusters.hosts(2, num_devices // 2, 2.5e10, 1e9, ROOM))
    found = list(promising(Evaluator(problem, CostModel(problem.profile))))
    assert bool(found) == is_asked
    assert all(plan.fits for plan in found)
