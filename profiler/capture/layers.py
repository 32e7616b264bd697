"""Which operators make up a layer: one each, but for helpers that nobody else reads.

Joined to their reader are constants (the zeros an LSTM starts from) and views of parameters (a tied, transposed
weight); joined to its neighbour is what updates a buffer and has no reader (the batch counter of a batch norm).  So a
cut between layers never separates what would only be sent about.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from profiler.capture.functional import is_write
from profiler.capture.kinds import NO_RULES, RESHAPE, Rules, kind_of
from profiler.capture.operators import nodes_in, place
from profiler.capture.trace import Traced


@dataclass(frozen=True, slots=True)
class Group:
    """The operators of a layer, in order of execution.

    Attributes:
        main: makes the layer's outputs.
        nodes: all of them, ``main`` and the ``getitem`` of its outputs included.
    """

    main: fx.Node
    nodes: tuple[fx.Node, ...]


def makes_tensors(node: fx.Node) -> bool:
    """Whether ``node`` is computed and belongs in a layer: all but sizes."""
    return node.op == "call_function" and not isinstance(
        node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)
    )


def groups(traced: Traced, rules: Rules = NO_RULES) -> tuple[Group, ...]:
    """The layers of a graph, in the order of their main operators."""
    nodes = [node for node in traced.module.graph.nodes if makes_tensors(node)]
    fed = _depends_on_inputs(traced)
    leader: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        leader[node] = leader[node.args[0]] if is_output_of(node) else node
    _join_helpers(nodes, leader, fed, traced, rules)
    _join_updates(nodes, leader, fed, traced)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(_end(leader, node), []).append(node)
    order = {node: index for index, node in enumerate(nodes)}
    return tuple(Group(main, tuple(members[main])) for main in sorted(members, key=order.__getitem__))


def is_output_of(node: fx.Node) -> bool:
    """Whether ``node`` picks one of several outputs of another."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and not _is_tensor(node.args[0])


def tensor_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that ``node`` reads, in the order of its arguments, as often as it reads them."""
    found = nodes_in((node.args, node.kwargs))
    return (argument for argument in found if argument.op == "get_attr" or _is_tensor_source(argument))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_tensor_source(node: fx.Node) -> bool:
    return makes_tensors(node) or (node.op == "placeholder" and _is_tensor(node))


def _depends_on_inputs(traced: Traced) -> set[fx.Node]:
    fed: set[fx.Node] = set()
    for node in traced.module.graph.nodes:
        if node.target in traced.inputs or (
            makes_tensors(node) and any(argument in fed for argument in node.all_input_nodes)
        ):
            fed.add(node)
    return fed


def _end(leader: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while leader[node] is not node:
        node = leader[node]
    return node


def _join_helpers(
    nodes: list[fx.Node], leader: dict[fx.Node, fx.Node], fed: set[fx.Node], traced: Traced, rules: Rules
) -> None:
    for node in reversed(nodes):
        if node in fed or is_write(node) or is_output_of(node):
            continue
        reads_parameter = any(argument.target in traced.parameters for argument in _attributes_behind(node))
        if reads_parameter and kind_of(node, rules)[0] != RESHAPE:
            continue
        readers = {_end(leader, user) for user in node.users if makes_tensors(user)}
        if len(readers) == 1 and all(makes_tensors(user) for user in node.users):
            leader[node] = readers.pop()


def _attributes_behind(node: fx.Node) -> Iterator[fx.Node]:
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            yield argument
        else:
            yield from _attributes_behind(argument)


def _join_updates(nodes: list[fx.Node], leader: dict[fx.Node, fx.Node], fed: set[fx.Node], traced: Traced) -> None:
    order = {node: index for index, node in enumerate(nodes)}
    for node in reversed(nodes):
        if not _only_updates(node) or any(user in order and not _only_updates(user) for user in node.users):
            continue
        later = [user for user in node.users if user in order]
        if later:  # it is updated again: one layer has all updates that read each other
            leader[node] = _end(leader, later[0])
            continue
        makers = [_end(leader, maker) for maker in node.all_input_nodes if maker in fed and maker in order]
        host = max(makers, key=order.__getitem__) if makers else _neighbour(nodes, order[node])
        if host is not None and _end(leader, host) is not node:
            leader[node] = _end(leader, host)


def _only_updates(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return is_write(node) or (not isinstance(value, Tensor) and not value)


def _neighbour(nodes: list[fx.Node], index: int) -> fx.Node | None:
    """The next operator of the same module, else the next one, else the one before."""
    later = [node for node in nodes[index + 1 :] if not _only_updates(node)]
    alike = next((node for node in later if place(node) == place(nodes[index])), None)
    earlier = (node for node in reversed(nodes[:index]) if not _only_updates(node))
    return alike or next(iter(later), None) or next(earlier, None)
