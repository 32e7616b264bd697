"""Published planners as solvers of our problems: plans that the checker finds good, and what each is known for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.extras.baselines import bapipe, dapple, dryden, hpgo, sparsepipe
from planner.extras.baselines.common import as_profile as clusters
from planner.extras.baselines.common.answer import slowest_kind
from planner.extras.baselines.common.as_profile import as_profile
from planner.extras.baselines.common.problem import block_ends, held, network, searchable
from planner.extras.baselines.pipedream import solver as pipedream
from planner.extras.baselines.pipedream.format import read, states_of
from planner.extras.baselines.piper import solver as piper
from planner.extras.baselines.tarnawski import planner as tarnawski_peer
from planner.extras.baselines.tarnawski import solver as tarnawski
from planner.ir.cluster import Cluster
from planner.ir.errors import InfeasibleError
from planner.ir.graph import TensorSpec
from planner.ir.plan import Plan
from planner.ir.problem import ALWAYS, AUTO, NEVER, Problem
from planner.solvers import baselines, solver
from planner.solvers.best_first import solver as best_first
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.solvers.instances import branching_problem
from tests.planner.sparse_networks import classifier, sparse_profile

VGG16 = read(Path(__file__).parents[3] / "data" / "profiles" / "pipedream" / "vgg16.graph.txt")
MODULES = {
    "pipedream": pipedream,
    "pipedream-hierarchical": pipedream,
    "sparsepipe": sparsepipe,
    "dapple": dapple,
    "bapipe": bapipe,
    "dryden": dryden,
    "tarnawski": tarnawski,
    "piper": piper,
    "piper-equal": piper,
}
ROOM = 2**40


def test_published_planners_are_baselines_and_name_their_paper() -> None:
    assert {*baselines()} == {*MODULES, "data-parallel", "even-split", "one-device"}
    for module in MODULES.values():
        assert any(word in (module.__doc__ or "") for word in ("et al.", "SparsePipe", "NeurIPS"))


@pytest.mark.parametrize("recompute", [NEVER, AUTO, ALWAYS])
@pytest.mark.parametrize("name", MODULES)
def test_every_plan_of_a_network_with_branches_passes_the_checker_or_nothing_fits(name: str, recompute: str) -> None:
    found = 0
    for seed in range(15):
        problem = replace(branching_problem(seed), recompute=recompute)
        try:
            plan = solver(name)(problem, None)
        except InfeasibleError:
            continue
        found += 1
        assert check(plan, problem.profile) == ()
        assert (plan.search.status, plan.search.solver) == ("heuristic", name)
    assert found >= 4


def vgg16(cluster: Cluster, **more: object) -> Problem:
    profile = as_profile(VGG16, cluster, 128, {"fast": 2.0})
    return Problem(
        profile, 128 * 4, **{"confidence": 0.0, "micro_batch_sizes": (32, 128), "memory_margin": 0.0, **more}
    )


def groups(plan: Plan) -> list[int]:
    return [len(stage.ranks) for stage in plan.decision.stages]


def test_each_planner_plans_vgg16_as_its_paper_does() -> None:
    one_host = vgg16(clusters.flat(4, 1e9, ROOM))
    two_hosts = vgg16(clusters.hosts(2, 4, 1e10, 1.25e9, ROOM))
    flat = pipedream.solve(one_host)
    assert [stage.ranks for stage in flat.decision.stages] == [(0, 1, 2), (3,)]
    assert pipedream.solve_hierarchical(one_host).decision.stages == flat.decision.stages  # one host is one level
    levels = pipedream.solve_hierarchical(two_hosts)  # replicas on one host
    assert groups(levels) == [4, 1, 1, 1, 1]
    assert levels.decision.stages[0].ranks == (0, 1, 2, 3)
    mixed = sparsepipe.solve(vgg16(clusters.mixed({"gpu": 1, "fast": 3}, 1e9, ROOM)))  # most devices first
    assert mixed.decision.stages[0].ranks[0] in (1, 2, 3)
    every = dapple.solve(vgg16(clusters.hosts(2, 2, 1e10, 1e9, ROOM)))
    for plan in (mixed, every):
        assert sorted(rank for stage in plan.decision.stages for rank in stage.ranks) == [0, 1, 2, 3]
    few = piper.solve(vgg16(clusters.flat(4, 1e9, ROOM), micro_batch_sizes=(32,)))  # replicas of few parameters
    assert groups(few)[0] > 1
    assert sum(groups(few)) <= 4
    assert not any(stage.recompute for stage in few.decision.stages)
    halves = vgg16(clusters.flat(4, 1e9, ROOM), max_stages=2)
    for peer in (pipedream, dapple):
        assert len(peer.solve(halves).decision.stages) <= 2


def test_hosts_of_different_sizes_are_named() -> None:
    profile = chain_profile(4, 3, hosts=["n0", "n0", "n1"])
    with pytest.raises(InfeasibleError, match="n0 2, n1 1"):
        pipedream.solve_hierarchical(Problem(profile, 4, confidence=0.0))


def test_equal_layers_are_cut_evenly_and_faster_devices_get_more() -> None:
    profile = chain_profile(6, 3, activation_bytes=4, parameter_bytes=2**26, bandwidth_bytes_per_s=1e8)
    for peer in (tarnawski, piper):
        decision = peer.solve(Problem(profile, 8, micro_batch_sizes=(1,), confidence=0.0)).decision
        layers = [sorted({*decision.layers_of(stage)} - {"loss"}) for stage in range(3)]
        assert layers == [["l0", "l1"], ["l2", "l3"], ["l4", "l5"]]
    two_stages = tarnawski.solve(Problem(chain_profile(6, 4, activation_bytes=4), 8, max_stages=2, confidence=0.0))
    assert len(two_stages.decision.stages) <= 2
    profile = chain_profile(
        6, 2, speeds=[1.0, 2.0], activation_bytes=4, parameter_bytes=2**20, bandwidth_bytes_per_s=1e7
    )
    plan = bapipe.solve(Problem(profile, 8, micro_batch_sizes=(2,), confidence=0.0))
    assert [len(plan.decision.layers_of(stage)) for stage in (0, 1)] == [2, 5]  # the loss takes no time


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (0.5, 1.0), (10.0, 2.0, 2.0), (2.0, 10.0)])
def test_planners_for_like_devices_count_on_the_slowest(speeds: tuple[float, ...]) -> None:
    """Whatever kinds are called and come first."""
    profile = chain_profile(3, len(speeds), speeds=speeds)
    assert slowest_kind(Problem(profile, 4, confidence=0.0), CostModel(profile), 2) == f"kind-{min(speeds):g}"


def test_layers_that_share_a_parameter_stay_together() -> None:
    profile = chain_profile(5, 2)
    layers = list(profile.graph.layers)
    tied = {**profile.graph.parameters, "tied": TensorSpec(("dim0",), (4,), "float32")}
    for index in (1, 3):
        layers[index] = replace(layers[index], parameters=("tied",))
    profile = replace(profile, graph=replace(profile.graph, layers=tuple(layers), parameters=tied))
    for peer in (pipedream, dapple, bapipe):
        plan = peer.solve(Problem(profile, 4, confidence=0.0))
        assert check(plan, profile) == ()
        stages = {layer: s for s in range(len(plan.decision.stages)) for layer in plan.decision.layers_of(s)}
        assert stages["l1"] == stages["l2"] == stages["l3"]


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
    halves = hpgo.Planner(graph, hpgo.HpgoMachines(2, 4, 2.5e10, 1e9, 1e9), 4, 4).pipelines()[hpgo.HALVES]
    bounds = 0, len(states_of(graph).layers(None, halves.ends[0])), len(problem.profile.graph.layers)
    candidate = Candidate.chain(bounds, ((0, 1, 2, 3), (4, 5, 6, 7)), ((32,) * 4,) * 2, (128,) * 4, "1f1b-so")
    released_s = Evaluator(problem, cost_model).evaluate(candidate).step_s
    assert dapple.solve(problem).prediction.step_s <= released_s * (1 + 1e-9)


@pytest.mark.parametrize("name", MODULES)
def test_replicas_are_planned_from_costs_of_one_sample(name: str) -> None:
    profile = chain_profile(6, 4, sizes=(1,), parameter_bytes=2**10)
    assert check(solver(name)(Problem(profile, 8, confidence=0.0), None), profile) == ()


def test_a_planner_without_a_plan_says_why_and_of_what_size() -> None:
    problem = Problem(chain_profile(6, 4), 2, confidence=0.0)  # replicas on three or four devices have no sample
    with pytest.raises(InfeasibleError, match="no plan at any micro-batch size") as caught:
        sparsepipe.solve(replace(problem, max_stages=1))
    why = "micro-batches of 2: its plan has a stage of 4 devices, some of them without a sample"
    assert why in caught.value.details


@pytest.mark.parametrize("mib", [100, 134])
def test_piper_recomputes_where_memory_is_short(mib: int) -> None:
    profile = chain_profile(8, 2, activation_bytes=2**20, parameter_bytes=4, saved_bytes=2**24, memory_bytes=2**28)
    tight = Problem(
        profile, 16, micro_batch_sizes=(1,), memory_margin=0.0, memory_bytes=mib * 2**20, recompute=AUTO, confidence=0.0
    )
    assert any(stage.recompute for stage in piper.solve(tight).decision.stages)
    assert all(stage.recompute for stage in piper.solve(replace(tight, recompute=ALWAYS)).decision.stages)
    with pytest.raises(InfeasibleError):
        piper.solve(replace(tight, recompute=NEVER))


def test_tarnawskis_planner_keeps_a_layer_and_its_gradient_together() -> None:
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


def late(plan: Plan) -> bool:
    """Whether all that is prepared stands directly before the forward that needs it."""
    rows = plan.decision.rows()
    after = [str(b) for row in rows for a, b in pairwise(row) if a.op == "PREP"]
    prepared = [str(a).replace("PREP", "F") for row in rows for a in row if a.op == "PREP"]
    return after == prepared


@pytest.mark.parametrize("num_devices", [1, 3])
def test_sparsepipe_prepares_when_features_have_arrived_and_our_search_ahead(num_devices: int) -> None:
    """On one device their stages are the same, so that this is all that it loses."""
    profile = sparse_profile(classifier(), (1.0,) * num_devices, preparation_s=5e-3, device="gpu")
    problem = Problem(profile, 4, micro_batch_sizes=(1,) if num_devices == 1 else (4,), confidence=0.0)
    plan = sparsepipe.solve(problem)
    ours = best_first.solve(replace(problem, schedules=("1f1b",)))
    assert (late(plan), late(ours)) == (True, False)
    assert check(plan, profile) == ()
    assert predict(profile, ours.decision)[0].step_s < predict(profile, plan.decision)[0].step_s
    for number, stage in enumerate(plan.decision.stages):
        shares = plan.decision.layout_of(number).samples(4)
        assert len(stage.ranks) == 1 or max(shares) - min(shares) <= 1
