"""All that one rank has to save so that training goes on, also under another plan: by the model's own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from planner.ir.plan import Decision
from runtime.checkpoint.state import MODEL, Number, RankState, joined
from runtime.resident import Resident
from runtime.stages.buffers import stages_using
from runtime.stages.captured import CapturedModel
from runtime.updates.optimizer_state import StateSource, load_state, state_of

STEP = "run/step"
"""Key of the number of training steps done."""


def speakers(model: CapturedModel, decision: Decision) -> dict[str, int]:
    """By parameter, buffer or constant, the rank that saves it where it is not trained: one of all that have a copy."""
    return {name: min(decision.stages[min(stages)].ranks) for name, stages in stages_using(model, decision).items()}


def rank_state(
    residents: Mapping[int, Resident],
    named: Mapping[str, Tensor],
    speaks: Mapping[str, int],
    rank: int,
    step: int,
) -> RankState:
    """Parameters, buffers, the optimisers' state and the number of steps.

    Args:
        speaks: see :func:`speakers`.
        named: parameters and buffers of this rank's stages that belong to the model's state dict, by each of its names.
    """
    owned = _owned(residents, speaks, rank)
    tensors = {MODEL + name: tensor.detach() for name, tensor in named.items()}
    writes = {MODEL + name for name, tensor in named.items() if tensor in owned}
    numbers: dict[str, Number] = {STEP: step}
    writes |= {STEP} if rank == 0 else set()
    own = RankState(tensors, {}, numbers, frozenset(writes))
    optimizers = (
        state_of(resident.optimizer, resident.updates.speaks_for)
        for resident in residents.values()
        if resident.optimizer is not None
    )
    return joined((own, *optimizers))


@torch.no_grad()
def load_rank_state(residents: Mapping[int, Resident], named: Mapping[str, Tensor], source: StateSource) -> int:
    """Puts back what :func:`rank_state` gave on whatever ranks; the number of steps done.

    Raises:
        CorruptFileError: ``source`` lacks something, or has it in another shape.
    """
    for name, tensor in named.items():
        tensor.copy_(source.read(MODEL + name))
    for resident in residents.values():
        if resident.optimizer is not None:
            load_state(resident.optimizer, source)
    step = source.number(STEP)
    return int(step or 0)


def _owned(residents: Mapping[int, Resident], speaks: Mapping[str, int], rank: int) -> set[Tensor]:
    """What this rank saves on behalf of all that have a copy."""
    found: set[Tensor] = set()
    for resident in residents.values():
        found |= {resident.parameters[name] for name in resident.updates.speaks_for}
        found |= {buffer for name, buffer in resident.buffers.items() if speaks[name] == rank}
    return found
