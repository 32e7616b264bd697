"""The engine: one rank's part of a plan, step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx, nn

from planner.ir.errors import UsageError
from planner.ir.graph import SAMPLE, Graph, producer
from planner.ir.plan import Decision
from planner.ir.program import Program
from planner.ir.schedule import Op
from planner.ir.timeline import Span
from planner.layers.boundary import Boundaries
from runtime.activity import Activity
from runtime.build import Builder, CapturedModel, MakeOptimizer, check_layers
from runtime.context import Context
from runtime.executor import Executor
from runtime.plumbing import Plumbing
from runtime.transport import Transport


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave on one rank.

    Attributes:
        loss: of the whole global batch; None on ranks that do not make it.
        step_s: from the common start to this rank's end.
        spans: when each action ran, in order.
        thread_s: this thread's processor time in each of them.
    """

    loss: float | None
    step_s: float
    spans: tuple[Span, ...]
    thread_s: tuple[float, ...]


class Engine:
    """Executes ``decision`` on this rank of ``transport``.

    A step gives the losses, gradients and buffers of one device that runs the micro-batches one after another: the loss
    of each weighted by its rows, gradients added, batch normalisation within each micro-batch, one update.

    Args:
        graph, graph_module, layer_of_node, node_of_value: what ``profiler.capture`` gives.
        module: the user's; its parameters and buffers are those of ``graph_module``, and those of this rank's stages
            are trained in place.  The engine keeps no other part of it alive.
        transport: with ``runtime.build.groups_of(decision)`` declared.
        optimizer: makes an optimiser of the parameters it is given; called once for each stage of this rank.
        deadline_s: longest wait for another rank.
        lookahead: receives announced ahead; 0: as many as the memory model counts.
        activity: told what is done, for a heartbeat.
        others: what the other ranks do, as one line; asked when something failed.

    Raises:
        CorruptFileError: the decision's layers are not the graph's.
        UnsupportedModelError: the model cannot be cut that way.
        UsageError: the schedule changes the weights within a step.
    """

    def __init__(
        self,
        decision: Decision,
        graph: Graph,
        graph_module: fx.GraphModule,
        layer_of_node: Mapping[str, str],
        node_of_value: Mapping[str, str],
        module: nn.Module,
        transport: Transport,
        optimizer: MakeOptimizer,
        *,
        deadline_s: float = 120.0,
        lookahead: int = 0,
        activity: Activity | None = None,
        others: Callable[[], str] = str,
    ) -> None:
        check_layers(decision, graph)
        self._decision, self._graph, self._transport = decision, graph, transport
        self._activity = activity or Activity()
        boundaries = Boundaries.of_decision(graph, decision)
        self._program = boundaries.program(decision)
        _refuse_updates_within_a_step(self._program, decision.schedule)
        model = CapturedModel(graph, graph_module, layer_of_node, node_of_value)
        builder = Builder(decision, model, boundaries, self._program.stages, transport, optimizer, deadline_s)
        self._residents = builder.residents()
        self._loss_stage = decision.layers[producer(graph.loss)].stage
        self._state = self._named_state(module)
        self._executor = Executor(
            self._program,
            self._residents,
            Plumbing(boundaries, self._program, decision.micro_batches, transport.rank),
            transport,
            context=Context(self._program, transport.rank, device_of(decision, transport.rank), others),
            deadline_s=deadline_s,
            lookahead=lookahead or self._program.receive_window(transport.rank),
            activity=self._activity,
        )
        self._step = 0

    def step(self, inputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> StepResult:
        """One training step on a global batch, which every rank is given whole.

        Raises:
            UsageError: the batch has another number of tensors or rows than the plan.
            StageFailedError, DeadlineError, TransportError: the step failed; the engine cannot be used any more.
        """
        batch = (*inputs, *targets)
        self._check(batch)
        self._executor.prepare(self._step, batch)
        start = time.perf_counter()
        spans, thread_s = self._executor.run()
        step_s = time.perf_counter() - start
        loss = self._loss()
        self._step += 1
        self._activity.num_done, self._activity.loss, self._activity.step_s = self._step, loss, step_s
        return StepResult(loss, step_s, tuple(spans), tuple(thread_s))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank's stages, by the user's own names; tied ones under each name."""
        return {name: tensor.detach() for name, tensor in self._state.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last step's parameters on this rank, by the user's own names."""
        return {
            name: parameter.grad
            for resident in self._residents.values()
            for name, parameter in resident.parameters.items()
            if parameter.grad is not None
        }

    def forget_step(self) -> None:
        """Let go of the last step's gradients and losses; each step does so first."""
        for resident in self._residents.values():
            resident.reset()

    def held_tensors(self) -> list[torch.Tensor]:
        """What stays between steps, but gradients: parameters, buffers and the optimisers' state."""
        held: list[torch.Tensor] = []
        for resident in self._residents.values():
            held += [*resident.parameters.values(), *resident.buffers.values()]
            states = resident.optimizer.state.values() if resident.optimizer is not None else ()
            held += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return held

    def close(self) -> None:
        """Leave the transport."""
        self._transport.close()

    def _loss(self) -> float | None:
        resident = self._residents.get(self._loss_stage)
        if resident is None:
            return None
        loss = resident.loss()
        if len(resident.ranks) > 1:
            total = torch.tensor([loss], dtype=torch.float64)
            resident.add(total)
            loss = total.item()
        return loss

    def _named_state(self, module: nn.Module) -> dict[str, torch.Tensor]:
        here = {
            id(tensor)
            for resident in self._residents.values()
            for tensor in (*resident.parameters.values(), *resident.buffers.values())
        }
        everything = module.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in everything.items() if id(tensor) in here}

    def _check(self, batch: tuple[torch.Tensor, ...]) -> None:
        names = list(self._graph.inputs)
        if len(batch) != len(names):
            raise UsageError(f"a step takes {len(names)} tensors ({', '.join(names)}), it was given {len(batch)}")
        for tensor, (name, spec) in zip(batch, self._graph.inputs.items(), strict=True):
            expected = spec.at(self._decision.global_batch, self._graph.samples).shape
            if tuple(tensor.shape) != expected:
                dim = f" (the plan's global batch is {self._decision.global_batch})" if SAMPLE in spec.dims else ""
                raise UsageError(f"{name} has shape {tuple(tensor.shape)}, the plan expects {expected}{dim}")


def _refuse_updates_within_a_step(program: Program, schedule: str) -> None:
    """Raises :class:`UsageError` where micro-batches of a step see different weights: stages keep one version."""
    for rank, row in enumerate(program.rows):
        for action in row:
            if action.version or (action.op is Op.UPDATE and action.microbatch is not None):
                raise UsageError(
                    f"schedule {schedule} updates weights within a step, which cannot be run",
                    [f"rank {rank} has {action}; every rank keeps one version of its weights"],
                    ["--schedule 1f1b"],
                )


def device_of(decision: Decision, rank: int) -> str:
    """Name of the device that the plan means for ``rank``."""
    for stage in decision.stages:
        if rank in stage.ranks and len(stage.devices) == len(stage.ranks):
            return stage.devices[stage.ranks.index(rank)]
    return "no device"
