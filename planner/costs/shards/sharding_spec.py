"""The boxes of a layer under each of many sharding specs: what every rank makes, holds, reads and uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.costs.shards.boxes import Boxes, Counts, as_box, as_boxes, boxes_of, volumes
from planner.costs.shards.contraction import PartialSums, partial_sums
from planner.ir.box import Box
from planner.ir.graph import BYTES_PER_ELEMENT
from planner.ir.layout import Layout
from planner.ir.plan import Placement
from planner.layers.sized import SPACE, SizedLayer


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """How a layer may be run on a group.

    Attributes:
        cuts: cut points by dim (``Layout.cuts``), in the order of the grid of ranks.
        margin: rows by which each rank works beyond its own part along the cut dims of space, so that the next layers
            need no halo (one wide exchange for several layers; the overlap is computed twice).
        recompute: whether what it saves is dropped after the forward and computed again before the backward.
        ways: ranks that share the input channels of a contraction (``costs.shards.contraction``); 0: as many as is
            cheapest.
    """

    cuts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    margin: int = 0
    recompute: bool = False
    ways: int = 0

    @classmethod
    def of(cls, layout: Layout, margin: int = 0) -> ShardingSpec:
        """The option that is ``layout``."""
        return cls(tuple((dim, tuple(points)) for dim, points in layout.cuts.items()), margin)

    @classmethod
    def placed(cls, placement: Placement, recompute: bool = False) -> ShardingSpec:
        """The option that a plan writes down, its stage recomputing or not."""
        cuts = tuple((dim, tuple(points)) for dim, points in placement.cuts.items())
        return cls(cuts, placement.margin, recompute, placement.ways)

    def placement(self, stage: int) -> Placement:
        """What a plan writes down."""
        return Placement(stage, dict(self.cuts), max(1, self.ways), self.margin)

    @property
    def layout(self) -> Layout:
        """The cut points as a layout."""
        return Layout(dict(self.cuts))

    @property
    def grid(self) -> tuple[tuple[str, int], ...]:
        """Parts by dim."""
        return tuple((dim, len(points) - 1) for dim, points in self.cuts)

    def __str__(self) -> str:
        parts = " x ".join(f"{dim}:{parts}" for dim, parts in self.grid) or "whole"
        shared = f" channels shared by {self.ways}" if self.ways > 1 else ""
        margin = f" margin {self.margin}" if self.margin else ""
        return parts + shared + margin + (" recomputed" if self.recompute else "")


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Boxes by option and rank, ``[options, ranks, dims, 2]``, and how much of the work each rank does.

    Attributes:
        sized: a layer of this signature, not always the one that was asked about: names differ.
        owned: of each output: disjoint or identical.
        held: of each output: what a rank makes, its margin included.
        needed: of each input.
        weights: of each parameter.
        work: the part of the work done, margin included.
        samples: ``[options, ranks]``: samples of the part.
        share: ``[options, ranks]``: of the work of one sample.
        contractions: by option, the ways to contract its first input.
    """

    sized: SizedLayer
    options: tuple[ShardingSpec, ...]
    owned: tuple[Boxes, ...]
    held: tuple[Boxes, ...]
    needed: tuple[Boxes, ...]
    weights: tuple[Boxes, ...]
    work: Boxes
    samples: NDArray[np.int64]
    share: Counts
    contractions: tuple[tuple[PartialSums, ...], ...] = field(repr=False)

    def read_share(self, option: int) -> Counts:
        """``[ranks]``: the share of the bytes of its inputs that each rank's part reads, of as many whole samples."""
        read, total, ways = np.zeros(self.samples.shape[1]), 0.0, self.contractions[option]
        for position, (spec, boxes) in enumerate(zip(self.sized.inputs, self.needed, strict=True)):
            of_option = ways[-1].needed if ways and position == 0 else boxes[option]
            read += volumes(of_option) * BYTES_PER_ELEMENT[spec.dtype]
            total += spec.num_bytes
        whole = total * self.samples[option] / self.sized.samples
        share_read: Counts = np.minimum(1.0, np.divide(read, whole, out=np.zeros_like(read), where=whole > 0))
        return share_read


def shards_of(sized: SizedLayer, options: tuple[ShardingSpec, ...]) -> Shards:
    """The boxes of ``sized`` under each option; all options are of equally many ranks."""
    layouts = [option.layout for option in options]
    margins = [option.margin for option in options]
    own = np.array([boxes_of(layout, sized.work, sized.samples) for layout in layouts])
    work = _grown(own, sized.work.dims, sized.work.shape, options)
    inputs, weights = _read(sized, work)
    owned = tuple(
        np.array([boxes_of(layout, spec, sized.samples) for layout in layouts]) for spec in sized.layer.outputs
    )
    held = tuple(
        _grown(boxes, spec.dims, spec.shape, options) if any(margins) else boxes
        for boxes, spec in zip(owned, sized.layer.outputs, strict=True)
    )
    first = inputs[0] if inputs else None
    contractions = tuple(
        partial_sums(sized, layout, first[k], options[k].ways) if first is not None and not margins[k] else ()
        for k, layout in enumerate(layouts)
    )
    for k, (option, ways) in enumerate(zip(options, contractions, strict=True)):
        if option.ways > 1 and ways and (weight := ways[0].weight) is not None:
            weights = (_replaced(weights[0], k, weight), *weights[1:])
    samples = _samples(sized, own)
    share = _share(sized, work, samples)
    return Shards(sized, options, owned, held, inputs, weights, work, samples, share, contractions)


def _replaced(boxes: Boxes, k: int, of_option: Boxes) -> Boxes:
    replaced = boxes.copy()
    replaced[k] = of_option
    return replaced


def _read(sized: SizedLayer, work: Boxes) -> tuple[tuple[Boxes, ...], tuple[Boxes, ...]]:
    """What each rank reads of each input and of each parameter; asked once for each distinct box."""
    num_options, num_ranks, dims, _ = work.shape
    flat = work.reshape(num_options * num_ranks, 2 * dims)
    if dims:
        distinct, place = np.unique(flat, axis=0, return_inverse=True)
    else:  # numbers, all alike
        distinct, place = flat[:1], np.zeros(len(flat), np.int64)
    parts = [as_box(box) for box in distinct.reshape(len(distinct), dims, 2)]

    def spread(column: Sequence[Box]) -> Boxes:
        boxes = as_boxes(column)
        return boxes[place.ravel()].reshape(num_options, num_ranks, *boxes.shape[1:])

    columns = [
        [spread(column) for column in zip(*rows, strict=True)]
        for rows in ([sized.input_boxes(part) for part in parts], [sized.weight_boxes(part) for part in parts])
    ]
    return _joined(sized.layer.inputs, tuple(columns[0])), tuple(columns[1])


def _joined(names: Sequence[str], inputs: tuple[Boxes, ...]) -> tuple[Boxes, ...]:
    """An input that is read twice is asked for once: the hull of both."""
    hulls = list(inputs)
    for position, name in enumerate(names):
        first = names.index(name)
        if first != position:
            start = np.minimum(hulls[first][..., 0], hulls[position][..., 0])
            stop = np.maximum(hulls[first][..., 1], hulls[position][..., 1])
            hulls[first] = np.stack([start, stop], axis=-1)
    return tuple(hulls)


def _grown(boxes: Boxes, dims: tuple[str, ...], shape: tuple[int, ...], options: tuple[ShardingSpec, ...]) -> Boxes:
    """Boxes with the options' margins along cut dims of space, inside the tensor."""
    if not any(option.margin for option in options):
        return boxes
    grown = boxes.copy()
    for k, option in enumerate(options):
        for dim, _ in option.cuts:
            if option.margin and dim in SPACE and dim in dims:
                at = dims.index(dim)
                grown[k, :, at, 0] = np.maximum(boxes[k, :, at, 0] - option.margin, 0)
                grown[k, :, at, 1] = np.minimum(boxes[k, :, at, 1] + option.margin, shape[at])
    return grown


def _samples(sized: SizedLayer, own: Boxes) -> NDArray[np.int64]:
    at = sized.samples_dim
    if at is None or not sized.samples:
        return np.full(own.shape[:2], sized.samples, dtype=np.int64)
    each = max(1, sized.work.shape[at] // sized.samples)
    whole_samples: NDArray[np.int64] = (own[..., at, 1] - own[..., at, 0]) // each
    return whole_samples


def _share(sized: SizedLayer, work: Boxes, samples: NDArray[np.int64]) -> Counts:
    """The part's elements over those of as many whole samples."""
    total = float(np.prod(sized.work.shape, dtype=np.float64)) or 1.0
    of_samples = np.maximum(samples, 1) / max(1, sized.samples) if sized.samples_dim is not None else 1.0
    share: Counts = volumes(work) / (total * of_samples)
    return share
