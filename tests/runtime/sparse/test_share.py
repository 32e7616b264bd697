"""What the ranks of a stage are fed of a micro-batch, put together, is the micro-batch in the order of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from planner.ir.graph import Graph, TensorSpec
from planner.layers.boundary import Boundaries
from runtime.pipeline.microbatches import WholeBatch
from runtime.sparse.batch import PreparedInputs
from runtime.sparse.preparing import Preparing
from runtime.sparse.share import SiteShare
from runtime.stage.shapes import step_inputs
from tests.runtime.plans import batch_of, decide
from tests.runtime.sparse.test_plans import network

torch.set_num_threads(1)
SPEEDS = [((1.0, 1.0), (2, 2)), ((3.0, 1.0, 2.0), (2, 1, 1)), ((1.0, 0.0, 1.0), (2, 0, 2)), ((1.0,) * 8, (1, 0) * 4)]


def prepared(name: str, num_ranks: int) -> object:
    model, captured = network(name)
    decision = decide(captured.graph, [], (4,), [tuple(range(num_ranks))], [(1,) * num_ranks])
    inputs, targets = batch_of(model, 4, 0)
    whole = captured
    specs = step_inputs(whole)
    prepared = PreparedInputs.of(whole.graph, whole.preparation, dict(whole.raw))
    return Preparing.of(decision, prepared).batch(WholeBatch(specs, (*inputs, *targets), (4,)))


@pytest.mark.parametrize(("speeds", "shares"), SPEEDS, ids=str)
@pytest.mark.parametrize("name", ["unet", "averaged"])
def test_parts_put_together_are_the_whole(name: str, speeds: tuple[float, ...], shares: tuple[int, ...]) -> None:
    batch = prepared(name, len(speeds))
    parts = [SiteShare.of(batch, 0, speeds, position, shares) for position in range(len(speeds))]
    for word, count in batch.sizes(0).items():
        assert sum(part.sizes[word] for part in parts) == count
        assert all(part.cuts == parts[0].cuts for part in parts)
    for value, spec in batch.prepared.graph.inputs.items():
        whole: Tensor = batch.whole(value, 0)
        found = [part.tensor(value) for part in parts]
        if value in batch.prepared.maps and value not in batch.prepared.looked_at:
            assert not any(each.numel() for each in found)
            continue
        assert torch.equal(torch.cat(found, next((d for d, x in enumerate(spec.dims) if x != "dim0"), 0)), whole)


@pytest.mark.parametrize(("speeds", "shares"), SPEEDS, ids=str)
def test_rows_of_a_sample_stay_together_and_blocks_whole(speeds: tuple[float, ...], shares: tuple[int, ...]) -> None:
    batch = prepared("unet", len(speeds))
    clouds = batch.clouds(0)
    words = clouds.clouds.preparation.size_of
    for route in words:
        samples = clouds.samples(route)
        assert len(torch.unique_consecutive(samples)) == len(samples.unique())
        segments = clouds.segments(route)
        for sample, (start, length) in enumerate(zip(segments.starts, segments.lengths, strict=True)):
            assert (samples[start : start + length] == sample).all()
        places = clouds.places(speeds)
        owned = [clouds.owned(route, places, position) for position in range(len(speeds))]
        assert [len(each) for each in owned] == torch.tensor(clouds.cut_points(places)[words[route]]).diff().tolist()
        assert torch.equal(torch.cat([each.rows for each in owned]).sort().values, torch.arange(len(samples)))
        for position, (each, speed) in enumerate(zip(owned, speeds, strict=True)):
            assert (each.owners[each.rows] == position).all()
            assert speed or not len(each)


def test_features_and_targets_go_with_their_sites() -> None:
    """In whatever order: each site's row is that of the sorted batch."""
    batch = prepared("unet", 3)
    sorted_ = prepared("unet", 1)
    names = {own: value for value, own in batch.prepared.names.items()}
    pairs = [
        sorted(
            map(
                tuple,
                torch.cat([each.whole(names["features"], 0), each.whole(names["target_0"], 0)[:, None]], 1).tolist(),
            )
        )
        for each in (batch, sorted_)
    ]
    assert pairs[0] == pairs[1]
    assert not torch.equal(batch.whole(names["features"], 0), sorted_.whole(names["features"], 0))


def test_clouds_that_are_not_arranged_are_not_shared_out() -> None:
    with pytest.raises(ValueError, match="arranged"):
        SiteShare.of(prepared("unet", 1), 0, (1.0, 1.0), 0, (2, 2))


def test_boundaries_at_other_sites_are_those_of_the_plan_for_the_graph_of_these_sites() -> None:
    graph = network("unet")[1].graph
    decision = decide(graph, [0.3], (4,), [(0,), (1, 2)], [(1,), (1, 1)])
    sites = {word: count // 2 + 1 for word, count in prepared("unet", 1).sizes(0).items()}
    planned = Boundaries.of_decision(graph, decision)
    expected = Boundaries.of_decision(with_sites(graph, 3, sites), decision)
    found = planned.at_sites(sites, planned.layouts)
    edges = planned.edges()
    assert [found.messages(edge, 3) for edge in edges] == [expected.messages(edge, 3) for edge in edges]
    assert [found.messages(edge, 3) for edge in edges] != [planned.messages(edge, 3) for edge in edges]
    for value in graph.values():
        assert found.spec(value, 3) == expected.spec(value, 3)
        assert [found.needed(value, stage, 3) for stage in (0, 1)] == [
            expected.needed(value, stage, 3) for stage in (0, 1)
        ]


def with_sites(graph: Graph, samples: int, sites: Mapping[str, int]) -> Graph:
    """The graph of ``samples`` samples that have so many sites."""

    def at(spec: TensorSpec) -> TensorSpec:
        resized = spec.at(samples, graph.samples)
        return replace(resized, shape=tuple(sites.get(d, n) for d, n in zip(resized.dims, resized.shape, strict=True)))

    inputs = {name: at(spec) for name, spec in graph.inputs.items()}
    layers = tuple(replace(layer, outputs=tuple(map(at, layer.outputs))) for layer in graph.layers)
    return replace(graph, samples=samples, inputs=inputs, layers=layers)
