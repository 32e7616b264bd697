"""How high memory rises while layers run; what is timed ahead of a micro-batch."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from benchmarks.site_balance import cut
from cuda_ops.memory import available, meter_of
from planner.costs.memory.action_peaks import ActionPeaks, RunningLayers, action_peaks
from planner.ir.profile import LEVEL_NAMES, ModelSource, Optimizer
from planner.sites.arrangement import arrange, halo_sites
from planner.sites.prices import NeighbourPairs, network_work, prices
from planner.sites.work import SiteLevel
from profiler import CapturedModule
from profiler.capture.sizes import NUM_SAMPLES
from profiler.measure import preparing, worker
from profiler.measure.job import MeasuringJob
from profiler.measure.memory import footprints
from profiler.measure.preparing import PARTS, preparation_costs, site_halos
from profiler.source.model import LoadedModel, PreparedExample, example_of, fed_example
from profiler.source.source import load_model
from runtime.sparse.share import SiteShare
from tests.captures import capture

counts_allocations_here = pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")

NETWORKS = {
    "residual": ModelSource(
        "profiler.models.resnet:resnet18", {"width": "8", "num_classes": "5", "depths": "[1, 1]"}, (4, 3, 32, 32)
    ),
    "transformer": ModelSource(
        "profiler.models.gpt:gpt",
        {"vocabulary": "50", "width": "32", "layers": "2", "heads": "2", "context": "16"},
        (4, 16),
    ),
}


def peaks_of(captured: CapturedModule, model: LoadedModel) -> ActionPeaks:
    graph = captured.graph
    found = footprints(captured, example_of(graph.inputs, model, graph.samples), graph.samples)
    names = [layer.name for layer in graph.layers]
    seen: set[str] = set()
    gradients = []
    for layer in graph.layers:
        gradients.append(sum(graph.parameters[name].num_bytes for name in {*layer.parameters} - seen))
        seen |= {*layer.parameters}
    levels = np.array([[getattr(found[n].levels, each) for n in names] for each in LEVEL_NAMES], dtype=float)
    saved = np.array([found[n].saved_bytes for n in names], dtype=float)
    return action_peaks(RunningLayers(saved, np.array(gradients, float), levels))


@counts_allocations_here
@pytest.mark.parametrize(
    ("name", "counts_allocations"),
    [("residual", True), ("transformer", True), ("transformer", False)],  # a convolution allocates for itself
    ids=["residual", "transformer", "transformer-by-operators"],
)
def test_the_levels_of_layers_make_up_the_peaks_of_the_network(
    name: str, counts_allocations: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(NETWORKS[name])
    captured = capture(model)
    if not counts_allocations:
        monkeypatch.setattr("profiler.measure.memory.meter_of", lambda device: None)
    expected = peaks_of(captured, model)
    graph = captured.graph_module
    tensors = example_of(captured.graph.inputs, model, captured.graph.samples)
    names = [node.target for node in graph.graph.nodes if node.op == "placeholder"]
    inputs = [captured.graph.samples if each == NUM_SAMPLES else tensors[each] for each in names]
    meter = meter_of(torch.device("cpu"))
    assert meter is not None
    peaks = []
    for _ in range(2):  # gradients are made, then there
        gc.collect()
        meter.take_peak()
        start = meter.current_bytes
        loss = graph(*inputs)
        loss = loss[0] if isinstance(loss, tuple) else loss
        peaks.append(meter.take_peak() - start)
        loss.backward()
        peaks.append(meter.take_peak() - start)
        del loss
    assert expected["forward"] == pytest.approx(peaks[0], rel=0.03)
    assert expected["B first"] == pytest.approx(peaks[1], rel=0.03)
    assert expected["B"] == pytest.approx(peaks[3], rel=0.03)


@counts_allocations_here
def test_it_is_known_whose_backward_made_a_gradient_and_who_reads_it_last() -> None:
    """A block's shortcut and its convolutions read one value: who runs backward first makes a gradient that waits."""
    model = load_model(NETWORKS["residual"])
    captured = capture(model)
    graph = captured.graph
    found = footprints(captured, example_of(graph.inputs, model, graph.samples), graph.samples)
    at = {layer.name: place for place, layer in enumerate(graph.layers)}
    spans = [
        (at[layer.name], at[last], size)
        for layer in graph.layers
        for last, size in (found[layer.name].levels or pytest.fail("no levels")).gradients_made
    ]
    assert all(maker > last for maker, last, _ in spans)
    assert any(maker - last > 1 for maker, last, _ in spans), "a shortcut's gradient waits for the other branch"
    for layer in graph.layers[1:]:
        levels = found[layer.name].levels
        assert levels is not None
        under_way = sum(size for maker, last, size in spans if last <= at[layer.name] < maker)
        assert under_way <= levels.backward
        assert sum(size for _, size in levels.gradients_left_from) <= levels.left
        assert all(at[maker] < at[layer.name] for maker, _ in levels.inputs_left)
        assert levels.inputs_saved <= levels.inputs_kept
    convolution = next(layer for layer in graph.layers[1:] if layer.kind == "conv")
    levels = found[convolution.name].levels
    assert levels is not None
    assert len(levels.inputs_left) == len(levels.gradients_left_from) == 1
    assert levels.inputs_kept == sum(size for _, size in levels.inputs_left), "whoever saves it first"


SAMPLES = 4


def unet() -> LoadedModel:
    return load_model(ModelSource("tests.runtime.sparse.networks:unet", dtype="float64"))


def test_a_share_is_timed_of_each_map_that_layers_read_and_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    model = unet()
    asked = list[str]()
    graph = capture(model).graph
    preparation = model.clouds.preparation
    monkeypatch.setattr(preparing, "_NUM_RUNS", 1)
    made = SiteShare.map

    def noted(share: SiteShare, name: str, *device: torch.device) -> object:
        asked.append(name)
        return made(share, name, *device)

    monkeypatch.setattr(SiteShare, "map", noted)
    costs = preparation_costs(graph, model.clouds, fed_example(model, SAMPLES), SAMPLES)
    assert sorted(asked) == sorted(prices(graph).pair)
    shared = {cost.name for cost in costs if cost.shared_s > 0}
    assert shared == {"collate", *(f"map_{index}" for index in range(len(preparation.recipe.maps)))}
    halves = [sum(name in asked for name in cost.inputs) for cost in costs if cost.name.startswith("map_")]
    assert max(halves) == 2, "this network goes through a map in both directions"
    assert all(cost.seconds > 0 and cost.samples == SAMPLES for cost in costs)


def test_halos_are_those_of_the_intervals_that_ranks_own() -> None:
    model = unet()
    graph = capture(model).graph
    clouds = model.clouds.preparation.clouds(fed_example(model, SAMPLES))
    words = clouds.preparation.size_of
    names = dict(zip(graph.inputs, clouds.preparation.names, strict=True))
    passages = {name: clouds.preparation.recipe.passage(clouds, names[name]) for name in prices(graph).pair}
    levels = {word: SiteLevel(*clouds.level(route)) for route, word in words.items()}
    pairs = {
        name: NeighbourPairs(words[each.source], words[each.target], *((half.numpy() >= 0).sum(0) for half in halves))
        for name, each in passages.items()
        for halves in [(each.kernel_map.reverse, each.kernel_map.neighbours)]
    }
    work = network_work(levels, pairs, prices(graph))
    found = {(halo.layer, halo.parts): halo.rows for halo in site_halos(graph, model.clouds, clouds_of(model), SAMPLES)}
    for parts in PARTS:
        owned = cut(arrange(work, (1.0,) * parts), (1.0,) * parts)
        owner = {word: owned.owner(each.samples, each.coordinates, each.stride) for word, each in levels.items()}
        for layer in graph.layers:
            name = next((value for value in layer.inputs[1:] if value in passages), None)
            if name is not None:
                each = passages[name]
                ends = owner[words[each.source]], owner[words[each.target]]
                rows = halo_sites(*ends, each.kernel_map.neighbours.numpy(), parts)
                assert found[layer.name, parts] == int(rows.sum(0).max(initial=0))
    assert len(found) == len(PARTS) * sum(bool(set(layer.inputs[1:]) & set(passages)) for layer in graph.layers)
    assert any(np.array(list(found.values())) > 0)


def clouds_of(model: LoadedModel) -> tuple[torch.Tensor, ...]:
    return fed_example(model, SAMPLES)


def test_layers_are_measured_on_clouds_of_which_the_first_have_about_as_many_sites_as_are_average() -> None:
    source = ModelSource("profiler.models.sparse_resnet:sparse_resnet_tiny", {}, (8, 300, 4))
    given = load_model(source).clouds
    measured, _ = worker._captured(lambda _: None, MeasuringJob(source, Optimizer(), (), quick=True))
    counts = {samples: by_sample(given, samples) for samples in (1, 2, 4, 8)}
    found = {samples: by_sample(measured.clouds, samples) for samples in counts}
    assert found[8] == pytest.approx(counts[8]), "they are the same clouds"
    mean = found[8]
    for samples in (1, 2, 4):
        assert distance(found[samples], mean) < distance(counts[samples], mean)
    rows = {(tuple(x.flatten().tolist()), int(y)) for x, y in zip(given.inputs[0], given.targets[0], strict=True)}
    own = measured.clouds
    assert rows == {(tuple(x.flatten().tolist()), int(y)) for x, y in zip(own.inputs[0], own.targets[0], strict=True)}


def by_sample(example: PreparedExample, samples: int) -> list[float]:
    """Sites a sample, by level, of the first samples."""
    clouds = example.preparation.clouds([each[:samples] for each in (*example.inputs, *example.targets)])
    return [count / samples for count in clouds.sizes.values()]


def distance(one: list[float], mean: list[float]) -> float:
    return sum((a / b - 1) ** 2 for a, b in zip(one, mean, strict=True))
