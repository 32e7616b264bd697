"""Runs the layers of a stage divided: puts a local form in place of the operator of each layer.

    captured:  x -> [conv] -> [bn] -> [relu] -> ...
    divided:   x -> conv's form (exchange, convolution of the part) -> bn's form (sums over ranks) -> relu's form -> ...

The graph stays as it was captured, with the same parameters and buffers; what each form moves and computes follows from
the division of the stage for the micro-batch that is being run (:class:`planner.layers.division.Division`), which may
have another number of samples each time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, chain
from typing import Any

import torch
from torch import fx

from planner.ir.graph import Layer, producer
from planner.layers.division import Division
from runtime.spatial.calling import Call
from runtime.spatial.deferred import Later
from runtime.spatial.empties import connected
from runtime.spatial.exchange import Wire
from runtime.spatial.integers import evaluate
from runtime.spatial.op_rules import form
from runtime.spatial.step import Step, group_of
from runtime.stage.captured import CapturedModel, main_nodes
from runtime.stage.cut import NUM_SAMPLES, Rule
from runtime.stage.modes import Portion

LOSS = "loss"
"""The kind of layers whose form gives this rank's share."""

_MOST_KEPT = 64
"""Divisions whose steps are kept."""


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
        self._main = {layer: node.name for layer, node in main_nodes(model).items()}
        self._loss = producer(model.graph.loss)
        self._read = frozenset(producer(value) for layer in model.graph.layers for value in layer.inputs)
        self._places = _places(self._layers)
        self._now: dict[tuple[str, bool], Step] = {}
        self._calls: dict[str, Call] = {}
        self._kept: dict[int, tuple[Division, dict[tuple[str, bool], Step]]] = {}
        self._division: Division | None = None

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
            call = Call.of(node, self._layers[layer], self._value_of_node)
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
            place=self._places[layer],
        )

    def _integers(self, call: Call, rows: int, division: Division) -> dict[str, Any]:
        sizes = {NUM_SAMPLES: rows, **dict(division.sizes)}
        return {name: evaluate(value, sizes) for name, value in call.integers.items()}

    def _formed(self, call: Call, layer: str, function: Callable[..., Any], training: bool) -> Callable[..., Any]:
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

    def _helper(self, call: Call, layer: str, function: Callable[..., Any], training: bool) -> Callable[..., Any]:
        """An operator beside the main one, such as the zeros that a recurrent layer starts from."""
        op = call.operator(function)

        def helped(*args: Any, **kwargs: Any) -> Any:
            rows = self.step(layer, training).division.rows(self.wire.position)
            division = self._division
            if division is None:
                raise ValueError("a divided stage was not told what is run")
            return op(**{**call.arguments(args, kwargs), **self._integers(call, rows, division)})

        return helped


def _places(layers: Mapping[str, Layer]) -> dict[str, int]:
    """Where the keys of each layer's exchanges begin: one for each input, and one for statistics."""
    ends = accumulate(len(layer.inputs) + 1 for layer in layers.values())
    return dict(zip(layers, chain((0,), ends), strict=False))
