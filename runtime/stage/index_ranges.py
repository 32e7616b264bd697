"""Which integers the inputs of a step may hold: classes of a loss, rows of a table.

    cross_entropy(logits (4, 3), targets)      targets: 0 ... 2, or -100
    embedding(table (50, 8), words.view(-1))   words: 0 ... 49

A number beyond them ends a step wherever the layer runs, on an accelerator without a word of which it was.  So whoever
is given a batch looks first, and says which sample has it.  Numbers that forward computes of an input, such as
``targets - 1``, are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops.calls import arguments_of
from cuda_ops.operator_table import CLASSES, PERMUTED, functional_row, operator_row
from planner.ir.errors import UsageError
from runtime.captured import CapturedModule

_IGNORED = -100
"""torch's default of ``ignore_index``."""


@dataclass(frozen=True, slots=True)
class IndexRange:
    """What an input may hold.

    Attributes:
        layer: that reads it.
        count: numbers are 0 ... ``count`` - 1.
        ignored: one more, that a loss leaves out; None: there is none.
        cut: of the input, (dim, start, end) of slices that are taken first: the rest may hold anything.
    """

    layer: str
    count: int
    ignored: int | None = None
    cut: tuple[tuple[int, int, int], ...] = ()

    def require(self, name: str, tensor: Tensor) -> None:
        """Raises :class:`UsageError` where ``tensor``, the input ``name``, samples first, holds another number."""
        read = tensor
        for dim, start, end in self.cut:
            read = read[(slice(None),) * dim + (slice(start, end),)]
        if not read.numel():
            return
        least, most = (int(each) for each in torch.aminmax(read))
        if least >= 0 and most < self.count:
            return
        wrong = (read < 0) | (read >= self.count)
        if self.ignored is not None:
            wrong &= read != self.ignored
        if not wrong.any():
            return
        first = tuple(int(each) for each in wrong.nonzero()[0])
        is_loss = self.ignored is not None
        allowed = f"0 ... {self.count - 1}"
        number = int(read[first])
        place = f"sample {first[0]}" + (f", at {', '.join(map(str, first[1:]))}" if len(first) > 1 else "")
        what = f"{self.count} classes" if is_loss else f"a table of {self.count} rows"
        raise UsageError(
            f"{name} holds {number}, and layer {self.layer} has {what}: {allowed}",
            [
                f"{place}, of the {len(tensor)} that are given" + (", behind what is sliced off" if self.cut else ""),
                f"{int(wrong.sum())} of {read.numel()} numbers are out of range, between {least} and {most}",
                *([f"{self.ignored} is ignored"] if is_loss else []),
            ],
            [
                "numbers counted from 0" + (", targets - 1, or the ignore_index of the loss" if is_loss else ""),
                "a model with as many classes as the data have" if is_loss else "a larger table: num_embeddings",
            ],
        )


def index_ranges(model: CapturedModule) -> dict[str, tuple[IndexRange, ...]]:
    """By input of a step, what it may hold; those of sparse networks are not looked at."""
    by_input: dict[str, list[IndexRange]] = {}
    if model.preparation is not None:
        return {}
    for node in model.graph_module.graph.nodes:
        layer = model.layer_of_node.get(node.name, node.name)
        for index, count, ignored in _read_by(node):
            source = _source(index)
            if source is not None and not _is_float(source[0]):
                name = str(source[0].target)
                cut = source[1]
                by_input.setdefault(name, []).append(IndexRange(layer, count, ignored, cut))
    return {name: tuple(dict.fromkeys(ranges)) for name, ranges in by_input.items()}


def _read_by(node: fx.Node) -> Iterator[tuple[Any, int, int | None]]:
    """What a node takes for numbers of classes or rows, how many there are, and which one it ignores."""
    entries = functional_row(node.target).entries if node.op == "call_function" else None
    if entries is not None:
        arguments = arguments_of(node)
        numbers, table, dim = entries
        shape = arguments[table].meta["val"].shape
        ignored = arguments.get("ignore_index", _IGNORED) if entries == CLASSES else None
        yield arguments[numbers], int(shape[min(dim, len(shape) - 1)]), ignored


def _source(index: Any) -> tuple[fx.Node, tuple[tuple[int, int, int], ...]] | None:
    """The input whose numbers ``index`` holds, and slices of it that are taken; None: it is made otherwise."""
    ways: list[fx.Node] = []
    while isinstance(index, fx.Node) and index.op == "call_function":
        row = operator_row(index.target)
        is_told = index.meta["val"].dtype is torch.bool  # from nothing, whatever number it is
        if is_told or (not row.moves and row.name != "slice"):
            return None
        ways.append(index)
        index = index.args[0]
    if not isinstance(index, fx.Node) or index.op != "placeholder":
        return None
    cut: list[tuple[int, int, int]] = []
    is_moved = False
    for node in reversed(ways):
        if operator_row(node.target).moves:
            is_moved = is_moved or not _is_alike(node)
            continue
        arguments = arguments_of(node)
        dim = arguments["dim"]
        start = arguments["start"] or 0
        end = _FAR if arguments["end"] is None else arguments["end"]
        is_known = isinstance(dim, int) and isinstance(start, int) and isinstance(end, int)
        if is_moved or not is_known or dim < 0 or arguments["step"] != 1:
            return None
        if (start, end) != (0, _FAR):
            cut.append((dim, start, end))
    return index, tuple(cut)


_FAR = 2**63 - 1


def _is_alike(node: fx.Node) -> bool:
    """Whether a node leaves every number in its place."""
    before, after = (each.meta.get("val") for each in (node.args[0], node) if isinstance(each, fx.Node))
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.shape == after.shape
        and operator_row(node.target).elements != PERMUTED
    )


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
