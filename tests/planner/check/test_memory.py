"""The checker and the planner agree about memory where levels were measured, under every schedule that trains."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.check import check
from planner.costs.cost_model import PriceBook
from planner.costs.memory.levels import course
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.problem import Problem
from planner.ir.profile import Levels, Measurement, Profile
from planner.layers.boundary import Boundaries
from planner.schedules import names, positions, traits
from planner.solvers.candidates.candidate import Candidate
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.factories import chain_profile
from tests.planner.solvers.laid_out_plans import plan_of_candidate


def with_levels(profile: Profile, seed: int) -> Profile:
    """``profile`` with levels, and every other layer such that its weight gradients cannot come later."""

    def measured(one: Measurement) -> Measurement:
        draw = random.Random(f"{seed} {one.layer}")
        sizes = [draw.randrange(2**20) * one.samples for _ in Levels.__slots__]
        found = replace(one, levels=Levels(*sizes), saved_bytes=draw.randrange(2**20) * one.samples)
        if draw.random() < 0.5:
            found = replace(found, backward_input_s=found.backward_s, backward_weight_s=0.0)
        return found

    return replace(
        profile, measurements={kind: tuple(map(measured, found)) for kind, found in profile.measurements.items()}
    )


@pytest.mark.parametrize("schedule", [name for name in names() if traits(name).trains])
@pytest.mark.parametrize("seed", range(3))
def test_the_peaks_are_reckoned_the_same(schedule: str, seed: int) -> None:
    profile = with_levels(chain_profile(8, 2, parameter_bytes=2**20), seed)
    wanted = traits(schedule).stages_per_position
    ranks = tuple((rank,) for rank in positions(schedule, 2, 1 if wanted == 1 else 2))
    num_layers = len(profile.graph.layers)
    bounds = tuple(round(num_layers * stage / len(ranks)) for stage in range(len(ranks) + 1))
    candidate = Candidate.chain(bounds, ranks, ((1,),) * len(ranks), (1,) * 4, schedule)
    evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), PriceBook(profile))
    plan = plan_of_candidate(evaluator, candidate)
    assert check(plan, profile) == ()
    ranks_of = plan.prediction.ranks
    low = tuple(replace(each, peak_bytes=each.peak_bytes - 2**16) for each in ranks_of)
    assert check(replace(plan, prediction=replace(plan.prediction, ranks=low)), profile) != ()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_input_that_is_saved_where_it_was_received_counts_once(schedule: str) -> None:
    """Layer l4 saves what l3, of the stage before, made: 4 KiB a sample, and as much of its own making."""
    size = 4096

    def plan(inputs_saved: int) -> tuple[int, ...]:
        def measured(one: Measurement) -> Measurement:
            saved = size * one.samples if one.layer == "l4" else 0
            some = Levels(2 * saved, 0, 0, 0, 2 * saved, 0, min(inputs_saved, 1) * saved)
            return replace(one, levels=some, saved_bytes=2 * saved)

        bare = chain_profile(8, 2, activation_bytes=size)
        measurements = {kind: tuple(map(measured, found)) for kind, found in bare.measurements.items()}
        profile = replace(bare, measurements=measurements)
        candidate = Candidate.chain((0, 4, 9), ((0,), (1,)), ((1,), (1,)), (1,) * 4, schedule)
        evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), PriceBook(profile))
        found = plan_of_candidate(evaluator, candidate)
        assert check(found, profile) == ()
        return tuple(rank.peak_bytes for rank in found.prediction.ranks)

    apart, once = plan(0), plan(1)
    assert once[0] == apart[0]
    assert apart[1] - once[1] in (size, 2 * size)  # of one micro-batch, or of two where weight gradients come later


def test_gradients_that_cannot_wait_come_with_those_of_inputs() -> None:
    saved, gradients, levels = np.zeros(3), np.array([10.0, 100.0, 1.0]), np.zeros((6, 3))
    found = course(saved, gradients, levels, defers=np.array([True, False, True]))
    assert (found.early, found.input_first, found.input_later) == (100, 100, 100)
    assert (found.weight_first, found.weight_later) == (11, 10)
    whole = course(saved, gradients, levels)
    assert (whole.early, whole.input_first, whole.weight_first) == (0, 0, 111)
    assert found.backward_first == whole.backward_first == 111


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("transport", ["gloo", SHARED_MEMORY])
def test_what_comes_with_another_message_is_there_from_then_on(schedule: str, transport: str) -> None:
    """Layer 0 is read by a second stage of the other rank, in one message where that is small."""
    profile = with_levels(chain_profile(8, 2, activation_bytes=2**12, skips=[(0, 3), (0, 4), (0, 7)]), 0)
    links = {name: replace(link, transport=transport) for name, link in profile.cluster.links.items()}
    profile = replace(profile, cluster=replace(profile.cluster, links=links))
    ranks = tuple((rank,) for rank in positions(schedule, 2, 2))
    candidate = Candidate.chain((0, 2, 4, 6, 9), ranks, ((1,),) * len(ranks), (1,) * 4, schedule)
    evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), PriceBook(profile))
    plan = plan_of_candidate(evaluator, candidate)
    assert Boundaries.of_decision(profile.graph, plan.decision).program(plan.decision).joined()
    assert check(plan, profile) == ()
