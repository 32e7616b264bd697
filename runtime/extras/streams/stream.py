"""Batches without an end, of which each stage has its own at the same time: a pipeline over time.

    rank 0   0F0 0F0 0F0 0F0 ...         batch 0, 1, 2, 3: no flush and no barrier between them
    rank 1       1F0 1F0 1F0 ...         a stage waits for its input, and for nothing else

The rows are those of the plan's program, once for each batch.  A rank announces the receives of a batch while it works
on the one before, so that messages travel meanwhile.  What was sent is waited for every few batches: a rank is never
more than that ahead of its readers, whatever is offered (:data:`LEAD`).

Stages keep state of their own from batch to batch: the buffers that their layers write.  Where a stream *learns*, each
stage has a loss of its own and updates its weights as soon as it is done with a batch: the weights that a stage applies
to batch k are those after its updates for the batches before, all of them and no other.  As no gradient crosses between
stages, that is what one device does which updates all stages after each batch, whatever the speed of the stages.
(Meloni et al., "PARTIME: scalable and parallel processing over time with deep neural networks", 2022, where stages
process the frames of a stream one after another and update by what is local to them.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cuda_ops._torch import BatchNormBase
from planner.ir.errors import NotFiniteError, UsageError
from planner.ir.timeline import Span
from runtime.captured import answers_of, attribute
from runtime.optim.gradient_sync import GradientSync
from runtime.pipeline.executor import Executor
from runtime.pipeline.microbatches import Batch, WholeBatch
from runtime.pipeline.routing import Piece
from runtime.pipeline.runner import Runner
from runtime.pipeline.specialize import Specialization
from runtime.rank import RankContext
from runtime.recent import Recent
from runtime.stage.local_stage import LocalStage

DEPTH = 2
"""Batches that a rank has announced and not run: one that it works on and one whose messages travel meanwhile."""

LEAD = 2
"""Batches whose messages may wait for their readers; together with those announced no more than a transport tells
apart (:func:`runtime.transport.frame.tag`)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a stream does, and what a rank reads and gives.

    Attributes:
        learns: whether stages update their weights after each batch.
        training: whether stages run in the mode that the module was captured in, else in evaluation mode.
        answers: the values of the module's output, in its order.
        frozen: buffers that evaluation mode does not write.
        reads: graph inputs of which this rank needs the numbers; of others the shapes are enough.
    """

    learns: bool
    training: bool
    answers: tuple[str, ...]
    frozen: frozenset[str]
    reads: tuple[str, ...]

    def opened(self, runner: Runner, gradient_sync: GradientSync, learn: Callable[[], None]) -> RequestStream:
        """A rank's part of such a stream; ``learn`` is called before a batch is learnt from.

        Raises:
            UsageError: sequences are cut, or the plan does not learn by local losses alone.
        """
        if runner.context.decision.num_parts > 1:
            remedies = ["plan without --allow time and --token-slices"]
            raise UsageError("a stream is not cut into token slices", ["the plan is"], remedies)
        if self.learns:
            require_local(runner.context, gradient_sync)
        return RequestStream(self, runner, learn)


@dataclass(frozen=True, slots=True)
class Answered:
    """What a rank gives for a batch.

    Attributes:
        number: of the batch in the stream, from 0.
        rows: samples of each micro-batch.
        outputs: by micro-batch and value, where this rank's part lies in the micro-batch, and the tensor.
        losses: the sum over samples of the losses that this rank's stages made; 0 where they make none.
        spans: when each action ran, in seconds from the beginning of the first.
    """

    number: int
    rows: tuple[int, ...]
    outputs: Mapping[int, Mapping[str, Piece]]
    losses: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class _Offered:
    number: int
    batch: Batch
    specialization: Specialization
    executor: Executor
    probes: bool


class RequestStream:
    """One rank's part of a stream; all ranks are offered the same batches in the same order.

    Args:
        learn: called before a batch is learnt from.
    """

    def __init__(self, setting: Setting, runner: Runner, learn: Callable[[], None]) -> None:
        self.setting = setting
        self._runner = runner
        self._context = runner.context
        self._learn = learn
        self._answer = partial(LocalStage.answer, training=setting.training, frozen=setting.frozen)
        self._executors = Recent[tuple[Specialization, int, bool], Executor]()
        self._offered: deque[_Offered] = deque()
        self._number = self._unflushed = 0

    @property
    def num_offered(self) -> int:
        """Batches that wait for :meth:`run`."""
        return len(self._offered)

    @property
    def upcoming(self) -> Batch | None:
        """The batch that :meth:`run` works on next; None where none was offered."""
        return self._offered[0].batch if self._offered else None

    @property
    def has_room(self) -> bool:
        """Whether another batch may be offered."""
        return len(self._offered) < DEPTH

    def batch(self, tensors: Sequence[Tensor]) -> WholeBatch:
        """A batch of all inputs of the graph, in their order; those that this rank does not read may be on ``meta``.

        Raises:
            UsageError: they are not what the model takes.
        """
        return WholeBatch(self._context.inputs, tensors, self._context.decision.micro_batches)

    def offer(self, batch: Batch, *, probes: bool = False) -> None:
        """Announce the messages of the next batch.

        Args:
            probes: whether the batch leaves no trace: buffers are as before, and nothing is learnt of it.
        """
        learns = self.setting.learns and not probes
        specialization = self._runner.stream_binding(batch, learns)
        executor = self._executor(specialization, learns)
        executor.announce(self._runner.next_turn())
        self._offered.append(_Offered(self._number, batch, specialization, executor, probes))
        self._number += 1

    def run(self) -> Answered:
        """Works on the batch that was offered first.

        Raises:
            StageFailedError, DeadlineError, TransportError: as a step of the engine.
            NotFiniteError: a loss or gradient of a stage that learns is NaN or infinite; it made no update of it.
        """
        one = self._offered.popleft()
        local_stages = one.specialization.local_stages
        learns = self.setting.learns and not one.probes
        kept = _buffers(local_stages) if one.probes else {}
        one.executor.enter(one.number, one.batch)
        self._runner.begin(one.batch, one.specialization, learns)
        if learns:
            self._learn()
        self._unflushed += 1
        flushes = self._unflushed >= LEAD
        ran = one.executor.run(flushes=flushes)
        self._unflushed = 0 if flushes else self._unflushed
        outputs = {m: _apart(pieces, local_stages) for m, pieces in one.executor.outputs.items()}
        with torch.no_grad():
            for tensor, value in kept.values():
                tensor.copy_(value)
        if learns:
            self._require_finite(one, local_stages)
        losses = sum(local_stage.loss() for local_stage in local_stages.values())
        return Answered(one.number, one.batch.rows, outputs, losses, ran.spans)

    def settle(self) -> None:
        """Waits until all that was sent has been taken; nothing may be offered."""
        self._context.transport.flush()
        self._unflushed = 0

    def _require_finite(self, one: _Offered, local_stages: Mapping[int, LocalStage]) -> None:
        for stage, local_stage in local_stages.items():
            if local_stage.accumulation.is_spoilt:
                raise NotFiniteError(
                    f"stage {stage} cannot learn from batch {one.number} of the stream",
                    ["its loss or a gradient is NaN or infinite; no update was made of it"],
                    ["a smaller learning rate", "look at the data of that batch"],
                )

    def _executor(self, specialization: Specialization, learns: bool) -> Executor:
        """One that no batch is on its way in: those of like batches take turns."""
        key = (specialization, self._number % DEPTH, learns)
        if key not in self._executors:
            run_forward = None if learns else self._answer
            executor = Executor(specialization, self._context, self._runner.finish, run_forward=run_forward)
            executor.kept = self.setting.answers
            self._executors[key] = executor
        return self._executors[key]


def setting_of(context: RankContext, local_stages: Mapping[int, LocalStage]) -> Setting:
    """That of a rank's stages, in training mode and learning nothing.

    Raises:
        UnsupportedModelError: the captured graph does not make all that the module puts out.
    """
    read = {name for local_stage in local_stages.values() for name in local_stage.passes.inputs}
    read |= {name for stage in local_stages for name in context.counted.get(stage, ())}
    reads = tuple(name for name in context.graph.inputs if name in read)
    return Setting(False, True, answers_of(context.model), statistics_of(context, local_stages), reads)


def statistics_of(context: RankContext, local_stages: Mapping[int, LocalStage]) -> frozenset[str]:
    """The buffers of batch normalisation, which evaluation mode leaves as they are."""
    parts = context.module.modules()
    own = {id(each) for part in parts if isinstance(part, BatchNormBase) for each in part.buffers()}
    names = (name for local_stage in local_stages.values() for name in local_stage.buffers)
    return frozenset(name for name in names if id(attribute(context.model.graph_module, name)) in own)


def require_local(context: RankContext, gradient_sync: GradientSync) -> None:
    """Raises :class:`UsageError` unless each stage can update its weights without hearing of another."""
    crossing = [f"{edge.src} to {edge.dst}" for edge in context.program.stages.edges if edge.gradient]
    faults = []
    if not context.program.trains:
        faults.append("the plan has forward passes alone")
    if crossing:
        faults.append(f"gradients cross between stages: {', '.join(crossing)}")
    if context.is_versioned:
        faults.append("its schedule keeps several versions of the weights")
    if gradient_sync.joins_ranks:
        faults.append("parameters that several stages share, or clipping, need all ranks before an update")
    if faults:
        raise UsageError(
            "this plan cannot learn over a stream, where each stage updates by a loss of its own",
            faults,
            ["halopipe profile --local-loss stage, or --local-loss N, and plan that", "serve without learning"],
        )


def _buffers(local_stages: Mapping[int, LocalStage]) -> dict[int, tuple[Tensor, Tensor]]:
    """What stages may write, with copies of its values."""
    tensors = (tensor for local_stage in local_stages.values() for tensor in local_stage.buffers.values())
    return {id(tensor): (tensor, tensor.detach().clone()) for tensor in tensors}


def _apart(pieces: Mapping[str, Piece], local_stages: Mapping[int, LocalStage]) -> dict[str, Piece]:
    """``pieces``, with copies of what lies in a buffer, which the next batch may write."""
    storages = {
        tensor.untyped_storage().data_ptr()
        for local_stage in local_stages.values()
        for tensor in local_stage.buffers.values()
    }
    return {
        name: (box, tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor)
        for name, (box, tensor) in pieces.items()
    }
