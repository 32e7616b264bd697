"""Layouts are what they are called, layers are timed where they run, and rows say what was missed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from benchmarks.devices.layer_clock import LayerClock
from benchmarks.devices.ranks import on_ranks
from benchmarks.strong_scaling.__main__ import chosen, run_point
from benchmarks.strong_scaling.layouts import Ways, shapes_of
from benchmarks.strong_scaling.points import (
    LayerPoint,
    Point,
    enlarged_graph,
    further_rows,
    layer_rows,
    roofline_profile,
    rows_of,
)
from benchmarks.strong_scaling.runs import Network, require_equal_losses
from planner.costs.stages.stage_cost import stage_cost
from planner.ir.graph import Graph
from planner.ir.profile import ModelSource, Profile
from profiler import load_model
from profiler.capture.graph import capture

MESH = "profiler.models.mesh_tangling:mesh_tangling_128"
SOURCE = ModelSource(MESH, {"width": "0.0625"}, (2, 18, 32, 32))


@cache
def graph() -> Graph:
    return capture(load_model(SOURCE)).graph


@cache
def ways(ranks: int) -> Ways:
    return Ways(roofline_profile(SOURCE, graph(), 4), 2, ranks)


def test_a_larger_graph_is_what_a_capture_at_that_size_gives() -> None:
    larger = capture(load_model(replace(SOURCE, input_shape=(2, 18, 64, 64)))).graph
    assert enlarged_graph(SOURCE, 2) == larger


def test_a_uniform_layout_cuts_every_layer_as_far_as_it_can_be() -> None:
    found = ways(4).uniform({"height": 4})
    parts = {ways(4).prices.layers[k].name: option.grid for k, option in found.options.items()}
    assert parts["features.0.conv"] == (("height", 4),)
    assert parts["head"] == (("height", 2), ("replica", 2))  # of two rows
    assert found.name == "height:4"
    assert found.decision.num_ranks == 4


def test_the_mix_is_no_slower_than_any_uniform_layout_nor_dryden() -> None:
    def seconds(way: object) -> float:
        return stage_cost(ways(4).prices, way.options).step_s(1)

    mix = ways(4).mix()
    others = [ways(4).best_uniform(), ways(4).best_uniform(("height", "width")), ways(4).dryden()]
    assert seconds(others[0]) <= seconds(others[1])
    assert all(seconds(mix) <= seconds(other) * (1 + 1e-9) for other in others)
    assert mix.is_proven
    assert not ways(4).mix(most_options=4).is_proven


def test_what_wins_a_layer_of_the_mix_is_what_the_mix_has() -> None:
    mix = ways(4).mix()
    for lead in ways(4).leads(mix):
        assert lead.chosen_s == pytest.approx(lead.winner_s, rel=1e-9, abs=1e-12)
        assert lead.runner_up_s >= lead.winner_s


def test_nothing_is_called_measured_that_was_not() -> None:
    found = ways(2).uniform({"height": 2})
    assert ways(2).measured_share(found) == 0.0
    assert not any(each.is_measured for each in ways(2).per_layer(found, 0).values())


def test_ways_that_are_the_same_are_looked_at_once() -> None:
    found = list(chosen(ways(2)))
    assert next(role for role, _ in found) == "samples"
    assert all(a.options != b.options for (_, a), (_, b) in itertools.combinations(found, 2))
    assert [role for role, _ in chosen(ways(1))] == ["one device"]


def test_parts_are_asked_for_at_the_sizes_that_are_wanted() -> None:
    found = shapes_of((2,), ("sample", "spatial"), 2)(graph(), (1, 2))
    assert {shape.samples for shape in found} == {2}


@pytest.mark.exhaustive("captures and runs the mesh network twice")
def test_every_layer_is_timed_on_every_rank_and_losses_agree() -> None:
    network, losses = Network(SOURCE), {}
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


def test_what_a_rank_raises_is_told() -> None:
    def work(transport: object) -> None:
        raise ValueError("so it is")

    with pytest.raises(RuntimeError, match=r"rank 2:\n(.|\n)*ValueError: so it is"):
        on_ranks(3, work)


def test_time_belongs_to_the_innermost_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ticks = LayerClock(), _ticks()
    monkeypatch.setattr("benchmarks.devices.layer_clock.time.thread_time", lambda: next(ticks))
    outer, inner = ("outer", "backward"), ("inner", "backward")
    clock._enter(outer)
    clock._within(inner, lambda: None)()
    clock._leave()
    clock.next_step()
    assert clock.medians() == {"outer": (0.0, 2.0), "inner": (0.0, 1.0)}


def test_a_backward_is_that_of_the_nodes_of_the_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ticks = LayerClock(), _ticks()
    monkeypatch.setattr("benchmarks.devices.layer_clock.time.thread_time", lambda: next(ticks))
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
    monkeypatch.setattr("benchmarks.strong_scaling.points.num_cores", lambda: 2)
    points = [_point(1, 4.0, 3.0), replace(_point(2, 2.0, 2.5), alone_s=4.0)]
    rows = {row.name: row for row in rows_of(points)}
    assert rows["net, 2 ranks, mix: predicted speed-up"].value == 2.0
    assert rows["net, 2 ranks, mix: measured speed-up"].value == pytest.approx(1.6)
    assert rows["net, 2 ranks, mix: speed-up by processor time"].value == pytest.approx(1.0)
    assert not rows["net, 2 ranks, mix: error"].holds
    assert not rows["net, 1 rank, mix: error"].holds
    far = {row.name: row.value for row in further_rows(points, [_point(8, 1.0, 0.0)])}
    assert far["net, 8 ranks, mix: efficiency"] == 50.0


def test_the_profile_of_rooflines_knows_four_devices_a_host() -> None:
    found: Profile = roofline_profile(SOURCE, graph(), 8)
    assert [device.host for device in found.cluster.devices] == ["n0"] * 4 + ["n1"] * 4
    assert {each.evidence for found in found.measurements.values() for each in found} == {"datasheet"}
