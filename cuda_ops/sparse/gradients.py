"""The operators' gradients, in terms of the operators: so they can be differentiated again, exported and compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cuda_ops.sparse.registrations import NAMESPACE

_OPS = getattr(torch.ops, NAMESPACE)


def _register(name: str, backward: Any, keep: Any) -> None:
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=keep)


def _keep_conv(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, neighbours, reverse = inputs
    wants_x, wants_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None, neighbours, reverse)


def _conv(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, neighbours, reverse = ctx.saved_tensors
    dx = None if weight is None else _OPS.sparse_conv(dy, weight.transpose(1, 2), reverse, neighbours)
    return dx, None if x is None else _OPS.sparse_conv_weight(x, dy, neighbours), None, None


def _keep_three(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _conv_weight(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    x, dy, neighbours = ctx.saved_tensors
    reverse = _OPS.reversed_map(neighbours, x.shape[0])
    dx = _OPS.sparse_conv(dy, dw.transpose(1, 2), reverse, neighbours) if ctx.needs_input_grad[0] else None
    ddy = _OPS.sparse_conv(x, dw, neighbours, reverse) if ctx.needs_input_grad[1] else None
    return dx, ddy, None


def _keep_two_and_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.rows = inputs[0].shape[0]


def _keep_one_and_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.shape = inputs[0].shape


def _keep_max_pool(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[2])
    ctx.set_materialize_grads(False)


def _max_pool(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return None if dy is None else _OPS.sparse_max_pool_backward(dy, *ctx.saved_tensors), None, None


def _max_pool_backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
    return taken_at(dx, ctx.saved_tensors[0]), None, None


def taken_at(rows: Tensor, argmax: Tensor) -> Tensor:
    """[M, C]: element argmax[m, c] of column c of rows [N, C]; 0 where it is -1."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    absent = torch.where(argmax < 0, rows.shape[0], argmax)
    return padded.gather(0, absent.to(torch.int64))


def _sum_pool(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    neighbours, reverse = ctx.saved_tensors
    return _OPS.sparse_sum_pool(dy, reverse, neighbours), None, None


def _segment_sum(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _OPS.segment_expand(dy, *ctx.saved_tensors, ctx.rows), None, None


def _keep_segment_grid(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.num_cells = inputs[4]


def _segment_grid(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    cells, starts, lengths = ctx.saved_tensors
    rows = dy.transpose(1, 2).reshape(-1, dy.shape[1])
    first = torch.arange(starts.shape[0], device=dy.device, dtype=torch.float64) * ctx.num_cells  # whole below 2^53
    of_rows = torch.stack((first, torch.ones_like(first)), 1)
    begin, is_in = _OPS.segment_expand(of_rows, starts, lengths, cells.shape[0]).unbind(1)
    dx = _OPS.pack_rows(rows, begin.to(torch.int64) + cells)
    return dx * is_in.to(dx.dtype).unsqueeze(1), None, None, None, None


def _segment_expand(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return _OPS.segment_sum(dy, *ctx.saved_tensors), None, None, None


def _keep_segment_max(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.rows = inputs[0].shape[0]
    ctx.set_materialize_grads(False)


def _segment_max(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return None, None, None
    (argmax,) = ctx.saved_tensors  # a row is the maximum of one segment at most: nothing is added twice
    absent = torch.where(argmax < 0, ctx.rows, argmax).to(torch.int64)
    return dy.new_zeros(ctx.rows + 1, dy.shape[1]).scatter(0, absent, dy)[:-1], None, None


def _interpolate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, index, weight = ctx.saved_tensors
    dx = _OPS.interpolate_backward(dy, index, weight, x.shape[0]) if ctx.needs_input_grad[0] else None
    return dx, None, _OPS.interpolate_weight(x, dy, index) if ctx.needs_input_grad[2] else None


def _interpolate_backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
    dy, index, weight = ctx.saved_tensors
    ddy = _OPS.interpolate(dx, index, weight) if ctx.needs_input_grad[0] else None
    return ddy, None, _OPS.interpolate_weight(dx, dy, index) if ctx.needs_input_grad[2] else None, None


def _interpolate_weight(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    x, dy, index = ctx.saved_tensors
    dx = _OPS.interpolate_backward(dy, index, dw, x.shape[0]) if ctx.needs_input_grad[0] else None
    return dx, _OPS.interpolate(x, index, dw) if ctx.needs_input_grad[1] else None, None


def _pack_rows(ctx: Any, rows: Tensor) -> tuple[Tensor | None, ...]:
    return _OPS.unpack_add(rows.new_zeros(ctx.shape), ctx.saved_tensors[0], rows), None


def _unpack_add(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    rows = _OPS.pack_rows(dy, ctx.saved_tensors[0]) if ctx.needs_input_grad[2] else None
    return dy, None, rows


def _keep_pack_boxes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape
    ctx.boxes = list(inputs[1])


def _pack_boxes(ctx: Any, buffer: Tensor) -> tuple[Tensor | None, ...]:
    return _OPS.unpack_boxes(buffer, buffer.new_zeros(ctx.shape), ctx.boxes, True), None


def _keep_unpack_boxes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.boxes = list(inputs[2])
    ctx.add = inputs[3]


def _unpack_boxes(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    buffer = _OPS.pack_boxes(dy, ctx.boxes)
    dx = dy if ctx.add else _OPS.unpack_boxes(torch.zeros_like(buffer), dy, ctx.boxes, False)
    return buffer, dx, None, None


_register("sparse_conv", _conv, _keep_conv)
_register("sparse_conv_weight", _conv_weight, _keep_three)
_register("sparse_max_pool", _max_pool, _keep_max_pool)
_register("sparse_max_pool_backward", _max_pool_backward, _keep_one_and_shape)
_register("sparse_sum_pool", _sum_pool, _keep_two_and_rows)
_register("segment_sum", _segment_sum, _keep_two_and_rows)
_register("segment_expand", _segment_expand, _keep_two_and_rows)
_register("segment_grid", _segment_grid, _keep_segment_grid)
_register("segment_max", _segment_max, _keep_segment_max)
_register("interpolate", _interpolate, _keep_three)
_register("interpolate_backward", _interpolate_backward, _keep_three)
_register("interpolate_weight", _interpolate_weight, _keep_three)
_register("pack_rows", _pack_rows, _keep_one_and_shape)
_register("unpack_add", _unpack_add, _keep_one_and_shape)
_register("pack_boxes", _pack_boxes, _keep_pack_boxes)
_register("unpack_boxes", _unpack_boxes, _keep_unpack_boxes)
