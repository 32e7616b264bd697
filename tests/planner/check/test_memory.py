"""The oracle and the planner agree about memory where levels were measured, under every schedule that trains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import LEVEL_NAMES, Levels, Measurement, Profile
from planner.layers.boundary import Boundaries
from planner.schedules import names, positions, traits
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.solvers.laid_out_plans import EVERYTHING, plan_of_candidate, random_candidate, random_network


def with_levels(profile: Profile, seed: int) -> Profile:
    """``profile`` with levels, and every other layer such that its weight gradients cannot come later."""

    order = {layer.name: place for place, layer in enumerate(profile.graph.layers)}

    def pairs(draw: random.Random, others: list[str], samples: int) -> tuple[tuple[str, int], ...]:
        return tuple((name, draw.randrange(2**20) * samples) for name in others if draw.random() < 0.4)

    def measured(one: Measurement) -> Measurement:
        draw = random.Random(f"{seed} {one.layer}")
        sizes = [draw.randrange(2**20) * one.samples for _ in LEVEL_NAMES]
        levels = Levels(*sizes)
        if seed:  # the first is of a profile that does not know gradients of values
            names = list(order)
            place = order[one.layer]
            earlier = names[:place]
            later = names[place + 1 :]
            made, inputs, left = (pairs(draw, others, one.samples) for others in (earlier, earlier, later))
            levels = replace(levels, gradients_made=made, inputs_left=inputs, gradients_left_from=left)
        found = replace(one, levels=levels, saved_bytes=draw.randrange(2**20) * one.samples)
        if draw.random() < 0.5:
            found = replace(found, backward_input_s=found.backward_s, backward_weight_s=0.0)
        return found

    return replace(
        profile, measurements={kind: tuple(map(measured, found)) for kind, found in profile.measurements.items()}
    )


def planned(profile: Profile, bounds: Sequence[int], ranks: Sequence[tuple[int, ...]], count: int, name: str) -> Plan:
    """Of a chain cut at ``bounds``, ``count`` micro-batches; the oracle agrees with what is predicted of it."""
    rows = 1 if all(len(group) == 1 for group in ranks) else 4
    shares = tuple((1,) * len(group) for group in ranks)
    candidate = Candidate.chain(tuple(bounds), tuple(ranks), shares, (rows,) * count, name)
    problem = Problem(profile, rows * count, memory_margin=0.0)
    plan = plan_of_candidate(Evaluator(problem, CostModel(profile)), candidate)
    assert check(plan, profile) == ()
    return plan


def over(profile: Profile, transport: str) -> Profile:
    links = {name: replace(link, transport=transport) for name, link in profile.cluster.links.items()}
    return replace(profile, cluster=replace(profile.cluster, links=links))


@pytest.mark.cases(18)
@pytest.mark.parametrize("schedule", [name for name in names() if traits(name).trains])
@pytest.mark.parametrize("seed", range(3))
def test_the_peaks_are_reckoned_the_same(schedule: str, seed: int) -> None:
    size = 2**19 if seed == 1 else 2**12  # tensors travel on their own, or in frames
    profile = with_levels(chain_profile(8, 2, parameter_bytes=2**20, activation_bytes=size), seed)
    wanted = traits(schedule).stages_per_position
    ranks = tuple((rank,) for rank in positions(schedule, 2, 1 if wanted == 1 else 2))
    num_layers = len(profile.graph.layers)
    bounds = [round(num_layers * stage / len(ranks)) for stage in range(len(ranks) + 1)]
    plan = planned(profile, bounds, ranks, 4, schedule)
    low = tuple(replace(each, peak_bytes=each.peak_bytes - 2**16) for each in plan.prediction.ranks)
    assert check(replace(plan, prediction=replace(plan.prediction, ranks=low)), profile) != ()


def test_announced_receives_of_unlike_sizes_are_counted_in_their_order() -> None:
    """Small activations and large gradients by turns, four of them announced: each makes room for one."""
    sizes = [1000] * 9
    sizes[2] = 2 * 2**20
    sizes[5] = 6 * 2**20
    profile = chain_profile(9, 3, activation_bytes=sizes, saved_bytes=1000)
    planned(profile, (0, 3, 6, 10), ((0,), (1,), (2,)), 8, "1f1b")


@pytest.mark.cases(20)
@pytest.mark.parametrize("seed", range(40))
def test_shared_and_laid_out_stages_are_reckoned_the_same(seed: int) -> None:
    draw = random.Random(seed)
    profile = with_levels(random_network(draw), 1 + seed)
    evaluator = Evaluator(Problem(profile, 4, allow=EVERYTHING), CostModel(profile))
    assert check(plan_of_candidate(evaluator, random_candidate(draw, evaluator)), profile) == ()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_input_that_is_saved_where_it_was_received_counts_once(schedule: str) -> None:
    """Layer l4 saves what l3, of the stage before, made: 4 KiB a sample, and as much of its own making."""
    size = 4096

    def peaks(inputs_saved: int) -> list[int]:
        def measured(one: Measurement) -> Measurement:
            saved = size * one.samples if one.layer == "l4" else 0
            some = Levels(2 * saved, 0, 0, 0, 2 * saved, 0, inputs_saved * saved)
            return replace(one, levels=some, saved_bytes=2 * saved)

        bare = chain_profile(8, 2, activation_bytes=size)
        measurements = {kind: tuple(map(measured, found)) for kind, found in bare.measurements.items()}
        plan = planned(replace(bare, measurements=measurements), (0, 4, 9), ((0,), (1,)), 4, schedule)
        return [rank.peak_bytes for rank in plan.prediction.ranks]

    apart = peaks(0)
    once = peaks(1)
    assert once[0] == apart[0]
    assert apart[1] - once[1] in (size, 2 * size)  # of one micro-batch, or of two where weight gradients come later


@pytest.mark.parametrize(("parameter_bytes", "stands"), [(2**16, 3 * 2**16), (2**17, 0)])
def test_receives_of_small_sums_of_two_ranks_stand_ready(parameter_bytes: int, stands: int) -> None:
    """Three layers, one bucket: up to 256 KiB are exchanged over gloo, more go round a ring."""
    profile = chain_profile(3, 2, parameter_bytes=parameter_bytes)
    plans = [planned(over(profile, name), (0, 4), ((0, 1),), 1, "1f1b") for name in ("gloo", SHARED_MEMORY)]
    peaks = [[rank.peak_bytes for rank in plan.prediction.ranks] for plan in plans]
    assert [beside - within for beside, within in zip(*peaks, strict=True)] == [stands] * 2


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("transport", ["gloo", SHARED_MEMORY])
def test_what_comes_with_another_message_is_there_from_then_on(schedule: str, transport: str) -> None:
    """Layer 0 is read by a second stage of the other rank, in one message where that is small."""
    profile = over(
        with_levels(chain_profile(8, 2, activation_bytes=2**12, skips=[(0, 3), (0, 4), (0, 7)]), 0), transport
    )
    plan = planned(profile, (0, 2, 4, 6, 9), tuple((rank,) for rank in positions(schedule, 2, 2)), 4, schedule)
    assert Boundaries.of_decision(profile.graph, plan.decision).program(plan.decision).joined()
