"""Which nodes of a graph share memory with a parameter or buffer, and which of them write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled

_STATISTICS = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}
"""Operators that write running statistics, which their schema does not tell, and the argument that says when."""


def attributes_behind(graph: fx.Graph, given: Mapping[fx.Node, str] | None = None) -> dict[fx.Node, str]:
    """The parameter, buffer or constant that a node is, is a view of, or has written in place.

    Args:
        given: what placeholders stand for, where that is such a one.
    """
    found: dict[fx.Node, str] = dict(given or {})
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = str(node.target)
            continue
        returned = {name for each in _returns(node) for name in _aliases(each)}
        for argument, value in _arguments(node):
            if isinstance(value, fx.Node) and value in found and returned & _aliases(argument):
                found[node] = found[value]
    return found


def written(node: fx.Node, behind: Mapping[fx.Node, str]) -> frozenset[str]:
    """The attributes that a node writes, those included that a graph writes which it calls without gradients."""
    if node.target is wrap_with_set_grad_enabled:
        return _written_inside(node, behind)
    values = [value for argument, value in _arguments(node) if argument.alias_info and argument.alias_info.is_write]
    if node.target in _STATISTICS:
        arguments = arguments_of(node)
        if arguments[_STATISTICS[node.target]] is True:
            values += [arguments["running_mean"], arguments["running_var"]]
    return frozenset(behind[value] for value in values if isinstance(value, fx.Node) and value in behind)


def _written_inside(node: fx.Node, behind: Mapping[fx.Node, str]) -> frozenset[str]:
    module = node.graph.owning_module
    inner = node.args[1]
    if module is None or not isinstance(inner, fx.Node):
        return frozenset()
    graph = module.get_submodule(str(inner.target)).graph
    outer = {
        place: behind[argument]
        for place, argument in zip(
            (each for each in graph.nodes if each.op == "placeholder"), node.args[2:], strict=True
        )
        if isinstance(argument, fx.Node) and argument in behind
    }
    inside = attributes_behind(graph, outer)
    return frozenset(name for each in graph.nodes for name in written(each, inside))


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node's operator writes to an argument, as its schema tells."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(each.alias_info and each.alias_info.is_write for each in schema.arguments)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by the names that its operator gives them; those left at their defaults are not there."""
    return {argument.name: value for argument, value in _arguments(node)}


def _arguments(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    schema = getattr(node.target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    yield from zip(arguments, node.args, strict=False)
    yield from ((argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs)


def _returns(node: fx.Node) -> tuple[Any, ...]:
    schema = getattr(node.target, "_schema", None)
    return () if schema is None else tuple(schema.returns)


def _aliases(argument: Any) -> set[str]:
    return set() if argument.alias_info is None else set(argument.alias_info.before_set)
