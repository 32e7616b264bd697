"""One device: the step that a plan's step must equal.

What it runs is the user's own module and loss, which know nothing of graphs.  Where they draw random numbers, they are
answered with those that a plan draws (:mod:`runtime.stage.random.user_module`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from runtime.stage.modes import MicrobatchShard
from runtime.stage.random.streams import CounterRng
from runtime.stage.random.user_module import Answers

StepTensors = tuple[Tensor, ...]
LossOfStep = Callable[[StepTensors, StepTensors], Tensor]
"""(inputs, targets) -> loss, a mean over samples."""


def serial_step(
    loss_of: LossOfStep,
    optimizer: Optimizer,
    inputs: StepTensors,
    targets: StepTensors,
    micro_batches: tuple[int, ...],
    rng: CounterRng | None = None,
    *,
    answers: Answers | None = None,
    whole: bool = False,
    weights: Sequence[float] = (),
) -> float:
    """One step on a global batch: forward and backward of each micro-batch in turn, then one update.

    The losses of micro-batches are weighted; gradients are added, and stay after the update.

    Args:
        inputs, targets: whatever has as many rows as ``micro_batches`` in sum is cut along dim 0, the rest is whole.
        rng: what ``loss_of`` draws by; its step is the caller's to set.
        answers: to what the user's own module draws.
        whole: the batch in one call, as if it were not cut; the same where no layer mixes samples.
        weights: of the losses of the micro-batches; none: their shares of the rows.

    Returns:
        The weighted loss of the global batch.

    Raises:
        UnlikeDrawsError: ``answers`` are not for what the module draws.
    """
    global_batch = sum(micro_batches)
    if whole:
        return serial_step_each(
            loss_of, optimizer, [(inputs, targets)], (global_batch,), answers=answers, cut=micro_batches
        )
    starts = [sum(micro_batches[:number]) for number in range(len(micro_batches))]
    parts = [
        (in_rows(inputs, first, rows, global_batch), in_rows(targets, first, rows, global_batch))
        for first, rows in zip(starts, micro_batches, strict=True)
    ]
    return serial_step_each(loss_of, optimizer, parts, micro_batches, rng, answers=answers, weights=weights)


def serial_step_each(
    loss_of: LossOfStep,
    optimizer: Optimizer,
    parts: Sequence[tuple[StepTensors, StepTensors]],
    rows: Sequence[int],
    rng: CounterRng | None = None,
    *,
    answers: Answers | None = None,
    cut: Sequence[int] = (),
    weights: Sequence[float] = (),
) -> float:
    """The same of micro-batches given one by one, as (inputs, targets), of ``rows`` samples each.

    Args:
        cut: micro-batches that each of ``parts`` stands for, where it is the whole batch.
    """
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    weights = weights or [count / sum(rows) for count in rows]
    for microbatch, (count, weight, (inputs, targets)) in enumerate(zip(rows, weights, parts, strict=True)):
        if rng is not None:
            rng.at(MicrobatchShard(microbatch, count, 0, count))
        with answers.given(cut or (count,), microbatch) if answers is not None else nullcontext():
            loss = loss_of(inputs, targets)
            if weight:  # else it may be a mean of nothing, which is not a number
                torch.autograd.backward(loss * weight)  # where numbers drawn again, by checkpointing, are noticed
                total += loss.item() * weight
    optimizer.step()
    return total


def in_rows(tensors: StepTensors, first: int, count: int, global_batch: int) -> StepTensors:
    """Samples of whatever has as many rows as the batch; the rest is whole."""
    return tuple(
        tensor.narrow(0, first, count) if tensor.ndim and tensor.shape[0] == global_batch else tensor
        for tensor in tensors
    )
