"""Predicted beside measured: memory of plans, shapes that nobody measured, layouts on more devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from benchmarks import memory
from benchmarks.accuracy.cases import Network, case, case_of
from benchmarks.devices.layer_clock import LayerClock
from benchmarks.devices.metered import steps_within
from benchmarks.strong_scaling.__main__ import Network as ScaledNetwork
from benchmarks.strong_scaling.__main__ import require_equal_losses, run_point
from benchmarks.strong_scaling.layouts import (
    LayerPoint,
    Point,
    Ways,
    enlarged_graph,
    further_rows,
    layer_rows,
    roofline_profile,
    rows_of,
    shapes_of,
)
from benchmarks.unseen_shapes import Errors, Held, sizes_and_shapes
from benchmarks.unseen_shapes import rows_of as rows_unseen
from cuda_ops.memory import available
from halopipe.run_spec.options import GLOO
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.costs.stages.stage_cost import stage_cost
from planner.ir.graph import Graph
from planner.ir.problem import Problem
from planner.ir.profile import Measurement, ModelSource, Profile
from planner.layers.recomputed import cores_among
from profiler import load_model
from profiler.capture.graph import capture
from tests.oracles.evaluation import evaluate
from tests.planner.networks import mesh_like, priced
from tests.planner.parts import with_parts

counts = pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")
GPT = "profiler.models.gpt:gpt"
GPT_ARGUMENTS = {"layers": "2", "heads": "4"}
SAMPLES = 4
MESH = "profiler.models.mesh_tangling:mesh_tangling_128"
SOURCE = ModelSource(MESH, {"width": "0.0625"}, (2, 18, 32, 32))


@counts
@pytest.mark.exhaustive("watches a network, then runs each plan on its ranks, which capture it again")
def test_plans_hold_what_is_predicted_and_fit_into_it() -> None:
    arguments = {**GPT_ARGUMENTS, "vocabulary": "500", "width": "256", "context": "64"}
    network = Network(ModelSource(GPT, arguments, (8, 64)), 8, (1, 2, 4, 8))
    for label, found in memory.plans_of(network, memory.profile_of(network), ((2, ("zb-h1/4", memory.DIVIDED)),)):
        assert max(found.errors) < 5.0, label
        assert min(found.errors) > -memory.UNDER_PERCENT, label
        assert (found.fits, found.runs_out) == (True, True), label


@cache
def watched(dropout: str) -> Profile:
    torch.set_num_threads(1)
    arguments = {**GPT_ARGUMENTS, "vocabulary": "100", "width": "32", "context": "96", "fused": "false"}
    source = ModelSource(GPT, {**arguments, "dropout": dropout}, (SAMPLES, 96))
    return memory.profile_of(Network(source, SAMPLES, (1, 2, 4)))


RANKS = pytest.mark.exhaustive("each rank captures the network")


@counts
@pytest.mark.parametrize(
    ("dropout", "plan", "ranks"),
    [
        ("0.1", "one device", 1),
        pytest.param("0.1", "gpipe/2", 2, marks=RANKS),
        pytest.param("0.1", "1f1b/1", 2, marks=RANKS),
        pytest.param("0.0", "one device", 1, marks=RANKS),
        pytest.param("0.0", "1f1b/1", 2, marks=RANKS),
        ("0.1", "zb-h1/1", 2),
    ],
)
def test_what_selective_recomputation_holds_is_predicted_within_three_per_cent(
    dropout: str, plan: str, ranks: int
) -> None:
    """Every allocation of a rank that runs the plan is counted."""
    profile = watched(dropout)
    problem = Problem(replace(profile, cluster=memory.cluster_of(ranks)), SAMPLES, confidence=0.0)
    plain = case(problem, plan, pads=False).decision
    spans = [cores_among(profile.graph, plain.layers_of(number)) for number in range(len(plain.stages))]
    stages = tuple(replace(each, recomputed=own) for each, own in zip(plain.stages, spans, strict=True))
    again = replace(plain, stages=stages)
    cost_model = CostModel(problem.profile)
    said, before = (
        [rank.peak_bytes for rank in forecast(Pricing(cost_model), each, 0.0).memories] for each in (again, plain)
    )
    no_limit = [None] * ranks
    counted = steps_within(case_of(problem, plan, again, pads=False).plan, GLOO, [no_limit, no_limit]).peak_bytes(2)
    assert said == pytest.approx(list(counted), rel=0.03)
    assert max(said) < 0.95 * max(before), "the scores are much of what is held"
    assert list(evaluate(cost_model, again).peak_bytes) == pytest.approx(said, abs=8)


def test_errors_are_relative_and_may_be_weighted_by_seconds() -> None:
    errors = Errors()
    for predicted_s, measured_s in ((1.5, 1.0), (9.0, 9.0), (None, 1.0)):
        errors.add("planner", predicted_s, measured_s)
    assert errors.mape("planner") == pytest.approx(25.0)
    assert errors.mape("planner", weighted=True) == pytest.approx(5.0)


def test_every_shape_is_held_back_once_and_gone_with_all_that_are_like_it() -> None:
    held = Held(priced(*mesh_like(height=32), sizes=(1, 2, 4)))
    folds = list(held.folds(held.whole, by_shape=False))
    assert sum(map(len, folds)) == len({(held.shape[m.layer], m.samples) for m in held.whole})

    def what(m: Measurement) -> tuple[int, int]:
        return held.shape[m.layer], m.samples

    left = held.without(folds[0]).measurements[held.kind]
    assert not {what(m) for m in left} & {what(m) for m in folds[0]}


def test_costs_in_proportion_to_work_are_found_again_and_rows_say_who_predicts_what() -> None:
    errors = sizes_and_shapes(Held(priced(*mesh_like(height=64), sizes=(1, 2, 4, 8))), by_shape=False)
    assert errors.mape("planner") < min(10, errors.mape("roofline"))
    profile = with_parts(priced(*mesh_like(height=32), speeds=(1.0,), sizes=(1, 2)), (1, 2), 2)
    names = [row.name for row in rows_unseen("net", profile)]
    assert {"net: sizes: planner", "net: parts: share", "net: parts, none known: planner"} <= set(names)


@cache
def graph() -> Graph:
    return capture(load_model(SOURCE)).graph


@cache
def ways(ranks: int) -> Ways:
    return Ways(roofline_profile(SOURCE, graph(), 4), 2, ranks)


def test_a_larger_graph_is_what_a_capture_at_that_size_gives_and_rooflines_know_four_devices_a_host() -> None:
    larger = capture(load_model(replace(SOURCE, input_shape=(2, 18, 64, 64)))).graph
    assert enlarged_graph(SOURCE, 2) == larger
    found = roofline_profile(SOURCE, graph(), 8)
    assert [device.host for device in found.cluster.devices] == ["n0"] * 4 + ["n1"] * 4
    assert {each.evidence for found in found.measurements.values() for each in found} == {"datasheet"}
    asked = shapes_of((2,), ("sample", "spatial"), 2)(graph(), (1, 2))
    assert {shape.samples for shape in asked} == {2}


def test_a_uniform_layout_cuts_every_layer_as_far_as_it_can_be_and_nothing_is_called_measured() -> None:
    found = ways(4).uniform({"height": 4})
    parts = {ways(4).prices.layers[k].name: option.grid for k, option in found.options.items()}
    assert parts["features.0.conv"] == (("height", 4),)
    assert parts["head"] == (("height", 2), ("replica", 2))  # of two rows
    assert (found.name, found.decision.num_ranks) == ("height:4", 4)
    assert ways(4).measured_share(found) == 0.0
    assert not any(each.is_measured for each in ways(4).per_layer(found, 0).values())


def test_the_mix_is_no_slower_than_any_uniform_layout_nor_dryden_and_wins_each_of_its_layers() -> None:
    def seconds(way: object) -> float:
        return stage_cost(ways(4).prices, way.options).step_s(1)  # type: ignore[attr-defined]

    mix = ways(4).mix()
    others = [ways(4).best_uniform(), ways(4).best_uniform(("height", "width")), ways(4).dryden()]
    assert seconds(others[0]) <= seconds(others[1])
    assert all(seconds(mix) <= seconds(other) * (1 + 1e-9) for other in others)
    assert mix.is_proven
    assert not ways(4).mix(most_options=4).is_proven
    for lead in ways(4).leads(mix):
        assert lead.chosen_s == pytest.approx(lead.winner_s, rel=1e-9, abs=1e-12)
        assert lead.runner_up_s >= lead.winner_s


@pytest.mark.exhaustive("captures and runs the mesh network twice")
def test_every_layer_is_timed_on_every_rank_and_losses_agree() -> None:
    network = ScaledNetwork(SOURCE)
    losses = {}
    names = {layer.name for layer in graph().layers}
    for ranks, grid in ((1, {}), (2, {"height": 2})):
        way = ways(ranks).uniform(grid)
        ran = network.run(way.decision, steps=1, timed_steps=1)
        losses[way.name] = ran.loss
        assert len(ran.ranks) == ranks
        for rank in ran.ranks:
            assert set(rank.layer_s) == names
            assert all(forward_s > 0 for forward_s, _ in rank.layer_s.values())
            assert all(backward_s > 0 for name, (_, backward_s) in rank.layer_s.items() if name.endswith("conv"))
        point = run_point("mesh", 2, "space", ways(ranks), way, ran)
        assert len(point.layers) == 2 * ranks * len(names)
    require_equal_losses(losses)
    with pytest.raises(RuntimeError, match="the loss is"):
        require_equal_losses({**losses, "other": 2 * ran.loss})


def test_time_belongs_to_the_innermost_layer_and_a_backward_is_that_of_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = _ticks()
    monkeypatch.setattr("benchmarks.devices.layer_clock.time.thread_time", lambda: next(ticks))
    clock = LayerClock()
    clock._enter(("outer", "backward"))
    clock._within(("inner", "backward"), lambda: None)()
    clock._leave()
    clock.next_step()
    assert clock.medians() == {"outer": (0.0, 2.0), "inner": (0.0, 1.0)}
    clock = LayerClock()
    weight = nn.Parameter(torch.ones(2))

    def first(x: Tensor) -> Tensor:
        return (x * weight).sin()

    y = clock._timed("second", torch.relu)(clock._timed("first", first)(torch.ones(2)))
    y.sum().backward()
    clock.next_step()
    assert clock.medians() == {"first": (1.0, 2.0), "second": (1.0, 1.0)}  # a second a node


def _ticks() -> Iterator[float]:
    """Each reading that begins something is at once after the one before, each that ends something 1 s later."""
    now = 0.0
    for number in itertools.count():
        now += number % 2 == 0
        yield now


def _point(ranks: int, predicted_s: float, measured_s: float, *layers: LayerPoint) -> Point:
    return Point("net", ranks, 2, "mix", "mix", {}, predicted_s, "measured", 1.0, True, measured_s, 1.0, 1.0, layers)


def test_errors_of_layers_count_parts_that_were_measured_alone() -> None:
    layers = [
        LayerPoint("a", "conv", 0, "forward", 1.0, 1.05, True),
        LayerPoint("b", "conv", 0, "forward", 3.0, 6.0, True),
        LayerPoint("c", "pool", 0, "forward", 1.0, 9.0, False),
        LayerPoint("a", "conv", 0, "backward", 1.0, 1.0, True),
    ]
    rows = {row.name: row for row in layer_rows(_point(2, 1.0, 1.0, *layers))}
    forward = "net, 2 ranks, mix, forward of layers"
    assert rows[f"{forward}: median absolute error"].value == pytest.approx(52.5)
    assert not rows[f"{forward}: median absolute error"].holds
    assert rows[f"{forward}: within 10 %"].value == 50.0
    assert rows[f"{forward}: within 10 %, by time"].value == 25.0
    assert rows[f"{forward}: error of the sum of conv"].value == pytest.approx(100 * 3.05 / 4)
    assert rows["net, 2 ranks, mix, backward of layers: median absolute error"].holds


def test_speed_ups_are_against_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.strong_scaling.layouts.num_cores", lambda: 2)
    points = [_point(1, 4.0, 3.0), replace(_point(2, 2.0, 2.5), alone_s=4.0)]
    rows = {row.name: row for row in rows_of(points)}
    assert rows["net, 2 ranks, mix: predicted speed-up"].value == 2.0
    assert rows["net, 2 ranks, mix: measured speed-up"].value == pytest.approx(1.6)
    assert rows["net, 2 ranks, mix: speed-up by processor time"].value == pytest.approx(1.0)
    assert not rows["net, 2 ranks, mix: error"].holds
    assert not rows["net, 1 rank, mix: error"].holds
    far = {row.name: row.value for row in further_rows(points, [_point(8, 1.0, 0.0)])}
    assert far["net, 8 ranks, mix: efficiency"] == 50.0
