"""How one node of a captured graph is called on a part: arguments by name, and which inputs of its layer they are.

Integers of the graph follow from the number of samples and other sizes.  In a divided stage layers may have different
numbers of samples on one rank, so no integer holds for all of them: each layer's are worked out from its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from cuda_ops._torch import schema_of
from planner.ir.graph import Layer, producer

InputIndex = int | tuple[int | None, ...] | None
"""Which input of a layer an argument of its operator is; for a list of tensors, which one each of them is."""


@dataclass(frozen=True, slots=True)
class NodeCall:
    """How one node is called, worked out once.

    Attributes:
        names: of the operator's arguments, by place; empty where it has no schema.
        keywords: of those, the ones that are given by name only.
        defaults: of the arguments that the node leaves out.
        inputs: by argument, which inputs of the layer it is.
        integers: by argument, those that depend on sizes, as the graph has them.
    """

    names: tuple[str, ...]
    keywords: frozenset[str]
    defaults: Mapping[str, Any]
    inputs: Mapping[str, InputIndex]
    integers: Mapping[str, Any]

    @classmethod
    def of(cls, node: fx.Node, layer: Layer, value_of_node: Mapping[str, str]) -> NodeCall:
        """The call of ``node``, of ``layer``; ``value_of_node`` says which values nodes are, by name."""
        schema = schema_of(node.target)
        parameters = () if schema is None else tuple(schema.arguments)
        names = tuple(argument.name for argument in parameters) or tuple(f"argument_{k}" for k in range(len(node.args)))
        keywords = frozenset(argument.name for argument in parameters if argument.kwarg_only)
        defaults = {argument.name: argument.default_value for argument in parameters if argument.has_default_value()}
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        places = _InputPlaces(layer, value_of_node)
        inputs = {name: places.of(value) for name, value in arguments.items()}
        return cls(
            names,
            keywords,
            defaults,
            {name: index for name, index in inputs.items() if index is not None},
            {name: value for name, value in arguments.items() if depends(value)},
        )

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """By name."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def operator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which takes arguments by place, called with all of them by name."""
        places = tuple(name for name in self.names if name not in self.keywords)
        keywords = self.keywords

        def call(**arguments: Any) -> Any:
            named = {name: arguments[name] for name in keywords if name in arguments}
            return function(*[arguments[name] for name in places if name in arguments], **named)

        return call


class _InputPlaces:
    """Which inputs of a layer the nodes are that it reads, in the order in which it reads them."""

    def __init__(self, layer: Layer, value_of_node: Mapping[str, str]) -> None:
        self._layer = layer
        self._value_of_node = value_of_node
        self._reads = Counter[str]()

    def of(self, value: Any) -> InputIndex:
        """Of an argument; None where it is no input."""
        if isinstance(value, fx.Node):
            return self._index(value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, fx.Node) for each in value):
            indices = tuple(self._index(each) if isinstance(each, fx.Node) else None for each in value)
            return indices if any(index is not None for index in indices) else None
        return None

    def _index(self, node: fx.Node) -> int | None:
        """The n-th reading of a value is its n-th place among the inputs."""
        value = self._value_of_node.get(node.name)
        if value is None or producer(value) == self._layer.name or value not in self._layer.inputs:
            return None
        places = [index for index, name in enumerate(self._layer.inputs) if name == value]
        self._reads[value] += 1
        return places[min(self._reads[value], len(places)) - 1]


def depends(value: Any) -> bool:
    """Whether an argument is, or holds, an integer that the graph computes."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return any(map(_is_integer, nodes))


def evaluate(value: Any, sizes: Mapping[str, int]) -> Any:
    """``value`` with numbers in place of the nodes that compute them.

    Args:
        sizes: by placeholder, the number of samples included.
    """
    values: dict[fx.Node, Any] = {}

    def number(node: fx.Node) -> Any:
        if node not in values:
            if node.op == "placeholder":
                values[node] = sizes[str(node.target)]
            else:
                function: Any = node.target
                values[node] = function(*fx.map_arg(node.args, number), **fx.map_arg(node.kwargs, number))
        return values[node]

    return fx.map_arg(value, number)


def _is_integer(node: fx.Node) -> bool:
    if node.op == "placeholder" and "val" not in node.meta:
        return True  # the number of samples, or another size that varies
    value = node.meta.get("val")
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
