from __future__ import annotations

import pytest
import torch

from halopipe.data.rank_slices import Need, needs, portion, whole_needs
from halopipe.training.evaluate import Classes, classes_of
from planner.ir.graph import Graph
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from tests.captures import capture
from tests.halopipe import cloudy, learners
from tests.halopipe.plans import RESNET
from tests.runtime.plans import decide, folded

CLASSIFIER = ModelSource("tests.halopipe.learners:classifier", {}, (4, learners.WIDTH))
TAGGER = ModelSource("tests.halopipe.learners:tagger")


def graph_of(source: ModelSource) -> Graph:
    return capture(load_model(source)).graph


def test_a_rank_needs_the_rows_of_the_inputs_that_its_stages_read() -> None:
    graph = graph_of(RESNET)
    decision = decide(graph, [0.3, 0.6], (5, 2), [(0, 1), (2,), (3, 4)], [(3, 2), (1,), (1, 1)])
    assert needs(decision, graph, 1, (5, 2)) == (Need("inputs", 0, 3, 2), Need("inputs", 1, 1, 1))
    assert needs(decision, graph, 2, (5, 2)) == ()
    last = needs(decision, graph, 4, (5, 2))
    assert [need.name for need in last] == ["targets", "targets"]
    assert portion(decision, 2, 4, 5) == (last[0].start, last[0].count)
    assert [need.microbatch for need in needs(decision, graph, 0, (5, 0))] == [0]


def test_who_makes_what_the_loss_reads_needs_the_targets_too() -> None:
    graph = graph_of(CLASSIFIER)
    loss = graph.layers[-1].name
    decision = decide(graph, [loss], (4,))
    assert [need.name for need in needs(decision, graph, 0, (4,))] == ["inputs", "targets"]
    assert [need.name for need in needs(decision, graph, 1, (4,))] == ["targets"]


def test_a_stage_of_a_ring_reads_once_what_two_of_its_stages_read() -> None:
    graph = graph_of(RESNET)
    decision = decide(graph, [0.3, 0.6], (4,), [(0,), (1,), (0,)], schedule=folded)
    found = needs(decision, graph, 0, (4,))
    assert sorted(need.name for need in found) == ["inputs", "targets"]


@pytest.mark.parametrize("source", [CLASSIFIER, TAGGER], ids=["classifier", "tagger"])
def test_models_that_classify_are_known_by_their_loss(source: ModelSource) -> None:
    graph = graph_of(source)
    classes = classes_of(graph)
    assert classes is not None
    assert [classes.logits, classes.target] == list(graph.layers[-1].inputs)
    assert classes.dim == 1


def test_a_network_that_classifies_sites_is_known_before_the_means_of_its_loss() -> None:
    graph = graph_of(cloudy.source("segmenter"))
    classes = classes_of(graph)
    assert classes is not None
    assert classes.target == "targets"
    assert graph.values()[classes.logits].dims == ("sites", "channel")
    assert graph.values()[graph.layers[-1].inputs[0]].dims == ("sample",)


def test_every_rank_needs_all_clouds_that_its_maps_are_made_of() -> None:
    names = ("coordinates", "features", "counts")
    assert whole_needs(names, (2, 0, 1)) == tuple(
        Need(name, m, 0, count) for m, count in ((0, 2), (2, 1)) for name in names
    )


def test_other_models_are_known_too() -> None:
    assert classes_of(graph_of(ModelSource("tests.halopipe.bombs:mined", {}, (4, 3)))) is None


def test_targets_that_the_loss_ignores_are_no_questions() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [5.0, 1.0]])
    assert Classes("x", "y", 1).count(logits, torch.tensor([0, 0, -100])) == (1, 2)
