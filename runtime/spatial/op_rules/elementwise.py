"""Op rules of layers that treat elements by themselves, and of losses, which then add them up over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.ir.graph import SAMPLE
from planner.layers import kind
from planner.layers.elementwise import ELEMENTS, PLACES
from runtime.spatial.collectives import start_sum, summed
from runtime.spatial.empties import connected, connected_to_all, empty_like_done, tensors_in
from runtime.spatial.op_rules.generic import operator_of
from runtime.spatial.step import Step, along, broadcast_part, gathered, within
from runtime.stage.sample_weights import weight_of_targets

_CHANNEL = 1

_MODELLED = ("type_as", "expand_as")
"""Operators that read of an input what it is like, and nothing else."""

_MEAN, _SUM = 1, 2
_CLASS = 1
_BROADCAST_ARGUMENTS = ("weight", "pos_weight")
"""Arguments that a loss of elements broadcasts to the prediction."""


def run_pointwise(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator on the part's elements: the same part of everything, constants included.

    Some do not pass on gradients, to one of their inputs or to any; autograd's graph has them all (see ``empties``).
    """
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    if not step.memo.get("plain"):
        constants = [name for name, each in found.items() if isinstance(each, Tensor) and step.input_of(name) is None]
        step.memo["plain"] = not constants
        found |= {name: _part_of_constant(step, found[name]) for name in constants}
    result = op(**found)
    if isinstance(result, Tensor) and result.requires_grad and not any(name in operator_of(step) for name in _MODELLED):
        return result
    return connected_to_all(step, result, found)


def _part_of_constant(step: Step, constant: Tensor) -> Tensor:
    shape = step.layer.outputs[0].shape
    if "prelu" not in operator_of(step):
        return broadcast_part(constant, shape, step.done)
    return constant if constant.numel() == 1 else along(constant, 0, shape[_CHANNEL], step.done[_CHANNEL])


def run_loss(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """What this rank adds to the loss of the whole micro-batch, so that the sum over ranks is that loss.

    What other layers read (a term of a loss, or what it is a function of) is that sum itself, on every rank.

        terms elements   the sum over the own part, divided by the number of elements of the prediction
        terms places     the sum over the own samples and places, divided by the number (or weight) of those that count
        otherwise        of whole samples, each on one rank: their mean, weighed by their share of the samples

    Ranks whose part another one counts (replicas, parts of the same samples), and empty ones, add 0.
    """
    share = _share_of_loss(step, op, gathered(step, arguments))
    return summed(step, share) if step.is_read else share


def _share_of_loss(step: Step, op: Callable[..., Any], found: dict[str, Any]) -> Tensor:
    for name, index in step.inputs_of.items():
        if isinstance(index, int):
            found[name] = _own_part(step, index, found[name])
    is_mean = found.get("reduction", _MEAN) == _MEAN and operator_of(step) != "sum"
    if "ignore_index" in found:
        return _of_places(step, op, found, is_mean)
    if not _counts(step):
        return _no_share(step, found)
    if step.layer.attributes.get("terms") == ELEMENTS:
        return _of_elements(step, op, found, is_mean)
    result: Tensor = op(**found)
    return result * (_num_samples(step) / step.division.samples) if is_mean else result


def _of_elements(step: Step, op: Callable[..., Any], found: dict[str, Any], is_mean: bool) -> Tensor:
    """The sum over the own part as a share of the mean over all."""
    for name in _BROADCAST_ARGUMENTS:
        if isinstance(found.get(name), Tensor) and step.input_of(name) is None:
            found[name] = broadcast_part(found[name], step.division.work.shape, step.own)
    if operator_of(step) in ("mean", "sum"):
        total: Tensor = found["self"].sum(dtype=found.get("dtype"))
    else:
        total = op(**{**found, "reduction": _SUM})
    shapes = (spec.shape for spec in step.division.inputs)
    broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
    return total / prod(broadcast(*shapes)) if is_mean else total


def _of_places(step: Step, op: Callable[..., Any], found: dict[str, Any], is_mean: bool) -> Tensor:
    """The sum over the own places as a share of the mean over all that are not ignored, by the weights of classes."""
    counts = _counts(step)
    weight = torch.zeros((), dtype=torch.float64)
    if counts and is_mean:
        weight = weight_of_targets(found["self"], found["target"], found["weight"], found["ignore_index"])
    if is_mean:
        table = start_sum(step, weight.to(found["self"].device))  # on all ranks, whether they count or not
        weight = table.wait().sum()
    if not counts:
        return _no_share(step, found)
    total: Tensor = op(**{**found, "reduction": _SUM})
    return total / weight.to(total.dtype) if is_mean else total


def _own_part(step: Step, index: int, x: Tensor) -> Tensor:
    """What the own part reads of an input, of which ``x`` has at least that."""
    inputs = step.division.inputs
    box = kind(step.layer.kind).input_boxes(step.layer, inputs, step.own)[index]
    have = step.exchange(index).wanted
    return x if box == have else within(x, have, box)


def _counts(step: Step) -> bool:
    """Whether this rank is the one that counts what its part reads."""
    if not step.is_first:
        return False
    terms, dims = step.layer.attributes.get("terms"), step.division.work.dims
    if terms == ELEMENTS:
        return True
    shared = [_CLASS] if terms == PLACES else [at for at, dim in enumerate(dims) if dim != SAMPLE]
    return all(step.own[at].start == 0 for at in shared if at < len(dims))


def _num_samples(step: Step) -> float:
    """Samples of the own part."""
    division = step.division
    if SAMPLE not in division.work.dims:
        return division.samples
    at = division.work.dims.index(SAMPLE)
    return len(step.own[at]) * division.samples / division.work.shape[at]


def _no_share(step: Step, found: dict[str, Any]) -> Tensor:
    """0, connected to all that the loss is made of."""
    tensors = tuple(tensors_in(found.values()))
    zero = torch.zeros((), dtype=getattr(torch, step.layer.outputs[0].dtype), device=tensors[0].device)
    return connected(zero, *tensors)
