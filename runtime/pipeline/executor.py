"""Executes one rank's row of a program, action by action, and notes when each of them ran.

What is computed and sent, and in which order, is the program's decision.  The executor adds two things: a stage is told
before the last action that adds to its gradients, so that their sum is overlapped with what follows; and the step is
finished (:mod:`runtime.optim.gradient_sync`) before the first of the updates that end it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import cast

import torch
from torch import Tensor

from cuda_ops.device import driver
from planner.ir.box import Box
from planner.ir.errors import HalopipeError
from planner.ir.program import Route
from planner.ir.schedule import MESSAGE, RECEIVE, Action, Op
from planner.ir.timeline import Span
from runtime.monitor.waits import BETWEEN, END, START
from runtime.pipeline.microbatches import Ahead, Batch
from runtime.pipeline.p2p import P2PMailbox
from runtime.pipeline.routing import BACKWARD, CPU, FORWARD, Piece, add_up, assemble
from runtime.pipeline.specialize import Specialization, ends_step, last_gradients, last_updates
from runtime.rank import STOP, RankContext, stage_failed
from runtime.stage.local_stage import LocalStage

RunForward = Callable[[LocalStage, int, Mapping[str, Tensor]], dict[str, Tensor]]
"""Runs a stage forward on the values of a micro-batch."""


class StopBeforeStepError(Exception):
    """A rank asked all ranks to stop: raised on each of them before the same step, of which nothing was done."""


@dataclass(frozen=True, slots=True)
class RowTrace:
    """What a row did.

    Attributes:
        spans: when each action ran, in order.
        peak_bytes: the most in use in each of them, then after the last; empty where memory is not counted.
    """

    spans: tuple[Span, ...]
    peak_bytes: tuple[int, ...] = ()


class WallClock:
    """When the actions of a row ended: on a processor, when its call has."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def mark(self) -> None:
        """An action has ended, or the first one begins."""
        self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each mark since the first; the step is over then."""
        return [mark - self._marks[0] for mark in self._marks]


class StreamClock:
    """On a GPU work ends after the call that starts it: an event in its stream says when.

    Events are read when the step is over, so that no action waits for the GPU, whose next kernels are launched while
    messages travel.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """As of a :class:`WallClock`."""
        self._events.append(driver.recorded_event(self._device))

    def seconds(self) -> list[float]:
        """As of a :class:`WallClock`."""
        self._events[-1].synchronize()
        return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]


def clock_of(device: torch.device) -> WallClock | StreamClock:
    """For what is computed there."""
    return StreamClock(device) if device.type == "cuda" else WallClock()


@dataclass(frozen=True, slots=True)
class _Task:
    """An action; ``run`` is given the executor, which it does not keep: one of clouds' sizes goes after its step."""

    action: Action
    text: str
    run: Callable[[Executor], None]


@dataclass(frozen=True, slots=True)
class _PassWork:
    """What a forward or backward reads and gives, the same in every step.

    Attributes:
        values: that come from other stages, or whose gradients do: where this rank's part lies, and its dtype.
        routes: along which results go.
        is_whole: whether a backward is both halves.
        is_last: whether it is the last that adds to gradients which are then summed or used.
    """

    stage: int
    microbatch: int
    version: int
    local_stage: LocalStage
    values: tuple[tuple[str, Box, torch.dtype], ...]
    routes: tuple[Route, ...]
    is_whole: bool
    is_last: bool


class Executor:
    """One rank's row for one combination of sizes, ready to be run step after step.

    Args:
        finish: called before the first update that ends a step.
        evaluates: forward passes in evaluation mode.
        run_forward: how a stage is run forward where it is not evaluated; None: as in training.

    Attributes:
        kept: names of values of which ``outputs`` keeps what this rank makes; changed between runs.
        outputs: of the last run, by micro-batch and value.
    """

    def __init__(
        self,
        specialization: Specialization,
        context: RankContext,
        finish: Callable[[], object] = str,  # which does nothing
        *,
        evaluates: bool = False,
        run_forward: RunForward | None = None,
    ) -> None:
        self._program = specialization.program
        self._local_stages = specialization.local_stages
        self._routing = specialization.routing
        self._context = context
        self._finish = finish
        self._evaluates = evaluates
        self._run_forward = run_forward
        self._device = context.device or CPU
        self._moves_inputs = self._device.type != "cpu"
        self.kept: tuple[str, ...] = ()
        row = specialization.program.rows[context.rank]
        self._mailbox = P2PMailbox(context, specialization.routing, specialization.program)
        # All ranks finish a step together, also those that have nothing to update.
        self._finishes_at_end = not evaluates and not any(ends_step(action) for action in row)
        self._last = last_gradients(row, specialization.program.ranks)  # with which sums of gradients are overlapped
        self._final = last_updates(row)  # whose gradients stay, for whoever looks at them between steps
        self._tasks = self._made(row)
        self._first_wait = next((number for number, action in enumerate(row) if action.op in _WAITS), len(row))
        self._batch: Batch | None = None  # between enter() and the end of the row
        self._ahead = Ahead(on_thread=self._moves_inputs)
        self._step = 0
        self.outputs: dict[int, dict[str, Piece]] = {}

    @property
    def num_left(self) -> int:
        """Pieces and messages that nobody took; none after a step."""
        return self._mailbox.num_left

    def begin(self, step: int, turn: int, batch: Batch) -> None:
        """Forget the last step, announce the first receives of this one and wait until every rank is there.

        Args:
            step: number of the training step, for people.
            turn: number of the run of a program, training or not; the same on all ranks: it is in the messages' names.

        Raises:
            StopBeforeStepError: a rank has asked for it.
        """
        context = self._context
        vote = context.vote
        self.enter(step, batch)
        self.announce(turn)
        try:
            vote.agreed = context.transport.barrier(vote.word)
        except HalopipeError as error:
            raise context.of(error, self._step, START) from error
        if vote.agreed == STOP:
            context.activity.begin(BETWEEN)
            raise StopBeforeStepError

    def announce(self, turn: int) -> None:
        """Announce the first receives of the next run; those of the last one have come."""
        self._mailbox.begin(turn)

    def enter(self, step: int, batch: Batch) -> None:
        """Forget the last step; what is run next is ``step``, on ``batch``."""
        activity = self._context.activity
        activity.begin(START)
        activity.step = step
        activity.deadline_s = self._context.deadline_s
        self._step = step
        self._batch = batch
        self._ahead.forget()
        self.outputs.clear()
        for local_stage in self._local_stages.values():
            local_stage.passes.reset(step) if self._evaluates else local_stage.reset(step)

    def run(self, waits: Callable[[], object] = str, *, flushes: bool = True) -> RowTrace:
        """Execute the row.

        Args:
            waits: called once, before the first action that may wait for other ranks, or at the row's end.
            flushes: whether to wait at its end until all that was sent has been taken.

        Raises:
            StageFailedError: a stage raised; DeadlineError, TransportError: a message failed.  The text says where.
        """
        context = self._context
        activity = context.activity
        clock = clock_of(self._device)
        meter = context.meter
        peak_bytes = list[int]()
        if meter is not None:
            meter.take_peak()
        clock.mark()
        for number, task in enumerate(self._tasks):
            activity.begin(task.text)
            try:
                if number == self._first_wait:
                    waits()
                task.run(self)
            except Exception as error:
                raise context.of_action(error, self._step, task.action) from error
            clock.mark()
            if meter is not None:
                peak_bytes.append(meter.take_peak())
        if self._finishes_at_end:
            self._finish()
        activity.begin(END)
        try:
            if self._first_wait == len(self._tasks):
                waits()
            if flushes:
                self._mailbox.flush()
            ends_s = clock.seconds()
        except Exception as error:
            typed = error if isinstance(error, HalopipeError) else stage_failed(error)
            raise context.of(typed, self._step, END) from error
        activity.begin(BETWEEN)
        self._batch = None
        if meter is not None:
            peak_bytes.append(meter.take_peak())
        spans = map(Span, repeat(context.rank), [task.text for task in self._tasks], ends_s, ends_s[1:])
        return RowTrace(tuple(spans), tuple(peak_bytes))

    def _forward(self, work: _PassWork) -> None:
        stage = work.stage
        microbatch = work.microbatch
        local_stage = work.local_stage
        pieces = self._mailbox.take(FORWARD, stage, microbatch)
        batch = cast(Batch, self._batch)  # since enter()
        values = self._ahead.take(stage, microbatch) or local_stage.feed(batch, microbatch)
        if self._moves_inputs:
            values = {name: part.to(self._device, non_blocking=True) for name, part in values.items()}
        for value, box, dtype in work.values:
            values[value] = assemble(pieces.get(value, ()), box, dtype, self._device)
        if self._evaluates:
            outputs = local_stage.evaluate(microbatch, values)
        elif self._run_forward is not None:
            outputs = self._run_forward(local_stage, microbatch, values)
        else:
            outputs = local_stage.forward(microbatch, values, work.version)
        if self.kept and (kept := self._judged(stage, microbatch, outputs)):
            self.outputs.setdefault(microbatch, {}).update(kept)
        for route in work.routes:
            self._mailbox.hand_out(FORWARD, route, outputs)

    def _prepare(self, action: Action) -> None:
        stage = action.stage
        microbatch = _microbatch(action)
        batch = cast(Batch, self._batch)  # since enter()
        self._ahead.make(stage, microbatch, partial(self._local_stages[stage].feed, batch, microbatch))

    def _judged(self, stage: int, microbatch: int, outputs: Mapping[str, Tensor]) -> dict[str, Piece]:
        """What the loss is computed from, and where it lies; of copies on several ranks, those of the first."""
        routing = self._routing
        return {
            name: (routing.held(name, stage, microbatch), outputs[name])
            for name in self.kept
            if name in outputs and routing.speaks_for(name, stage, microbatch)
        }

    def _backward(self, work: _PassWork) -> None:
        microbatch = work.microbatch
        passes = work.local_stage.passes
        pieces = self._mailbox.take(BACKWARD, work.stage, microbatch)
        # Zeros where none came: a rank with an empty share must still take part in what its stage does together.
        gradients = {
            value: add_up(pieces.get(value, ()), box, dtype, self._device) for value, box, dtype in work.values
        }
        if work.is_last and work.is_whole:
            work.local_stage.expect_last()
        input_gradients = (passes.backward if work.is_whole else passes.backward_input)(microbatch, gradients)
        for route in work.routes:
            self._mailbox.hand_out(BACKWARD, route, input_gradients)

    def _backward_weight(self, action: Action) -> None:
        if action in self._last:
            self._local_stages[action.stage].expect_last()
        self._local_stages[action.stage].passes.backward_weight(_microbatch(action))

    def _reduce(self, action: Action) -> None:
        self._local_stages[action.stage].reduce_gradients()

    def _update(self, action: Action) -> None:
        self._local_stages[action.stage].update()
        if action not in self._final:
            self._local_stages[action.stage].forget_gradients()

    def _finish_and_update(self, action: Action) -> None:
        self._finish()
        self._update(action)

    def _made(self, row: Sequence[Action]) -> tuple[_Task, ...]:
        first = next(filter(ends_step, row), None)
        mailbox = self._mailbox

        def handler(action: Action) -> Callable[[Executor], None]:
            if action.op in MESSAGE:
                moves = mailbox.handler(action)
                return lambda _: moves()
            if action.op in _PASSES:
                work = self._work(action)
                does_pass = _PASSES[action.op]
                return lambda executor: does_pass(executor, work)
            does = Executor._finish_and_update if action == first else _HANDLERS[action.op]
            return lambda executor: does(executor, action)

        return tuple(_Task(action, str(action), handler(action)) for action in row)

    def _work(self, action: Action) -> _PassWork:
        stage = action.stage
        microbatch = _microbatch(action)
        routing = self._routing
        local_stage = self._local_stages[stage]
        stages = self._program.stages
        is_forward = action.op is Op.FORWARD
        names = local_stage.received if is_forward else local_stage.handed_on
        if is_forward:
            routes = tuple((stage, edge.dst, microbatch) for edge in stages.out_of(stage))
        else:
            routes = tuple((edge.src, stage, microbatch) for edge in stages.into(stage))
        return _PassWork(
            stage,
            microbatch,
            action.version,
            local_stage,
            tuple((name, routing.held(name, stage, microbatch), routing.dtype(name)) for name in names),
            routes,
            action.op is Op.BACKWARD,
            action in self._last,
        )


_PASSES: Mapping[Op, Callable[[Executor, _PassWork], None]] = {
    Op.FORWARD: Executor._forward,
    Op.BACKWARD: Executor._backward,
    Op.BACKWARD_INPUT: Executor._backward,
}
_WAITS = RECEIVE | {Op.REDUCE_GRAD}
"""Operations that wait for other ranks."""
_HANDLERS: Mapping[Op, Callable[[Executor, Action], None]] = {
    Op.BACKWARD_WEIGHT: Executor._backward_weight,
    Op.REDUCE_GRAD: Executor._reduce,
    Op.UPDATE: Executor._update,
    Op.PREPARE: Executor._prepare,
}


def _microbatch(action: Action) -> int:
    if action.microbatch is None:
        raise ValueError(f"{action} names no micro-batch")
    return action.microbatch
