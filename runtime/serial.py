"""One device: the step that a plan's step must equal.

What it runs is the user's own module and loss, which know nothing of graphs.  A model that draws random numbers is the
exception: its numbers belong to nodes of the captured graph, so that graph is run, whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from cuda_ops.recurrent import autocast
from runtime.stages.captured import CapturedModel
from runtime.stages.cut import cut_stage
from runtime.stages.draws import Draw, Draws
from runtime.stages.manner import Portion

Tensors = tuple[torch.Tensor, ...]
LossOf = Callable[[Tensors, Tensors], torch.Tensor]
"""(inputs, targets) -> loss, a mean over samples."""


def serial_step(
    loss_of: LossOf,
    optimizer: Optimizer,
    inputs: Tensors,
    targets: Tensors,
    micro_batches: tuple[int, ...],
    draw: Draw | None = None,
) -> float:
    """One step on a global batch: forward and backward of each micro-batch in turn, then one update.

    The loss of each micro-batch is weighted by its share of the rows; gradients are added, and stay after the update.

    Args:
        inputs, targets: whatever has as many rows as ``micro_batches`` in sum is cut along dim 0, the rest is whole.
        draw: what ``loss_of`` draws by; its step is the caller's to set.

    Returns:
        The weighted loss of the global batch.
    """
    global_batch = sum(micro_batches)
    optimizer.zero_grad(set_to_none=True)
    total, first = 0.0, 0
    for microbatch, rows in enumerate(micro_batches):
        weight = rows / global_batch
        if draw is not None:
            draw.at(Portion(microbatch, rows, 0, rows))
        loss = loss_of(*(_rows(tensors, first, rows, global_batch) for tensors in (inputs, targets)))
        (loss * weight).backward()
        total += loss.item() * weight
        first += rows
    optimizer.step()
    return total


def drawing_loss(model: CapturedModel, draw: Draw) -> LossOf:
    """The loss by the captured graph, whose random numbers are those that a plan draws."""
    whole = cut_stage(
        model.graph_module,
        [layer.name for layer in model.graph.layers],
        model.layer_of_node,
        model.node_of_value,
        (model.graph.loss,),
        Draws(model).rule(draw),
        model.sizes,
    )
    state = tuple(whole.attributes.values())

    def loss_of(inputs: Tensors, targets: Tensors) -> torch.Tensor:
        given = dict(zip(model.graph.inputs, (*inputs, *targets), strict=True))
        sizes = (given[name].shape[dim] for name, dim in (model.sizes[size] for size in whole.sizes))
        device = inputs[0].device.type
        with autocast(device, model.autocast):
            (loss,) = whole.function(draw.total, *sizes, *(given[name] for name in whole.inputs), *state)
        return loss

    return loss_of


def _rows(tensors: Tensors, first: int, count: int, global_batch: int) -> Tensors:
    return tuple(
        tensor.narrow(0, first, count) if tensor.ndim and tensor.shape[0] == global_batch else tensor
        for tensor in tensors
    )
