"""One rank of a running plan: what it was told, where it is, its model, its peers, and what follows from all of these.

    told       decision, rank, optimizer, seed, ...     the same on all ranks, but for the number
    place      device, meter, activity, ...             where it computes, and who hears of it
    model      model, module                            once it is captured
    peers      transport                                once all have met

What follows (boundaries, program, ties, groups, inputs, ...) is worked out once, when it is first asked for, by
whichever of the rank's parts comes first: the builder of its stages, their messages, the weights of its losses, the
source of its batches.

Errors of a step are told with where they happened: rank, device, stage, step, micro-batch and direction.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from cuda_ops.memory import MemoryMeter
from planner.ir.errors import CorruptFileError, HalopipeError, StageFailedError
from planner.ir.graph import Graph, producer
from planner.ir.plan import Decision
from planner.ir.program import Program
from planner.ir.schedule import Action, format_grid
from planner.layers.boundary import Boundaries
from planner.layers.division import divides
from planner.layers.recomputed import span_faults
from planner.passes.versions import is_versioned, updates_of
from runtime.captured import CapturedModule, LossCall, judged_inputs, judged_values, watched_values
from runtime.memory import out_of_memory
from runtime.monitor.activity import Activity
from runtime.monitor.waits import WORDS
from runtime.numerics.finite import OnNan
from runtime.optim.optimizer import MakeOptimizer, MakeScheduler
from runtime.optim.ties import TiedParameters, ties_in
from runtime.pipeline.microbatches import InputSpecs
from runtime.stage.cut import NUM_SAMPLES
from runtime.stage.sample_weights import inputs_counted
from runtime.stage.shapes import step_inputs
from runtime.timeouts import WAIT_S
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops.preparation import InputPreparation

Compiler = str | Callable[..., Any]
"""A backend of torch.compile, by name or as a function."""

GRID_WIDTH = 4
"""Actions shown on each side of the one that failed."""

NOTHING, SAVE, STOP, BAD = range(4)
"""What a rank asks of all when a step begins: nothing, a checkpoint after this step, an end before it, or to look at
the step before, which has NaN or infinity on that rank."""


@dataclass(slots=True)
class Vote:
    """What the ranks ask of one another; it travels with the barrier that every step begins with, and costs nothing.

    Attributes:
        mine: gives what this rank asks for; called when a step begins.
        is_bad: whether the step before has NaN or infinity here, which all have to hear before anything else.
        agreed: the most that a rank asked for when the last step began; the same on all ranks.
    """

    mine: Callable[[], int] = lambda: NOTHING
    is_bad: bool = False
    agreed: int = NOTHING

    @property
    def word(self) -> int:
        """For the barrier."""
        return BAD if self.is_bad else self.mine()


@dataclass(eq=False)
class RankContext:
    """What one rank knows.

    Attributes:
        optimizer: makes an optimiser of the parameters it is given; called once for each stage of this rank.
        scheduler: makes a schedule of learning rates of an optimiser; stepped once an update.
        seed: of what layers draw (dropout): the same numbers under every plan of the same micro-batches.
        clip_norm: largest norm of all gradients together; 0: they are not clipped.
        accumulate: steps whose gradients make up one update.
        on_nan: what is done about a loss or gradient that is NaN or infinite.
        deadline_s: longest wait for another rank, which its transport keeps to.
        lookahead: receives announced ahead; 0: as many as the memory model counts.
        compiler: backend of torch.compile (``inductor``) for the stages' training functions, whose ranks then exchange
            by collectives of torch.distributed; None: stages are not compiled.
        answers: whether the stages give what the module's output is made of, as a stream needs.
        device: where this rank computes; what its stages use is moved there, in place.  None: where the model is.
        meter: counts the memory of that device; None: nobody does.
        activity: told what is done, for a heartbeat.
        others: what the other ranks do, as one line; asked when something failed.
        meet: waits for all ranks where others may take long (:meth:`runtime.monitor.waits.RankHeartbeat.meet`).
        spare_core: of the host, for the thread that prepares batches ahead; None: there is none.
        gives_way: whether that thread then gives way to this one, as both have one core.
        vote: what this rank asks of the others when a step begins, and what all of them agreed on.
        turns: numbers the batches that ranks hand to each other; the same on all ranks.
        model: there from when it is captured until its stages are built; so is ``module``, the user's own, of which
            what this rank's stages hold is trained in place.
        transport: to the other ranks, with the :func:`groups_of` the plan declared; there once they have met.
    """

    decision: Decision
    optimizer: MakeOptimizer
    rank: int = 0
    scheduler: MakeScheduler | None = None
    seed: int = 0
    clip_norm: float = 0.0
    accumulate: int = 1
    on_nan: OnNan = OnNan.IGNORE
    deadline_s: float = WAIT_S
    lookahead: int = 0
    compiler: Compiler | None = None
    answers: bool = False
    device: torch.device | None = None
    meter: MemoryMeter | None = None
    activity: Activity = field(default_factory=Activity)
    others: Callable[[], str] = str  # says nothing
    meet: Callable[[], object] = str  # waits for nobody
    spare_core: int | None = None
    gives_way: bool = False
    vote: Vote = field(default_factory=Vote)
    turns: Iterator[int] = field(default_factory=count)
    model: CapturedModule = None  # type: ignore[assignment]  # until it is captured
    module: nn.Module = None  # type: ignore[assignment]  # the same
    transport: Transport = None  # type: ignore[assignment]  # until all have met

    def __post_init__(self) -> None:
        if self.transport is not None:
            self.rank = self.transport.rank

    @cached_property
    def graph(self) -> Graph:
        """Of the model.

        Raises:
            CorruptFileError: its layers are not the decision's.
        """
        check_layers(self.decision, self.model.graph)
        return self.model.graph

    @cached_property
    def boundaries(self) -> Boundaries:
        """What crosses between stages, at the sizes that are planned."""
        return Boundaries.of_decision(self.graph, self.decision)

    @cached_property
    def program(self) -> Program:
        """The rows of all ranks, with their messages."""
        return self.boundaries.program(self.decision)

    @cached_property
    def row(self) -> tuple[Action, ...]:
        """What this rank does in a step."""
        return self.program.rows[self.rank]

    @cached_property
    def is_versioned(self) -> bool:
        """Whether weights are updated while micro-batches of a step are on their way."""
        return is_versioned(self.program)

    @cached_property
    def updates_after(self) -> tuple[int, ...]:
        """The micro-batches after which weights are updated."""
        last = len(self.decision.micro_batches) - 1
        return tuple(last if end is None else end for end in updates_of(self.program))

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Those that run on this rank."""
        return tuple(stage for stage, each in enumerate(self.decision.stages) if self.rank in each.ranks)

    def position(self, stage: int) -> int:
        """This rank's place among those of one of its stages, in the plan's order."""
        return self.decision.stages[stage].ranks.index(self.rank)

    @cached_property
    def divided(self) -> frozenset[int]:
        """Stages whose ranks divide layers along more than samples."""
        return frozenset(s for s in range(len(self.decision.stages)) if divides(self.decision, s, self.graph))

    @cached_property
    def ties(self) -> tuple[TiedParameters, ...]:
        """The parameters that several stages use."""
        return ties_in(self.decision, self.graph)

    @cached_property
    def inputs(self) -> InputSpecs:
        """What a step is given."""
        return step_inputs(self.model)

    @cached_property
    def counted(self) -> Mapping[int, tuple[str, ...]]:
        """By stage, the inputs of which each rank reads its samples to know what parts of a batch count for."""
        layers_of = map(self.decision.layers_of, range(len(self.decision.stages)))
        names = {stage: inputs_counted(self.model, layers) for stage, layers in enumerate(layers_of)}
        return {stage: of_stage for stage, of_stage in names.items() if of_stage}

    @cached_property
    def takes_any(self) -> bool:
        """Whether a micro-batch may have any number of samples, not that of the capture alone."""
        return any(node.target == NUM_SAMPLES for node in self.model.graph_module.graph.nodes)

    @cached_property
    def judged(self) -> tuple[str, ...]:
        """The values that layers make and that the loss compares with the targets."""
        return judged_values(self.graph)

    @cached_property
    def loss_stage(self) -> int:
        """The stage that makes the loss."""
        return self.decision.layers[producer(self.graph.loss)].stage

    @cached_property
    def preparation(self) -> InputPreparation | None:
        """Makes the graph's inputs of batches of clouds or seeds; None: the model takes them as they are."""
        return self.model.preparation

    @property
    def per_site(self) -> tuple[bool, ...]:
        """Of each target of a sparse network, whether it has a value a point."""
        return () if self.preparation is None else self.preparation.per_site

    @cached_property
    def outputs(self) -> Mapping[str, str]:
        """The values that are the module's outputs, by the names that its user has for them."""
        return {name: value for name, value in self.model.outputs.items() if value}

    @cached_property
    def loss_call(self) -> LossCall | None:
        """How the user's loss function is called; None where it makes none."""
        return self.model.loss_call

    @cached_property
    def watched(self) -> tuple[str, ...]:
        """The values that layers make and that evaluation may be asked for."""
        return watched_values(self.model)

    @cached_property
    def judged_inputs(self) -> tuple[str, ...]:
        """The inputs that those are compared with."""
        return judged_inputs(self.model)

    @property
    def loss_rank(self) -> int:
        """The first rank that makes the loss."""
        return min(self.decision.stages[self.loss_stage].ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of the job."""
        return tuple(range(self.transport.world_size))

    def let_go(self) -> None:
        """Call when the stages are built: what others train need not stay alive."""
        for name in _OF_MODEL:
            getattr(self, name)
        self.model = cast(Any, None)
        self.module = cast(Any, None)

    def wait_for_all(self) -> None:
        """Waits for all ranks, of which some may take long, but for none that is gone.

        Raises:
            DeadlineError, TransportError: one is.
        """
        self.meet()
        self.transport.barrier()

    def where(self, rank: int, layer: str) -> str:
        """A rank in words, and the stage of a layer."""
        placement = self.decision.layers.get(layer)
        stage = "" if placement is None else f", stage {placement.stage}"
        return f"rank {rank} ({self.decision.device_of(rank)}{stage})"

    def of_action(self, error: Exception, step: int, action: Action) -> HalopipeError:
        """The error of an action, with the grid around it; what is not ours becomes a StageFailedError."""
        microbatch = "" if action.microbatch is None else f"micro-batch {action.microbatch}, "
        grid = format_grid(self.program.rows, (self.rank, action), GRID_WIDTH)
        typed = error if isinstance(error, HalopipeError) else out_of_memory(error) or stage_failed(error)
        return self.of(typed, step, f"{microbatch}{WORDS[action.op]}", f", stage {action.stage}", grid)

    def of(self, error: HalopipeError, step: int, doing: str, stage: str = "", grid: str = "") -> HalopipeError:
        """An error of the same kind that says where it happened and what the others do."""
        others = self.others()
        device = self.decision.device_of(self.rank)
        details = [*error.details, *([f"the others: {others}"] if others else []), *([grid] if grid else [])]
        title = f"rank {self.rank} ({device}{stage}) stopped at step {step}, {doing}: {error.title}"
        return type(error)(title, details, error.remedies)


_OF_MODEL = (
    "program",
    "inputs",
    "counted",
    "takes_any",
    "preparation",
    "outputs",
    "loss_call",
    "watched",
    "judged_inputs",
)
"""What a rank goes on to know of its model, when that is let go; the rest is of the graph."""

_NOT_USERS = (
    *(str(Path(__file__).parents[1] / name) + os.sep for name in ("cuda_ops", "halopipe", "planner", "runtime")),
    str(Path(torch.__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep + "contextlib",
    "<",
)
"""How paths of code begin that is ours or torch's, or was made by them."""


def stage_failed(error: Exception) -> StageFailedError:
    """Of what an operator, or the user's code, raised; its place is the innermost in that code, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((each for each in reversed(frames) if not each.filename.startswith(_NOT_USERS)), frames[-1])
    return StageFailedError(f"{type(error).__name__}: {error}", [f"raised at {frame.filename}:{frame.lineno}"])


def check_layers(decision: Decision, graph: Graph) -> None:
    """Raises :class:`CorruptFileError` unless the decision places exactly the graph's layers, and spans can run."""
    names = graph.by_name()
    faults = [f"layer {name} is in no stage" for name in names if name not in decision.layers]
    faults += [f"layer {name} is not in the model" for name in decision.layers if name not in names]
    if faults:
        raise CorruptFileError("the plan's layers are not those of the model", faults[:20])
    wrong_spans = [fault for stage in range(len(decision.stages)) for fault in span_faults(decision, stage, graph)]
    if wrong_spans:
        raise CorruptFileError("the plan's layers cannot be computed again so", wrong_spans[:20])
