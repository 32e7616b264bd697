"""In-place operators become their functional twins, so that every value has one maker and may be kept or sent.

    y = relu_(x)    ->    y = relu(x), and later uses of x read y

Updates of buffers (running statistics) stay in place: they are state.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from planner.ir.errors import UnsupportedModelError
from profiler.naming import place

_TWINS = {
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
    torch.ops.aten.normal_.default: torch.ops.aten.normal_functional.default,
}
"""Of operators whose twin has another name."""


def rewrite_in_place(graph: fx.Graph, attributes: Mapping[str, Any]) -> None:
    """Rewrites ``graph``; ``attributes`` holds what its ``get_attr`` nodes read.

    Raises:
        UnsupportedModelError: a view of a tensor is written to while the tensor, or another view, is read later.
    """
    base_of: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if is_write(node):
            root = _root(node.args[0], base_of)
            if root.op == "get_attr" and not _is_trained(attributes[root.target]):
                base_of[node] = node.args[0]
                continue
            _require_no_late_reader(graph, node, root, base_of)
            base = node.args[0]
            node.target = _functional(node)
            base.replace_all_uses_with(node, delete_user_cb=lambda user, node=node: _is_after(graph, user, node))
        viewed = _viewed(node)
        if viewed is not None:
            base_of[node] = viewed


def is_write(node: fx.Node) -> bool:
    """Whether ``node`` writes to its first argument."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    arguments = node.target._schema.arguments
    info = arguments[0].alias_info if arguments else None
    return info is not None and info.is_write


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def _root(node: fx.Node, base_of: Mapping[fx.Node, fx.Node]) -> fx.Node:
    while node in base_of:
        node = base_of[node]
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that the result of ``node`` may share its memory with."""
    if node.target is operator.getitem:
        return node.args[0]
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    results = node.target._schema.returns
    shares = any(result.alias_info is not None for result in results) or node.target is torch.ops.aten.chunk.default
    return node.args[0] if shares else None


def _is_after(graph: fx.Graph, user: fx.Node, node: fx.Node) -> bool:
    return user is not node and node < user


def _require_no_late_reader(graph: fx.Graph, node: fx.Node, root: fx.Node, base_of: Mapping[fx.Node, fx.Node]) -> None:
    for other in graph.nodes:
        if other is node.args[0] or other is node or _root(other, base_of) is not root:
            continue
        late = [user for user in other.users if _is_after(graph, user, node) and _reads(user)]
        if late:
            raise UnsupportedModelError(
                f"{node.target} writes to a part of a tensor that is read again",
                [f"in {place(node)}", f"the tensor is read by {late[0].target} in {place(late[0])}"],
                ["write it without the in-place operator, as x = x + y rather than x += y"],
            )


def _reads(user: fx.Node) -> bool:
    return not isinstance(user.meta.get("val"), (int, torch.SymInt))


def _functional(node: fx.Node) -> torch._ops.OpOverload:
    name = node.target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    overload = _TWINS.get(node.target) or getattr(packet, node.target._overloadname, None)
    if overload is None:
        raise UnsupportedModelError(
            f"{node.target} has no twin that is not in place", [f"in {place(node)}"], ["use an operator that returns"]
        )
    return overload
