"""All that one rank has to save so that training goes on, also under another plan: by the model's own names.

What a rank has a part of, be it a parameter or the running statistics of its channels, is saved as that box of the
whole, by the first rank that has it, and read so by whoever needs which box.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from planner.ir.graph import LOSS_PREFIX
from planner.ir.plan import Decision
from runtime.checkpoint.state import MODEL, BoxOf, Number, RankState, joined
from runtime.optim.optimizer_state import StateSource, load_state, state_of
from runtime.spatial.parameters import Part
from runtime.stage.captured import CapturedModel, attribute
from runtime.stage.cut import attributes_behind, stages_using, written
from runtime.stage.local_stage import Resident

STEP = "run/step"
"""Key of the number of training steps done."""

WEIGHTS_ALONE = "run/weights_alone"
"""Key of a checkpoint that has parameters and buffers alone: optimisers and schedules begin anew."""


def named_state(residents: Mapping[int, Resident], model: CapturedModel, module: nn.Module) -> dict[str, Tensor]:
    """What this rank's stages have of the state dict of ``module``, by each of its names, in its order; or parts of it.

    Args:
        model: whose parameters and buffers are those of ``module``.
    """
    here: dict[int, Tensor] = {}
    for resident in residents.values():
        for name, tensor in (*resident.parameters.items(), *resident.buffers.items()):
            here[id(attribute(model.graph_module, name))] = tensor
    everything = {**module.state_dict(keep_vars=True), **_of_loss(residents, model)}
    return {name: here[id(tensor)] for name, tensor in everything.items() if id(tensor) in here}


def _of_loss(residents: Mapping[int, Resident], model: CapturedModel) -> dict[str, Tensor]:
    """What a loss with a state of its own changes: its parameters, and buffers that it writes."""
    behind = attributes_behind(model.graph_module.graph)
    changing = {name for node in model.graph_module.graph.nodes for name in written(node, behind)}
    names = [
        name
        for resident in residents.values()
        for name in (*resident.parameters, *(changing & resident.buffers.keys()))
        if name.startswith(LOSS_PREFIX)
    ]
    return {name: attribute(model.graph_module, name) for name in sorted(names)}


def unread_state(model: CapturedModel, module: nn.Module, speaks: Mapping[str, int]) -> dict[str, Tensor]:
    """What the state dict of ``module`` has and no layer reads: it stays as it is, under any plan.

    Args:
        speaks: see :func:`speakers`.
    """
    read = {id(attribute(model.graph_module, name)) for name in speaks}
    own = module.state_dict(keep_vars=True)
    return {name: value for name, value in own.items() if isinstance(value, Tensor) and id(value) not in read}


def named_parts(residents: Mapping[int, Resident], named: Mapping[str, Tensor]) -> dict[str, Part]:
    """Of what :func:`named_state` gave, that which not every rank of its stage has all of."""
    found: dict[int, Part] = {}
    for resident in residents.values():
        for name, tensor in (*resident.parameters.items(), *resident.buffers.items()):
            part = resident.updates.parts.get(name)
            if part is not None and part.is_divided:
                found[id(tensor)] = part
    return {name: found[id(tensor)] for name, tensor in named.items() if id(tensor) in found}


def speakers(model: CapturedModel, decision: Decision) -> dict[str, int]:
    """By parameter, buffer or constant, the rank that saves it where it is not trained: one of all that have a copy."""
    return {name: min(decision.stages[min(stages)].ranks) for name, stages in stages_using(model, decision).items()}


def rank_state(
    residents: Mapping[int, Resident],
    named: Mapping[str, Tensor],
    speaks: Mapping[str, int],
    rank: int,
    step: int,
    unread: Mapping[str, Tensor],
) -> RankState:
    """Parameters, buffers, the optimisers' state and the number of steps.

    Args:
        unread: see :func:`unread_state`; rank 0 saves it.
        speaks: see :func:`speakers`.
        named: see :func:`named_state`.
    """
    owned = _owned(residents, speaks, rank)
    tensors = {MODEL + name: tensor.detach() for name, tensor in (*named.items(), *unread.items())}
    boxes: dict[str, BoxOf] = {
        MODEL + name: (part.box, part.shape) for name, part in named_parts(residents, named).items()
    }
    writes = {MODEL + name for name, tensor in named.items() if tensor in owned}
    numbers: dict[str, Number] = {STEP: step}
    writes |= {STEP, *(MODEL + name for name in unread)} if rank == 0 else set()
    own = RankState(tensors, {}, numbers, frozenset(writes), boxes)
    optimizers = (
        state_of(resident.optimizer, resident.updates.speaks_for)
        for resident in residents.values()
        if resident.optimizer is not None
    )
    return joined((own, *optimizers))


@torch.no_grad()
def load_rank_state(
    residents: Mapping[int, Resident], named: Mapping[str, Tensor], source: StateSource, unread: Mapping[str, Tensor]
) -> int:
    """Puts back what :func:`rank_state` gave on whatever ranks; the number of steps done.

    Checkpoints of earlier releases lack what no operator reads.

    Raises:
        CorruptFileError: ``source`` lacks something, or has it in another shape.
    """
    parts = named_parts(residents, named)
    for name, tensor in named.items():
        key, part = MODEL + name, parts.get(name)
        tensor.copy_(source.read(key) if part is None else source.read_box(key, part.box))
    there = source.tensors()
    for name, tensor in unread.items():
        if MODEL + name in there:
            tensor.copy_(source.read(MODEL + name))
    for resident in residents.values() if WEIGHTS_ALONE not in source.numbers() else ():
        if resident.optimizer is not None:
            load_state(resident.optimizer, source)
    step = source.number(STEP)
    return int(step or 0)


def _owned(residents: Mapping[int, Resident], speaks: Mapping[str, int], rank: int) -> set[Tensor]:
    """What this rank saves on behalf of all that have the same."""
    found: set[Tensor] = set()
    for resident in residents.values():
        updates = resident.updates
        found |= {resident.parameters[name] for name in updates.speaks_for}
        for name, buffer in resident.buffers.items():
            part = updates.parts.get(name)
            if part.is_first if part is not None and part.is_divided else speaks[name] == rank:
                found.add(buffer)
    return found
