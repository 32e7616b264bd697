"""One device that trains on the weights a program says: each stage's, of some version, by micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from planner.ir.graph import Graph
from planner.ir.plan import Decision
from planner.ir.schedule import Op
from profiler.source.model import LoadedModel
from tests.runtime.plans import Trained, batch_of, sgd


def train_on_versions(model: LoadedModel, graph: Graph, decision: Decision, steps: int = 2) -> Trained:
    """What a plan that updates weights within a step must compute.

    Version v of a stage are its weights after v updates in this step.  A micro-batch runs on one version of each stage,
    its gradient counts in proportion to its rows among those of its update; gradients are those of the last update.
    """
    twin = copy.deepcopy(model)
    actions = [action for row in decision.rows() for action in row]
    version_of = {(a.stage, a.microbatch): a.version for a in actions if a.op is Op.FORWARD}
    ends = sorted({a.microbatch for a in actions if a.op is Op.UPDATE and a.microbatch is not None})
    parameters = dict(twin.module.named_parameters())
    stage_of = {name: decision.layers[layer.name].stage for layer in graph.layers for name in layer.parameters}
    stages = sorted(set(stage_of.values()))  # others have nothing to train
    optimizers = [sgd([p for name, p in parameters.items() if stage_of[name] == stage]) for stage in stages]
    losses = []
    gradients = {}
    for step in range(steps):
        batch = batch_of(model, decision.global_batch, step)
        versions = [_copied(parameters)]
        losses.append(0.0)
        for end, members in _updates(ends):
            _forget(parameters.values())
            for m in members:
                weights = {name: versions[version_of[stage_of[name], m]][name] for name in parameters}
                counted = sum(decision.micro_batches[each] for each in members)
                share = decision.micro_batches[m] / counted
                losses[-1] += _add_gradients(
                    twin, parameters, weights, _rows(batch, decision.micro_batches, m), share
                ) * (decision.micro_batches[m] / decision.global_batch)
            gradients = {name: parameter.grad for name, parameter in parameters.items()}
            for optimizer in optimizers:
                optimizer.step()
            versions.append(_copied(parameters))
            assert len(versions) == ends.index(end) + 2
    return Trained(losses, gradients, twin.module.state_dict())


def _updates(ends: list[int]) -> list[tuple[int, range]]:
    return [(end, range(first, end + 1)) for first, end in zip([0, *(e + 1 for e in ends)], ends, strict=False)]


def _add_gradients(
    model: LoadedModel,
    parameters: Mapping[str, nn.Parameter],
    weights: Mapping[str, Tensor],
    batch: tuple[tuple[Tensor, ...], ...],
    share: float,
) -> float:
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in weights.items()}
    inputs, targets = batch
    loss = model.loss_fn(functional_call(model.module, leaves, inputs), targets)
    found = torch.autograd.grad(loss * share, list(leaves.values()))
    for name, gradient in zip(leaves, found, strict=True):
        parameter = parameters[name]
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return loss.item()


def _copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _forget(parameters: object) -> None:
    for parameter in parameters:
        parameter.grad = None


def _rows(
    batch: tuple[tuple[Tensor, ...], ...], micro_batches: tuple[int, ...], m: int
) -> tuple[tuple[Tensor, ...], ...]:
    first = sum(micro_batches[:m])
    return tuple(tuple(tensor[first : first + micro_batches[m]] for tensor in tensors) for tensors in batch)
