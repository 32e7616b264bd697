"""All that one rank has to save so that training goes on, also under another plan: by the model's own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.checkpoint.state import Number, RankState, joined
from runtime.optimizer_state import StateSource, load_state, state_of
from runtime.resident import Resident

STEP = "run/step"
"""Key of the number of training steps done."""


def rank_state(residents: Mapping[int, Resident], named: Mapping[str, Tensor], rank: int, step: int) -> RankState:
    """Parameters, buffers, the optimisers' state and the number of steps.

    Args:
        named: parameters and buffers of this rank's stages that belong to the model's state dict, by each of its names.
    """
    owned = _owned(residents, rank)
    tensors = {f"model/{name}": tensor.detach() for name, tensor in named.items()}
    writes = {f"model/{name}" for name, tensor in named.items() if tensor in owned}
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
        tensor.copy_(source.read(f"model/{name}"))
    for resident in residents.values():
        if resident.optimizer is not None:
            load_state(resident.optimizer, source)
    step = source.number(STEP)
    return int(step or 0)


def _owned(residents: Mapping[int, Resident], rank: int) -> set[Tensor]:
    """What this rank saves on behalf of all that have a copy."""
    found: set[Tensor] = set()
    for resident in residents.values():
        found |= {resident.parameters[name] for name in resident.updates.speaks_for}
        if resident.ranks[0] == rank:
            found |= set(resident.buffers.values())
    return found
