"""Which nodes of a graph share memory with a parameter or buffer, which of them write it, and what of.

What a rank writes to its copy of a buffer must be what every other rank writes to its own.  It is that wherever it
follows from parameters and buffers alone, as the average of a teacher's weights does, or a count of calls; what follows
from samples differs from rank to rank.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx

from cuda_ops._torch import schema_of, wrap_with_set_grad_enabled
from cuda_ops.calls import arguments_of, parameters_of
from cuda_ops.operator_table import operator_row

BATCH_NORM = torch.ops.aten.batch_norm.default


def attributes_viewed(graph: fx.Graph, placeholders: Mapping[fx.Node, str] | None = None) -> dict[fx.Node, str]:
    """The parameter, buffer or constant that a node is, is a view of, or has written in place.

    Args:
        placeholders: what placeholders stand for, where that is such a one.
    """
    viewed: dict[fx.Node, str] = dict(placeholders or {})
    for node in graph.nodes:
        if node.op == "get_attr":
            viewed[node] = str(node.target)
            continue
        if node.target is operator.getitem and node.args[0] in viewed:  # of a list of views
            viewed[node] = viewed[node.args[0]]
            continue
        results = getattr(schema_of(node.target), "returns", ())
        returned = {name for each in results for name in _aliases(each)}
        makes_list = any(each.alias_info is not None and not _aliases(each) for each in results)
        for argument, value in _arguments(node):
            if isinstance(value, fx.Node) and value in viewed:
                aliases = _aliases(argument)
                if returned & aliases or (makes_list and aliases):
                    viewed[node] = viewed[value]
    return viewed


def written(node: fx.Node, viewed: Mapping[fx.Node, str]) -> frozenset[str]:
    """The attributes that a node writes, those included that a graph writes which it calls without gradients."""
    return frozenset(name for name, _ in _writes(node, viewed, frozenset()))


def written_of_samples(graph: fx.Graph) -> dict[fx.Node, frozenset[str]]:
    """By node, the attributes that it writes from samples, be it from their number alone.

    Running statistics of batch normalisation are none of them: they are taken over the samples of all ranks.
    """
    viewed = attributes_viewed(graph)
    dependent = _dependent(graph, None)
    writers = {}
    for node in graph.nodes:
        names = frozenset(name for name, of_samples in _writes(node, viewed, dependent) if of_samples)
        if names and node.target is not BATCH_NORM:
            writers[node] = names
    return writers


def users_of_attributes(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """The parameters, buffers and constants with the nodes that read or write them, in the graph's order."""
    viewed = attributes_viewed(graph)
    for node in graph.nodes:
        for name in dict.fromkeys(viewed[argument] for argument in node.all_input_nodes if argument in viewed):
            yield name, node


def _writes(node: fx.Node, viewed: Mapping[fx.Node, str], dependent: Collection[fx.Node]) -> Iterator[tuple[str, bool]]:
    """What a node writes, and whether it follows from what is ``dependent``."""
    if node.target is wrap_with_set_grad_enabled:
        yield from _writes_inside(node, viewed, dependent)
        return
    values = [value for argument, value in _arguments(node) if argument.alias_info and argument.alias_info.is_write]
    arguments = arguments_of(node)
    if arguments.get(operator_row(node.target).statistics) is True:
        values += [arguments["running_mean"], arguments["running_var"]]
    yield from (
        (viewed[value], node in dependent) for value in values if isinstance(value, fx.Node) and value in viewed
    )


def _writes_inside(
    node: fx.Node, viewed: Mapping[fx.Node, str], dependent: Collection[fx.Node]
) -> Iterator[tuple[str, bool]]:
    module = node.graph.owning_module
    inner = node.args[1]
    if module is None or not isinstance(inner, fx.Node):
        return
    graph = cast(fx.GraphModule, module.get_submodule(str(inner.target))).graph
    places = [each for each in graph.nodes if each.op == "placeholder"]
    outer = dict(zip(places, node.args[2:], strict=True))
    inside = attributes_viewed(graph, {place: viewed[each] for place, each in outer.items() if each in viewed})
    from_outside = _dependent(graph, [place for place, each in outer.items() if each in dependent])
    for each in graph.nodes:
        yield from _writes(each, inside, from_outside)


def _dependent(graph: fx.Graph, sources: Collection[fx.Node] | None) -> frozenset[fx.Node]:
    """What depends on ``sources``, or on any input, where None."""
    dependent: set[fx.Node] = set(sources or ())
    for node in graph.nodes:
        is_given = sources is None and node.op == "placeholder"
        if is_given or any(argument in dependent for argument in node.all_input_nodes):
            dependent.add(node)
    return frozenset(dependent)


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    parameters = parameters_of(node.target)
    yield from zip(parameters, node.args, strict=False)
    yield from ((each, node.kwargs[each.name]) for each in parameters if each.name in node.kwargs)


def _aliases(argument: Any) -> set[str]:
    return set() if argument.alias_info is None else set(argument.alias_info.before_set)
