"""The oracle and the planner agree about memory where levels were measured, under every schedule that trains."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.memory.action_peaks import DeferredWeights, RunningLayers, ValueGradients, action_peaks
from planner.costs.memory.levels import BACKWARD, LayerParts, LevelTables
from planner.costs.memory.messages import CoalescedMessage, Received
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.layout import Layout
from planner.ir.problem import Problem
from planner.ir.profile import LEVEL_NAMES, Levels, Measurement, Profile
from planner.ir.schedule import Edge
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
            names, place = list(order), order[one.layer]
            earlier, later = names[:place], names[place + 1 :]
            made, inputs, left = (pairs(draw, others, one.samples) for others in (earlier, earlier, later))
            levels = replace(levels, gradients_made=made, inputs_left=inputs, gradients_left_from=left)
        found = replace(one, levels=levels, saved_bytes=draw.randrange(2**20) * one.samples)
        if draw.random() < 0.5:
            found = replace(found, backward_input_s=found.backward_s, backward_weight_s=0.0)
        return found

    return replace(
        profile, measurements={kind: tuple(map(measured, found)) for kind, found in profile.measurements.items()}
    )


@pytest.mark.parametrize("schedule", [name for name in names() if traits(name).trains])
@pytest.mark.parametrize("seed", range(3))
def test_the_peaks_are_reckoned_the_same(schedule: str, seed: int) -> None:
    size = 2**19 if seed == 1 else 2**12  # tensors travel on their own, or in frames
    profile = with_levels(chain_profile(8, 2, parameter_bytes=2**20, activation_bytes=size), seed)
    wanted = traits(schedule).stages_per_position
    ranks = tuple((rank,) for rank in positions(schedule, 2, 1 if wanted == 1 else 2))
    num_layers = len(profile.graph.layers)
    bounds = tuple(round(num_layers * stage / len(ranks)) for stage in range(len(ranks) + 1))
    candidate = Candidate.chain(bounds, ranks, ((1,),) * len(ranks), (1,) * 4, schedule)
    evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), CostModel(profile))
    plan = plan_of_candidate(evaluator, candidate)
    assert check(plan, profile) == ()
    ranks_of = plan.prediction.ranks
    low = tuple(replace(each, peak_bytes=each.peak_bytes - 2**16) for each in ranks_of)
    assert check(replace(plan, prediction=replace(plan.prediction, ranks=low)), profile) != ()


def test_announced_receives_of_unlike_sizes_are_counted_in_their_order() -> None:
    """Small activations and large gradients by turns, four of them announced: each makes room for one."""
    sizes = [1000] * 9
    sizes[2], sizes[5] = 2 * 2**20, 6 * 2**20
    profile = chain_profile(9, 3, activation_bytes=sizes, saved_bytes=1000)
    candidate = Candidate.chain((0, 3, 6, 10), ((0,), (1,), (2,)), ((1,),) * 3, (1,) * 8, "1f1b")
    plan = plan_of_candidate(Evaluator(Problem(profile, 8, memory_margin=0.0), CostModel(profile)), candidate)
    assert check(plan, profile) == ()


@pytest.mark.parametrize("seed", range(10))
def test_shared_and_laid_out_stages_are_reckoned_the_same(seed: int) -> None:
    draw = random.Random(seed)
    profile = with_levels(random_network(draw), 1 + seed)
    evaluator = Evaluator(Problem(profile, 4, allow=EVERYTHING), CostModel(profile))
    for _ in range(2):
        plan = plan_of_candidate(evaluator, random_candidate(draw, evaluator))
        assert check(plan, profile) == ()


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
        evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), CostModel(profile))
        found = plan_of_candidate(evaluator, candidate)
        assert check(found, profile) == ()
        return tuple(rank.peak_bytes for rank in found.prediction.ranks)

    apart, once = plan(0), plan(1)
    assert once[0] == apart[0]
    assert apart[1] - once[1] in (size, 2 * size)  # of one micro-batch, or of two where weight gradients come later


def levels_of(first: Callable[[int], Levels]) -> tuple[LevelTables, str]:
    """Tables of a chain whose first layer has these levels, by samples; and the kind of device."""
    bare = chain_profile(2)
    (kind,) = bare.measurements
    nothing = Levels(0, 0, 0, 0, 0, inputs_kept=1)
    found = tuple(
        replace(one, levels=first(one.samples) if one.layer == "l0" else nothing) for one in bare.measurements[kind]
    )
    return LevelTables(replace(bare, measurements={kind: found})), kind


def part_of_first(share: float, read_share: float, **columns: float) -> LayerParts:
    """A part of the first layer, of 4 samples."""
    numbers = {"saved": 0.0, "samples": 4.0, "share": share, "read_share": read_share, **columns}
    names = LayerParts._fields[1:]
    return LayerParts(np.array([0]), *(np.array([numbers.get(name, 0.0)]) for name in names))


@pytest.mark.parametrize(
    ("weights", "weight_bytes", "expected"),
    [(0.25, 80.0, 35.0), (1.0, 80.0, 35.0 + 0.75 * 80.0), (1.0, 1000.0, 35.0 + 0.75 * 100.0), (0.0, 0.0, 35.0)],
)
def test_a_copy_of_the_weights_is_there_whole_in_a_part_that_uses_all(
    weights: float, weight_bytes: float, expected: float
) -> None:
    table, kind = levels_of(lambda samples: Levels(0, 100 + 10 * samples, 0, 0, 0))
    part = part_of_first(0.25, 0.25, parameters=weights * weight_bytes, all_parameters=weight_bytes)
    found = table.of_parts(kind, part, alone=False)
    assert found is not None
    assert found[0][BACKWARD] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("first", "every", "copied", "expected"),
    [
        (0, 10, 16, 40.0),  # the copy, whole: another layer has saved its part of the values as well
        (2, 2, 16, 16.0),  # what comes at least
        (10, 10, 16, 20.0),  # the copy, of which the share of what is saved first is counted already
        (0, 10, 0, 16.0),  # a halo that comes, and is saved as it is
        (0, 0, 16, 0.0),  # it saves nothing of its inputs
        (0, 0, 0, 0.0),
    ],
)
def test_who_reads_a_copy_saves_it(first: int, every: int, copied: float, expected: float) -> None:
    """Half of the work of 4 samples, which reads all of them, 16 bytes of which come from others."""
    table, kind = levels_of(lambda n: Levels(0, 0, 0, 0, 0, inputs_saved=first * n, inputs_kept=every * n))
    found = table.of_parts(kind, part_of_first(0.5, 1.0, received=16.0, copied=copied), alone=False)
    assert found is not None
    assert [*found[1], *found[2]] == pytest.approx([expected, 0.0 if copied else 4.0 * first])


@pytest.mark.parametrize(("dim", "is_copied"), [("sample", False), ("feature", True)])
def test_a_part_that_is_cut_out_is_sent_from_a_copy(dim: str, is_copied: bool) -> None:
    """Halves of 8 samples of 2 MiB features: the first dim's lie in one piece, the second's do not."""
    graph = chain_profile(2, 2, parameter_bytes=0, activation_bytes=2**21).graph
    points = (0, 4, 8) if dim == "sample" else (0, 2**18, 2**19)
    stages = {layer.name: min(number, 1) for number, layer in enumerate(graph.layers)}
    boundaries = Boundaries.of(graph, stages, (Layout({}), Layout({dim: points})), ((0,), (1, 2)))
    messages = boundaries.messages(Edge(0, 1, ("l0",)), 8)
    assert [part.is_copied for message in messages for part in message.parts] == [is_copied] * 2
    assert [CoalescedMessage.of(message.parts) for message in messages] == [(0, 2**23 if is_copied else 0)] * 2


FLOWS = ("outside", "after", "left", "begin", "given", "shared")


def flowing(**pairs: object) -> ValueGradients:
    """Gradients of values of a stage of three layers; nothing but what is given."""
    return ValueGradients(**{name: np.array(pairs.get(name, (0.0, 0.0, 0.0))) for name in FLOWS})


def test_a_gradient_that_was_received_counts_once_for_as_long_as_the_backward_lasts() -> None:
    saved, gradients, levels = np.zeros(3), np.zeros(3), np.zeros((8, 3))
    levels[1] = [9.0, 7.0, 8.0]  # backward: of these 4 is the gradient of an output that the first layer reads last
    found = action_peaks(
        RunningLayers(saved, gradients, levels, output_gradients=5.0, flow=flowing(outside=(4.0, 4.0, 4.0)))
    )
    assert found["B first"] == 9 - 4 + 5
    assert (
        action_peaks(RunningLayers(saved, gradients, levels, output_gradients=5.0))["B first"] == 9 + 5
    )  # where nothing of that is known
    alone = action_peaks(RunningLayers(saved, gradients, levels, flow=flowing(outside=(4.0, 4.0, 4.0))))
    assert alone["B first"] == 9, "what no message brought lies where the level has it"


def test_a_bucket_is_put_together_beside_what_is_there_when_its_last_layer_has_run() -> None:
    saved, gradients, levels = np.array([2.0, 3.0, 50.0]), np.array([10.0, 20.0, 30.0]), np.zeros((8, 3))
    levels[1] = [1.0, 40.0, 1.0]
    copies, flow = np.array([0.0, 25.0, 0.0]), flowing(after=(6.0, 7.0, 8.0))
    assert action_peaks(RunningLayers(saved, gradients, levels, flow=flow))["B first"] == 5 + 40 + 50
    found = action_peaks(RunningLayers(saved, gradients, levels, flow=flow), copies)
    assert found["B first"] == max(5 + 40 + 50, 2 + 7 + 50 + 25)
    levels[1, 1] = 0.0
    assert action_peaks(RunningLayers(saved, gradients, levels, flow=flow), copies)["B first"] == max(
        55 + 1 + 30, 2 + 7 + 50 + 25
    )


def test_weight_gradients_that_are_put_off_hold_what_they_need_until_ranks_wait_for_statistics() -> None:
    """norm, conv, conv from below: both convolutions leave theirs to the norm, which makes them before its own."""
    saved, gradients, levels = np.array([1.0, 2.0, 4.0]), np.zeros(3), np.zeros((8, 3))
    levels[1] = [10.0, 20.0, 30.0]
    given, needs, flow = np.array([0.0, 200.0, 400.0]), np.array([0.0, 50.0, 60.0]), flowing(begin=(7.0, 0.0, 0.0))
    deferred_weights = DeferredWeights.of([False, True, True], [True, False, False], given + saved, needs)
    assert deferred_weights.extra.tolist() == [0.0, 404.0, 0.0]
    assert (deferred_weights.runs.tolist(), deferred_weights.end) == ([404.0 + 202.0 + 60.0, 0.0, 0.0], 0.0)
    found = action_peaks(RunningLayers(saved, gradients, levels, flow=flow, deferred_weights=deferred_weights))
    assert found["B first"] == max(7 + 30, 3 + 20 + 404, 1 + 7 + 666)
    alone = DeferredWeights.of([False, True, True], [False] * 3, given + saved, needs)
    assert alone.end == 666.0, "with no norm below they are made when the backward is over"
    third = DeferredWeights.of([True] * 3, [False] * 3, given + saved, needs)
    assert third.extra[0] == 404.0 + 202.0 + 60.0, "of three the first is made at once"


def test_a_part_of_a_concatenations_gradient_that_is_sent_on_stays_with_the_rest() -> None:
    saved, gradients, levels = np.zeros(3), np.zeros(3), np.zeros((8, 3))
    levels[1] = [9.0, 7.0, 8.0]
    assert (
        action_peaks(RunningLayers(saved, gradients, levels, flow=flowing(shared=(0.0, 5.0, 0.0))))["B first"] == 7 + 5
    )


@pytest.mark.parametrize(("parameter_bytes", "stands"), [(2**16, 3 * 2**16), (2**17, 0)])
def test_receives_of_small_sums_of_two_ranks_stand_ready(parameter_bytes: int, stands: int) -> None:
    """Three layers, one bucket: up to 256 KiB are exchanged over gloo, more go round a ring."""

    def peaks(transport: str) -> list[int]:
        profile = chain_profile(3, 2, parameter_bytes=parameter_bytes)
        links = {name: replace(link, transport=transport) for name, link in profile.cluster.links.items()}
        profile = replace(profile, cluster=replace(profile.cluster, links=links))
        evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), CostModel(profile))
        plan = plan_of_candidate(evaluator, Candidate.chain((0, 4), ((0, 1),), ((1, 1),), (4,), "1f1b"))
        assert check(plan, profile) == ()
        return [rank.peak_bytes for rank in plan.prediction.ranks]

    assert [over - beside for over, beside in zip(peaks("gloo"), peaks(SHARED_MEMORY), strict=True)] == [stands] * 2


def test_a_gradient_in_its_buffer_goes_when_its_own_weight_gradients_are_made() -> None:
    saved, gradients, levels = np.zeros(3), np.zeros(3), np.zeros((8, 3))
    levels[3] = [30.0, 0.0, 1.0]

    def peaks(*left: float) -> dict[str, float]:
        kept = np.array(left)
        running = RunningLayers(
            saved, gradients, levels, output_gradients=8.0, output_gradients_left=kept, flow=flowing()
        )
        return action_peaks(running)

    last = peaks(0.0, 0.0, 8.0)
    assert (last["deferred"], last["W first"]) == (8, 30)
    assert peaks(8.0, 0.0, 0.0)["W first"] == 38


def test_parts_that_several_ranks_sent_go_once_they_are_put_together() -> None:
    size = 2**20
    one, two = Received.of({0: [(size, 0, False)]}), Received.of({0: [(size // 2, 0, False), (size // 2, 0, False)]})
    assert (one.whole, one.total, one.assembled) == (size + size // 8, size + size // 8, 0)
    assert (two.whole, two.total, two.assembled) == (size, 2 * size + size // 8, size)
    assert (one.left(0.0), one.left(size / 2), two.left(size), one.left(None)) == (0, 9 * size // 16, size, one.whole)


def test_gradients_that_cannot_wait_come_with_those_of_inputs() -> None:
    saved, gradients, levels = np.zeros(3), np.array([10.0, 100.0, 1.0]), np.zeros((6, 3))
    found = action_peaks(RunningLayers(saved, gradients, levels, defers=np.array([True, False, True])))
    assert (found["early gradients"], found["I first"], found["I"]) == (100, 100, 100)
    assert (found["W first"], found["W"]) == (11, 10)
    whole = action_peaks(RunningLayers(saved, gradients, levels))
    assert (whole["early gradients"], whole["I first"], whole["W first"]) == (0, 0, 111)
    assert found["B first"] == whole["B first"] == 111


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
@pytest.mark.parametrize("transport", ["gloo", SHARED_MEMORY])
def test_what_comes_with_another_message_is_there_from_then_on(schedule: str, transport: str) -> None:
    """Layer 0 is read by a second stage of the other rank, in one message where that is small."""
    profile = with_levels(chain_profile(8, 2, activation_bytes=2**12, skips=[(0, 3), (0, 4), (0, 7)]), 0)
    links = {name: replace(link, transport=transport) for name, link in profile.cluster.links.items()}
    profile = replace(profile, cluster=replace(profile.cluster, links=links))
    ranks = tuple((rank,) for rank in positions(schedule, 2, 2))
    candidate = Candidate.chain((0, 2, 4, 6, 9), ranks, ((1,),) * len(ranks), (1,) * 4, schedule)
    evaluator = Evaluator(Problem(profile, 4, memory_margin=0.0), CostModel(profile))
    plan = plan_of_candidate(evaluator, candidate)
    assert Boundaries.of_decision(profile.graph, plan.decision).program(plan.decision).joined()
    assert check(plan, profile) == ()
