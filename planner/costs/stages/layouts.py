"""What layers cost on a group of ranks under layouts: tables over options, each built once.

    compute        the measured cost of the part that a rank does (``costs.layers.shards``); where none like it was
                   measured, of its samples x the share of a sample's work that it does; margins included
                                                                                       ``LayoutPrices.layer``
    statistics     a normalisation whose samples or space are cut sums over the ranks with equal channels
    parameters     gradients are summed over the ranks with equal weight boxes, all layers' in one go (the rate of a
                   sum of all parameters); updates and additions in proportion to the bytes held
    messages       what a rank reads and does not hold comes from its owner, as ``planner.layers.boxes`` says, and goes
                   back in the backward pass (the adjoint); channels are contracted in the way that moves least
                                                                                       ``LayoutPrices.crossing``
    overlap        a convolution's halo travels while it computes                       ``resharding.exposed``

The slowest rank counts, layer by layer.  Messages of a rank follow one another, and receiving overlaps sending where
the link is duplex.  Ignored: traffic of several pairs on one cable.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.resharding import Resharding, exposed, resharding_of, scattered_s
from planner.costs.cost_model import CostModel
from planner.costs.layers.shards import MeasuredParts
from planner.costs.shards.device_mesh import axes_of, candidate_layouts, factorisations, most_margin
from planner.costs.shards.partial_sums import Sums, reduction_rate, sums_of
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.cluster import RankIds
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec, output_of, producer
from planner.ir.lazy import once, once_by
from planner.ir.problem import SAMPLE_DIMS
from planner.layers import takes_statistics
from planner.layers.boxes import volumes
from planner.layers.shards import Shards, shards_of
from planner.layers.sized import SizedLayer
from planner.layers.stage_rules import may_be_laid_out, sharing_weights

Array = NDArray[np.float64]

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, SAVED, WORKSPACE = range(6)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTable:
    """A layer under each option (first axis) on each rank (second).

    Attributes:
        seconds: ``[4, options, ranks]``: forward, backward, backward for the input, backward for the weights.
        statistics_s: ``[2, options]``: exchanges of statistics, forward and backward.
        saved_bytes, workspace_bytes, parameter_bytes: ``[options, ranks]``.
        reduction_s: ``[options]``: the sum of its gradients, as part of one sum over the whole stage.
        update_s, accumulate_s: ``[options, ranks]``: a step's update; adding one more micro-batch's gradients.
    """

    shards: Shards
    seconds: Array
    statistics_s: Array
    saved_bytes: Array
    workspace_bytes: Array
    parameter_bytes: Array
    reduction_s: Array
    update_s: Array
    accumulate_s: Array


@dataclass(eq=False)
class LayoutPrices:
    """Prices of layers on ``ranks`` for micro-batches of ``samples``; everything is looked up once.

    Attributes:
        allow: families of dims that may be cut (``Problem.allow``).
        halo_depth: most rows by which a rank may work beyond its part (0: halos are exchanged layer by layer).
        parts: of layers, as they were measured at their own shapes.
        evaluates: whether it is about forward passes alone (:func:`planner.layers.takes_statistics`).
    """

    cost_model: CostModel
    ranks: RankIds
    samples: int
    allow: tuple[str, ...] = (SAMPLE_DIMS,)
    halo_depth: int = 0
    evaluates: bool = False
    parts: MeasuredParts = field(init=False, repr=False)
    _values: dict[str, TensorSpec] = field(init=False, repr=False)
    _sharing: frozenset[str] = field(init=False, repr=False)
    _axes: tuple[str, ...] = field(init=False, repr=False)
    _own: dict[str, tuple[bool, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        graph = self.cost_model.graph
        self.parts = self.cost_model.tables.parts
        self._values = graph.values()
        self._sharing = sharing_weights(graph)
        self._axes = axes_of(graph, self.allow)
        owned: set[str] = set()
        self._own = {}
        for layer in graph.layers:
            self._own[layer.name] = tuple(name not in owned for name in layer.parameters)
            owned.update(layer.parameters)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of the graph."""
        return self.cost_model.graph.layers

    def speeds(self) -> tuple[float, ...]:
        """Of each rank: whole samples a second, at the most that all kinds in the group were measured at."""
        kinds = [self.cost_model.main_kind(rank) for rank in self.ranks]
        samples = min(self.cost_model.tables.largest_measured(kind) for kind in kinds)
        seconds = {kind: float(self.cost_model.tables.columns(kind, samples)[:2].sum()) for kind in kinds}
        return tuple(1.0 / seconds[kind] if seconds[kind] > 0 else 1.0 for kind in kinds)

    @property
    def num_grids(self) -> int:
        """Ways to lay the ranks out over what may be cut, and those that hold the same."""
        return sum(1 for _ in factorisations(len(self.ranks), len(self._axes) + 1))

    @once
    def sized(self, index: int) -> SizedLayer:
        """Layer number ``index`` of the graph at this number of samples."""
        graph = self.cost_model.graph
        layer = self.layers[index]
        return SizedLayer.of(graph, layer, self._values, self.samples, layer.name in self.cost_model.mixing())

    @once_by(lambda self, index: (self.sized(index).signature, self.layers[index].name in self._sharing))
    def options(self, index: int) -> tuple[ShardingSpec, ...]:
        """What a layer may choose from, of what the runtime runs (:mod:`planner.layers.stage_rules`)."""
        sized = self.sized(index)
        ranks = len(self.ranks)
        shares_weight = sized.layer.name in self._sharing
        layouts = (ShardingSpec.of(each) for each in candidate_layouts(sized, self.speeds(), self._axes))
        plain = tuple(each for each in layouts if may_be_laid_out(sized.layer, dict(each.grid), ranks, shares_weight))
        with_margins = (
            replace(option, margin=rows)
            for option in plain
            for rows in range(1, min(self.halo_depth, most_margin(sized, option.layout)) + 1)
        )
        return (*plain, *with_margins)

    @once_by(lambda self, index, options: (self.sized(index).signature, options))
    def shards(self, index: int, options: tuple[ShardingSpec, ...]) -> Shards:
        """The boxes of a layer under ``options``."""
        return shards_of(self.sized(index), options)

    def layer(self, index: int, options: tuple[ShardingSpec, ...]) -> LayerTable:
        """What a layer costs under ``options``, messages apart.

        Raises:
            MissingMeasurementError: the profile says nothing about a number of samples that an option uses.
        """
        shards = self.shards(index, options)
        costs = self.cost_of_part(index, shards)
        sums = self.sums(index, shards)
        update, accumulate = self._parameter_costs(index, sums.held_bytes)
        return LayerTable(
            shards,
            costs[:4],
            sums.statistics_s,
            costs[SAVED],
            costs[WORKSPACE],
            sums.held_bytes,
            sums.reduction_s,
            update,
            accumulate,
        )

    def crossing(
        self, maker: int, reader: int, of_maker: tuple[ShardingSpec, ...], of_reader: tuple[ShardingSpec, ...]
    ) -> Resharding:
        """What moves from layer ``maker`` to layer ``reader``, by the options of both."""
        values = tuple(_values_read(self.layers[maker], self.layers[reader]))
        return self._resharding(self.shards(maker, of_maker), self.shards(reader, of_reader), values)

    @once_by(
        lambda self, source, destination, values: (
            *(source.sized.signature, source.options),
            *(destination.sized.signature, destination.options),
            values,
        )
    )
    def _resharding(self, source: Shards, destination: Shards, values: tuple[tuple[int, int], ...]) -> Resharding:
        return resharding_of(source, destination, values, self.ranks, self.cost_model.network)

    def exposed_s(self, reader: int, crossing: Resharding, table: LayerTable) -> tuple[Array, Array]:
        """What of a crossing into layer ``reader`` is waited for, forward and backward; halos overlap with compute."""
        seconds = table.seconds[FORWARD], table.seconds[BACKWARD]
        return exposed(crossing, self.layers[reader].kind, *seconds, self.cost_model.cluster)

    def apart_s(self, index: int, shards: Shards, within: Collection[int]) -> Array:
        """``[options]``: partial sums of a layer whose first input no layer ``within`` the stage makes."""
        names = {self.layers[other].name for other in within}
        first = self.layers[index].inputs[:1]
        if any(producer(name) in names for name in first):
            return np.zeros(len(shards.options))
        return scattered_s(shards, self.ranks, self.cost_model.network)

    def output_bytes(self, index: int, shards: Shards) -> Array:
        """``[options, ranks]``: what each rank holds of a layer's outputs."""
        specs = self.sized(index).layer.outputs
        sizes = [volumes(boxes) * BYTES_PER_ELEMENT[spec.dtype] for boxes, spec in zip(shards.held, specs, strict=True)]
        return np.asarray(np.sum(sizes, axis=0), dtype=np.float64)

    def edges(self, layers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Pairs (maker, reader) among ``layers``."""
        number = {self.layers[index].name: index for index in layers}
        pairs = {
            (number[producer(name)], index)
            for index in layers
            for name in self.layers[index].inputs
            if producer(name) in number
        }
        return tuple(sorted(pairs))

    def sums(self, index: int, shards: Shards) -> Sums:
        """What a layer sums over ranks, and holds of parameters."""
        takes = takes_statistics(self.layers[index], not self.evaluates)
        return self._sums(shards, self._own[self.layers[index].name], takes)

    @once_by(lambda self, shards, own, takes: (shards.sized.signature, shards.options, own, takes))
    def _sums(self, shards: Shards, own: tuple[bool, ...], takes: bool) -> Sums:
        layer_sums = sums_of(shards, own, self.ranks, self._rate, self.cost_model.cluster)
        if takes or shards.sized.relation.REDUCTION != "statistics":
            return layer_sums
        return replace(
            layer_sums,
            statistics_s=np.zeros_like(layer_sums.statistics_s),
            standing_bytes=np.zeros_like(layer_sums.standing_bytes),
        )

    def cost_of_part(self, index: int, shards: Shards) -> Array:
        """``[6, options, ranks]``: seconds and bytes of each part, as measured or from the cost of whole samples."""
        costs = np.zeros((6, *shards.share.shape))
        kinds = [self.cost_model.main_kind(rank) for rank in self.ranks]
        for member, kind in enumerate(kinds):
            for samples in np.unique(shards.samples[:, member]).tolist():
                rows = shards.samples[:, member] == samples
                whole = self.cost_model.tables.columns(kind, samples)[:, index]
                costs[:, rows, member] = whole[:, None] * shards.share[rows, member]
        self.parts.put_in(costs, self.layers[index].name, kinds, shards)
        for member, kind in enumerate(kinds):
            costs[:SAVED, :, member] *= self.cost_model.added(kind, len(kinds) > 1)[:, None]
        return costs

    @once
    def _rate(self, ranks: RankIds) -> float:
        """Seconds a byte of a sum over ``ranks``, where all parameters of the graph are summed at once."""
        return reduction_rate(self.cost_model, ranks)

    def _parameter_costs(self, index: int, held_bytes: Array) -> tuple[Array, Array]:
        update = np.zeros_like(held_bytes)
        accumulate = np.zeros_like(held_bytes)
        total = float(np.diff(self.cost_model.tables.graph.parameter_bytes)[index])
        shared = len(self.ranks) > 1
        for member, rank in enumerate(self.ranks):
            kind = self.cost_model.main_kind(rank)
            update_s = self.cost_model.tables.parameters(kind).update_s
            accumulate_s = self.cost_model.accumulate_s(kind, shared)
            share = held_bytes[:, member] / total if total else 0.0
            update[:, member] = (update_s[index + 1] - update_s[index]) * share
            accumulate[:, member] = (accumulate_s[index + 1] - accumulate_s[index]) * share
        return update, accumulate


def _values_read(maker: Layer, reader: Layer) -> list[tuple[int, int]]:
    """(output of the maker, input of the reader) for each value that passes, once."""
    pairs = []
    for position, name in enumerate(reader.inputs):
        layer, output = output_of(name)
        if layer == maker.name and reader.inputs.index(name) == position:
            pairs.append((output, position))
    return pairs
