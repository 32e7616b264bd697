"""What is timed ahead of a micro-batch is what ranks make, and halos are counted in the order of the shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.site_balance import cut
from planner.ir.profile import ModelSource
from planner.sites.arrangement import arrange, halo_sites
from planner.sites.partition import SiteLevel
from planner.sites.prices import NeighbourPairs, network_work, prices
from profiler.measure import preparing
from profiler.measure.preparing import PARTS, preparation_costs, site_halos
from profiler.source.model import LoadedModel, fed_example
from profiler.source.source import load_model
from runtime.sparse.share import SiteShare
from tests.captures import capture

torch.set_num_threads(1)
SAMPLES = 4


def unet() -> LoadedModel:
    return load_model(ModelSource("tests.runtime.sparse.networks:unet", dtype="float64"))


def test_a_share_is_timed_of_each_map_that_layers_read_and_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = unet(), list[str]()
    graph, preparation = capture(model).graph, model.clouds.preparation
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
    graph, clouds = capture(model).graph, model.clouds.preparation.clouds(fed_example(model, SAMPLES))
    words, names = clouds.preparation.size_of, dict(zip(graph.inputs, clouds.preparation.names, strict=True))
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
