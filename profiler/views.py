"""Views in a traced graph, and what a write to a view makes of the tensor that it shows.

    v = x[:, 0]; v += 1; y = x * 2    ->    w = x[:, 0] + 1; z = select_scatter(x, w, 1, 0); y = z * 2

Whoever reads ``x``, or another view of it, before the write reads what it was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, fx

from profiler.naming import operation
from profiler.operators import RESHAPES

_aten = torch.ops.aten
_SELF_INVERSE = frozenset(["swapaxes", "swapdims", "t", "transpose"])
_SAME = frozenset(["alias", "contiguous", "to", "type_as"])
_SPLITS = frozenset(["chunk", "split", "split_with_sizes", "tensor_split"])
_UNSUPPORTED = frozenset(["expand", "movedim"])


class Views:
    """Which values of a graph are views of which others, as it is gone through in order."""

    def __init__(self) -> None:
        self._whole: dict[fx.Node, fx.Node] = {}
        self._maker: dict[fx.Node, fx.Node] = {}  # whose operator shows that part of the whole

    def note(self, node: fx.Node) -> None:
        """Takes up ``node`` if it is a view."""
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is not None and node.target is operator.getitem:
            source = source.args[0] if source.args and isinstance(source.args[0], fx.Node) else None
        if source is not None and _shows(node, source):
            self._whole[node], self._maker[node] = source, node

    def alias(self, node: fx.Node, of: fx.Node) -> None:
        """Takes up ``node`` as another name of ``of``."""
        self._whole[node], self._maker[node] = of, node

    def chain(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """``node``, what it is a view of, and so on up to what is none."""
        found = [node]
        while found[-1] in self._whole:
            found.append(self._whole[found[-1]])
        return tuple(found)

    def under(self, root: fx.Node) -> tuple[fx.Node, ...]:
        """All views of ``root``, and of these, which come later."""
        found = [self.chain(node) for node in self._whole]
        return tuple(chain[0] for chain in sorted(found, key=len) if chain[-1] is root)

    def whole(self, graph: fx.Graph, part: fx.Node, written: fx.Node) -> fx.Node | None:
        """A new node: what ``part`` is a view of, where ``written`` is in its place; None for views of other kinds."""
        made = _undone(graph, self._maker[part], self._whole[part], written)
        if made is not None and made is not written:
            made.meta = {**written.meta, "val": self._whole[part].meta.get("val")}
        return made

    def again(self, graph: fx.Graph, view: fx.Node, written: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A new node: ``view`` of what is now in the place of its whole."""
        maker, whole = self._maker[view], written[self._whole[view]]
        if maker.target is not operator.getitem:
            return graph.node_copy(maker, lambda node: whole if node is maker.args[0] else node)
        split = maker.args[0]
        parts = graph.node_copy(split, lambda node: whole if node is split.args[0] else node)
        with graph.inserting_after(parts):
            return graph.node_copy(maker, lambda node: parts)

    def replace(self, written: Mapping[fx.Node, fx.Node]) -> None:
        """The values of ``written`` take the places of its keys."""
        for old, new in written.items():
            if old in self._whole:
                self._whole[new] = written.get(self._whole[old], self._whole[old])
                self._maker[new] = self._maker[old]


def _shows(node: fx.Node, source: fx.Node) -> bool:
    """Whether the result of ``node`` lies in the memory of ``source``: as seen when it was traced, else by schema."""
    if operation(node) == "lift_fresh_copy":  # of a constant, which was no copy when it was traced
        return False
    mine, others = node.meta.get("val"), source.meta.get("val")
    if isinstance(mine, Tensor) and isinstance(others, Tensor):
        return mine.untyped_storage()._cdata == others.untyped_storage()._cdata
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker.target, torch._ops.OpOverload):
        return False
    return any(result.alias_info is not None for result in maker.target._schema.returns)


def _undone(graph: fx.Graph, maker: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node | None:
    if maker.target is operator.getitem:
        return _joined(graph, maker, whole, part)
    name, rest = operation(maker), maker.args[1:]
    if name in _SAME:
        return part
    if name == "slice":
        return graph.call_function(_aten.slice_scatter.default, (whole, part, *rest), maker.kwargs)
    if name == "select":
        return graph.call_function(_aten.select_scatter.default, (whole, part, *rest), maker.kwargs)
    if name == "narrow" and _are_numbers(rest):
        dim, start, length = rest
        return graph.call_function(_aten.slice_scatter.default, (whole, part, dim, start, start + length))
    if name == "diagonal":
        return graph.call_function(_aten.diagonal_scatter.default, (whole, part, *rest), maker.kwargs)
    if name in _SELF_INVERSE:
        return graph.call_function(maker.target, (part, *rest), maker.kwargs)
    if name == "permute":
        order = [dim % len(rest[0]) for dim in rest[0]]
        return graph.call_function(maker.target, (part, [order.index(dim) for dim in range(len(order))]))
    if name in RESHAPES - _UNSUPPORTED:
        return graph.call_function(_aten.reshape_as.default, (part, whole))
    return None


def _joined(graph: fx.Graph, maker: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node | None:
    """For one of several parts that a tensor was divided into."""
    split, index = maker.args
    name, arguments = operation(split), split.target._schema.arguments
    dim = next((value for value, about in zip(split.args, arguments, strict=False) if about.name == "dim"), 0)
    dim = split.kwargs.get("dim", dim)
    if name == "unbind":
        return graph.call_function(_aten.select_scatter.default, (whole, part, dim, index))
    lengths = [value.shape[dim] for value in split.meta.get("val", ())]
    if name not in _SPLITS or not _are_numbers(lengths):
        return None
    start = sum(lengths[:index])
    return graph.call_function(_aten.slice_scatter.default, (whole, part, dim, start, start + lengths[index]))


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(value, int) for value in values)
