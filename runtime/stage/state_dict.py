"""What the stages of a rank hold between steps, by the user's own names.

It is given to the user and taken from them, put together of all ranks, saved and loaded.  What is saved, and how it is
read under another plan, is told in :mod:`runtime.checkpoint.training_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cuda_ops.dense.state_writes import attributes_viewed, written
from planner.ir.graph import LOSS_PREFIX
from planner.ir.plan import Decision
from runtime.captured import CapturedModule, attribute
from runtime.rank import RankContext
from runtime.stage.cut import stages_using
from runtime.stage.local_stage import LocalStage

if TYPE_CHECKING:
    from runtime.checkpoint.state import RankState
    from runtime.optim.optimizer_state import StateSource
    from runtime.optim.pass_shards import PassShards
    from runtime.optim.sharding import ParameterSlice
    from runtime.spatial.parameters import ParameterPart


class StateDict:
    """Parameters, buffers and optimisers of one rank's stages, and the number of steps that made them.

    The engine is one that also takes steps.

    Attributes:
        num_steps: training steps done, those before a checkpoint that was loaded included.
        named: what this rank's stages have of the module's state dict.
    """

    def __init__(self, context: RankContext, local_stages: Mapping[int, LocalStage]) -> None:
        model = context.model
        module = context.module
        self._local_stages = local_stages
        self._transport = context.transport
        self.num_steps = 0
        self.named = named_state(local_stages, model, module)
        parts: dict[int, ParameterPart] = {}
        slices: dict[int, tuple[PassShards, str]] = {}
        for local_stage in local_stages.values():
            for name, tensor in (*local_stage.parameters.items(), *local_stage.buffers.items()):
                part = local_stage.updates.parts.get(name)
                if part is not None and part.is_divided:
                    parts[id(tensor)] = part
            if (shards := local_stage.gathered) is not None:
                slices |= {id(local_stage.parameters[name]): (shards, name) for name in sorted(shards.names)}
        self._parts = {name: parts[id(tensor)] for name, tensor in self.named.items() if id(tensor) in parts}
        self._sliced = {name: slices[id(tensor)] for name, tensor in self.named.items() if id(tensor) in slices}
        self._speaks = speakers(model, context.decision)
        read = {id(attribute(model.graph_module, name)) for name in self._speaks}
        state = module.state_dict(keep_vars=True)  # what no layer reads of it stays as it is, under any plan
        self._unread = {n: value for n, value in state.items() if isinstance(value, Tensor) and id(value) not in read}

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's stages, by the user's own names; tied ones under each name.

        Where the ranks of a stage have parts of them, all of them have to call this together.
        """
        whole = {id(shards): shards.values() for shards in self._gathered()}
        return {
            name: whole[id(self._sliced[name][0])][self._sliced[name][1]]
            if name in self._sliced
            else self._whole(tensor.detach(), self._parts.get(name))
            for name, tensor in self.named.items()
        }

    def unshard(self) -> None:
        """The module's parameters are whole until the next step; all ranks call this together.

        Without effect but where ranks have them in slices between passes.
        """
        for shards in self._gathered():
            shards.unshard()

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Those of all stages, on every rank, as copies on the processor; all ranks call this together."""
        return self._united(self.state_dict())

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's part of ``state``, which has all parameters and buffers of the model."""
        for name, tensor in self.named.items():
            if name in self._sliced:
                shards, parameter = self._sliced[name]
                shards.load(parameter, partial(_slice_of, state[name].reshape(-1)))
                continue
            part = self._parts.get(name)
            place = () if part is None else tuple(slice(each.start, each.stop) for each in part.box)
            tensor.copy_(state[name][place])

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step's parameters on this rank, by the user's own names.

        Where the ranks of a stage divide its optimiser or parameters, all of them have to call this together.
        """
        by_name: dict[str, Tensor] = {}
        for local_stage in self._local_stages.values():
            own = local_stage.gradients()
            for name, parameter in local_stage.parameters.items():
                part = local_stage.updates.parts.get(name)
                if part is not None and part.is_divided:
                    mine = own.get(name)
                    own[name] = self._whole(torch.zeros_like(parameter) if mine is None else mine, part)
            by_name |= own
        return by_name

    def held_tensors(self) -> list[Tensor]:
        """What stays between steps, but gradients: parameters, buffers and the optimisers' state."""
        tensors: list[Tensor] = []
        for local_stage in self._local_stages.values():
            shards = local_stage.gathered
            names = () if shards is None else shards.names
            tensors += [each for name, each in local_stage.parameters.items() if name not in names]
            tensors += [] if shards is None else [part.view for part in shards.slices.values()]
            tensors += local_stage.buffers.values()
            states = local_stage.optimizer.state.values() if local_stage.optimizer is not None else ()
            kept = (value for state in states if isinstance(state, Mapping) for value in state.values())
            tensors += [value for value in kept if isinstance(value, Tensor)]
        return tensors

    @property
    def device(self) -> torch.device:
        """Where the stages are."""
        tensors = chain.from_iterable(
            (*r.parameters.values(), *r.buffers.values()) for r in self._local_stages.values()
        )
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def forget_step(self) -> None:
        """Let go of the last step's gradients and losses; each step does so first."""
        for local_stage in self._local_stages.values():
            local_stage.reset()

    def state(self) -> RankState:
        """All that this rank has to save for training to go on, also under another plan; no copies."""
        from runtime.checkpoint.training_state import rank_state  # late: most runs save nothing

        named = self.named, self._parts, self._sliced
        return rank_state(self._local_stages, *named, self._speaks, self._transport.rank, self.num_steps, self._unread)

    def load_state(self, source: StateSource) -> None:
        """Goes on from what was saved, under whatever plan of the same model."""
        from runtime.checkpoint.training_state import load_rank_state

        named = self.named, self._parts, self._sliced
        self.num_steps = load_rank_state(self._local_stages, *named, source, self._unread)

    def whole_optimizer_state(self) -> dict[str, Any]:
        """What the optimisers of all stages keep, on every rank, by names of parameters; all ranks call this together.

        Its form is told in :mod:`runtime.optim.whole_state`.
        """
        from runtime.optim.whole_state import pieces_of, whole_of

        return whole_of(self._united(pieces_of(StateDict.state(self), self._transport.rank)), self.num_steps)

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with what :meth:`whole_optimizer_state` gave, under whatever plan of the same model.

        Raises:
            UsageError: it is not that, or lacks something.
        """
        from runtime.optim.optimizer_state import load_state
        from runtime.optim.whole_state import WholeState

        whole_state = WholeState(state)
        for local_stage in self._local_stages.values():
            if local_stage.optimizer is not None:
                load_state(local_stage.optimizer, whole_state)
        self.num_steps = whole_state.num_steps

    def _gathered(self) -> list[PassShards]:
        return [shards for local_stage in self._local_stages.values() if (shards := local_stage.gathered) is not None]

    def _whole(self, tensor: Tensor, part: ParameterPart | None) -> Tensor:
        if part is None:
            return tensor
        from runtime.optim.whole_state import gathered  # late: few plans divide parameters

        return gathered(tensor, part, self._transport)

    def _united(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from runtime.optim.whole_state import united

        return united(own, self._transport)


def named_state(local_stages: Mapping[int, LocalStage], model: CapturedModule, module: nn.Module) -> dict[str, Tensor]:
    """What this rank's stages have of the state dict of ``module``, by each of its names, in its order; or parts of it.

    Args:
        model: whose parameters and buffers are those of ``module``.
    """
    here: dict[int, Tensor] = {}
    for local_stage in local_stages.values():
        for name, tensor in (*local_stage.parameters.items(), *local_stage.buffers.items()):
            here[id(attribute(model.graph_module, name))] = tensor
    everything = {**module.state_dict(keep_vars=True), **_of_loss(local_stages, model)}
    return {name: here[id(tensor)] for name, tensor in everything.items() if id(tensor) in here}


def _of_loss(local_stages: Mapping[int, LocalStage], model: CapturedModule) -> dict[str, Tensor]:
    """What a loss with a state of its own changes: its parameters, and buffers that it writes."""
    viewed = attributes_viewed(model.graph_module.graph)
    changing = {name for node in model.graph_module.graph.nodes for name in written(node, viewed)}
    names = [
        name
        for local_stage in local_stages.values()
        for name in (*local_stage.parameters, *(changing & local_stage.buffers.keys()))
        if name.startswith(LOSS_PREFIX)
    ]
    return {name: attribute(model.graph_module, name) for name in sorted(names)}


def speakers(model: CapturedModule, decision: Decision) -> dict[str, int]:
    """By parameter, buffer or constant, the rank that saves it where it is not trained: one of all that have a copy."""
    return {name: min(decision.stages[min(stages)].ranks) for name, stages in stages_using(model, decision).items()}


def _slice_of(flat: Tensor, part: ParameterSlice) -> Tensor:
    return flat[part.start : part.stop]
