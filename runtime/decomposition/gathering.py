"""Whole tensors from the parts that the ranks of a stage have, for whoever asks for a model's state or gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.ir.box import volume, whole
from runtime.decomposition.parameters import Part
from runtime.pieces import assemble
from runtime.resident import Resident
from runtime.transport import Transport


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
    pieces = flat.split(counts)
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
