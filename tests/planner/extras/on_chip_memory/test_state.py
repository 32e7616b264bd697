"""Devices with two memories: parameters, their gradients and the optimiser's state on chip where all of them fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.layers.roofline import on_cluster, work_of
from planner.costs.memory.lifetimes import RankMemory
from planner.costs.memory.table import What
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.cluster import WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Decision, Prediction
from planner.ir.problem import Problem
from planner.ir.profile import Optimizer, Profile
from planner.solvers import solver
from planner.solvers.best_first.solver import solve
from tests.oracles.evaluation import evaluate
from tests.oracles.plans import check
from tests.planner.costs.layers.test_roofline import PROFILE as MEASURED
from tests.planner.costs.layers.test_roofline import THERE, cluster, costs
from tests.planner.extras.on_chip_memory.boards import board_problem
from tests.planner.factories import chain_decision
from tests.planner.solvers.instances import assert_best_of_all

BYTES = 8192

MOMENTUM = Optimizer("SGD", {"lr": 0.1, "momentum": 0.9}, 1.0)

HELD = 3 * 2 * BYTES
"""Parameters, gradients and momentum of two layers."""


def boards(on_chip: int, optimizer: Optimizer = MOMENTUM) -> Profile:
    """Four layers, which on these boards take what reading takes."""
    measured = chain_profile(4, activation_bytes=64, parameter_bytes=BYTES, optimizer=optimizer, update_s=1e-5)
    board = DeviceSpec("n0/fpga0", "board", "n0", 2**20, {"float32": 1e15}, 1e6, on_chip_bytes=on_chip)
    devices = board, replace(board, name="n0/fpga1")
    return on_cluster(measured, Cluster(devices, {WITHIN_HOST: Link(0.0, 1e9)}))


def found(profile: Profile, decision: Decision) -> tuple[Prediction, tuple[RankMemory, ...]]:
    made = forecast(Pricing.of(profile), decision, 0.0, num_draws=0)
    again = evaluate(profile, decision)
    assert again.step_s == pytest.approx(made.prediction.step_s, rel=1e-12)
    assert again.peak_bytes == tuple(rank.peak_bytes for rank in made.prediction.ranks)
    assert again.on_chip_bytes == tuple(rank.on_chip_bytes for rank in made.prediction.ranks)
    return made.prediction, made.memories


def test_they_are_on_chip_if_they_fit_to_the_byte() -> None:
    decision = chain_decision(boards(0), (2,), (1, 1))
    (roomy, near), (tight, _), (none, far) = (found(boards(size), decision) for size in (HELD, HELD - 1, 0))
    assert [rank.on_chip_bytes for rank in roomy.ranks] == [HELD, HELD]
    assert [rank.on_chip_bytes for rank in tight.ranks] == [0, 0]
    assert [rank.on_chip_limit_bytes for rank in tight.ranks] == [HELD - 1] * 2
    assert (tight.step_s, tight.ranks[0].peak_bytes) == (none.step_s, none.ranks[0].peak_bytes)
    assert roomy.step_s < tight.step_s / 10  # what is left to read are activations of 64 bytes
    for one, other in zip(near, far, strict=True):  # a stage is charged for what is in the larger memory alone
        assert one.bytes_beside == HELD
        moved = one.peak_bytes - (other.peak_bytes - HELD)  # without gradients another action may be the fullest
        assert 0 <= moved <= other.held[What.ACTIVATIONS] + one.held[What.ACTIVATIONS]
        assert not any(one.held[what] for what in (What.PARAMETERS, What.GRADIENTS, What.OPTIMISER_STATE))


@pytest.mark.parametrize(
    ("size", "cut", "schedule", "on_chip"),
    [
        (HELD, 1, "1f1b", [HELD // 2, 0]),  # devices decide each for its own stage
        (2 * BYTES, 2, "forward", [2 * BYTES] * 2),  # which needs no gradients there
    ],
)
def test_devices_decide_by_what_their_stages_hold(size: int, cut: int, schedule: str, on_chip: list[int]) -> None:
    decision = chain_decision(boards(0), (cut,), (1, 1), schedule=schedule)
    assert [rank.on_chip_bytes for rank in found(boards(size), decision)[0].ranks] == on_chip


def test_older_versions_of_weights_are_off_chip() -> None:
    decision = chain_decision(boards(0), (2,), (1, 1, 1), schedule="pipedream")
    _, memories = found(boards(HELD), decision)
    assert [memory.held[What.PARAMETERS] for memory in memories] == [2 * BYTES, 0]  # the first stage keeps one more


def test_memory_that_is_too_small_for_all_is_enough_with_some_on_chip() -> None:
    def step_s(on_chip: int) -> float:
        profile = boards(on_chip)
        small = tuple(replace(device, memory_bytes=3000) for device in profile.cluster.devices)
        problem = Problem(
            replace(profile, cluster=replace(profile.cluster, devices=small)), 4, memory_margin=0.0, confidence=0.0
        )
        plan = solve(problem)
        assert plan.search.status == "proven"
        return plan.prediction.step_s

    assert step_s(HELD) > 0
    with pytest.raises(InfeasibleError):
        step_s(HELD - 1)


@pytest.mark.parametrize("seed", range(60))
def test_the_plan_for_boards_is_the_best_of_all_plans(seed: int) -> None:
    assert_best_of_all(board_problem(seed))


@pytest.mark.parametrize("seed", range(12))
def test_plans_for_boards_are_good_and_the_integer_program_finds_them_too(seed: int) -> None:
    problem = replace(board_problem(seed), confidence=0.0)
    try:
        plan = solve(problem)
    except InfeasibleError:
        return
    assert check(plan, problem.profile) == ()
    if problem.schedules != ("fbp-as",) or len(problem.profile.cluster.devices) == 1:
        return
    other = solver("span-ilp")(problem)
    assert other.prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-6)


def test_a_board_with_two_memories_has_two_kinds_of_costs() -> None:
    board = replace(THERE, on_chip_bytes=2**20, on_chip_bytes_per_s=1e6)
    found = on_cluster(MEASURED, cluster(board))
    assert set(found.measurements) == {"there", "there, weights off chip"}
    fast = on_cluster(MEASURED, cluster(replace(board, on_chip_bytes_per_s=None)))
    one = on_cluster(MEASURED, cluster())
    work = work_of(MEASURED.graph, MEASURED.graph.values(), MEASURED.graph.layers[2], 1)
    assert work.num_bytes == 2 * 4096 + 8192
    assert costs(found, "there, weights off chip", "l2") == costs(one, "there", "l2")
    assert costs(found, "there", "l2", 1)[0] == 8192 / 1e6  # read on chip, which is slow here
    assert costs(fast, "there", "l1") == costs(one, "there", "l1")  # it has no parameters
    assert fast.parameters["there"]["l2"].update_s == 0.0
    assert fast.parameters["there, weights off chip"] == one.parameters["there"]
