"""What layers cost slice by slice, where sequences are cut into token slices.

    a layer that reads its own tokens    t(l): as its parts were measured, or the model of its family says, else its
                                         share of the whole (``costs.layers.shards``)
    one that reads earlier ones too      t(l, c) = t(l) + a0 + a1 l + a2 c + a3 l c  for c > 0 tokens before the slice
    rows of samples and tokens           their share of the whole
    what every slice does                the whole

The coefficients are least squares over what was measured after other tokens, none below 0 (Li et al., "TeraPipe", ICML
2021, section 3.3, "cost model", fit the same form).  Without such measurements a slice takes as many times t(l) as it
reads pairs of a query and a key: 1 + 2 c / l.  Kept for the backward, and counted as received: what a slice reads of
the tokens before it, and its own that later ones read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from planner.costs.cost_model import CostModel
from planner.costs.layers.confidence import weakest
from planner.costs.layers.cost_table import Array
from planner.costs.layers.interpolation import values_of
from planner.costs.layers.part_shapes import alike_layers
from planner.costs.layers.shards import part_of
from planner.costs.stages.stage_cost import LayerBytes, StageCost
from planner.costs.stages.stage_sums import with_recompute
from planner.extras.token_slices.axes import SlicedDivision, TokenAxes
from planner.ir.box import volume
from planner.ir.cluster import INTERPOLATED
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer
from planner.ir.lazy import once
from planner.ir.plan import AxisPart, Size
from planner.layers import check_samples_apart
from planner.layers.sized import SizedLayer

SAVED = 4
WORKSPACE = 5
"""Places in the costs of a layer, after the seconds of F, B, I and W."""

_COEFFICIENTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class SliceTable:
    """All layers of a graph for one slice on one kind of device.

    Attributes:
        costs: ``[6, layers]``: forward, backward, backward for inputs and for weights in seconds, saved and workspace
            bytes.
        received: by layer, bytes of other tokens that it reads, and of its own that others do.
        share: by layer, of its whole work.
    """

    costs: Array
    received: Array
    share: Array


class SlicePrices:
    """Prices of token slices, each looked up once.

    Raises:
        UnsupportedModelError: the network cannot be run in token slices.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model
        self.tables = cost_model.tables
        graph = self.tables.profile.graph
        self.axes = TokenAxes.of(graph)
        self._classes = alike_layers(graph, graph.values(), frozenset(check_samples_apart(graph)))
        self._index = {layer.name: number for number, layer in enumerate(graph.layers)}

    def stages(
        self, kind: str, layers: Sequence[int], sizes: Iterable[Size], recompute: bool
    ) -> Mapping[Size, StageCost]:
        """A stage of one rank with the layers of these indices, for one slice of every micro-batch, by slice.

        Raises:
            MissingMeasurementError: the profile says nothing about that many samples.
        """
        slices = [size for size in dict.fromkeys(sizes) if isinstance(size, AxisPart)]
        return {size: self._stage(kind, list(layers), size, recompute) for size in slices}

    def _stage(self, kind: str, layers: list[int], size: AxisPart, recompute: bool) -> StageCost:
        cost_model = self.cost_model
        table = self.table(kind, size)
        costs = table.costs[:, layers]
        received = table.received[layers]
        forward, backward, of_input, of_weight = costs[:SAVED].sum(axis=1).tolist()
        backward, of_input = with_recompute(backward, of_input, forward * recompute)
        parameters = np.diff(self.tables.graph.parameter_bytes)[layers]
        one = np.array([1.0])
        none = np.zeros((len(layers), 1))
        transient = float(costs[SAVED].sum()) * one
        return StageCost(
            compute_s=((forward,), (backward,), (of_input,), (of_weight,)),
            accumulate_s=(float(np.diff(cost_model.accumulate_s(kind, shared=False))[layers].sum()),),
            exchange_forward_s=0.0,
            exchange_backward_s=0.0,
            update_s=float(np.diff(self.tables.parameters(kind).update_s)[layers].sum()),
            reduction_s=0.0,
            saved_bytes=float(received.sum()) * one if recompute else transient + float(received.sum()),
            transient_bytes=transient if recompute else 0.0 * one,
            workspace_bytes=float(costs[WORKSPACE].max(initial=0.0)) * one,
            parameter_bytes=float(parameters.sum()) * one,
            by_layer=LayerBytes(
                tuple(layers),
                costs[SAVED][:, None],
                costs[WORKSPACE][:, None],
                received[:, None],
                none,
                parameters[:, None],
                np.full((len(layers), 1), size.samples),
                table.share[layers][:, None],
                none,
            ),
            standing_bytes=np.zeros(1),
            evidence=weakest((INTERPOLATED, *(self.tables.at(kind, size.samples).evidence[at] for at in layers))),
        )

    @once
    def table(self, kind: str, size: AxisPart) -> SliceTable:
        """All layers on a device of ``kind``.

        Raises:
            MissingMeasurementError: the profile says nothing about that many samples.
        """
        tokens = self.axes.num_tokens
        length = size.stop - size.start
        whole = self.tables.columns(kind, size.samples)
        costs = whole.copy()
        share = np.ones(whole.shape[1])
        received = np.zeros(whole.shape[1])
        slices = tuple(part for part in (size.start, length, tokens - size.stop) if part)
        position = 1 if size.start else 0
        for layers in self._classes:
            first = layers[0]
            if first.name not in self.axes.works:
                continue
            members = [self._index[layer.name] for layer in layers]
            share[members] = length / tokens
            ratio = self._ratio(kind, first, size, whole[:, members[0]])
            costs[:, members] = whole[:, members] * ratio[:, None]
            if first.name in self.axes.reads_earlier:
                division = self.axes.divided([first.name], slices, size.samples)
                read, others = _read_bytes(division, first.name, position)
                received[members] = read
                costs[WORKSPACE, members] += others  # gradients of earlier tokens, which are added up
        costs[:SAVED] *= self.cost_model.added(kind, shared=False)[:, None]
        return SliceTable(costs, received, share)

    def _ratio(self, kind: str, layer: Layer, size: AxisPart, whole: Array) -> Array:
        """``[6]``: what a slice of a layer costs over what ``whole`` says of all tokens."""
        length = size.stop - size.start
        before = size.start
        own = self._of_first(kind, self._index[layer.name], size.samples, length)
        if before and layer.name in self.axes.reads_earlier:
            fit = self._fit(kind, self._index[layer.name], size.samples)
            own = own.copy()
            if fit is None:
                own[:SAVED] *= 1 + 2 * before / length
            else:
                own[:SAVED] += fit @ np.array([1.0, length, before, length * before])
        ratio: Array = np.divide(own, whole, out=np.full_like(own, length / self.axes.num_tokens), where=whole > 0)
        return ratio

    @once
    def _of_first(self, kind: str, index: int, samples: int, length: int) -> Array:
        """``[6]``: of the first ``length`` tokens of layer number ``index``."""
        graph = self.tables.profile.graph
        layer = self.tables.profile.graph.layers[index]
        work = self.axes.works[layer.name]
        share: Array = self.tables.columns(kind, samples)[:, index] * (length / self.axes.num_tokens)
        if work.is_merged:
            return share
        sized = SizedLayer.of(graph, layer, graph.values(), samples, mixes_samples=False)
        extents = [length if dim == work.dim else extent for dim, extent in enumerate(sized.work.shape)]
        part = part_of(sized, extents)
        of_all = part_of(sized, sized.work.shape)
        return self.tables.parts.estimate(kind, layer.name, (samples, part), of_all, share)

    @once
    def _fit(self, kind: str, index: int, samples: int) -> Array | None:
        """``[4, 4]``: a0 to a3 of F, B, I and W; None where too few slices were measured after other tokens."""
        layer = self.tables.profile.graph.layers[index]
        work = self.axes.works[layer.name]
        spec = layer.outputs[0]
        at = work.dim - (spec.dims.index("sample") < work.dim if "sample" in spec.dims else 0)
        rows = []
        rises = []
        for one in self.tables.parts.after_others(kind, layer.name, samples):
            length = one.part[at]
            own = self._of_first(kind, index, one.samples, length)
            rows.append([1.0, length, one.before, length * one.before])
            rises.append((np.array(values_of(one)[:4]) - own[:4]) * (samples / one.samples))
        return _least_squares(np.array(rows), np.array(rises)) if len(rows) >= _COEFFICIENTS else None


def part_shapes(graph: Graph) -> Callable[[SizedLayer], Iterator[tuple[tuple[int, ...], int]]]:
    """Of each layer, the slices that are worth measuring (:func:`planner.costs.layers.part_shapes.part_shapes`).

    Raises:
        UnsupportedModelError: the network cannot be run in token slices.
    """
    return partial(_slices, TokenAxes.of(graph))


def _slices(axes: TokenAxes, sized: SizedLayer) -> Iterator[tuple[tuple[int, ...], int]]:
    """(extents, tokens before) of slices between which others are read: a half, a quarter, an eighth of a sequence.

    Behind others only where a layer reads what those before it made; at least four, for as many numbers are fitted.
    """
    name = sized.layer.name
    work = axes.works.get(sized.layer.name)
    if work is None or work.is_merged or work.dim == sized.samples_dim:
        return
    lengths = [axes.num_tokens // parts for parts in (2, 4, 8) if axes.num_tokens // parts]
    for length in dict.fromkeys(lengths):
        extents = [length if dim == work.dim else extent for dim, extent in enumerate(sized.work.shape)]
        rest = axes.num_tokens - length
        befores = {rest, rest // 3} if name in axes.reads_earlier else set[int]()
        yield from ((part_of(sized, extents), before) for before in sorted({0, *befores}))


def _read_bytes(division: SlicedDivision, name: str, position: int) -> tuple[float, float]:
    """Bytes that a slice keeps of what its layer reads of several slices, and those of other slices among them."""
    layer = division.layers[name]
    graph = division.axes.graph
    kept = others = 0.0
    specs = graph.values()
    for index, value in enumerate(layer.layer.inputs):
        moves = division.moves(name, index)
        if moves:
            each = BYTES_PER_ELEMENT[specs[value].dtype]
            kept += each * volume(division.wanted(name, index)[position])
            others += each * sum(volume(move.box) for move in moves if move.dst == position)
    return kept, others


def _least_squares(rows: Array, rises: Array) -> Array:
    """``[quantities, coefficients]``, none below 0: those that would be are left out, the most negative first."""
    coefficients = np.zeros((rises.shape[1], rows.shape[1]))
    for quantity in range(rises.shape[1]):
        left = list(range(rows.shape[1]))
        while left:
            fit, *_ = np.linalg.lstsq(rows[:, left], rises[:, quantity], rcond=None)
            if (fit >= 0).all():
                coefficients[quantity, left] = fit
                break
            left.pop(int(np.argmin(fit * rows[:, left].max(axis=0))))
    return coefficients
