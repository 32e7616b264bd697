"""Operators whose shapes follow from data, as one: which tokens an expert takes, and what is made of them.

    captured:  i = nonzero(x > 0); y = x[i]; z = f(y, w); r = index_add(zeros, 0, i, z)       y has as many rows as i
    one node:  r = unit(x, zeros, w)

What lies inside has sizes that nobody knows before it runs, so nothing in it can be measured, cut or sent alone.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn


class Unit:
    """Several operators of a captured graph as a function; what it reads comes as arguments, in order.

    Attributes:
        module: placeholders are the arguments; the output is a value or several.
    """

    __name__ = "data_dependent"
    __module__ = __name__

    def __init__(self, graph: fx.Graph) -> None:
        self.module = fx.GraphModule(nn.Module(), graph, "Unit")

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def __repr__(self) -> str:
        """Its name and a digest of its operators: the same in every process, which compare their graphs."""
        calls = [str(node.target) for node in self.module.graph.nodes if node.op == "call_function"]
        return f"{self.__name__}:{hashlib.sha256(' '.join(calls).encode()).hexdigest()[:12]}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        return self  # it has no state

    def changed(self, argument: Callable[[Any], Any]) -> Unit:
        """A copy whose operators have ``argument(each)`` in place of each argument that is no node."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        for node in graph.nodes:
            node.args = fx.node.map_aggregate(node.args, argument)
            node.kwargs = fx.node.map_aggregate(node.kwargs, argument)
        return Unit(graph)


def is_unit(node: fx.Node) -> bool:
    """Whether ``node`` calls a :class:`Unit`."""
    return isinstance(node.target, Unit)


def join(graph: fx.Graph, is_inside: Callable[[fx.Node], bool]) -> tuple[fx.Node, ...]:
    """Puts a unit in place of all nodes that ``is_inside`` tells of, and of who reads them.

    Nodes that lie between two of a unit belong to it.  Returns the units' nodes, in order.
    """
    inside = [node for node in graph.nodes if node.op == "call_function" and is_inside(node)]
    groups = [{node, *(user for user in node.users if user.op != "output")} for node in inside]
    order = {node: index for index, node in enumerate(graph.nodes)}
    merged = _merged([_convex(group, order) for group in groups], order)
    return tuple(_joined(graph, sorted(group, key=order.__getitem__)) for group in merged)


def _merged(groups: list[set[fx.Node]], order: dict[fx.Node, int]) -> list[set[fx.Node]]:
    """Groups that share a node, or of which each reads the other, as one; in the order of their last nodes."""
    merged: list[set[fx.Node]] = []
    for group in groups:
        own = group
        while touching := [other for other in merged if other & own]:
            merged = [other for other in merged if not other & own]
            own = _convex(own.union(*touching), order)
        merged.append(own)
    return sorted(merged, key=lambda group: max(order[node] for node in group))


def _convex(group: set[fx.Node], order: dict[fx.Node, int]) -> set[fx.Node]:
    """With all nodes on ways from one of it to another."""
    last = max(order[node] for node in group)
    downstream = _reached(group, lambda node: [user for user in node.users if order[user] <= last])
    return group | _reached(group, lambda node: [each for each in node.all_input_nodes if each in downstream])


def _reached(group: set[fx.Node], next_of: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    waiting = list(group)
    while waiting:
        further = [node for node in next_of(waiting.pop()) if node not in reached]
        reached.update(further)
        waiting += further
    return reached


def cut_out(nodes: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node], list[fx.Node], list[fx.Node]]:
    """Copies ``nodes``, which are in running order, into a graph of their own, whose output is still to be set.

    Returns:
        The graph; by node its copy there; what ``nodes`` are given by others, as the graph's inputs; and those of
        ``nodes`` that others use.
    """
    own = set(nodes)
    inner = fx.Graph()
    copies = dict[fx.Node, fx.Node]()
    inputs = list(dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each not in own))
    for index, node in enumerate(inputs):
        copies[node] = inner.placeholder(f"value_{index}")
    for node in nodes:
        copies[node] = inner.node_copy(node, copies.__getitem__)
    return inner, copies, inputs, [node for node in nodes if any(user not in own for user in node.users)]


def _joined(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    inner, copies, inputs, results = cut_out(nodes)
    own = set(nodes)
    last = nodes[-1]
    downstream = _reached(own, lambda node: list(node.users))
    for node in [each for each in reversed(graph.nodes) if each < last and each in downstream and each not in own]:
        last.append(node)  # it reads a part of what is there only once all of the unit has run
    inner.output(copies[results[0]] if len(results) == 1 else tuple(copies[node] for node in results))
    with graph.inserting_after(last):
        made = graph.call_function(Unit(inner), tuple(inputs))
    made.meta = dict((results or nodes)[-1].meta)  # results: none of a unit that only writes
    made.meta["nodes"] = tuple(str(node.target) for node in nodes)
    if len(results) == 1:
        results[0].replace_all_uses_with(made)
    elif results:
        made.meta["val"] = tuple(node.meta["val"] for node in results)
        with graph.inserting_after(made):
            for index, node in reversed(list(enumerate(results))):
                picked = graph.call_function(operator.getitem, (made, index))
                picked.meta = dict(node.meta)
                node.replace_all_uses_with(picked, delete_user_cb=lambda user: user not in own)
    for node in reversed(nodes):
        graph.erase_node(node)
    return made
