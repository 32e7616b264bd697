"""Which layer compares what a model answers with what is right."""

from __future__ import annotations

from planner.ir.graph import Graph, Layer, producer

_OF_CLASSES = ("aten.cross_entropy_loss.default", "aten.nll_loss.default", "aten.nll_loss_nd.default")


def judging_layer(graph: Graph) -> Layer:
    """The layer of the loss; of a loss that is a mean of one of classes (over sites, over samples), the latter."""
    of_classes = [layer for layer in graph.layers if layer.attributes.get("op") in _OF_CLASSES]
    return of_classes[0] if len(of_classes) == 1 else graph.by_name()[producer(graph.loss)]
