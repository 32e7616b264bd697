"""Operators that number the samples of a batch, by others that do not.

    x[torch.arange(len(x)), i]      ->   gather: a place in each sample
    nn.EmbeddingBag of rows         ->   embedding, and the sum or mean over each row

The numbers say where in its batch a sample is, which no part of a batch knows: with them nothing could be trained in
more micro-batches than one.
"""

from __future__ import annotations

from inspect import signature
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from cuda_ops._torch import OpOverload
from cuda_ops.operator_table import operator_row

_aten = torch.ops.aten
_PAIR = 2
_MATRIX = 2


class BagsOfRows(TorchFunctionMode):
    """Bags that are the rows of a matrix are summed row by row.

    torch joins the rows and says by the numbers of their first elements where each begins.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``; of bags of rows what they mean."""
        named = dict(kwargs or {})
        if func is F.embedding_bag:
            arguments = signature(F.embedding_bag).bind(*args, **named).arguments
            is_plain = arguments.get("offsets") is None and arguments.get("max_norm") is None
            if is_plain and arguments["input"].dim() == _MATRIX and arguments.get("mode", "mean") in ("sum", "mean"):
                return _bags(
                    **{name: value for name, value in arguments.items() if name not in ("offsets", "max_norm")}
                )
        return func(*args, **named)


def _bags(
    input: Tensor,
    weight: Tensor,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``[row, place]`` of a table of ``[number, feature]`` to ``[row, feature]``; padding does not count."""
    rows = F.embedding(input, weight, padding_idx, None, norm_type, scale_grad_by_freq, sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    counts = input.ne(padding_idx % weight.shape[0]).unsqueeze(-1)
    total = rows.masked_fill(~counts, 0.0).sum(1)
    return total if mode == "sum" else total / counts.sum(1).clamp(min=1)


def pick_by_sample(graph: fx.Graph) -> None:
    """Rewrites ``x[torch.arange(len(x)), i]``, with one place ``i`` in each sample or several."""
    for node in list(graph.nodes):
        if node.target is not _aten.index.Tensor:
            continue
        source, indices = cast("tuple[fx.Node, list[fx.Node | None]]", node.args)
        if len(indices) != _PAIR or not all(isinstance(each, fx.Node) for each in indices):
            continue
        rows, at = cast("list[fx.Node]", indices)
        value = source.meta["val"]
        places = at.meta["val"]
        is_integer = not places.is_floating_point() and places.dtype not in (torch.bool, torch.uint8)
        fixed = (*value.shape[1:], *places.shape[1:])
        if is_integer and _numbers_samples(rows, value, places) and all(isinstance(size, int) for size in fixed):
            _picked(graph, node, source, at)


def _picked(graph: fx.Graph, node: fx.Node, source: fx.Node, at: fx.Node) -> None:
    """Puts a ``gather`` in place of ``node``; places may count from the end, and stay to be in range."""
    size, *rest = source.meta["val"].shape[1:]
    inner = at.meta["val"].shape[1:]

    def call(target: OpOverload, *arguments: Any) -> fx.Node:
        made = graph.call_function(target, arguments)
        values = fx.map_arg(arguments, lambda each: each.meta["val"])
        made.meta = {**node.meta, "val": target(*values)}
        return made

    with graph.inserting_before(node):
        at = call(_aten.where.self, call(_aten.lt.Scalar, at, 0), call(_aten.add.Scalar, at, size), at)
        at = call(_aten.reshape.default, at, [-1, prod(inner), *(1 for _ in rest)])
        at = call(_aten.expand.default, at, [-1, -1, *rest])
        made = call(_aten.reshape.default, call(_aten.gather.default, source, 1, at), [-1, *inner, *rest])
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _numbers_samples(node: fx.Node, value: Tensor, places: Tensor) -> bool:
    """Whether ``node`` holds the numbers of the rows of ``value``, in order, to be broadcast to ``places``."""
    shape = node.meta["val"].shape
    rows: Any = value.shape[0]
    is_column = str(shape[0]) == str(rows) and all(size == 1 for size in shape[1:])
    if not is_column or isinstance(rows, int) or len(shape) != places.dim() or str(places.shape[0]) != str(rows):
        return False
    while _moves(node) and str(node.meta["val"].shape[0]) == str(rows):
        node = cast("fx.Node", node.args[0])
    if not str(node.target).startswith("aten.arange") or str(node.meta["val"].shape) != str(torch.Size([rows])):
        return False
    start, step = (0, 1) if node.target is _aten.arange.default else (node.args[0], (*node.args, 1)[2])
    return bool(start == 0 and step == 1)


def _moves(node: fx.Node) -> bool:
    """Whether it holds what it is given, or the first of it."""
    row = operator_row(node.target)
    return row.moves or row.name == "slice"
