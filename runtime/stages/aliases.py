"""Which nodes of a graph share memory with a parameter or buffer, and which of them write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

_STATISTICS = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}
"""Operators that write running statistics, which their schema does not tell, and the argument that says when."""


def attributes_behind(graph: fx.Graph) -> dict[fx.Node, str]:
    """The parameter, buffer or constant that a node is, is a view of, or has written in place."""
    found: dict[fx.Node, str] = {}
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
    """The attributes that a node writes."""
    values = [value for argument, value in _arguments(node) if argument.alias_info and argument.alias_info.is_write]
    if node.target in _STATISTICS:
        arguments = arguments_of(node)
        if arguments[_STATISTICS[node.target]] is True:
            values += [arguments["running_mean"], arguments["running_var"]]
    return frozenset(behind[value] for value in values if isinstance(value, fx.Node) and value in behind)


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
