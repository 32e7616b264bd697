"""How one node of a captured graph is called on a part: arguments by name, and which inputs of its layer they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from planner.ir.graph import Layer, producer
from runtime.spatial.integers import depends
from runtime.spatial.step import InputIndex


@dataclass(frozen=True, slots=True)
class Call:
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
    def of(cls, node: fx.Node, layer: Layer, value_of_node: Mapping[str, str]) -> Call:
        """The call of ``node``, of ``layer``; ``value_of_node`` says which values nodes are, by name."""
        schema = getattr(node.target, "_schema", None)
        known = () if schema is None else tuple(schema.arguments)
        names = tuple(argument.name for argument in known) or tuple(f"argument_{k}" for k in range(len(node.args)))
        keywords = frozenset(argument.name for argument in known if argument.kwarg_only)
        defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        places = _Places(layer, value_of_node)
        inputs = {name: places.of(value) for name, value in given.items()}
        return cls(
            names,
            keywords,
            defaults,
            {name: index for name, index in inputs.items() if index is not None},
            {name: value for name, value in given.items() if depends(value)},
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


class _Places:
    """Which inputs of a layer the nodes are that it reads, in the order in which it reads them."""

    def __init__(self, layer: Layer, value_of_node: Mapping[str, str]) -> None:
        self._layer, self._value_of_node = layer, value_of_node
        self._reads = Counter[str]()

    def of(self, value: Any) -> InputIndex:
        """Of an argument; None where it is no input."""
        if isinstance(value, fx.Node):
            return self._index(value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, fx.Node) for each in value):
            found = tuple(self._index(each) if isinstance(each, fx.Node) else None for each in value)
            return found if any(index is not None for index in found) else None
        return None

    def _index(self, node: fx.Node) -> int | None:
        """The n-th reading of a value is its n-th place among the inputs."""
        value = self._value_of_node.get(node.name)
        if value is None or producer(value) == self._layer.name or value not in self._layer.inputs:
            return None
        places = [index for index, name in enumerate(self._layer.inputs) if name == value]
        self._reads[value] += 1
        return places[min(self._reads[value], len(places)) - 1]
