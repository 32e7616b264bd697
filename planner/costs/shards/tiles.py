"""Layers of a block under each of its tiles, and what a layer of a forward pass needs while it runs.

To the prices of layers a tile is an option like a layout: a box of work for every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from planner.costs.shards.boxes import Boxes, as_boxes, volumes
from planner.costs.shards.option import Option, Shards
from planner.costs.shards.shapes import SizedLayer
from planner.ir.box import Box, intersect, volume, whole
from planner.ir.graph import BYTES_PER_ELEMENT
from planner.layers import is_convolution
from planner.layers.division import LayerDivision

_OF_LOSS = 3
"""Tensors of a prediction's size that elementwise losses and a logarithm of softmax make on their way."""

_COPIES = ("pool", "adaptive_pool", "upsample")
"""Kinds that take a copy of what they read, where it is a part of a tensor or is padded; convolutions do as well."""


def tile_shards(sized: SizedLayer, tiles: Sequence[LayerDivision]) -> Shards:
    """The layer's boxes, one option a tile."""
    work = _stacked([tile.done for tile in tiles])
    samples = np.array([[tile.rows(member) for member in range(len(tile.done))] for tile in tiles], dtype=np.int64)
    at = sized.samples_dim
    of_samples = np.maximum(samples, 1) / max(1, sized.samples) if at is not None else np.ones(samples.shape)
    owned = tuple(_stacked([tile.held(index) for tile in tiles]) for index in range(len(sized.layer.outputs)))
    needed = tuple(_stacked([tile.needed[index] for tile in tiles]) for index in range(len(sized.inputs)))
    weights = tuple(_stacked([tile.weights[index] for tile in tiles]) for index in range(len(sized.parameters)))
    total = float(prod(sized.work.shape)) or 1.0
    share = volumes(work) / (total * of_samples)
    options = tuple(Option.of(tile.layout) for tile in tiles)
    return Shards(sized, options, owned, owned, needed, weights, work, samples, share, ((),) * len(tiles))


def box_bytes(box: Box, dtype: str) -> int:
    """What a tensor that covers ``box`` takes."""
    return volume(box) * BYTES_PER_ELEMENT[dtype]


def transient_bytes(sized: SizedLayer, read: Sequence[Box]) -> int:
    """What a layer needs in a forward pass beside what it reads and makes; ``read``: of each input.

    A convolution or pool copies what it reads where that is no tensor of its own, or is padded at one side alone.  What
    libraries take beside torch's allocator is not in it.
    """
    kind = sized.layer.kind
    pairs = [
        (intersect(box, whole(spec.shape)), spec.dtype)
        for box, spec in zip(read, sized.inputs, strict=True)
        if volume(box)
    ]
    sizes = [0 if inside is None else box_bytes(inside, dtype) for inside, dtype in pairs]
    if kind == "loss":
        return _OF_LOSS * max(sizes, default=0)
    return sizes[0] if sizes and (is_convolution(kind) or kind in _COPIES) else 0


def _stacked(boxes: Sequence[Sequence[Box]]) -> Boxes:
    """``[tiles, ranks, dims, 2]``."""
    return np.array([as_boxes(row) for row in boxes])
