"""Block sizes of the two kernels that multiply, by width of the type and number of channels.

They are read from ``configurations.json``, one row each, and are never searched for at run time: a search inside a
training step would keep the other ranks waiting in their collectives.  ``python -m benchmarks.sparse_gpu --tune``
measures candidates on a GPU and writes the rows of that device; ``source`` says where a row comes from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("configurations.json")
CONVOLUTION, WEIGHT = "sparse_conv", "sparse_conv_weight"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the table.

    Attributes:
        op: the operator.
        bits: width of an element of the features.
        channels: for up to so many channels, the larger of both sides; beyond the last row, the last row.
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
