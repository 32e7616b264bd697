from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common import as_profile as clusters
from planner.extras.baselines.common.as_profile import as_profile
from planner.extras.baselines.common.problem import held, network
from planner.extras.baselines.pipedream.format import read
from planner.extras.baselines.piper import solver as piper
from planner.extras.baselines.tarnawski import planner as tarnawski_peer
from planner.extras.baselines.tarnawski import solver as tarnawski
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.problem import ALWAYS, AUTO, Problem
from planner.solvers import baselines
from tests.oracles.plans import check
from tests.planner.solvers.instances import branching_problem, random_problem

PROFILES = Path(__file__).parents[3] / "data" / "profiles" / "pipedream"
ROOM = 2**40
SOLVERS = {"tarnawski": tarnawski, "piper": piper}


def stages_of(plan: Plan) -> list[list[str]]:
    return [sorted(plan.decision.layers_of(stage)) for stage in range(len(plan.decision.stages))]


def groups(plan: Plan) -> list[int]:
    return [len(stage.ranks) for stage in plan.decision.stages]


@pytest.mark.parametrize("name", ["tarnawski", "piper"])
@pytest.mark.parametrize("make", [random_problem, branching_problem])
@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
def test_every_plan_passes_the_checker_or_nothing_fits(name: str, make: object, recompute: str) -> None:
    found = 0
    for seed in range(15):
        problem = replace(make(seed), recompute=recompute)  # type: ignore[operator]
        try:
            plan = SOLVERS[name].solve(problem)
        except InfeasibleError:
            continue
        found += 1
        assert check(plan, problem.profile) == ()
        assert (plan.search.status, plan.search.solver) == ("heuristic", name)
    assert found >= 4


def test_both_are_baselines() -> None:
    assert {"tarnawski", "piper"} <= set(baselines())


def test_equal_layers_are_cut_evenly() -> None:
    profile = chain_profile(6, 3, activation_bytes=4, parameter_bytes=2**26, bandwidth_bytes_per_s=1e8)
    for solver in (tarnawski, piper):
        plan = solver.solve(Problem(profile, 8, micro_batch_sizes=(1,)))
        assert [[name for name in stage if name != "loss"] for stage in stages_of(plan)] == [
            ["l0", "l1"],
            ["l2", "l3"],
            ["l4", "l5"],
        ]


def test_piper_replicates_where_parameters_are_few() -> None:
    profile = as_profile(read(PROFILES / "vgg16.graph.txt"), clusters.flat(4, 1e9, ROOM), 128, {"fast": 2.0})
    plan = piper.solve(Problem(profile, 512, micro_batch_sizes=(32,), memory_margin=0.0))
    assert groups(plan)[0] > 1
    assert sum(groups(plan)) <= 4
    assert not any(stage.recompute for stage in plan.decision.stages)


@pytest.mark.parametrize("mib", [100, 134])
def test_piper_recomputes_where_memory_is_short(mib: int) -> None:
    profile = chain_profile(8, 2, activation_bytes=2**20, parameter_bytes=4, saved_bytes=2**24, memory_bytes=2**28)
    tight = Problem(profile, 16, micro_batch_sizes=(1,), memory_margin=0.0, memory_bytes=mib * 2**20, recompute=AUTO)
    plan = piper.solve(tight)
    assert any(stage.recompute for stage in plan.decision.stages)
    assert all(stage.recompute for stage in piper.solve(replace(tight, recompute=ALWAYS)).decision.stages)
    with pytest.raises(InfeasibleError):
        piper.solve(replace(tight, recompute="never"))


def test_a_layer_and_its_gradient_stay_together() -> None:
    problem = branching_problem(3)
    cost_model = CostModel(problem.profile)
    kind = cost_model.kind(0)
    found = network(problem, cost_model, kind, 1)
    memory = held(cost_model, found, kind, 1)
    made = tarnawski.instance(problem, found, memory, 2)
    count = len(found.graph.nodes)
    assert [node.colour for node in made.nodes] == [*range(count), *range(count)]
    assert [node.backward for node in made.nodes] == [False] * count + [True] * count
    total_s = sum(node.forward_s + node.backward_s for node in found.graph.nodes)
    assert tarnawski_peer.solve(made, variant="single").value == pytest.approx(1e3 * total_s)
    sizes = [a + 2 * b for a, b in zip(memory.always, memory.saved, strict=True)]
    assert [node.size_bytes for node in made.nodes[:count]] == sizes


def test_no_more_stages_than_the_problem_allows() -> None:
    profile = chain_profile(6, 4, activation_bytes=4)
    plan = tarnawski.solve(Problem(profile, 8, micro_batch_sizes=(1,), max_stages=2))
    assert len(plan.decision.stages) <= 2
