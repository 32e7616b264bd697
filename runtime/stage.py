"""One stage on one rank: forward and backward of micro-batches, in whatever order the program says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from runtime.cut import StageFunction


@dataclass(slots=True)
class _Held:
    """What a micro-batch leaves behind between its forward and the end of its backward.

    Attributes:
        leaves: differentiable inputs received from other stages.
        edges: where each output enters the autograd graph; the outputs themselves need not stay alive for it.
        loss_weight: seed of the loss's gradient.
        seeds: gradients of the outputs, kept by a backward for the input for the backward for the weights.
    """

    leaves: dict[str, torch.Tensor]
    edges: dict[str, GradientEdge]
    loss_weight: float
    seeds: dict[str, torch.Tensor]


class StageProgram:
    """Runs a :class:`StageFunction`, several micro-batches at a time.

    Args:
        function: what the stage computes; gradients are added to ``.grad`` of its parameters.
        received: names of those inputs that another stage made; the floating ones among them get a gradient.
        loss: name of the output that is the loss; None on a stage that does not make it.
    """

    def __init__(self, function: StageFunction, received: frozenset[str], loss: str | None) -> None:
        self._function = function
        self._received = received
        self._loss = loss
        self._state = tuple(function.attributes.values())
        self._parameters = tuple(function.parameters.values())
        self._held: dict[int, _Held] = {}
        self.losses: dict[int, torch.Tensor] = {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that ``forward`` needs."""
        return self._function.inputs

    def forward(
        self, microbatch: int, num_samples: int, values: Mapping[str, torch.Tensor], loss_weight: float
    ) -> dict[str, torch.Tensor]:
        """The outputs but the loss, detached; the loss goes to ``losses[microbatch]``.

        Args:
            num_samples: this rank's share of the micro-batch; may be 0.
            values: by name, this rank's share of each.
            loss_weight: what the loss counts for in the step's loss, this rank's rows over all rows of the step.
        """
        leaves = {
            name: values[name].detach().requires_grad_()
            for name in self._function.inputs
            if name in self._received and _is_differentiable(values[name])
        }
        arguments = (leaves.get(name, values[name]) for name in self._function.inputs)
        outputs = dict(
            zip(self._function.outputs, self._function.function(num_samples, *arguments, *self._state), strict=True)
        )
        edges = {name: get_gradient_edge(output) for name, output in outputs.items() if output.requires_grad}
        self._held[microbatch] = _Held(leaves, edges, loss_weight, {})
        if self._loss is not None:
            self.losses[microbatch] = outputs.pop(self._loss).detach()
        return {name: output.detach() for name, output in outputs.items()}

    def backward(self, microbatch: int, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Adds to the parameters' gradients; returns those of the received inputs, zeros where nothing flows back.

        Args:
            gradients: of the outputs, by name; an output without one takes no part.
        """
        held = self._held.pop(microbatch)
        seeds = self._seeds(microbatch, held, gradients)
        if seeds:
            torch.autograd.backward([held.edges[name] for name in seeds], list(seeds.values()))
        return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in held.leaves.items()}

    def backward_input(self, microbatch: int, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients of the received inputs alone; everything stays alive for :meth:`backward_weight`."""
        held = self._held[microbatch]
        held.seeds = self._seeds(microbatch, held, gradients)
        found = _gradients(held, list(held.leaves.values()), retain_graph=True)
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(held.leaves.items(), found, strict=True)
        }

    def backward_weight(self, microbatch: int) -> None:
        """Adds to the parameters' gradients what :meth:`backward_input` left out.

        The chain of input gradients is walked again: exact, and what a split backward costs without support inside the
        operators.
        """
        held = self._held.pop(microbatch)
        found = _gradients(held, list(self._parameters), retain_graph=False)
        for parameter, gradient in zip(self._parameters, found, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def reset(self) -> None:
        """Forget the micro-batches of the last step."""
        self._held.clear()
        self.losses.clear()

    def _seeds(self, microbatch: int, held: _Held, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seeds = {name: gradients[name] for name in held.edges if name in gradients}
        if self._loss in held.edges:
            seeds[self._loss] = torch.full_like(self.losses[microbatch], held.loss_weight)
        return seeds


def _gradients(held: _Held, wanted: list[torch.Tensor], retain_graph: bool) -> tuple[torch.Tensor | None, ...]:
    if not held.seeds or not wanted:
        return (None,) * len(wanted)
    edges = [held.edges[name] for name in held.seeds]
    return torch.autograd.grad(edges, wanted, list(held.seeds.values()), retain_graph, allow_unused=True)


def _is_differentiable(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
