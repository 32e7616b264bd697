"""Networks of trivial arithmetic, and what one device computes that trains them by any program.

A layer is ``tanh(sum of its inputs @ weight)``; some add the mean of that over the samples of the micro-batch, which
the ranks of a stage have to find together.  The loss is the mean over samples of a square.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from planner.ir.graph import Layer, producer
from planner.ir.program import Program
from planner.ir.schedule import Op
from planner.layers.boundary import Boundaries
from planner.passes.versions import updates_of

FEATURES = 6
RATE = 0.1
WITH_MEAN = "reshape"
"""The kind of the layers that add a mean."""

MicroBatch = Mapping[str, Tensor]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Of one device, or of a rank: losses by step where they are made, and weights after the last."""

    losses: tuple[float, ...]
    weights: Weights


def random_weights(boundaries: Boundaries, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        layer.name: torch.randn(FEATURES, FEATURES, generator=generator, dtype=torch.float64) / 2
        for layer in boundaries.graph.layers
        if layer.name != producer(boundaries.graph.loss)
    }


def random_batch(micro_batches: Sequence[int], seed: int) -> tuple[MicroBatch, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        {
            "x": torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64),
            "y": torch.randint(5, (rows,), generator=generator),
        }
        for rows in micro_batches
    )


def computed_alone(
    boundaries: Boundaries, program: Program, batch: Sequence[MicroBatch], start: Weights, steps: int = 1
) -> Outcome:
    """One device, micro-batch by micro-batch, on the versions of the weights that the program names."""
    layers = boundaries.graph.layers
    weights = dict(start)
    losses = []
    version_of = {
        (action.stage, action.microbatch): action.version
        for row in program.rows
        for action in row
        if action.op is Op.FORWARD
    }
    rows = [len(each["y"]) for each in batch]
    ends = [len(batch) - 1 if end is None else end for end in updates_of(program)]
    for _ in range(steps):
        losses.append(0.0)
        versions = [weights]
        for first, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
            sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
            for m in range(first, end + 1):
                on = {
                    name: versions[version_of[boundaries.stage_of[name], m]][name].clone().requires_grad_()
                    for name in weights
                }
                values = run_layers(layers, dict(batch[m]), on, functional.linear, _mean)
                loss = values[boundaries.graph.loss]
                losses[-1] += loss.item() * rows[m] / sum(rows)
                for name, gradient in zip(on, torch.autograd.grad(loss, list(on.values())), strict=True):
                    sums[name] += gradient * rows[m] / sum(rows[first : end + 1])
            if program.trains:
                weights = {name: weight - RATE * sums[name] for name, weight in weights.items()}
                versions.append(weights)
    return Outcome(tuple(losses), weights)


def run_layers(
    layers: Sequence[Layer],
    values: dict[str, Tensor],
    weights: Mapping[str, Tensor],
    linear: Callable[[Tensor, Tensor], Tensor],
    mean: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """``values`` and those of ``layers``."""
    for layer in layers:
        if layer.kind == "loss":
            total = sum(values[name] for name in layer.inputs[:-1]).sum(1)
            values[layer.name] = (total - values[layer.inputs[-1]]).square().mean()
        else:
            y = linear(sum(values[name] for name in layer.inputs), weights[layer.name]).tanh()
            values[layer.name] = y + mean(y) if layer.kind == WITH_MEAN else y
    return values


def _mean(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True)
