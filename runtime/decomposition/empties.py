"""Results of parts without elements, which still hang on what they would have been made of.

A rank may have nothing to do of a layer, while others do, and send it what they think it sends on: every exchange runs
on all ranks of a stage, backward as well.  So nothing may be missing from autograd's graph: an empty result sends zeros
back to all that its layer reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from planner.ir.errors import StageFailedError
from runtime.decomposition.parts import shape_of
from runtime.decomposition.step import Step


def connected(result: Tensor, *tensors: Tensor) -> Tensor:
    """``result``, on which ``tensors`` hang as well: backward gives them zeros."""
    loose = [tensor for tensor in tensors if tensor.requires_grad]
    if not loose or not (result.is_floating_point() or result.is_complex()):
        return result
    found: Tensor = _Connected.apply(result, *loose)
    return found


def empty_like_done(step: Step, found: Mapping[str, Any]) -> Any:
    """The result of a layer on a rank whose part is empty: one tensor an output, hung on all tensors of ``found``.

    A layer with several outputs gives a tuple.

    Raises:
        StageFailedError: this rank's part of another output is not empty.
    """
    tensors = tuple(tensors_in(found.values()))
    device = tensors[0].device if tensors else torch.device("cpu")
    made = tuple(
        connected(
            torch.empty(_shape(step, output), dtype=getattr(torch, spec.dtype), device=device),
            *_read_by(step, output, tensors),
        )
        for output, spec in enumerate(step.layer.outputs)
    )
    return made[0] if len(made) == 1 else made


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _read_by(step: Step, output: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What an output hangs on where a rank is not empty: exchanges run backward on all ranks or on none."""
    name = str(step.layer.attributes.get("op", ""))
    if "broadcast_tensors" in name or "meshgrid" in name:
        return tensors[output : output + 1]
    return () if "detach" in name else tensors


def _shape(step: Step, output: int) -> tuple[int, ...]:
    box = step.division.held(output)[step.position] if output else step.done
    if all(len(interval) for interval in box):
        raise StageFailedError(
            f"layer {step.layer.name} makes nothing of its first output here, and all of output {output} in "
            f"{', '.join(map(str, box))}",
            ["cut it along dims that its outputs have in common"],
        )
    return shape_of(box)


class _Connected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, result: Tensor, *tensors: Tensor) -> Tensor:
        ctx.likes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return result.view_as(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.likes)
        return gradient, *zeros
