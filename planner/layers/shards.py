"""What every rank makes, holds, reads and uses of a layer, under each of many ways to divide it.

A placement says how a layer's work is cut.  Everything else follows from its access relation:

    own      the part of the work that the layout gives a rank
    done     the part it does: ``own``, grown by the halo margin along the dims of space that are cut
    held     of each output, what ``done`` makes; ``owned`` is the part that others ask this rank for
    needed   of each input, what ``done`` reads; it may reach outside the tensor, where padding is
    wanted   what of that lies inside
    weights  of each parameter, what ``done`` uses; ranks with equal boxes share its gradient

Planners look at many options at once; what a stage runs is one of them (``planner.layers.division``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec
from planner.ir.layout import Layout
from planner.layers._kinds import kind
from planner.layers.boxes import Array, BoxArray, Members, boxes_of, equal_ranks, filled, inside, volumes
from planner.layers.contraction import Contraction, contractions_of
from planner.layers.sized import SPACE, SizedLayer


class Sharding(Protocol):
    """How a layer is divided: as a plan says (:class:`planner.ir.plan.Placement`), or as a search tries."""

    @property
    def layout(self) -> Layout:
        """The cut points."""

    @property
    def margin(self) -> int:
        """Rows by which each rank works beyond its part."""

    @property
    def ways(self) -> int:
        """Ranks that share the input channels of a contraction; 0: any number of them is looked at."""


@dataclass(frozen=True, eq=False)
class Shards:
    """Boxes by option and rank, ``[options, ranks, dims, 2]``.

    Attributes:
        sized: a layer of this signature, not always the one that was asked about: names differ.
        own, done: parts of the work.
        owned: of each output: disjoint or identical.
        held: of each output: what a rank makes, its margin included.
        needed: of each input.
        weights: of each parameter; where ranks share a block's filters as if each used its own filters of all channels,
            which are as many elements where the channels can be shared out evenly.
        contractions: by option, the ways to share the channels of its first input beside each rank reading them all; of
            an option that says how many ranks share them that one alone, which ``needed`` then follows.
    """

    sized: SizedLayer
    options: tuple[Sharding, ...]
    own: BoxArray
    done: BoxArray
    owned: tuple[BoxArray, ...]
    held: tuple[BoxArray, ...]
    needed: tuple[BoxArray, ...]
    weights: tuple[BoxArray, ...]
    contractions: tuple[tuple[Contraction, ...], ...] = field(repr=False)

    @cached_property
    def wanted(self) -> tuple[BoxArray, ...]:
        """Of each input what lies inside the tensor; one that is read twice is asked for once: the hull of both."""
        wanted = [inside(boxes, spec.shape) for boxes, spec in zip(self.needed, self.sized.inputs, strict=True)]
        names = self.sized.layer.inputs
        for position, name in enumerate(names):
            first = names.index(name)
            if first != position:
                a = wanted[first]
                b = wanted[position]
                wanted[first] = np.stack([np.minimum(a[..., 0], b[..., 0]), np.maximum(a[..., 1], b[..., 1])], axis=-1)
        return tuple(wanted)

    @cached_property
    def samples(self) -> NDArray[np.int64]:
        """``[options, ranks]``: samples of which a rank does a part."""
        at = self.sized.samples_dim
        samples = self.sized.samples
        if at is None or not samples:
            return np.full(self.done.shape[:2], samples, dtype=np.int64)
        rows = np.maximum(self.done[..., at, 1] - self.done[..., at, 0], 0)
        return np.asarray(rows // max(1, self.sized.work.shape[at] // samples), dtype=np.int64)

    @cached_property
    def share(self) -> Array:
        """``[options, ranks]``: the part's elements over those of as many whole samples."""
        total = float(np.prod(self.sized.work.shape, dtype=np.float64)) or 1.0
        is_by_sample = self.sized.samples_dim is not None
        of_samples = np.maximum(self.samples, 1) / max(1, self.sized.samples) if is_by_sample else 1.0
        return np.asarray(volumes(self.done) / (total * of_samples))

    def read_share(self, option: int) -> Array:
        """``[ranks]``: the share of the bytes of its inputs that each rank's part reads, of as many whole samples."""
        read = np.zeros(self.samples.shape[1])
        total = 0.0
        ways = self.contractions[option]
        for position, (spec, boxes) in enumerate(zip(self.sized.inputs, self.wanted, strict=True)):
            of_option = inside(ways[-1].needed, spec.shape) if ways and position == 0 else boxes[option]
            read += volumes(of_option) * BYTES_PER_ELEMENT[spec.dtype]
            total += spec.num_bytes
        whole = total * self.samples[option] / self.sized.samples
        share_read: Array = np.minimum(1.0, np.divide(read, whole, out=np.zeros_like(read), where=whole > 0))
        return share_read


def shards_of(sized: SizedLayer, options: Sequence[Sharding]) -> Shards:
    """The boxes of ``sized`` under each option; all options are of equally many ranks."""
    layouts = [option.layout for option in options]
    specs = (sized.work, *sized.layer.outputs)
    own, *owned = (np.array([boxes_of(layout, spec, sized.samples) for layout in layouts]) for spec in specs)
    done, *held = (_grown(boxes, spec, options) for boxes, spec in zip((own, *owned), specs, strict=True))
    needed, weights = sized.read(done)
    contractions = tuple(
        contractions_of(sized, layout, own[k], option.ways) if option.ways > 1 or not option.margin else ()
        for k, (layout, option) in enumerate(zip(layouts, options, strict=True))
    )
    for k, (option, ways) in enumerate(zip(options, contractions, strict=True)):
        if option.ways > 1 and ways:
            needed[0][k] = ways[0].needed
            if ways[0].along != ways[0].dims.filters:
                weights[0][k] = ways[0].weight
    return Shards(sized, tuple(options), own, done, tuple(owned), tuple(held), needed, weights, contractions)


def _grown(boxes: BoxArray, spec: TensorSpec, options: Sequence[Sharding]) -> BoxArray:
    """Boxes with the options' margins on each side along the dims of space that are cut, inside the tensor."""
    if not any(option.margin for option in options):
        return boxes
    rows = [[option.margin * (dim in SPACE and dim in option.layout.cuts) for dim in spec.dims] for option in options]
    sides = np.array(rows, dtype=np.int64)[:, None, :, None] * (-1, 1)
    return np.where(filled(boxes)[..., None, None], inside(boxes + sides, spec.shape), boxes)


def channel_dim(layer: Layer) -> int:
    """Which dim of its output a normalisation over samples and space keeps apart."""
    dims = layer.outputs[0].dims
    return dims.index("channel") if "channel" in dims else 1


def summing_ranks(layer: Layer, own: BoxArray, owned: BoxArray) -> tuple[Members, ...]:
    """Ranks that combine statistics or partial sums, each in one group; those of a layer without any sum are one.

    A normalisation combines the ranks with equal channels.  Of other sums all ranks whose parts make the same output
    take part, copies too.

    Args:
        own: ``[ranks, dims, 2]`` of the work.
        owned: of the output.
    """
    reduction = kind(layer.kind).REDUCTION
    if reduction == "statistics":
        return equal_ranks(own[:, [channel_dim(layer)]])
    return equal_ranks(owned) if reduction == "sum" else (tuple(range(len(own))),)
