"""How the kernels that multiply are tiled: block sizes by type and channels, and which rows share a tile.

*Block sizes* are read from ``configurations.json``, one row for each width of the type and number of channels, and are
never searched for at run time: a search inside a training step would keep the other ranks waiting in their collectives.
``python -m benchmarks.sparse_gpu --tune`` measures candidates on a GPU and writes the rows of that device; ``source``
says where a row comes from.

*Arrangements* say in what order the rows of a map are worked on, found once a map and kept while the map lives.  There
are two.  *Grouped* rows: output rows sorted by which neighbours they have, so that the rows of a tile miss the same
offsets and the tile skips them.  A 3 x 3 x 3 map of an outdoor scan (0.143 m voxels, 101,364 rows) has 11.9 pairs a
row; tiles of 128 rows in the order of keys multiply 2.26 times as many rows as there are pairs, grouped ones 1.52
times.  *Pairs*: the pairs of each offset one after another, for the weight gradient, which then multiplies nothing in
vain.

Results do not depend on the grouping: any permutation of rows gives the same bits, because a row's sum runs over its
offsets in ascending order in every tile.  So a map whose contents are replaced in place keeps its grouping, valid if
no longer the best; pairs are made anew (by the tensor's version).

What is made on one stream is not ready on another, and what a CUDA graph makes exists only while it is replayed.  So
arrangements are kept for each stream, and none while a graph is captured: there rows stay as they are, and pairs become
part of the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cuda_ops._torch import times_written

TABLE = Path(__file__).with_name("configurations.json")
CONVOLUTION = "sparse_conv"
WEIGHT = "sparse_conv_weight"
BITS = 62  # of a sortable mask; further offsets do not take part in the grouping


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the table.

    Attributes:
        op: the operator.
        bits: width of an element of the features.
        channels: for up to this number of channels, the larger of both sides; beyond the last row, the last row.
        rows: of sites (``sparse_conv``: of the result's tile; ``sparse_conv_weight``: pairs multiplied at a time).
        columns: output channels of a tile.
        step: input channels (``sparse_conv``: multiplied at a time; ``sparse_conv_weight``: of the result's tile).
        warps: of a program.
        stages: of the loop, loads running ahead.
        grouped: whether rows with the same neighbours are put into one tile (`Arrangements`).
        device: such as ``sm_90``; empty for any.
        source: where the figures come from.
    """

    op: str
    bits: int
    channels: int
    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    grouped: bool
    device: str
    source: str


def read(text: str) -> tuple[Configuration, ...]:
    """The table from its text."""
    return tuple(Configuration(**row) for row in json.loads(text))


def written(table: Sequence[Configuration]) -> str:
    """The table as text, one row a line."""
    lines = ",\n ".join(json.dumps(dataclasses.asdict(row)) for row in table)
    return f"[{lines}]\n"


@functools.cache
def stored() -> tuple[Configuration, ...]:
    """The table that is installed."""
    return read(TABLE.read_text(encoding="utf-8"))


@functools.cache
def configuration(op: str, bits: int, channels: int, device: str = "") -> Configuration:
    """The row for an operator: that of the device if there is one, else that of any."""
    return chosen(stored(), op, bits, channels, device)


def chosen(table: Sequence[Configuration], op: str, bits: int, channels: int, device: str) -> Configuration:
    """The row of ``table`` that fits best: the device's own before any, then the fewest channels that hold ours."""
    rows = [row for row in table if row.op == op and row.bits == bits and row.device in ("", device)]
    return min(rows, key=lambda row: (row.channels < channels, abs(row.channels - channels), row.device == ""))


@dataclass(frozen=True, slots=True)
class OffsetPairs:
    """The pairs of every offset.

    Attributes:
        inputs: int32 [K, M], the input rows of an offset's pairs, then rubbish.
        outputs: int32 [K, M], their output rows, ascending.
        counts: int32 [K], how many pairs there are.
    """

    inputs: Tensor
    outputs: Tensor
    counts: Tensor


class Arrangements:
    """Arrangements by the map's tensor and the stream that reads it, dropped with the map."""

    def __init__(self) -> None:
        self._grouped: MutableMapping[Tensor, dict[int, Tensor]] = WeakTensorKeyDictionary()
        self._pairs: MutableMapping[Tensor, dict[int, tuple[int, OffsetPairs]]] = WeakTensorKeyDictionary()

    def grouped(self, neighbours: Tensor) -> Tensor | None:
        """The output rows in groups, int32 [M]; None: as they are."""
        if capturing(neighbours):
            return None
        kept = self._grouped.setdefault(neighbours, {})
        stream = stream_of(neighbours)
        if stream not in kept:
            kept[stream] = grouped(neighbours)
        return kept[stream]

    def pairs(self, neighbours: Tensor) -> OffsetPairs:
        """The pairs of a map."""
        if capturing(neighbours):
            return pairs(neighbours)
        kept = self._pairs.setdefault(neighbours, {})
        stream = stream_of(neighbours)
        version = times_written(neighbours)
        if stream not in kept or kept[stream][0] != version:
            kept[stream] = (version, pairs(neighbours))
        return kept[stream][1]


def capturing(tensor: Tensor) -> bool:
    """Whether work on this tensor goes into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def stream_of(tensor: Tensor) -> int:
    """The stream that works on this tensor now."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def grouped(neighbours: Tensor) -> Tensor:
    """The output rows sorted by the set of their offsets, int32 [M]; the rarest offset counts most."""
    present = neighbours >= 0
    rarest_last = torch.argsort(present.sum(1), descending=True, stable=True)[:BITS]
    place = torch.arange(len(rarest_last), device=neighbours.device)
    sets = (present[rarest_last].to(torch.int64) << place[:, None]).sum(0)
    return torch.argsort(sets, stable=True).to(torch.int32)


def pairs(neighbours: Tensor) -> OffsetPairs:
    """The pairs of every offset, in the order of output rows."""
    num_offsets, num_rows = neighbours.shape
    present = neighbours >= 0
    ranks = present.cumsum(1, dtype=torch.int32)
    places = torch.where(present, ranks - 1, num_rows).to(torch.int64)  # the last place takes the absent
    both = neighbours.new_empty((2, num_offsets, num_rows + 1))
    both[0].scatter_(1, places, neighbours)
    rows = torch.arange(num_rows, dtype=torch.int32, device=neighbours.device)
    both[1].scatter_(1, places, rows.expand(num_offsets, num_rows))
    inputs, outputs = both[:, :, :num_rows].contiguous()
    return OffsetPairs(inputs, outputs, present.sum(1, dtype=torch.int32))
