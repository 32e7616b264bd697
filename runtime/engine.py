"""The engine: one rank's part of a plan, step after step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cuda_ops.memory import MemoryMeter
from planner.ir.errors import DeadlineError, TransportError, UsageError
from planner.ir.graph import producer
from planner.ir.plan import Decision
from planner.ir.timeline import Span
from planner.layers import require_several_values
from planner.layers.boundary import Boundaries
from planner.passes.versions import is_versioned, partial_batch_refused, updates_of
from runtime.monitor.activity import Activity
from runtime.numerics.finite import OnNan
from runtime.numerics.nan_guard import GuardedStep, NanGuard
from runtime.optim.gradient_sync import GradientSync, check_finishing
from runtime.optim.optimizer import MakeScheduler
from runtime.pipeline.executor import Context, StepEnvironment, StopBeforeStepError, Vote
from runtime.pipeline.loss_weighting import LossWeighting
from runtime.pipeline.microbatches import Batch, InputSpecs, WholeBatch
from runtime.pipeline.routing import Piece
from runtime.pipeline.runner import Runner
from runtime.pipeline.specialize import Specialization, Specializer
from runtime.stage.builder import MakeOptimizer, StageBuilder, check_layers, ties_in
from runtime.stage.captured import CapturedModel, answers_of
from runtime.stage.index_ranges import index_ranges
from runtime.stage.shapes import graph_at, varying_dims, without_data
from runtime.stage.state_dict import StateDict
from runtime.transport import Transport

if TYPE_CHECKING:
    from runtime.checkpoint.state import RankState
    from runtime.pipeline.stream import RequestStream, Setting
    from runtime.sparse.ahead import BatchPreparation
    from runtime.sparse.share import AnyBatch
    from runtime.spatial import Compiler


_OTHER_BATCH = (
    "leave the smaller last batch out: DataLoader(..., drop_last=True)",
    "another halopipe plan --global-batch",
)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave on one rank.

    Attributes:
        loss: of the whole global batch; None on ranks that do not make it.
        step_s: from the common start to this rank's end; of clouds with the time of finding their sites before.
        spans: when each action ran, in order.
        gradient_norm: of all gradients before they were clipped; None where they are not, or not yet.
        learning_rates: that this step used, of this rank's optimisers' groups.
        peak_bytes: the most in use in each action, then behind the last; empty where memory is not counted.
        left_out: why no rank made the update, where it was left out (``on_nan``).
        before_bytes: the most in use before the program, while sites were found; 0 where none are, or nothing counts.
    """

    loss: float | None
    step_s: float
    spans: tuple[Span, ...]
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    left_out: str = ""
    before_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """What forward passes in evaluation mode gave on one rank.

    Attributes:
        loss: of the whole batch; None on ranks that do not make it.
        num_samples: of the whole batch.
        outputs: what the loss is computed from, or was to be kept, this rank's part, by micro-batch and name of the
            value: where it lies in the micro-batch, and the tensor.
        batch: what was evaluated on, as the graph's inputs.
        step_s, spans, peak_bytes: as of a :class:`StepResult`.
    """

    loss: float | None
    num_samples: int
    outputs: Mapping[int, Mapping[str, Piece]]
    batch: Batch
    step_s: float = 0.0
    spans: tuple[Span, ...] = ()
    peak_bytes: tuple[int, ...] = ()


class Engine(StateDict):
    """Executes ``decision`` on this rank of ``transport``.

    A step gives the losses, gradients and buffers of one device that runs the micro-batches in the program's order: the
    loss of each weighted by its rows, gradients added, batch normalisation within each micro-batch, one update.

    Args:
        model: its parameters and buffers are those of ``module``.  The engine keeps of it what this rank's stages use.
        module: the user's; what this rank's stages hold of it is trained in place.
        transport: with ``runtime.stage.builder.groups_of(decision, model.graph)`` declared.
        optimizer: makes an optimiser of the parameters it is given; called once for each stage of this rank.
        scheduler: makes a schedule of learning rates of an optimiser; stepped once an update.
        seed: of what layers draw (dropout): the same numbers under every plan.
        clip_norm: largest norm of all gradients together; 0: they are not clipped.
        accumulate: steps whose gradients make up one update.
        on_nan: what is done about a loss or gradient that is NaN or infinite.
        lookahead: receives announced ahead; 0: as many as the memory model counts.
        compiler: backend of torch.compile (``inductor``) for the stages' training functions, whose ranks then exchange
            by collectives of torch.distributed; None: stages are not compiled.
        activity: told what is done, for a heartbeat.
        device: where this rank computes; what its stages use is moved there, in place.  None: where the model is.
        meter: counts the memory of the stages' device (:func:`runtime.memory.meter_of`).
        others: what the other ranks do, as one line; asked when something failed.
        answers: whether the stages give what the module's output is made of, as :meth:`stream` needs.
        spare_core: of the host, for the thread that prepares batches ahead; None: there is none.
        gives_way: whether that thread then gives way to this one, as both have one core.

    Raises:
        CorruptFileError: the decision's layers are not the graph's.
        UnsupportedModelError: the model cannot be cut that way.
        UsageError: what is asked for does not go with the plan's schedule.
    """

    def __init__(
        self,
        decision: Decision,
        model: CapturedModel,
        module: nn.Module,
        transport: Transport,
        optimizer: MakeOptimizer,
        *,
        scheduler: MakeScheduler | None = None,
        seed: int = 0,
        clip_norm: float = 0.0,
        accumulate: int = 1,
        on_nan: OnNan = OnNan.IGNORE,
        lookahead: int = 0,
        compiler: Compiler | None = None,
        device: torch.device | None = None,
        activity: Activity | None = None,
        meter: MemoryMeter | None = None,
        others: Callable[[], str] = str,
        answers: bool = False,
        spare_core: int | None = None,
        gives_way: bool = False,
    ) -> None:
        check_layers(decision, model.graph)
        self._decision, self._graph = decision, model.graph
        self._activity = activity or Activity()
        boundaries = Boundaries.of_decision(model.graph, decision)
        self._axes = boundaries.axes
        program = boundaries.program(decision)
        ties = ties_in(decision, model.graph)
        if ties or clip_norm or on_nan is OnNan.SKIP:
            check_finishing(program)
        self._versioned, self._trains = is_versioned(program), program.trains
        self._refuse_what_versions_forbid(accumulate)
        made_for = (decision, model, boundaries, program.stages, transport, optimizer)
        answer_values = answers_of(model) if answers else ()
        builder = StageBuilder(*made_for, seed=seed, compiler=compiler, device=device, answers=answer_values)
        super().__init__(builder.local_stages(), decision, model, module, transport)
        self.layers_by_micro_batch = builder.layers_by_micro_batch
        for local_stage in self._local_stages.values():
            if scheduler is not None and local_stage.optimizer is not None:
                local_stage.optimizer.schedule(scheduler)
        self._gradient_sync = GradientSync(
            self._local_stages,
            ties,
            transport,
            clip_norm=clip_norm,
            on_nan=on_nan,
            accumulate=accumulate,
        )
        self._vote = Vote()
        self._guard = NanGuard(
            on_nan,
            self._local_stages,
            self._gradient_sync,
            transport,
            self._activity,
            model.graph.loss,
            decision.layers,
            self._where,
            self._run_again,
            self._vote,
        )
        self._norm: float | None = None
        self._loss_stage = decision.layers[producer(model.graph.loss)].stage
        self._judged = model.judged
        self._inputs = InputSpecs(model.fed, model.graph.samples, varying_dims(model), index_ranges(model))
        # Shapes that are not the capture's are found on a copy without parameters.
        reshape = partial(graph_at, without_data(model)) if model.sizes and model.prepared is None else None
        loss_weighting = LossWeighting(model, decision, transport.rank, updates_of(program))
        specializer = Specializer(decision, model, boundaries, program, transport.rank, reshape, loss_weighting)
        specializer.require_possible(self._local_stages)
        self._environment = StepEnvironment(
            transport,
            Context(program, transport.rank, decision.device_of(transport.rank), others),
            self._activity,
            lookahead,
            self.device if device is None else device,
            self._finish,
            meter,
            self._vote,
        )
        preparing = preparing_of(decision, model, spare_core, gives_way)
        self._runner = Runner(
            specializer, self._local_stages, self._environment, loss_weighting, preparing, self._guard.heard
        )
        self._streaming: Setting | None = None
        if answers:
            from runtime.pipeline.stream import setting_of  # late, see `stream`

            whole = (decision, model, module)
            self._streaming = setting_of(*whole, self._local_stages, self._inputs, takes_any=specializer.takes_any)

    @property
    def meter(self) -> MemoryMeter | None:
        """Counts the memory of the stages' device; None: nobody does."""
        return self._environment.meter

    @property
    def vote(self) -> Vote:
        """What this rank asks of the others when a step begins, and what all of them agreed on."""
        return self._vote

    @property
    def is_updated(self) -> bool:
        """Whether the last step ended with an update."""
        return self._gradient_sync.is_last

    @property
    def has_updated(self) -> bool:
        """The same, and it was not left out."""
        return self._gradient_sync.is_last and not self._gradient_sync.is_spoilt

    def step(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> StepResult:
        """One training step on a batch that every rank is given whole.

        Fewer rows than planned fill the first micro-batches.

        Raises:
            UsageError: the tensors are not what the model takes, or more rows than planned.
            StageFailedError, DeadlineError, TransportError: the step failed; the engine cannot be used any more.
            StopBeforeStepError: a rank asked to stop; the state is as before, the engine takes no more steps.
            NotFiniteError: so did the step before, or this one.
        """
        return self.step_on(WholeBatch(self._inputs, (*inputs, *targets), self._decision.micro_batches))

    def step_on(self, batch: Batch) -> StepResult:
        """One training step on ``batch``, which is the same on all ranks."""
        if not self._trains:
            raise UsageError("this plan has forward passes alone, it cannot train", [], ["evaluate", "plan again"])
        if self._versioned and batch.rows != self._decision.micro_batches:
            sizes = f"the batch has micro-batches of {batch.rows}, the plan {self._decision.micro_batches}"
            raise partial_batch_refused(self._decision.schedule, [sizes], _OTHER_BATCH)
        require_several_values(self._graph, batch.rows, _OTHER_BATCH)
        rates = tuple(
            chain.from_iterable(r.optimizer.learning_rates() for r in self._local_stages.values() if r.optimizer)
        )
        graph_batch, specialization, ahead_s, before_bytes = self._bound(batch, self.num_steps, trains=True)
        executor = self._runner.executor(specialization, evaluates=False)
        self._gradient_sync.begin()
        self._norm, kept = None, self._guard.begin()
        try:
            ran, step_s = self._runner.run(executor, graph_batch, self.num_steps)
        except StopBeforeStepError:
            self._gradient_sync.take_back()
            raise
        loss = self._loss(specialization)
        self.num_steps += 1
        left_out = self._guard.judge(GuardedStep(self.num_steps - 1, batch, loss, kept))
        self._activity.num_done, self._activity.loss, self._activity.step_s = self.num_steps, loss, step_s
        self._activity.steps.note(self.num_steps, ran.spans, step_s)
        seconds, peaks = ahead_s + step_s, ran.peak_bytes
        return StepResult(loss, seconds, ran.spans, self._norm, rates, peaks, left_out, before_bytes)

    def evaluate(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> EvaluationResult:
        """Forward passes in evaluation mode (running statistics, nothing dropped); nothing is changed by them."""
        return self.evaluate_on(WholeBatch(self._inputs, (*inputs, *targets), self._decision.micro_batches))

    def evaluate_on(self, batch: Batch, keep: Sequence[str] = ()) -> EvaluationResult:
        """As :meth:`evaluate`, on any batch.

        Args:
            batch: whose samples are those of the plan's micro-batches, or fewer.
            keep: values whose parts are given back instead of what the loss is computed from; among
                :attr:`runtime.stage.captured.CapturedModel.watched`.
        """
        batch, specialization, ahead_s, _ = self._bound(batch, self.num_steps)
        executor = self._runner.executor(specialization, evaluates=True)
        executor.kept = tuple(keep) or self._judged
        ran, step_s = self._runner.run(executor, batch, self.num_steps)
        loss, seconds = self._loss(specialization), ahead_s + step_s
        outputs: dict[int, Mapping[str, Piece]] = dict(executor.outputs)
        if self._axes is not None:
            from runtime.spatial.slices import of_micro_batches  # late: few plans cut sequences

            outputs = of_micro_batches(self._axes, outputs, batch.rows, self._decision.num_slices)
        return EvaluationResult(loss, sum(batch.rows), outputs, batch, seconds, ran.spans, ran.peak_bytes)

    def stream(self, *, learns: bool = False, training: bool = True) -> RequestStream:
        """An endless stream of batches, of which several may be on their way through the stages.

        Args:
            learns: whether each stage updates its weights after each batch, by losses of its own.
            training: whether stages run in the mode that the module was captured in, else in evaluation mode.

        Raises:
            UsageError: the engine was not made for answers, or a plan does not learn by local losses alone.
        """
        if self._streaming is None:
            raise UsageError("this engine gives no answers", ["it was made to train"], ["Engine(..., answers=True)"])
        if self._decision.num_slices > 1:
            remedies = ["plan without --allow time and --token-slices"]
            raise UsageError("a stream is not cut into token slices", ["the plan is"], remedies)
        from runtime.pipeline.stream import RequestStream, require_local  # late: most ranks serve no stream

        if learns:
            require_local(self._environment.context.program, self._gradient_sync, self._versioned)
        setting, runner = replace(self._streaming, learns=learns, training=training), self._runner
        return RequestStream(setting, self._environment, runner.stream_binding, self._begin_in_stream, runner.next_turn)

    @property
    def preparing(self) -> BatchPreparation[AnyBatch] | None:
        """Makes batches of clouds or seeds the graph's inputs; None: the model takes them as they are."""
        return self._runner.preparing

    @property
    def looks_ahead(self) -> bool:
        """Whether the next step's batch is prepared while this one is computed, if it is known (:meth:`expect`)."""
        return self.preparing is not None and self.preparing.looks_ahead

    def expect(self, batch: Batch) -> None:
        """Prepare ``batch``, that of the next step, while this one is computed; nothing where nobody looks ahead."""
        if self.preparing is not None and self.preparing.looks_ahead:
            self.preparing.expect(batch, self._transport.rank)

    def state(self) -> RankState:
        """All that this rank has to save for training to go on, also under another plan; no copies.

        Raises:
            UsageError: gradients wait for those of the next steps (``accumulate``), which is not part of the state.
            NotFiniteError: the state, or the last step, has NaN or infinity, and that is not to be ignored.
        """
        self.settle()
        self._require_updated()
        rank_state = super().state()
        self._guard.require_finite(rank_state, self.named, self.num_steps)
        return rank_state

    def whole_optimizer_state(self, *, of_last_update: bool = False) -> dict[str, Any]:
        """As of :class:`StateDict`.  Raises as :meth:`state`, but for what is not finite.

        Args:
            of_last_update: whatever has come since then, such as gradients that wait.
        """
        if not of_last_update:
            self.settle()
            self._require_updated()
        return super().whole_optimizer_state()

    def gradients(self) -> dict[str, Tensor]:
        """As of :class:`StateDict`, once the others' word on the last step has come."""
        self.settle()
        return super().gradients()

    @contextmanager
    def between_steps(self, doing: str) -> Iterator[None]:
        """Errors of what ranks do together beside their steps say where they were, as those of a step do."""
        try:
            yield
        except (DeadlineError, TransportError) as error:
            raise self._environment.context.of(error, self.num_steps, doing) from error

    def settle(self) -> None:
        """Waits for the others' word on the last step; all ranks call this before anything but the next step follows.

        Raises:
            NotFiniteError: on some rank its loss or a gradient is NaN or infinite; all ranks raise this.
        """
        with self.between_steps("waiting for the others to end the step"):
            self._guard.settle(self.num_steps)

    def close(self) -> None:
        """Leave the transport."""
        self._transport.close()

    def _where(self, rank: int, layer: str) -> str:
        placement = self._decision.layers.get(layer)
        stage = "" if placement is None else f", stage {placement.stage}"
        return f"rank {rank} ({self._decision.device_of(rank)}{stage})"

    def _require_updated(self) -> None:
        if not self.is_updated:
            raise UsageError(
                f"after step {self.num_steps} gradients wait for the update",
                ["they are not saved"],
                ["save after an update"],
            )

    def _bound(self, raw: Batch, step: int, *, trains: bool = False) -> tuple[Batch, Specialization, float, int]:
        """As :meth:`runtime.pipeline.runner.Runner.bound`.

        Of clouds what was made of the batch before goes first: sites and maps are much of what a rank holds, and would
        be there twice while the next are made.  So do gradients, where a training step begins with none.
        """
        if self._runner.preparing is not None:
            self._gradient_sync.bind(None)
            for each in self._local_stages.values():
                each.program.reset(step)
                if trains and self._gradient_sync.is_last:
                    each.forget_gradients()
        bound = self._runner.bound(raw, step)
        self._gradient_sync.bind(bound[1].local_stages)
        return bound

    def _run_again(self, guarded: GuardedStep) -> None:
        """The same step on the same batch; of clouds their sites are found once more."""
        batch, specialization, _, _ = self._bound(guarded.batch, guarded.number)
        self._runner.run(self._runner.executor(specialization, evaluates=False), batch, guarded.number)

    def _begin_in_stream(self, batch: Batch, specialization: Specialization, learns: bool) -> None:
        self._runner.weigh(batch, specialization)
        if learns:
            self._gradient_sync.bind(specialization.local_stages)
            self._gradient_sync.begin()
            self.num_steps += 1

    def _finish(self) -> None:
        self._norm = self._gradient_sync.run()

    def _loss(self, specialization: Specialization) -> float | None:
        local_stage = specialization.local_stages.get(self._loss_stage)
        if local_stage is None:
            return None
        loss = local_stage.loss()
        if len(local_stage.ranks) > 1:
            total = torch.tensor([loss], dtype=torch.float64)
            local_stage.add(total)
            loss = total.item()
        return loss / sum(specialization.rows)

    def _refuse_what_versions_forbid(self, accumulate: int) -> None:
        if self._versioned and accumulate > 1:
            raise UsageError(
                f"schedule {self._decision.schedule} updates the weights within a step",
                [f"gradients of {accumulate} steps cannot be gathered for one update"],
                ["a larger global batch", "halopipe plan --schedule 1f1b"],
            )


def preparing_of(
    decision: Decision, model: CapturedModel, core: int | None = None, gives_way: bool = False
) -> BatchPreparation[AnyBatch] | None:
    """What makes a sparse or graph network's batches its graph's inputs; None: the model takes batches as they are.

    Args:
        core, gives_way: as of :class:`Engine`.
    """
    if model.prepared is None:
        return None
    from runtime.sparse.preparing import preparing  # late: other networks do without

    return preparing(decision, model.prepared, core, gives_way=gives_way)
