"""Results that hang on what a layer reads, so that backward takes the same way on every rank.

Exchanges run on all ranks of a stage, backward as well, and autograd takes them in the order in which forward did.  So
its graph must have the same edges everywhere: a rank that has nothing to do of a layer makes an empty result, which
hangs on everything; and where an operator leaves an input alone (``type_as``), its result hangs on it all the same.
Nothing flows along such an edge: autograd passes on that there is no gradient, and exchanges take zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuda_ops.operator_table import operator_row
from planner.ir.errors import StageFailedError
from runtime.spatial.layer_shard import LayerShard, shape_of


def connected(result: Tensor, *tensors: Tensor) -> Tensor:
    """``result``, on which ``tensors`` hang as well; integers have no gradient."""
    loose = [tensor for tensor in tensors if tensor.requires_grad]
    if not loose or not torch.is_grad_enabled() or not (result.is_floating_point() or result.is_complex()):
        return result
    connect: Callable[..., Tensor] = _Connected.apply
    return connect(result, *loose)


def connected_to_all(shard: LayerShard, result: Any, operands: Mapping[str, Any]) -> Any:
    """What an operator gave, a tensor or several, each hung on all that it hangs on where a rank's part is empty."""
    tensors = tuple(tensors_in(operands.values()))
    if isinstance(result, Tensor):
        return connected(result, *_read_by(shard, 0, tensors))
    return tuple(
        connected(each, *_read_by(shard, output, tensors)) if isinstance(each, Tensor) else each
        for output, each in enumerate(result)
    )


def empty_like_done(shard: LayerShard, operands: Mapping[str, Any]) -> Any:
    """The result of a layer on a rank whose part is empty: one tensor an output, hung on all tensors of ``operands``.

    A layer with several outputs gives a tuple.

    Raises:
        StageFailedError: this rank's part of another output is not empty.
    """
    tensors = tuple(tensors_in(operands.values()))
    device = tensors[0].device if tensors else torch.device("cpu")
    made = tuple(
        connected(
            torch.empty(_shape(shard, output), dtype=getattr(torch, spec.dtype), device=device),
            *_read_by(shard, output, tensors),
        )
        for output, spec in enumerate(shard.layer.outputs)
    )
    return made[0] if len(made) == 1 else made


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _read_by(shard: LayerShard, output: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What an output hangs on, on all ranks."""
    gradient = operator_row(shard.operator).gradient
    if gradient == "each":
        return tensors[output : output + 1]
    return () if gradient == "none" else tensors


def _shape(shard: LayerShard, output: int) -> tuple[int, ...]:
    box = shard.division.held[output][shard.position] if output else shard.done
    if all(map(len, box)):
        raise StageFailedError(
            f"layer {shard.layer.name} makes nothing of its first output here, and all of output {output} in "
            f"{', '.join(map(str, box))}",
            ["cut it along dims that its outputs have in common"],
        )
    return shape_of(box)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *tensors: Tensor) -> Tensor:
        ctx.nothing = (None,) * len(tensors)
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *ctx.nothing
