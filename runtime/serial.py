"""One device: the step that a plan's step must equal, on the user's own module and loss; it knows nothing of graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

Tensors = tuple[torch.Tensor, ...]
LossOf = Callable[[Tensors, Tensors], torch.Tensor]
"""(inputs, targets) -> loss, a mean over samples."""


def serial_step(
    loss_of: LossOf, optimizer: Optimizer, inputs: Tensors, targets: Tensors, micro_batches: tuple[int, ...]
) -> float:
    """One step on a global batch: forward and backward of each micro-batch in turn, then one update.

    The loss of each micro-batch is weighted by its share of the rows; gradients are added, and stay after the update.

    Args:
        inputs, targets: whatever has as many rows as ``micro_batches`` in sum is cut along dim 0, the rest is whole.

    Returns:
        The weighted loss of the global batch.
    """
    global_batch = sum(micro_batches)
    optimizer.zero_grad(set_to_none=True)
    total, first = 0.0, 0
    for rows in micro_batches:
        weight = rows / global_batch
        loss = loss_of(*(_rows(tensors, first, rows, global_batch) for tensors in (inputs, targets)))
        (loss * weight).backward()
        total += loss.item() * weight
        first += rows
    optimizer.step()
    return total


def _rows(tensors: Tensors, first: int, count: int, global_batch: int) -> Tensors:
    return tuple(
        tensor.narrow(0, first, count) if tensor.ndim and tensor.shape[0] == global_batch else tensor
        for tensor in tensors
    )
