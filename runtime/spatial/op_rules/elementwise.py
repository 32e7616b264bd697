"""Op rules of layers that treat elements by themselves, and of losses, which then add them up over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuda_ops.operator_table import operator_row
from planner.ir.graph import SAMPLE
from planner.layers import kind
from planner.layers.elementwise import ELEMENTS, PLACES, has_classes_apart
from runtime.spatial.collectives import rows_among, start_sum, summed
from runtime.spatial.empties import connected, connected_to_all, tensors_in
from runtime.spatial.layer_shard import LayerShard, along, broadcast_part, gathered, within
from runtime.spatial.op_rules.generic import on_operands, run_whole_samples
from runtime.stage.sample_weights import weight_of_targets
from runtime.transport.small_allgather import Tell

_CHANNEL = 1

_MEAN = 1
_SUM = 2
_CLASS = 1
_BROADCAST_ARGUMENTS = ("weight", "pos_weight")
"""Arguments that a loss of elements broadcasts to the prediction."""

run_opaque = run_whole_samples


@on_operands
def run_pointwise(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """The operator on the part's elements: the same part of everything, constants included.

    Some do not pass on gradients, to one of their inputs or to any; autograd's graph has them all (see ``empties``).
    """
    if not shard.memo.get("plain"):
        constants = [
            name for name, each in operands.items() if isinstance(each, Tensor) and shard.input_of(name) is None
        ]
        shard.memo["plain"] = not constants
        operands |= {name: _part_of_constant(shard, operands[name]) for name in constants}
    result = op(**operands)
    if isinstance(result, Tensor) and result.requires_grad and not operator_row(shard.operator).model:
        return result
    return connected_to_all(shard, result, operands)


def _part_of_constant(shard: LayerShard, constant: Tensor) -> Tensor:
    shape = shard.layer.outputs[0].shape
    if "prelu" not in shard.operator:
        return broadcast_part(constant, shape, shard.done)
    return constant if constant.numel() == 1 else along(constant, 0, shape[_CHANNEL], shard.done[_CHANNEL])


def run_loss(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Tensor:
    """What this rank adds to the loss of the whole micro-batch, so that the sum over ranks is that loss.

    What other layers read (a term of a loss, or what it is a function of) is that sum itself, on every rank.

        terms elements   the sum over the own part, divided by the number of elements of the prediction
        terms places     the sum over the own samples and places, divided by the number (or weight) of those that count;
                         of parts of their classes, where they are cut, by one exchange of the ranks that have them
        otherwise        of whole samples, each on one rank: their mean, weighed by their share of the samples

    Ranks whose part another one counts (replicas, parts of the same samples), and empty ones, add 0.
    """
    share = _share_of_loss(shard, op, gathered(shard, arguments))
    return summed(shard, share) if shard.is_read else share


def _share_of_loss(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Tensor:
    for name, index in shard.inputs_of.items():
        if isinstance(index, int):
            operands[name] = _own_part(shard, index, operands[name])
    is_mean = operands.get("reduction", _MEAN) == _MEAN and shard.operator != "sum"
    if "ignore_index" in operands:
        return _of_places(shard, op, operands, is_mean)
    if not _counts(shard):
        return _no_share(shard, operands)
    if shard.layer.attributes.get("terms") == ELEMENTS:
        return _of_elements(shard, op, operands, is_mean)
    result: Tensor = op(**operands)
    return result * (_num_samples(shard) / shard.division.samples) if is_mean else result


def _of_elements(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any], is_mean: bool) -> Tensor:
    """The sum over the own part as a share of the mean over all."""
    for name in _BROADCAST_ARGUMENTS:
        if isinstance(operands.get(name), Tensor) and shard.input_of(name) is None:
            operands[name] = broadcast_part(operands[name], shard.division.work.shape, shard.own)
    if shard.operator in ("mean", "sum"):
        total: Tensor = operands["self"].sum(dtype=operands.get("dtype"))
    else:
        total = op(**{**operands, "reduction": _SUM})
    shapes = (spec.shape for spec in shard.division.inputs)
    broadcast: Callable[..., torch.Size] = torch.broadcast_shapes
    return total / prod(broadcast(*shapes)) if is_mean else total


def _of_places(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any], is_mean: bool) -> Tensor:
    """The sum over the own places as a share of the mean over all that are not ignored, by the weights of classes."""
    counts = _counts(shard)
    weight = torch.zeros((), dtype=torch.float64, device=operands["self"].device)
    if counts and is_mean:
        weight = weight_of_targets(operands["self"], operands["target"], operands["weight"], operands["ignore_index"])
    if is_mean:
        weight = start_sum(shard, weight).wait().sum()  # on all ranks, whether they count or not
    if _is_cut_by_class(shard) and shard.is_first:
        total = _of_classes(shard, operands, counts)
    elif counts:
        total = op(**{**operands, "reduction": _SUM})
    else:
        return _no_share(shard, operands)
    return total / weight.to(total.dtype) if is_mean else total


def _is_cut_by_class(shard: LayerShard) -> bool:
    """Whether ranks have parts of the classes of a place, and no rank has all of them."""
    division = shard.division
    if not has_classes_apart(shard.layer, division.inputs):
        return False
    whole = division.work.shape[_CLASS]
    return any(len(box[_CLASS]) < whole and all(map(len, box)) for box in division.own)


def _of_classes(shard: LayerShard, operands: dict[str, Any], counts: bool) -> Tensor:
    """The sum over the own places, from parts of their classes; 0 with its gradient where another rank counts it."""
    own = shard.division.own
    firsts = shard.division.is_first
    mine = (*shard.own[:_CLASS], *shard.own[_CLASS + 1 :])
    members = tuple(at for at, box in enumerate(own) if firsts[at] and (*box[:_CLASS], *box[_CLASS + 1 :]) == mine)
    part = _ClassPart(
        operands["ignore_index"],
        operands.get("label_smoothing", 0.0),
        shard.own[_CLASS].start,
        shard.division.work.shape[_CLASS],
        counts,
        rows_among(shard, members),
        getattr(torch, shard.layer.outputs[0].dtype),
    )
    apply: Callable[..., Tensor] = _ClassParallel.apply
    return apply(operands["self"], operands["target"], operands.get("weight"), part)


@dataclass(frozen=True, slots=True)
class _ClassPart:
    """This rank's part of the classes.

    Attributes:
        ignored: a target that does not count.
        smoothing: e of :class:`_ClassParallel`.
        first: the class that the part begins with, of ``num_classes``.
        counts: whether the sum over these places counts here.
        tell: the ranks that have the other classes of these places.
        result: the dtype of the sum; autocast makes it larger than the logits'.
    """

    ignored: int
    smoothing: float
    first: int
    num_classes: int
    counts: bool
    tell: Tell
    result: torch.dtype


class _ClassParallel(torch.autograd.Function):
    """Cross-entropy summed over places, from this rank's part of the classes.

    Of place i, with logits x, target t, weights w of the classes (1 without) and smoothing e of C classes:

        lse - x_t       where lse = log sum_c exp(x_c), from the maxima and sums of exponentials of the parts
        loss            (1 - e) w_t (lse - x_t) + e / C sum_c w_c (lse - x_c)
        d loss / d x_c  ((1 - e) w_t + e / C sum w) exp(x_c - lse) - (1 - e) w_t [c = t] - e / C w_c

    One exchange forward, of four numbers a place; none backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, part: _ClassPart) -> Tensor:
        smoothing = part.smoothing
        dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
        x = logits.movedim(_CLASS, -1).to(dtype)  # [places, classes of the part]
        counted = target != part.ignored  # [places]
        weights = x.new_ones(part.num_classes) if weight is None else weight.to(dtype)
        of_part = weights[part.first : part.first + x.shape[-1]]
        of_target = torch.where(counted, weights[target.clamp(0, part.num_classes - 1)], 0.0)
        local = target - part.first
        here = counted & (local >= 0) & (local < x.shape[-1])
        local = local.clamp(0, x.shape[-1] - 1).unsqueeze(-1)
        most = x.amax(-1)
        exponentials = (x - torch.where(most.isfinite(), most, 0.0).unsqueeze(-1)).exp_().sum(-1)
        at_target = torch.where(here, x.gather(-1, local).squeeze(-1), 0.0)
        numbers = [most, exponentials, at_target, x @ of_part if smoothing else torch.zeros_like(most)]
        by_rank = part.tell([each.reshape(-1) for each in numbers], dtype).wait().view(-1, len(numbers), *most.shape)
        most = by_rank[:, 0].amax(0)
        lse = most + (by_rank[:, 1] * (by_rank[:, 0] - most).exp()).sum(0).log()
        smooth = counted.to(dtype) * (smoothing / part.num_classes)
        loss = (1 - smoothing) * of_target * (lse - by_rank[:, 2].sum(0))
        loss = loss + smooth * (lse * weights.sum() - by_rank[:, 3].sum(0)) if smoothing else loss
        kept = (1 - smoothing) * of_target
        ctx.save_for_backward(
            x, lse, local, torch.where(here, kept, 0.0), kept + smooth * weights.sum(), smooth, of_part
        )
        ctx.dtype = logits.dtype
        total = torch.where(counted, loss, 0.0).sum() if part.counts else loss.new_zeros(())
        return total.to(part.result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, lse, local, at_target, softly, smooth, of_part = ctx.saved_tensors
        dlogits = (
            (x - lse.unsqueeze(-1)).exp_().mul_(softly.unsqueeze(-1))
        )  # one more tensor like the logits, no second
        dlogits.addcmul_(smooth.unsqueeze(-1), of_part, value=-1)
        dlogits.scatter_add_(-1, local, -at_target.unsqueeze(-1))
        dlogits *= gradient.to(dlogits.dtype)
        return dlogits.movedim(-1, _CLASS).to(ctx.dtype), None, None, None


def _own_part(shard: LayerShard, index: int, x: Tensor) -> Tensor:
    """What the own part reads of an input, of which ``x`` has at least that."""
    inputs = shard.division.inputs
    box = kind(shard.layer.kind).input_boxes(shard.layer, inputs, shard.own)[index]
    have = shard.exchange(index).wanted
    return x if box == have else within(x, have, box)


def _counts(shard: LayerShard) -> bool:
    """Whether this rank is the one that counts what its part reads."""
    if not shard.is_first:
        return False
    terms = shard.layer.attributes.get("terms")
    dims = shard.division.work.dims
    if terms == ELEMENTS:
        return True
    shared = [_CLASS] if terms == PLACES else [at for at, dim in enumerate(dims) if dim != SAMPLE]
    return all(shard.own[at].start == 0 for at in shared if at < len(dims))


def _num_samples(shard: LayerShard) -> float:
    """Samples of the own part."""
    division = shard.division
    if SAMPLE not in division.work.dims:
        return division.samples
    at = division.work.dims.index(SAMPLE)
    return len(shard.own[at]) * division.samples / division.work.shape[at]


def _no_share(shard: LayerShard, operands: dict[str, Any]) -> Tensor:
    """0, connected to all that the loss is made of."""
    tensors = tuple(tensors_in(operands.values()))
    zero = torch.zeros((), dtype=getattr(torch, shard.layer.outputs[0].dtype), device=tensors[0].device)
    return connected(zero, *tensors)
