"""The engine: one rank's part of a plan, step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cuda_ops.memory import MemoryMeter
from planner.ir.errors import DeadlineError, StageFailedError, TransportError, UsageError
from planner.ir.graph import producer
from planner.ir.plan import Decision
from planner.ir.schedule import FORWARD_PASS, Action
from planner.ir.timeline import Span
from planner.layers.boundary import Boundaries
from planner.passes.versions import is_versioned, updates_of
from runtime.checkpoint.state import RankState
from runtime.checkpoint.training_state import (
    load_rank_state,
    named_parts,
    named_slices,
    named_state,
    rank_state,
    speakers,
    unread_state,
)
from runtime.monitor.activity import Activity
from runtime.numerics.finite import OnNan
from runtime.numerics.guard import Guard, Ran
from runtime.optim.finishing import Finishing, check_finishing
from runtime.optim.optimizer import MakeScheduler
from runtime.optim.optimizer_state import StateSource, load_state
from runtime.optim.pass_shards import PassShards
from runtime.optim.sharding import ParameterSlice
from runtime.optim.whole_state import Given, pieces_of, whole_of
from runtime.pipeline.executor import Asking, Context, Executor, RowTrace, StepEnvironment, StopBeforeStepError
from runtime.pipeline.messages import Piece
from runtime.pipeline.microbatches import Batch, InputSpecs, WholeBatch
from runtime.pipeline.sample_weights import Weighing
from runtime.pipeline.specialize import Binder, Binding
from runtime.pipeline.stream import Setting, Stream, answers_of, reads_of, require_local, statistics_of
from runtime.spatial.collectives import gathered, gathered_gradients, united
from runtime.spatial.compiling.compiled import Compiler
from runtime.spatial.slices import joined
from runtime.stage.builder import Builder, MakeOptimizer, check_layers, ties_in
from runtime.stage.captured import CapturedModel
from runtime.stage.shapes import graph_at, varying_dims, without_data
from runtime.transport import Transport

if TYPE_CHECKING:
    from runtime.sparse.ahead import BatchPreparation
    from runtime.sparse.share import AnyBatch

_MOST_KEPT = 64
"""Combinations of sizes whose executors are kept."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave on one rank.

    Attributes:
        loss: of the whole global batch; None on ranks that do not make it.
        step_s: from the common start to this rank's end; of clouds with the time of finding their sites before.
        spans: when each action ran, in order.
        thread_s: this thread's processor time in each of them.
        gradient_norm: of all gradients before they were clipped; None where they are not, or not yet.
        learning_rates: that this step used, of this rank's optimisers' groups.
        peak_bytes: the most in use in each action, then behind the last; empty where memory is not counted.
        left_out: why no rank made the update, where it was left out (``on_nan``).
        before_bytes: the most in use before the program, while sites were found; 0 where none are, or nothing counts.
    """

    loss: float | None
    step_s: float
    spans: tuple[Span, ...]
    thread_s: tuple[float, ...]
    gradient_norm: float | None = None
    learning_rates: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    left_out: str = ""
    before_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
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


class Engine:
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
        deadline_s: longest wait for another rank.
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
        deadline_s: float = 120.0,
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
        self._decision, self._transport = decision, transport
        self._activity = activity or Activity()
        boundaries = Boundaries.of_decision(model.graph, decision)
        self._axes = boundaries.axes
        program = boundaries.program(decision)
        ties = ties_in(decision, model.graph)
        if ties or clip_norm or on_nan is OnNan.SKIP:
            check_finishing(program)
        self._versioned, self._trains = is_versioned(program), program.trains
        self._refuse_what_versions_forbid(accumulate)
        made_for = (decision, model, boundaries, program.stages, transport, optimizer, deadline_s)
        self._answers = answers_of(model) if answers else ()
        builder = Builder(*made_for, seed=seed, compiler=compiler, device=device, answers=self._answers)
        self._residents, self.layers_by_micro_batch = builder.residents(), builder.layers_by_micro_batch
        for resident in self._residents.values():
            if scheduler is not None and resident.optimizer is not None:
                resident.optimizer.schedule(scheduler)
        self._finishing = Finishing(
            self._residents,
            ties,
            transport,
            clip_norm=clip_norm,
            on_nan=on_nan,
            accumulate=accumulate,
            deadline_s=deadline_s,
        )
        self._asking = Asking()
        self._guard = Guard(
            on_nan,
            self._residents,
            self._finishing,
            transport,
            self._activity,
            deadline_s,
            model.graph.loss,
            decision.layers,
            self._where,
            self._run_again,
            self._asking,
        )
        self._norm: float | None = None
        self._loss_stage = decision.layers[producer(model.graph.loss)].stage
        self._judged = model.judged
        self._state = named_state(self._residents, model, module)
        self._statistics = statistics_of(module, model, self._residents) if answers else frozenset()
        self._read = reads_of(decision, model, self._residents) if answers else ()
        self._parts = named_parts(self._residents, self._state)
        self._sliced = named_slices(self._residents, self._state)
        self._speaks = speakers(model, decision)
        self._unread = unread_state(model, module, self._speaks)
        self._inputs = InputSpecs(model.fed, model.graph.samples, varying_dims(model))
        # Shapes that are not the capture's are found on a copy without parameters.
        reshape = partial(graph_at, without_data(model)) if model.sizes and model.prepared is None else None
        self._weighing = Weighing(model, decision, transport.rank, updates_of(program))
        self._binder = Binder(decision, model, boundaries, program, transport.rank, reshape, self._weighing)
        self._preparing = preparing_of(decision, model, spare_core, gives_way)
        self._binder.require_possible(self._residents)
        self._around = StepEnvironment(
            transport,
            Context(program, transport.rank, device_of(decision, transport.rank), others),
            deadline_s,
            self._activity,
            lookahead,
            self._device() if device is None else device,
            self._finish,
            meter,
            self._asking,
        )
        self._executors: dict[tuple[Binding, bool], Executor] = {}
        self._step = self._turn = 0

    @property
    def num_steps(self) -> int:
        """Training steps done, those before a checkpoint that was loaded included."""
        return self._step

    @property
    def meter(self) -> MemoryMeter | None:
        """Counts the memory of the stages' device; None: nobody does."""
        return self._around.meter

    @property
    def asking(self) -> Asking:
        """What this rank asks of the others when a step begins, and what all of them agreed on."""
        return self._asking

    @property
    def is_updated(self) -> bool:
        """Whether the last step ended with an update."""
        return self._finishing.is_last

    @property
    def has_updated(self) -> bool:
        """The same, and it was not left out."""
        return self._finishing.is_last and not self._finishing.is_spoilt

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
            raise UsageError(
                f"schedule {self._decision.schedule} updates the weights within a step, which needs a full batch",
                [f"the batch has micro-batches of {batch.rows}, the plan {self._decision.micro_batches}"],
                ["leave the smaller last batch out (drop_last=True)", "--schedule 1f1b"],
            )
        rates = tuple(
            chain.from_iterable(r.optimizer.learning_rates() for r in self._residents.values() if r.optimizer)
        )
        if self._preparing is not None and self._finishing.is_last:
            self.forget_gradients()  # which the step does anyhow, but not before it has found its sites
        batch, binding, ahead_s, before_bytes = self._bound(batch)
        executor = self._executor(binding, evaluates=False)
        self._finishing.begin(binding.residents)
        self._norm, kept = None, self._guard.begin()
        try:
            ran, step_s = self._run(executor, batch, self._step)
        except StopBeforeStepError:
            self._finishing.take_back()
            raise
        loss = self._loss(binding)
        self._step += 1
        left_out = self._guard.judge(Ran(self._step - 1, batch, binding, loss, kept))
        self._activity.num_done, self._activity.loss, self._activity.step_s = self._step, loss, step_s
        self._activity.steps.note(self._step, ran.spans, step_s)
        seconds, peaks = ahead_s + step_s, ran.peak_bytes
        return StepResult(loss, seconds, ran.spans, ran.thread_s, self._norm, rates, peaks, left_out, before_bytes)

    def evaluate(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Evaluation:
        """Forward passes in evaluation mode (running statistics, nothing dropped); nothing is changed by them."""
        return self.evaluate_on(WholeBatch(self._inputs, (*inputs, *targets), self._decision.micro_batches))

    def evaluate_on(self, batch: Batch, keep: Sequence[str] = ()) -> Evaluation:
        """As :meth:`evaluate`, on any batch.

        Args:
            batch: whose samples are those of the plan's micro-batches, or fewer.
            keep: values whose parts are given back instead of what the loss is computed from; among
                :attr:`runtime.stage.captured.CapturedModel.watched`.
        """
        batch, binding, ahead_s, _ = self._bound(batch)
        executor = self._executor(binding, evaluates=True)
        executor.kept = tuple(keep) or self._judged
        ran, step_s = self._run(executor, batch, self._step)
        seconds = ahead_s + step_s
        return Evaluation(
            self._loss(binding),
            sum(batch.rows),
            self._whole_outputs(executor.outputs, batch.rows),
            batch,
            seconds,
            ran.spans,
            ran.peak_bytes,
        )

    def stream(self, *, learns: bool = False, training: bool = True) -> Stream:
        """An endless stream of batches, of which several may be on their way through the stages.

        Args:
            learns: whether each stage updates its weights after each batch, by losses of its own.
            training: whether stages run in the mode that the module was captured in, else in evaluation mode.

        Raises:
            UsageError: the engine was not made for answers, or a plan does not learn by local losses alone.
        """
        if not self._answers:
            raise UsageError("this engine gives no answers", ["it was made to train"], ["Engine(..., answers=True)"])
        if self._decision.num_slices > 1:
            raise UsageError("a stream is not cut into token slices", ["the plan is"], ["plan without --allow time"])
        if learns:
            require_local(self._around.context.program, self._finishing, self._versioned)
        setting = Setting(
            learns,
            training,
            self._answers,
            self._statistics,
            self._read,
            self._inputs,
            self._decision.micro_batches,
            0 if self._binder.takes_any else self._inputs.captured,
        )
        return Stream(setting, self._around, self._stream_binding, self._begin_in_stream, self._next_turn)

    def _whole_outputs(
        self, outputs: Mapping[int, Mapping[str, Piece]], rows: tuple[int, ...]
    ) -> dict[int, Mapping[str, Piece]]:
        """Outputs by micro-batch; of token slices those of all its slices together."""
        slices, axes = self._decision.num_slices, self._axes
        if axes is None:
            return dict(outputs)
        found: dict[int, Mapping[str, Piece]] = {}
        for m in sorted({number // slices for number in outputs}):
            parts = [outputs[m * slices + k] for k in range(slices)]
            names = dict.fromkeys(name for part in parts for name in part)
            found[m] = {name: joined(axes, name, [p[name] for p in parts if name in p], rows[m]) for name in names}
        return found

    @property
    def preparing(self) -> BatchPreparation[AnyBatch] | None:
        """Makes batches of clouds or seeds the graph's inputs; None: the model takes them as they are."""
        return self._preparing

    @property
    def looks_ahead(self) -> bool:
        """Whether the next step's batch is prepared while this one is computed, if it is known (:meth:`expect`)."""
        return self._preparing is not None and self._preparing.looks_ahead

    def expect(self, batch: Batch) -> None:
        """Prepare ``batch``, that of the next step, while this one is computed; nothing where nobody looks ahead."""
        if self._preparing is not None and self._preparing.looks_ahead:
            self._preparing.expect(batch, self._transport.rank)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's stages, by the user's own names; tied ones under each name.

        Where the ranks of a stage have parts of them, all of them have to call this together.
        """
        whole = {id(shards): shards.values() for shards in self._gathered()}
        return {
            name: whole[id(self._sliced[name][0])][self._sliced[name][1]]
            if name in self._sliced
            else gathered(tensor.detach(), self._parts.get(name), self._transport, self._around.deadline_s)
            for name, tensor in self._state.items()
        }

    def unshard(self) -> None:
        """The module's parameters are whole until the next step; all ranks call this together.

        Without effect but where ranks have them in slices between passes.
        """
        for shards in self._gathered():
            shards.unshard()

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Those of all stages, on every rank, as copies on the processor; all ranks call this together."""
        return united(self.state_dict(), self._transport, self._around.deadline_s)

    def whole_optimizer_state(self) -> dict[str, Any]:
        """What the optimisers of all stages keep, on every rank, by names of parameters; all ranks call this together.

        Its form is told in :mod:`runtime.optim.whole_state`.  Raises as :meth:`state`.
        """
        self.settle()
        own = pieces_of(self._rank_state(), self._transport.rank)
        return whole_of(united(own, self._transport, self._around.deadline_s), self._step)

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with what :meth:`whole_optimizer_state` gave, under whatever plan of the same model.

        Raises:
            UsageError: it is not that, or lacks something.
        """
        given = Given(state)
        for resident in self._residents.values():
            if resident.optimizer is not None:
                load_state(resident.optimizer, given)
        self._step = given.num_steps

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's part of ``state``, which has all parameters and buffers of the model."""
        for name, tensor in self._state.items():
            if name in self._sliced:
                shards, parameter = self._sliced[name]
                shards.load(parameter, partial(_slice_of, state[name].reshape(-1)))
                continue
            part = self._parts.get(name)
            place = () if part is None else tuple(slice(each.start, each.stop) for each in part.box)
            tensor.copy_(state[name][place])

    def state(self) -> RankState:
        """All that this rank has to save for training to go on, also under another plan; no copies.

        Raises:
            UsageError: gradients wait for those of the next steps (``accumulate``), which is not part of the state.
            NotFiniteError: the state, or the last step, has NaN or infinity, and that is not to be ignored.
        """
        self.settle()
        found = self._rank_state()
        self._guard.require_finite(found, self._state, self._step)
        return found

    def load_state(self, source: StateSource) -> None:
        """Goes on from what was saved, under whatever plan of the same model."""
        self._step = load_rank_state(self._residents, self._state, source, self._unread)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the last step's parameters on this rank, by the user's own names.

        Where the ranks of a stage divide its optimiser or parameters, all of them have to call this together.
        """
        self.settle()
        found = (
            gathered_gradients(each, self._transport, self._around.deadline_s) for each in self._residents.values()
        )
        return {name: gradient for gradients in found for name, gradient in gradients.items()}

    def forget_step(self) -> None:
        """Let go of the last step's gradients and losses; each step does so first."""
        for resident in self._residents.values():
            resident.reset()

    def forget_gradients(self) -> None:
        """Let go of the gradients that the last update was made of."""
        for resident in self._residents.values():
            resident.forget_gradients()

    def held_tensors(self) -> list[Tensor]:
        """What stays between steps, but gradients: parameters, buffers and the optimisers' state."""
        held: list[Tensor] = []
        for resident in self._residents.values():
            shards = resident.gathered
            names = () if shards is None else shards.names
            held += [each for name, each in resident.parameters.items() if name not in names]
            held += [] if shards is None else [part.view for part in shards.slices.values()]
            held += resident.buffers.values()
            states = resident.optimizer.state.values() if resident.optimizer is not None else ()
            held += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return held

    @contextmanager
    def between_steps(self, doing: str) -> Iterator[None]:
        """Errors of what ranks do together beside their steps say where they were, as those of a step do."""
        try:
            yield
        except (DeadlineError, TransportError) as error:
            raise self._around.context.of(error, self._step, doing) from error

    def settle(self) -> None:
        """Waits for the others' word on the last step; all ranks call this before anything but the next step follows.

        Raises:
            NotFiniteError: on some rank its loss or a gradient is NaN or infinite; all ranks raise this.
        """
        with self.between_steps("waiting for the others to end the step"):
            self._guard.settle(self._step)

    def close(self) -> None:
        """Leave the transport."""
        self._transport.close()

    def _gathered(self) -> list[PassShards]:
        return [shards for resident in self._residents.values() if (shards := resident.gathered) is not None]

    def _where(self, rank: int, layer: str) -> str:
        placement = self._decision.layers.get(layer)
        stage = "" if placement is None else f", stage {placement.stage}"
        return f"rank {rank} ({device_of(self._decision, rank)}{stage})"

    def _rank_state(self) -> RankState:
        if not self.is_updated:
            raise UsageError(
                f"after step {self._step} gradients wait for the update",
                ["they are not saved"],
                ["save after an update"],
            )
        rank = self._transport.rank
        return rank_state(self._residents, self._state, self._speaks, rank, self._step, self._unread)

    def _run(self, executor: Executor, batch: Batch, number: int) -> tuple[RowTrace, float]:
        """What the row did in the step of this number, and seconds from the common start to this rank's end.

        Raises:
            NotFiniteError: as :meth:`settle`: the others' word on the last step is here when all begin the next.
        """
        self._turn += 1
        executor.prepare(number, self._turn, batch)
        self._guard.heard(self._asking.agreed)
        start = time.perf_counter()
        ran = executor.run()
        return ran, time.perf_counter() - start

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _stream_binding(self, batch: Batch, learns: bool) -> Binding:
        binding = self._binder.bind(self._residents, batch)
        return binding if learns else _forward_only(binding)

    def _begin_in_stream(self, batch: Batch, binding: Binding, learns: bool) -> None:
        self._weighing.begin(batch, binding.residents)
        if learns:
            self._finishing.begin(binding.residents)
            self._step += 1

    def _run_again(self, ran: Ran) -> None:
        """The same step on the same batch, which another may have been bound after."""
        self._weighing.begin(ran.batch, ran.binding.residents)
        self._run(self._executor(ran.binding, evaluates=False), ran.batch, ran.number)

    def _bound(self, batch: Batch) -> tuple[Batch, Binding, float, int]:
        """The batch as the graph's inputs, the plan bound to it; of finding sites of clouds seconds, and most bytes."""
        if self._preparing is None:
            binding = self._binder.bind(self._residents, batch)
            self._weighing.begin(batch, binding.residents)
            return batch, binding, 0.0, 0
        # What was bound to the sites of the batch before keeps these, and all that was made of them.
        self._executors = {key: each for key, each in self._executors.items() if key[0].is_kept}
        meter, start = self._around.meter, time.perf_counter()
        if meter is not None:
            meter.take_peak()
        try:
            batch = self._preparing.batch(batch)
            binding = self._binder.bind(self._residents, batch)
            self._weighing.begin(batch, binding.residents)
        except StageFailedError as error:  # clouds or seeds that cannot be used
            raise self._around.context.of(error, self._step, "finding sites") from error
        return batch, binding, time.perf_counter() - start, 0 if meter is None else meter.take_peak()

    def _executor(self, binding: Binding, *, evaluates: bool) -> Executor:
        if not binding.is_kept:
            self._executors.clear()
        key = (binding, evaluates)
        if key not in self._executors:
            if len(self._executors) >= _MOST_KEPT:
                self._executors.pop(next(iter(self._executors)))
            bound = _forward_only(binding) if evaluates else binding
            self._executors[key] = Executor(bound, self._around, evaluates=evaluates)
        return self._executors[key]

    def _finish(self) -> None:
        self._norm = self._finishing.run()

    def _loss(self, binding: Binding) -> float | None:
        resident = binding.residents.get(self._loss_stage)
        if resident is None:
            return None
        loss = resident.loss()
        if len(resident.ranks) > 1:
            total = torch.tensor([loss], dtype=torch.float64)
            resident.add(total)
            loss = total.item()
        return loss / sum(binding.rows)

    def _device(self) -> torch.device:
        tensors = chain.from_iterable(
            (*resident.parameters.values(), *resident.buffers.values()) for resident in self._residents.values()
        )
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _refuse_what_versions_forbid(self, accumulate: int) -> None:
        if self._versioned and accumulate > 1:
            raise UsageError(
                f"schedule {self._decision.schedule} updates the weights within a step",
                [f"gradients of {accumulate} steps cannot be gathered for one update"],
                ["a larger global batch", "--schedule 1f1b"],
            )


def _forward_only(binding: Binding) -> Binding:
    """The same, without what training adds; it ends if the whole did, since what is left waits for less."""
    rows = tuple(tuple(_at_newest(a) for a in row if a.op in FORWARD_PASS) for row in binding.program.rows)
    return replace(binding, program=replace(binding.program, rows=rows))


def _slice_of(flat: Tensor, part: ParameterSlice) -> Tensor:
    return flat[part.start : part.stop]


def _at_newest(action: Action) -> Action:
    return replace(action, version=0)


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


def device_of(decision: Decision, rank: int) -> str:
    """Name of the device that the plan means for ``rank``."""
    for stage in decision.stages:
        if rank in stage.ranks and len(stage.devices) == len(stage.ranks):
            return stage.devices[stage.ranks.index(rank)]
    return "no device"
