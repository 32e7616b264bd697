"""Runs the layers of a stage divided: puts a local form in place of the operator of each layer.

    captured:  x -> [conv] -> [bn] -> [relu] -> ...
    divided:   x -> conv's form (exchange, convolution of the part) -> bn's form (sums over ranks) -> relu's form -> ...

The graph stays as it was captured, with the same parameters and buffers; what each form moves and computes follows from
the division of the stage for the micro-batch that is being run (:class:`planner.layers.division.Division`), which may
have another number of samples each time.

Which random numbers a rank draws follows from its part of a layer (:class:`DrawnPlaces`).  An elementwise
layer draws for its part, attention for the weights of its part's queries; any other layer draws for its samples all
that they have, of which its form cuts a part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import fx

from planner.ir.box import Box
from planner.ir.graph import SAMPLE, Layer, producer
from planner.ir.plan import Placement
from planner.layers.division import Division
from runtime.captured import CapturedModule, main_nodes
from runtime.recent import Recent
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.empties import connected
from runtime.spatial.exchange import PeerGroup
from runtime.spatial.layer_shard import LayerShard, group_of
from runtime.spatial.node_call import NodeCall, evaluate
from runtime.spatial.op_rules import form
from runtime.stage.cut import NUM_SAMPLES, NodeRule
from runtime.stage.modes import MicrobatchShard
from runtime.stage.random.streams import DrawnPart

_IN_PARTS = frozenset({"pointwise", "attention"})


@dataclass(frozen=True, slots=True)
class DrawnPlaces:
    """The places of one rank, see :class:`runtime.stage.random.streams.DrawnParts`.

    Attributes:
        shard: a layer of the stage as it is being run in training.
        layers: of the stage, by name.
        placements: by layer.
    """

    shard: Callable[[str], LayerShard]
    layers: Mapping[str, Layer]
    placements: Mapping[str, Placement]

    def place(self, layer: str, is_main: bool) -> DrawnPart:
        """What is drawn in the micro-batch that is being run."""
        shard = self.shard(layer)
        key = "place", is_main
        if key not in shard.memo:
            shard.memo[key] = place_of(shard, is_main)
        drawn: DrawnPart = shard.memo[key]
        return drawn

    def parts_of_samples(self, layer: str) -> int:
        """Into how many parts the samples of a layer are cut."""
        return _parts(self.placements[layer].cuts.get(SAMPLE, ()))

    def draws_all(self, layer: str) -> bool:
        """Whether every rank draws all that one device draws."""
        made = self.layers[layer]
        cuts = self.placements[layer].cuts
        dims = made.outputs[0].dims if made.kind in _IN_PARTS else (SAMPLE,)
        return all(_parts(cuts.get(dim, ())) == 1 for dim in dims)


def place_of(shard: LayerShard, is_main: bool = True) -> DrawnPart:
    """Which numbers a rank draws of a layer."""
    division = shard.division
    start = 0
    count = division.samples
    total = division.samples
    if SAMPLE in division.work.dims and total:
        dim = division.work.dims.index(SAMPLE)
        each = division.work.shape[dim] // total
        start = shard.done[dim].start // each
        count = division.rows[shard.position]
    shape = shard.layer.outputs[0].shape
    if not is_main or shard.layer.kind not in _IN_PARTS:
        return DrawnPart(start, count, total)
    if shard.layer.kind == "pointwise":
        return DrawnPart(start, count, total, shard.done, shape)
    index = shard.input_of("key")
    if not isinstance(index, int):
        raise TypeError(f"the keys of {shard.layer.name} are no value")
    weights: Box = (*shard.done[:-1], shard.exchange(index).wanted[-2])
    return DrawnPart(start, count, total, weights, (*shape[:-1], shard.division.inputs[index].shape[-2]))


def _parts(points: tuple[int, ...]) -> int:
    return max(1, len(points) - 1)


LOSS = "loss"
"""The kind of layers whose form gives this rank's share."""

_MOST_KEPT = 1024
"""Divisions whose shards of layers are kept, those of parts of a stage among them."""


class DividedStage:
    """The layers of one stage on one rank.

    Args:
        layers: of the stage, by name.
        peers: the ranks of the stage, or parts of a micro-batch.

    Attributes:
        peers: count what was sent.
        later: where weight gradients wait in a backward.
    """

    def __init__(
        self, model: CapturedModule, layers: Iterable[str], peers: PeerGroup, later: DeferredGradients
    ) -> None:
        self.peers = peers
        self.later = later
        by_name = model.graph.by_name()
        self._layers = {name: by_name[name] for name in layers}
        self._layer_of_node = {node: name for node, name in model.layer_of_node.items() if name in self._layers}
        self._value_of_node = {node: value for value, node in model.node_of_value.items()}
        self._main = {layer: node.name for layer, node in main_nodes(model).items()}
        self._loss = producer(model.graph.loss)
        self._read = frozenset(producer(value) for layer in model.graph.layers for value in layer.inputs)
        self._places = _places(self._layers)
        self._now: dict[tuple[str, bool, int], LayerShard] = {}
        self._calls: dict[str, NodeCall] = {}
        self._kept = Recent[int, tuple[Division, dict[tuple[str, bool, int], LayerShard]]](_MOST_KEPT)
        self._division: Division | None = None
        self._position = peers.position

    @property
    def division(self) -> Division | None:
        """Of what is run now."""
        return self._division

    def at(self, microbatch_shard: MicrobatchShard) -> None:
        """What is run next."""
        division = microbatch_shard.division
        if division is None:
            raise ValueError("a divided stage is run with a division")
        self.peers.at(microbatch_shard.microbatch)
        self._position = self.peers.position
        self.enter(division)

    def enter(self, division: Division) -> None:
        """From here on, layers are those of ``division``, such as those of a part of the stage."""
        if division is self._division:
            return
        self._division = division
        entry = self._kept.get(id(division))
        if entry is None:
            entry = self._kept[id(division)] = (division, {})
        self._now = entry[1]

    def begin(self, microbatch: int) -> None:
        """The backward of a micro-batch, or of a part."""
        self.peers.at(microbatch)

    def finish(self) -> None:
        """A backward is over."""
        self.later.run()
        self.peers.finish()

    def reset(self) -> None:
        """What is under way came to nothing."""
        self.later.clear()
        self.peers.reset()

    def rule(self, inner: NodeRule, *, training: bool = True) -> NodeRule:
        """The rule that puts forms in place of operators; ``inner`` says what those are (draws, evaluation)."""

        def rule(node: fx.Node) -> Callable[..., Any] | None:
            layer = self._layer_of_node.get(node.name)
            function = inner(node)
            if layer is None or node.op != "call_function" or node.target is operator.getitem:
                return function
            call = NodeCall.of(node, self._layers[layer], self._value_of_node)
            target: Any = node.target
            if self._main.get(layer) == node.name:
                return self._formed(call, layer, function or target, training)
            if not call.integers:
                return function
            return self._helper(call, layer, function or target, training)

        return rule

    def shard(self, layer: str, training: bool) -> LayerShard:
        """The layer at the sizes that are being run."""
        shard = self._now.get((layer, training, self._position))
        if shard is None:
            shard = self._now[layer, training, self._position] = self._made(layer, training)
        return shard

    def _made(self, layer: str, training: bool) -> LayerShard:
        division = self._division
        if division is None:
            raise ValueError("a divided stage was not told what is run")
        mine = division.layers[layer]
        call = self._calls[layer]
        return LayerShard(
            self.peers,
            division,
            mine,
            group_of(mine, self.peers.ranks, self.peers.position),
            training,
            call.inputs,
            self._integers(call, mine.rows[self.peers.position], division),
            self.later,
            is_read=layer in self._read,
            place=self._places[layer],
        )

    def _integers(self, call: NodeCall, rows: int, division: Division) -> dict[str, Any]:
        sizes = {NUM_SAMPLES: rows, **dict(division.sizes)}
        return {name: evaluate(value, sizes) for name, value in call.integers.items()}

    def _formed(self, call: NodeCall, layer: str, function: Callable[..., Any], training: bool) -> Callable[..., Any]:
        self._calls[layer] = call
        run = form(self._layers[layer].kind)
        op = call.operator(function)

        def formed(*args: Any, **kwargs: Any) -> Any:
            shard = self.shard(layer, training)
            arguments = call.arguments(args, kwargs)
            if shard.integers:
                arguments.update(shard.integers)
            return run(shard, op, arguments)

        if layer != self._loss or self._layers[layer].kind == LOSS:
            return formed

        def counted_once(*args: Any, **kwargs: Any) -> Any:
            """All ranks have the same number; the first one counts it."""
            loss = formed(*args, **kwargs)
            return loss if self.shard(layer, training).is_first else connected(torch.zeros_like(loss), loss)

        return counted_once

    def _helper(self, call: NodeCall, layer: str, function: Callable[..., Any], training: bool) -> Callable[..., Any]:
        """An operator beside the main one, such as the zeros that a recurrent layer starts from."""
        op = call.operator(function)

        def helped(*args: Any, **kwargs: Any) -> Any:
            shard = self.shard(layer, training)
            rows = shard.division.rows[self.peers.position]
            return op(**{**call.arguments(args, kwargs), **self._integers(call, rows, shard.whole)})

        return helped


def _places(layers: Mapping[str, Layer]) -> dict[str, int]:
    """Where the keys of each layer's exchanges begin: one for each input, and one for statistics."""
    ends = accumulate(len(layer.inputs) + 1 for layer in layers.values())
    return dict(zip(layers, chain((0,), ends), strict=False))
