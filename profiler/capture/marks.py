"""What plans have to know of layers beside their kinds, as attributes: of samples that mix, of state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from cuda_ops.calls import arguments_of
from cuda_ops.dense.evaluation import is_random
from cuda_ops.dense.state_writes import (
    BATCH_NORM,
    attributes_viewed,
    users_of_attributes,
    written,
    written_of_samples,
)
from cuda_ops.dense.user_functions import LINEAR_BACKWARD, function_of
from planner.ir.graph import (
    FIXES_SAMPLES,
    KEEPS_SAMPLES,
    MIXES_SAMPLES,
    NEEDS_WHOLE_BATCH,
    NOT_LINEAR_BACKWARD,
    SEEDS,
    SHARED_STATE,
    SHARED_STATISTICS,
    UPDATES_STATE,
    Attribute,
    Graph,
    Layer,
)
from profiler.capture.layers import OperatorGroup
from profiler.capture.loss_reduction import reaching
from profiler.capture.operators import operation
from profiler.capture.sample_independence import Dependence
from profiler.capture.trace import TracedModel


def marked(
    graph: Graph,
    dependences: Mapping[str, Dependence],
    layer_nodes: tuple[OperatorGroup, ...],
    names: tuple[str, ...],
    traced: TracedModel,
    *,
    is_separate: bool = False,
) -> Graph:
    """``graph`` with attributes that say what its layers do beside their kinds.

    Args:
        dependences: by layer, what samples of it depend on.
        layer_nodes, names: the nodes of each layer, and its name.
        is_separate: whether inputs of some samples are prepared without those of others.
    """
    layer_of = {node: name for group, name in zip(layer_nodes, names, strict=True) for node in group.nodes}
    shared = _shared_state(traced.module.graph, layer_of)
    statistics = _shared_statistics(traced.module.graph, layer_of)
    # what follows from samples, kept in a buffer: ranks that share samples would each keep another one
    writes = written_of_samples(traced.module.graph)
    kept = {layer_of[node]: min(buffers) for node, buffers in writes.items() if node in layer_of}
    updates = {layer_of[node]: min(buffers) for node, buffers in _updates(traced.module.graph) if node in layer_of}
    by_name = dict(zip(names, layer_nodes, strict=True))

    def of(layer: Layer) -> Layer:
        on = dependences[layer.name]
        mark = MIXES_SAMPLES if layer.name in kept else on.mark
        nodes = by_name[layer.name].nodes
        functions = [function_of(node) for node in nodes if not node.meta.get(LINEAR_BACKWARD, True)]
        marks: dict[str, Attribute] = {
            mark: True for mark in (mark, NEEDS_WHOLE_BATCH if on.needs_whole_batch else "") if mark
        }
        marks |= {SHARED_STATE: shared[layer.name]} if layer.name in shared else {}
        marks |= {KEEPS_SAMPLES: kept[layer.name]} if layer.name in kept else {}
        marks |= {UPDATES_STATE: updates[layer.name]} if layer.name in updates else {}
        marks |= {SHARED_STATISTICS: statistics[layer.name]} if layer.name in statistics else {}
        marks |= {NOT_LINEAR_BACKWARD: functions[0]} if functions else {}
        if is_separate and mark == MIXES_SAMPLES:
            marks[SEEDS] = "mixes"
        elif is_separate and any(map(is_random, nodes)) and any(spec.has_sites for spec in layer.outputs):
            marks[SEEDS] = "draws"
        marks |= {} if traced.is_polymorphic else {FIXES_SAMPLES: True}
        return replace(layer, attributes={**layer.attributes, **marks}) if marks else layer

    return replace(graph, layers=tuple(map(of, graph.layers)))


def _updates(graph: fx.Graph) -> Iterator[tuple[fx.Node, frozenset[str]]]:
    """The nodes that write what the loss then reads; of norms it reads running statistics in evaluation alone."""
    behind = attributes_viewed(graph)
    in_loss = reaching(graph)
    for node in graph.nodes:
        if node in in_loss and "norm" not in operation(node) and (buffers := written(node, behind)):
            yield node, buffers


def _shared_state(graph: fx.Graph, layer_of: Mapping[fx.Node, str]) -> dict[str, str]:
    """By layer, the buffer that it uses with others, where one of them writes to it; of several that join, the last."""
    users: dict[str, dict[str, None]] = {}
    behind = attributes_viewed(graph)
    changed = {buffer for node in graph.nodes for buffer in written(node, behind)}
    for buffer, node in users_of_attributes(graph):
        if node in layer_of and buffer in changed:
            users.setdefault(buffer, {})[layer_of[node]] = None
    shared: dict[str, str] = {}
    for buffer, layers in users.items():
        if len(layers) > 1:
            joined_buffers = {shared[layer] for layer in layers if layer in shared}
            joined = [layer for layer, other in shared.items() if other in joined_buffers]
            shared.update(dict.fromkeys([*joined, *layers], buffer))
    return shared


def _shared_statistics(graph: fx.Graph, layer_of: Mapping[fx.Node, str]) -> dict[str, str]:
    """By batch norm, the running statistics that it uses with others."""
    users: dict[str, dict[str, None]] = {}
    for name, node in users_of_attributes(graph):
        if node in layer_of and node.target is BATCH_NORM and name in map(str, _statistics(node)):
            users.setdefault(name, {})[layer_of[node]] = None
    return {layer: name for name, layers in users.items() if len(layers) > 1 for layer in layers}


def _statistics(node: fx.Node) -> list[object]:
    buffers = (arguments_of(node)[name] for name in ("running_mean", "running_var"))
    return [each.target for each in buffers if isinstance(each, fx.Node) and each.op == "get_attr"]
