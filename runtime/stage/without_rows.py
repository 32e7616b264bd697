"""Operators on a rank that has no rows of a micro-batch.

Most operators take tensors without rows.  Some refuse them: ``view(0, -1)`` cannot tell what -1 stands for, and others
were not written for it, forward or backward.  Their result is known all the same, as it has no elements: a tensor of
the right shape, hung on the operator's input, so that a gradient without elements flows back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops.dense.user_functions import is_user_function
from cuda_ops.operator_table import operator_row
from runtime import spatial
from runtime.stage.cut import NodeRule


def without_rows(rule: NodeRule) -> NodeRule:
    """``rule``, and where it leaves an operator as it is, one that gives an empty result where torch refuses to."""

    def found(node: fx.Node) -> Callable[..., Any] | None:
        function = rule(node)
        target: Any = node.target
        if node.op == "call_function" and _is_reduction(node):
            return partial(_nothing, function or target)
        if function is not None or node.op != "call_function":
            return function
        if is_user_function(node):
            return partial(_several, target, [_without_rows(each) for each in node.meta["val"]])
        shape = _shape_without_rows(node)
        if shape is None:
            return None
        return partial(_call, target, shape, operator_row(target).gradient != "rows")

    return found


def _call(target: Callable[..., Any], shape: tuple[int, ...], is_trusted: bool, *args: Any, **kwargs: Any) -> Any:
    empty = next((tensor for tensor in _tensors(args) if not tensor.numel()), None)
    if empty is None:
        return target(*args, **kwargs)
    if is_trusted:
        with suppress(RuntimeError):  # the result is known
            return target(*args, **kwargs)
    return empty.reshape(shape)


EmptyResult = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one of several results."""


def _several(target: Callable[..., Any], results: list[EmptyResult], *args: Any) -> list[Tensor]:
    """Of a user's Function, which nobody wrote for no rows; other inputs than those without rows get gradients of 0."""
    tensors = list(_tensors(args))
    if all(tensor.numel() for tensor in tensors):
        outputs: list[Tensor] = target(*args)
        return outputs
    nothing = sum((tensor.sum() * 0 for tensor in tensors if tensor.requires_grad), start=torch.zeros(()))
    hung = nothing.nan_to_num()
    return [
        tensor + hung.to(dtype) if dtype.is_floating_point else tensor
        for shape, dtype in results
        for tensor in [torch.zeros(shape, dtype=dtype, device=tensors[0].device)]
    ]


def _without_rows(value: Tensor) -> EmptyResult:
    return tuple(extent if isinstance(extent, int) else 0 for extent in value.shape), value.dtype


def _nothing(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """0 in place of a mean of nothing, which is not a number and stays so however little it counts."""
    result = function(*args, **kwargs)
    return spatial.connected(torch.zeros_like(result), result)


def _is_reduction(node: fx.Node) -> bool:
    """Whether it makes one tensor of samples."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or _varies(value):
        return False
    return any(_varies(argument.meta.get("val")) for argument in node.all_input_nodes)


def _varies(value: Any) -> bool:
    return isinstance(value, Tensor) and any(not isinstance(extent, int) for extent in value.shape)


def _shape_without_rows(node: fx.Node) -> tuple[int, ...] | None:
    """The shape of a node's result where the dim that grows with the samples is 0; None if that dim is not plain."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    varying = sum(not isinstance(extent, int) for extent in value.shape)
    return tuple(extent if isinstance(extent, int) else 0 for extent in value.shape) if varying == 1 else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
