"""What holds for every solver in the registry."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.costs.shards.device_mesh import proportional
from planner.ir.codec import dumps, load, loads
from planner.ir.errors import InfeasibleError, UnknownNameError
from planner.ir.graph import FIXES_SAMPLES, MIXES_SAMPLES, NEEDS_WHOLE_BATCH
from planner.ir.layout import equal_shares
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import baselines, names, solver
from tests.oracles.plans import check
from tests.planner.solvers.instances import random_problem

GOLDEN = Path(__file__).resolve().parents[2] / "data" / "golden" / "plan_chain6_two_devices.json"


@pytest.mark.parametrize("name", names())
def test_every_plan_passes_the_independent_checker(name: str) -> None:
    num_plans = 0
    for seed in range(25):
        problem = random_problem(seed)
        try:
            plan = solver(name)(problem)
        except InfeasibleError:
            continue
        assert check(plan, problem.profile) == (), seed
        num_plans += 1
    assert num_plans > 5


@pytest.mark.parametrize("name", names())
def test_a_plan_survives_its_file(name: str) -> None:
    plan = solver(name)(Problem(chain_profile(5), 4))
    assert dumps(loads(dumps(plan), Plan)) == dumps(plan)
    assert plan.search.solver == name


def joining_problem(num_devices: int = 2, **options: object) -> Problem:
    """Of a chain whose loss needs the whole batch, and would be cut into micro-batches else."""
    profile = chain_profile(4, num_devices, parameter_bytes=4, activation_bytes=4)
    *others, loss = profile.graph.layers
    loss = replace(loss, attributes={**loss.attributes, MIXES_SAMPLES: True, NEEDS_WHOLE_BATCH: True})
    return Problem(replace(profile, graph=replace(profile.graph, layers=(*others, loss))), 8, **options)


@pytest.mark.parametrize("name", names())
def test_a_loss_over_the_whole_batch_keeps_it_in_one_micro_batch(name: str) -> None:
    try:
        plan = solver(name)(joining_problem())
    except InfeasibleError as error:
        assert "cut by samples" in str(error)  # noqa: PT017  # strategies that do nothing else
        return
    assert plan.decision.micro_batches == (8,)
    assert check(plan, joining_problem().profile) == ()


def test_one_device_cuts_nothing_and_takes_a_loss_over_the_whole_batch() -> None:
    for name in names():
        assert solver(name)(joining_problem(1)).decision.micro_batches == (8,), name


@pytest.mark.parametrize("name", names())
def test_micro_batches_of_a_loss_over_the_whole_batch_are_refused(name: str) -> None:
    with pytest.raises(InfeasibleError, match=r"cut by samples|needs all samples of a step at once"):
        solver(name)(joining_problem(micro_batch_sizes=(4,)))


def test_the_checker_finds_micro_batches_of_a_loss_over_the_whole_batch() -> None:
    problem = joining_problem()
    plan = solver("best-first")(problem)
    cut = replace(plan, decision=replace(plan.decision, micro_batches=(4, 4)))
    assert any("needs the whole batch, which is in 2 micro-batches" in fault for fault in check(cut, problem.profile))


def fixed_problem(num_devices: int = 2, global_batch: int = 16, **options: object) -> Problem:
    """Of a chain that was captured for as many samples as its example has."""
    profile = chain_profile(4, num_devices, parameter_bytes=4, activation_bytes=4)
    marks = {MIXES_SAMPLES: True, FIXES_SAMPLES: True}
    layers = tuple(replace(layer, attributes={**layer.attributes, **marks}) for layer in profile.graph.layers)
    return Problem(replace(profile, graph=replace(profile.graph, layers=layers)), global_batch, **options)


@pytest.mark.parametrize("name", names())
def test_a_graph_of_fixed_samples_is_planned_in_micro_batches_of_them(name: str) -> None:
    problem = fixed_problem()
    samples = problem.profile.graph.samples
    try:
        plan = solver(name)(problem)
    except InfeasibleError as error:
        assert "cut by samples" in str(error)  # noqa: PT017  # strategies that do nothing else
        return
    assert set(plan.decision.micro_batches) == {samples}
    assert check(plan, problem.profile) == ()
    cut = replace(plan, decision=replace(plan.decision, micro_batches=(samples + 1, *plan.decision.micro_batches[1:])))
    assert any(f"a micro-batch has {samples + 1}" in fault for fault in check(cut, problem.profile))


def test_a_batch_that_is_no_multiple_of_fixed_samples_is_refused() -> None:
    samples = fixed_problem().profile.graph.samples
    for problem in (fixed_problem(global_batch=2 * samples + 1), fixed_problem(micro_batch_sizes=(samples + 1,))):
        said = rf"captured for {samples} samples only[\s\S]*--micro-batch {samples}"
        with pytest.raises(InfeasibleError, match=said):
            solver("best-first")(problem)


def test_the_registry_knows_solvers_and_baselines() -> None:
    assert set(baselines()) >= {"data-parallel", "even-split", "one-device"}
    assert set(names()) == {*baselines(), "span-ilp", "best-first"}
    with pytest.raises(UnknownNameError, match="no solver 'magic'"):
        solver("magic")


def test_the_name_of_older_releases_still_finds_the_search() -> None:
    assert solver("suffix-dp")(golden_problem()).search.solver == "best-first"


@pytest.mark.parametrize("memory_bytes", [0, 1])
def test_a_search_leaves_the_collector_of_garbage_as_it_was(memory_bytes: int) -> None:
    before = gc.get_threshold()
    with suppress(InfeasibleError):
        solver("best-first")(replace(random_problem(0), memory_bytes=memory_bytes), None)
    assert gc.get_threshold() == before


def test_one_device_takes_the_fastest() -> None:
    plan = solver("one-device")(Problem(chain_profile(3, 3, speeds=(1.0, 4.0, 1.0)), 4))
    assert [stage.ranks for stage in plan.decision.stages] == [(1,)]


def test_data_parallel_shares_in_proportion_to_speed() -> None:
    plan = solver("data-parallel")(Problem(chain_profile(3, 2, speeds=(3.0, 1.0)), 8))
    assert plan.decision.micro_batches == (8,)
    assert plan.decision.layout_of(0).samples(8) == (6, 2)


def test_data_parallel_takes_smaller_micro_batches_where_memory_is_short() -> None:
    profile = chain_profile(2, 2, parameter_bytes=4, saved_bytes=10_000, activation_bytes=4, memory_bytes=50_000)
    assert solver("data-parallel")(Problem(profile, 8)).decision.micro_batches == (4, 4)


def test_even_split_counts_layers_and_not_costs() -> None:
    plan = solver("even-split")(Problem(chain_profile(5, 3, forward_s=(9e-3, 1e-3, 1e-3, 1e-3, 1e-3)), 4))
    assert [len(plan.decision.layers_of(stage)) for stage in range(3)] == [2, 2, 2]
    assert plan.decision.schedule == "gpipe"


def test_shares() -> None:
    assert equal_shares(7, 3) == (3, 2, 2)
    assert proportional(8, (1.0, 1.0, 1.0)) == (3, 3, 2)
    assert proportional(10, (3.0, 1.0, 1.0)) == (6, 2, 2)


def golden_problem() -> Problem:
    profile = chain_profile(
        6,
        2,
        forward_s=(1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 1e-3),
        parameter_bytes=2**20,
        bandwidth_bytes_per_s=1e8,
        latency_s=1e-4,
        update_s=1e-4,
        accumulate_s=5e-5,
        action_overhead_s=1e-5,
        skips=[(0, 4)],
    )
    return Problem(profile, 8)


def test_a_whole_plan_is_what_it_was() -> None:
    plan = solver("best-first")(golden_problem())
    golden = load(GOLDEN, Plan)
    assert plan.decision == golden.decision
    assert plan.inputs == golden.inputs
    assert plan.prediction.step_s == pytest.approx(golden.prediction.step_s, rel=1e-9)
    assert [a.name for a in plan.alternatives] == [a.name for a in golden.alternatives]
    assert check(golden, golden_problem().profile) == ()
