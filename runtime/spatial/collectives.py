"""Sums over the ranks of a step's group, of small tensors: every rank sends its own to every other.

Whole tensors from the parts that the ranks of a stage have, for whoever asks for a model's state or gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from planner.ir.box import volume, whole
from runtime.pipeline.messages import assemble
from runtime.spatial.parameters import Part
from runtime.spatial.step import Step
from runtime.stage.local_stage import Resident
from runtime.transport import Transport
from runtime.transport.small_allgather import Rows, Table, Tell

_BYTES = torch.uint8
_HALVES = (torch.float16, torch.bfloat16)


def rows_of(step: Step) -> Tell:
    """How the ranks of ``step.group`` tell each other rows."""
    if "rows" not in step.memo:
        key = step.key(len(step.layer.inputs))
        step.memo["rows"] = Rows(step.wire.transport, step.group, step.wire.deadline_s, key)
    found: Tell = step.memo["rows"]
    return found


def rows_among(step: Step, positions: tuple[int, ...]) -> Tell:
    """How some ranks of the stage, by position, tell each other rows; this one among them."""
    if ("rows", positions) not in step.memo:
        ranks = tuple(step.wire.ranks[position] for position in positions)
        step.memo["rows", positions] = Rows(step.wire.transport, ranks, step.wire.deadline_s)
    found: Tell = step.memo["rows", positions]
    return found


def start_sum(step: Step, tensor: Tensor) -> Table:
    """Start to tell the ranks of ``step.group`` a tensor, whose sum is that of the table's rows."""
    return rows_of(step)([tensor.reshape(-1)], sum_dtype(tensor.dtype))


def summed(step: Step, term: Tensor) -> Tensor:
    """The sum over ``step.group`` of what each rank has, whole on each of them; differentiable.

    Backward adds up what flows back on the ranks, since each has the gradient of its own copy of the sum.
    """
    apply: Callable[[Tensor, Step], Tensor] = _Summed.apply
    return apply(term, step)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums are not kept in half precision."""
    return torch.float32 if dtype in _HALVES else dtype


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: Tensor, step: Step) -> Tensor:
        ctx.step = step
        return start_sum(step, term).wait().sum(0).view(term.shape).to(term.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        step: Step = ctx.step
        table = start_sum(step, gradient)
        if step.later is not None:
            step.later.run()
        return table.wait().sum(0).view(gradient.shape).to(gradient.dtype), None


@torch.no_grad()
def united(own: Mapping[str, Tensor], transport: Transport, deadline_s: float) -> dict[str, Tensor]:
    """The tensors that any rank has, by name, on all of them and on the processor; all ranks call this together.

    Of what several ranks have, that of the first counts.  Values stay as they are to the bit.
    """
    everyone = tuple(range(transport.world_size))

    def gather(mine: Tensor) -> list[Tensor]:
        sizes = torch.zeros(len(everyone), dtype=torch.int64)
        sizes[transport.rank] = mine.numel()
        transport.all_gather(sizes, [1] * len(everyone), everyone, deadline_s)
        flat = torch.zeros(int(sizes.sum()), dtype=_BYTES)
        pieces = torch.split(flat, sizes.tolist())
        pieces[transport.rank].copy_(mine)
        if flat.numel():
            transport.all_gather(flat, sizes.tolist(), everyone, deadline_s)
        return list(pieces)

    listed = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in own.items()]
    lists = [json.loads(bytes(each.tolist())) for each in gather(_bytes_of(json.dumps(listed).encode()))]
    owner: dict[str, int] = {}
    for rank, names in enumerate(lists):
        for name, *_ in names:
            owner.setdefault(name, rank)
    mine = [_bytes_of(each) for name, each in own.items() if owner[name] == transport.rank]
    found = {}
    for rank, data in enumerate(gather(torch.cat([*mine, torch.zeros(0, dtype=_BYTES)]))):
        first = 0
        for name, dtype, shape in lists[rank]:
            if owner[name] == rank:
                kind: torch.dtype = getattr(torch, dtype)
                size = math.prod(shape) * kind.itemsize
                found[name] = data[first : first + size].clone().view(kind).view(shape)
                first += size
    return found


def _bytes_of(data: Tensor | bytes) -> Tensor:
    if isinstance(data, bytes):
        return torch.tensor(list(data), dtype=_BYTES)
    return data.detach().cpu().contiguous().reshape(-1).view(_BYTES)


@torch.no_grad()
def gathered(tensor: Tensor, part: Part | None, transport: Transport, deadline_s: float) -> Tensor:
    """The whole of what ``tensor`` is this rank's part of; without a part it is the whole.

    All ranks of the stage call this together, for the same tensors in the same order.
    """
    if part is None or not part.is_divided:
        return tensor
    ranks = tuple(sorted(part.ranks))
    boxes = [part.at(rank) for rank in ranks]
    counts = [volume(box) if first else 0 for box, first in boxes]
    flat = tensor.new_empty(sum(counts))
    pieces = torch.split(flat, counts)
    own = ranks.index(transport.rank)
    if counts[own]:
        pieces[own].copy_(tensor.reshape(-1))
    transport.all_gather(flat, counts, ranks, deadline_s)
    found = [
        (box, piece.view([len(interval) for interval in box]))
        for (box, _), piece in zip(boxes, pieces, strict=True)
        if piece.numel()
    ]
    return assemble(found, whole(part.shape), tensor.dtype, tensor.device)


def gathered_gradients(resident: Resident, transport: Transport, deadline_s: float) -> dict[str, Tensor]:
    """The last step's whole gradients of a stage, by name; all ranks of the stage call this together."""
    found = resident.gradients()
    for name, parameter in resident.parameters.items():
        part = resident.updates.parts.get(name)
        if part is not None and part.is_divided:
            mine = found.get(name)
            found[name] = gathered(torch.zeros_like(parameter) if mine is None else mine, part, transport, deadline_s)
    return found
