"""The two sides of a comparison: one network and one schedule under halopipe's engine and under torch's pipelining.

Both train the same ``Sequential`` of linear layers, cut into equal stages, with the same optimiser on the same batch;
what differs is who runs it.  torch's side uses the class that it has for a schedule; where it has none, its runtime of
action lists, given ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.devices.ranks import sgd
from cuda_ops._torch import pipeline_schedule
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.profile import ModelSource
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, Pipeline, StageGraph
from planner.ir.timeline import Span
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import positions, schedule
from profiler import load_model
from profiler.capture.graph import capture
from runtime import Engine, RankContext
from runtime.numerics.finite import OnNan
from runtime.transport import Transport

NUM_RANKS = 2
SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTIPLE = {
    "interleaved": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}


def chain(width: int, num_layers: int, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor], nn.MSELoss]:
    """Linear layers with ReLUs between them."""
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), (torch.randn(batch, width), torch.randn(batch, width)), nn.MSELoss()


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        schedule: by our name.
        width, num_layers: of the network.
        rows: of a micro-batch.
        stages_per_rank: the network is cut into twice as many stages.
    """

    schedule: str
    width: int
    num_layers: int
    rows: int
    num_microbatches: int
    stages_per_rank: int = 1

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.rows * self.num_microbatches

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return positions(self.schedule, NUM_RANKS, self.stages_per_rank)

    @cached_property
    def source(self) -> ModelSource:
        """The model, as a plan would name it."""
        sizes = {"width": self.width, "num_layers": self.num_layers, "batch": self.batch}
        return ModelSource("benchmarks.executor.sides:chain", {name: str(size) for name, size in sizes.items()})

    def stage_of(self, layer: str) -> int:
        """The stage of a layer of the ``Sequential``, and of the loss."""
        per_stage = 2 * self.num_layers // len(self.ranks)
        return int(layer) // per_stage if layer.isdecimal() else len(self.ranks) - 1

    def decision(self, graph: Graph) -> Decision:
        """The lowered plan."""
        placements = {layer.name: Placement(self.stage_of(layer.name)) for layer in graph.layers}
        stages = tuple(Stage((rank,), (f"host/cpu{rank}",)) for rank in self.ranks)
        micro_batches = (self.rows,) * self.num_microbatches
        draft = Decision(self.schedule, micro_batches, stages, placements, ())
        boundaries = Boundaries.of_decision(graph, draft)
        edges = boundaries.edges()
        dag = StageGraph(len(stages), self.num_microbatches, edges)
        order = schedule(self.schedule)(Pipeline(dag, self.ranks))
        program = lower(order, dag, boundaries.ranks, boundaries.routes(edges, micro_batches), NUM_RANKS)
        return replace(draft, program=tuple(tuple(map(str, row)) for row in program.rows))


class Ours:
    """halopipe's engine on one rank.

    Attributes:
        graph: of the network.
        decision, program: what it executes.
        spans: of the last step.
    """

    def __init__(self, case: Case, transport: Transport, on_nan: OnNan = OnNan.IGNORE) -> None:
        model = load_model(case.source)
        captured = capture(model)
        self.graph = captured.graph
        decision = case.decision(captured.graph)
        self.decision = decision
        self.program: Program = Boundaries.of_decision(captured.graph, decision).program(decision)
        self.spans: tuple[Span, ...] = ()
        self.step_s = 0.0
        self._batch = model.inputs, model.targets
        self._context = RankContext(
            decision, sgd, on_nan=on_nan, model=captured, module=model.module, transport=transport
        )
        self.held = [p for name, p in model.module.named_parameters() if self._is_here(case, name, transport.rank)]
        self._engine: Engine | None = None

    def start(self) -> None:
        """Make the engine."""
        self._engine = Engine(self._context)

    def step(self) -> None:
        """One training step; the engine waits for the others itself."""
        result = self.engine.step(*self._batch)
        self.spans = result.spans
        self.step_s = result.step_s

    def gradients(self) -> dict[str, Tensor]:
        """Of the last step, by the model's own names."""
        return self.engine.gradients()

    @property
    def engine(self) -> Engine:
        """Once it was made."""
        if self._engine is None:
            raise RuntimeError("start() comes first")
        return self._engine

    @staticmethod
    def _is_here(case: Case, parameter: str, rank: int) -> bool:
        return case.ranks[case.stage_of(parameter.partition(".")[0])] == rank


class Theirs:
    """``torch.distributed.pipelining`` on one rank, in the default process group."""

    def __init__(self, case: Case, transport: Transport, program: Program) -> None:
        model = load_model(case.source)
        modules = list(model.module.named_children())
        here = [stage for stage, rank in enumerate(case.ranks) if rank == transport.rank]
        self._parts = {
            stage: nn.Sequential(*(part for name, part in modules if case.stage_of(name) == stage)) for stage in here
        }
        self._names = {
            stage: [name for name, _ in model.module.named_parameters() if _stage_of(case, name) == stage]
            for stage in here
        }
        self._case = case
        self._program = program
        self._loss_fn = nn.MSELoss()
        self._inputs = model.inputs if 0 in here else ()
        self._target = model.targets[0] if len(case.ranks) - 1 in here else None
        self.held = [parameter for part in self._parts.values() for parameter in part.parameters()]

    def start(self) -> None:
        """Make stages and schedule."""
        case = self._case
        device = torch.device("cpu")
        stages = [PipelineStage(part, stage, len(case.ranks), device) for stage, part in self._parts.items()]
        count = case.num_microbatches
        loss_fn = self._loss_fn
        self._optimizers = [sgd(part.parameters()) for part in self._parts.values()]
        if case.schedule in SINGLE:
            self._schedule = SINGLE[case.schedule](stages[0], count, loss_fn)
        elif case.schedule in MULTIPLE:
            self._schedule = MULTIPLE[case.schedule](stages, count, loss_fn)
        else:
            rows = [[str(action) for action in row if action.op in COMPUTE] for row in self._program.rows]
            self._schedule = pipeline_schedule(stages, count, loss_fn, rows)

    def step(self) -> None:
        """One training step, in step with the other rank as the engine is."""
        dist.barrier()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        losses = None if self._target is None else []
        self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        for optimizer in self._optimizers:
            optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """Of the last step, by the model's own names."""
        found = {}
        for stage, part in self._parts.items():
            for name, parameter in zip(self._names[stage], part.parameters(), strict=True):
                if parameter.grad is not None:
                    found[name] = parameter.grad
        return found


class Bare:
    """The same forwards and backwards of one rank, called directly: no runtime, no messages, no waiting."""

    def __init__(self, case: Case, transport: Transport) -> None:
        model = load_model(case.source)
        parts = [part for name, part in model.module.named_children() if _stage_of(case, name) == transport.rank]
        self._stage = nn.Sequential(*parts)
        self._last = transport.rank == NUM_RANKS - 1
        self._inputs = model.inputs[0].split(case.rows)
        self._targets = model.targets[0].split(case.rows)
        self._loss_fn = nn.MSELoss()
        self._optimizer = sgd(self._stage.parameters())

    def step(self) -> None:
        """One training step of the stage."""
        self._optimizer.zero_grad()
        for rows, wanted in zip(self._inputs, self._targets, strict=True):
            output = self._stage(rows.requires_grad_(self._last))
            (self._loss_fn(output, wanted) if self._last else output).backward(None if self._last else wanted)
        self._optimizer.step()


def _stage_of(case: Case, name: str) -> int:
    return case.stage_of(name.partition(".")[0])
