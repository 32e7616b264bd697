"""Runs the layers of a stage divided: puts a local form in place of the operator of each layer.

    captured:  x -> [conv] -> [bn] -> [relu] -> ...
    divided:   x -> conv's form (exchange, convolution of the part) -> bn's form (sums over ranks) -> relu's form -> ...

The graph stays as it was captured, with the same parameters and buffers; what each form moves and computes follows from
the division of the stage for the micro-batch that is being run (:class:`planner.layers.division.Division`), which may
have another number of samples each time.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir.graph import Layer, producer
from planner.layers.division import Division
from runtime.decomposition.empties import connected
from runtime.decomposition.exchange import Wire
from runtime.decomposition.forms import form
from runtime.decomposition.groups import group_of
from runtime.decomposition.integers import depends, evaluate
from runtime.decomposition.later import Later
from runtime.decomposition.step import InputIndex, Step
from runtime.stages.captured import CapturedModel
from runtime.stages.cut import NUM_SAMPLES, Rule
from runtime.stages.manner import Portion

LOSS = "loss"
"""The kind of layers whose form gives this rank's share."""

_MOST_KEPT = 64
"""Divisions whose steps are kept."""


@dataclass(frozen=True, slots=True)
class _Call:
    """How one node is called, worked out once.

    Attributes:
        names: of the operator's arguments, by place; empty where it has no schema.
        keywords: of those, the ones that are given by name only.
        defaults: of the arguments that the node leaves out.
        inputs: by argument, which inputs of the layer it is.
        integers: by argument, those that depend on sizes, as the graph has them.
    """

    node: fx.Node
    names: tuple[str, ...]
    keywords: frozenset[str]
    defaults: Mapping[str, Any]
    inputs: Mapping[str, InputIndex]
    integers: Mapping[str, Any]

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


class DividedStage:
    """The layers of one stage on one rank.

    Args:
        layers: of the stage, by name.
        wire: to the other ranks of the stage.

    Attributes:
        wire: counts what was sent.
        later: where weight gradients wait in a backward.
    """

    def __init__(self, model: CapturedModel, layers: Iterable[str], wire: Wire, later: Later) -> None:
        self.wire, self.later = wire, later
        by_name = model.graph.by_name()
        self._layers = {name: by_name[name] for name in layers}
        self._layer_of_node = {node: name for node, name in model.layer_of_node.items() if name in self._layers}
        self._value_of_node = {node: value for value, node in model.node_of_value.items()}
        self._main = _main_nodes(model, self._layers)
        self._sizes = tuple(model.sizes)
        self._loss = producer(model.graph.loss)
        self._read = frozenset(producer(value) for layer in model.graph.layers for value in layer.inputs)
        self._now: dict[tuple[str, bool], Step] = {}
        self._calls: dict[str, _Call] = {}
        self._kept: dict[int, tuple[Division, dict[tuple[str, bool], Step]]] = {}
        self._division: Division | None = None
        self._given: dict[str, int] = {}

    @property
    def division(self) -> Division | None:
        """Of what is run now."""
        return self._division

    def at(self, portion: Portion) -> None:
        """What is run next."""
        division = portion.division
        if division is None:
            raise ValueError("a divided stage is run with a division")
        if division is self._division:
            return
        self._division = division
        found = self._kept.get(id(division))
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            found = self._kept[id(division)] = (division, {})
        self._now = found[1]

    def finish(self) -> None:
        """A backward is over."""
        self.later.run()

    def reset(self) -> None:
        """What is under way came to nothing."""
        self.later.clear()

    def rule(self, inner: Rule, *, training: bool = True) -> Rule:
        """The rule that puts forms in place of operators; ``inner`` says what those are (draws, evaluation)."""

        def rule(node: fx.Node) -> Callable[..., Any] | None:
            layer = self._layer_of_node.get(node.name)
            function = inner(node)
            if layer is None or node.op != "call_function" or node.target is operator.getitem:
                return function
            call = self._called(node, self._layers[layer])
            if self._main.get(layer) == node.name:
                return self._formed(call, layer, function or node.target, training)
            if not call.integers:
                return function
            return self._helper(call, layer, function or node.target, training)

        return rule

    def step(self, layer: str, training: bool) -> Step:
        """The layer at the sizes that are being run."""
        found = self._now.get((layer, training))
        if found is None:
            found = self._now[layer, training] = self._made(layer, training)
        return found

    def _made(self, layer: str, training: bool) -> Step:
        division = self._division
        if division is None:
            raise ValueError("a divided stage was not told what is run")
        mine = division.layers[layer]
        call = self._calls[layer]
        return Step(
            self.wire,
            division,
            mine,
            group_of(mine, self.wire.ranks, self.wire.position),
            training,
            call.inputs,
            self._integers(call, mine.rows(self.wire.position), division),
            self.later,
            is_read=layer in self._read,
        )

    def _integers(self, call: _Call, rows: int, division: Division) -> dict[str, Any]:
        sizes = {NUM_SAMPLES: rows, **dict(division.sizes)}
        return {name: evaluate(value, sizes) for name, value in call.integers.items()}

    def _formed(self, call: _Call, layer: str, function: Callable[..., Any], training: bool) -> Callable[..., Any]:
        self._calls[layer] = call
        run, op = form(self._layers[layer].kind).run, call.operator(function)

        def formed(*args: Any, **kwargs: Any) -> Any:
            step = self.step(layer, training)
            arguments = call.arguments(args, kwargs)
            if step.integers:
                arguments.update(step.integers)
            return run(step, op, arguments)

        if layer != self._loss or self._layers[layer].kind == LOSS:
            return formed

        def counted_once(*args: Any, **kwargs: Any) -> Any:
            """All ranks have the same number; the first one counts it."""
            loss = formed(*args, **kwargs)
            return loss if self.step(layer, training).is_first else connected(torch.zeros_like(loss), loss)

        return counted_once

    def _helper(self, call: _Call, layer: str, function: Callable[..., Any], training: bool) -> Callable[..., Any]:
        """An operator beside the main one, such as the zeros that a recurrent layer starts from."""
        op = call.operator(function)

        def helped(*args: Any, **kwargs: Any) -> Any:
            rows = self.step(layer, training).division.rows(self.wire.position)
            division = self._division
            if division is None:
                raise ValueError("a divided stage was not told what is run")
            return op(**{**call.arguments(args, kwargs), **self._integers(call, rows, division)})

        return helped

    def _called(self, node: fx.Node, layer: Layer) -> _Call:
        schema = getattr(node.target, "_schema", None)
        known = () if schema is None else tuple(schema.arguments)
        names = tuple(argument.name for argument in known) or tuple(f"argument_{k}" for k in range(len(node.args)))
        keywords = frozenset(argument.name for argument in known if argument.kwarg_only)
        defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        reads = Counter[str]()
        inputs = {name: self._input(value, layer, reads) for name, value in given.items()}
        return _Call(
            node,
            names,
            keywords,
            defaults,
            {name: index for name, index in inputs.items() if index is not None},
            {name: value for name, value in given.items() if depends(value)},
        )

    def _input(self, value: Any, layer: Layer, reads: Counter[str]) -> InputIndex:
        if isinstance(value, fx.Node):
            return self._index(value, layer, reads)
        if isinstance(value, (list, tuple)) and any(isinstance(each, fx.Node) for each in value):
            found = tuple(self._index(each, layer, reads) if isinstance(each, fx.Node) else None for each in value)
            return found if any(index is not None for index in found) else None
        return None

    def _index(self, node: fx.Node, layer: Layer, reads: Counter[str]) -> int | None:
        """Which input of the layer a node is: the n-th reading of a value is its n-th place among the inputs."""
        value = self._value_of_node.get(node.name)
        if value is None or producer(value) == layer.name or value not in layer.inputs:
            return None
        places = [index for index, name in enumerate(layer.inputs) if name == value]
        reads[value] += 1
        return places[min(reads[value], len(places)) - 1]


def _main_nodes(model: CapturedModel, layers: Mapping[str, Layer]) -> dict[str, str]:
    """The node of each layer that makes its outputs, by name."""
    nodes = {node.name: node for node in model.graph_module.graph.nodes}
    found: dict[str, str] = {}
    for value, name in model.node_of_value.items():
        layer, node = producer(value), nodes[name]
        if layer in layers:
            found[layer] = str(node.args[0]) if node.target is operator.getitem and _picks(node) else name
    return found


def _picks(node: fx.Node) -> bool:
    maker = node.args[0]
    return isinstance(maker, fx.Node) and not isinstance(maker.meta.get("val"), Tensor)
