"""All that one rank has to save so that training goes on, also under another plan: by the model's own names.

What a rank has a part of, be it a parameter or the running statistics of its channels, is saved as that box of the
whole, by the first rank that has it, and read so by whoever needs which box.  A parameter of which ranks have slices
between passes (ZeRO-3) is saved and read in these, and never put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runtime.checkpoint.state import MODEL, BoxOf, Number, RankState, Slice, joined
from runtime.optim.optimizer_state import StateSource, load_state, state_of
from runtime.optim.pass_shards import PassShards
from runtime.optim.sharding import ParameterSlice
from runtime.stage.local_stage import LocalStage

if TYPE_CHECKING:
    from runtime.spatial.parameters import ParameterParts

Sliced = Mapping[str, tuple[PassShards, str]]
"""By the user's name of a parameter that ranks have in slices, what has them, and the stage's name of it."""

STEP = "run/step"
"""Key of the number of training steps done."""

WEIGHTS_ALONE = "run/weights_alone"
"""Key of a checkpoint that has parameters and buffers alone: optimisers and schedules begin anew."""


def rank_state(
    local_stages: Mapping[int, LocalStage],
    named: Mapping[str, Tensor],
    parts: ParameterParts,
    sliced: Sliced,
    speaks: Mapping[str, int],
    rank: int,
    step: int,
    unread: Mapping[str, Tensor],
) -> RankState:
    """Parameters, buffers, the optimisers' state and the number of steps.

    Args:
        named: what this rank's stages have of the module's state dict, by its names (:mod:`runtime.stage.state_dict`).
        parts, sliced: of what is named.
        speaks: by parameter, buffer or constant, the rank that saves it where it is not trained.
        unread: what no layer reads; rank 0 saves it.
    """
    owned = _owned(local_stages, speaks, rank)
    tensors = {MODEL + name: tensor.detach() for name, tensor in (*named.items(), *unread.items())}
    slices: dict[str, Slice] = {}
    for name, (shards, parameter) in sliced.items():
        part = shards.slices.get(parameter)
        if part is None:  # other ranks have all of it
            del tensors[MODEL + name]
        else:
            tensors[MODEL + name] = part.view.detach()
            slices[MODEL + name] = (part.start, part.stop, part.shape)
    boxes: dict[str, BoxOf] = {MODEL + name: (part.box, part.shape) for name, part in parts.items()}
    writes = {MODEL + name for name, tensor in named.items() if tensor in owned} & tensors.keys() | slices.keys()
    numbers: dict[str, Number] = {STEP: step}
    writes |= {STEP, *(MODEL + name for name in unread)} if rank == 0 else set()
    own = RankState(tensors, slices, numbers, frozenset(writes), boxes)
    optimizers = (
        state_of(local_stage.optimizer, local_stage.updates.speaks_for)
        for local_stage in local_stages.values()
        if local_stage.optimizer is not None
    )
    return joined((own, *optimizers))


@torch.no_grad()
def load_rank_state(
    local_stages: Mapping[int, LocalStage],
    named: Mapping[str, Tensor],
    parts: ParameterParts,
    sliced: Sliced,
    source: StateSource,
    unread: Mapping[str, Tensor],
) -> int:
    """Puts back what :func:`rank_state` gave on whatever ranks; the number of steps done.

    Checkpoints of earlier releases lack what no operator reads.

    Args:
        named, parts, sliced, unread: as of :func:`rank_state`.

    Raises:
        CorruptFileError: ``source`` lacks something, or has it in another shape.
    """
    for name, tensor in named.items():
        key = MODEL + name
        part = parts.get(name)
        if name in sliced:
            shards, parameter = sliced[name]
            shards.load(parameter, partial(_slice_in, source, key))
            continue
        tensor.copy_(source.read(key) if part is None else source.read_box(key, part.box))
    there = source.tensors()
    for name, tensor in unread.items():
        if MODEL + name in there:
            tensor.copy_(source.read(MODEL + name))
    for local_stage in local_stages.values() if WEIGHTS_ALONE not in source.numbers() else ():
        if local_stage.optimizer is not None:
            load_state(local_stage.optimizer, source)
    step = source.number(STEP)
    return int(step or 0)


def _slice_in(source: StateSource, key: str, part: ParameterSlice) -> Tensor:
    return source.read_slice(key, part.start, part.stop)


def _owned(local_stages: Mapping[int, LocalStage], speaks: Mapping[str, int], rank: int) -> set[Tensor]:
    """What this rank saves on behalf of all that have the same."""
    owned: set[Tensor] = set()
    for local_stage in local_stages.values():
        updates = local_stage.updates
        owned |= {local_stage.parameters[name] for name in updates.speaks_for}
        for name, buffer in local_stage.buffers.items():
            part = updates.parts.get(name)
            if part.is_first if part is not None and part.is_divided else speaks[name] == rank:
                owned.add(buffer)
    return owned
