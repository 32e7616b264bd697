"""One rank's work: load and capture the model, meet the others, train, measure, compare with one device."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from halopipe.data.shared_source import DataSources
from halopipe.data.sources import Position, batches, take
from halopipe.run_spec.job import EventLog, Job, RankResult
from halopipe.training.first_step import FirstStep, read_when_written
from halopipe.training.isolated_timing import IsolatedTimer, budget_s
from halopipe.training.loop import AfterStep, Loop
from halopipe.training.rank import OpenedRank, OpenTransport, Rank, RankContext, RankModel, job_config_of, open_rank
from halopipe.training.rank_device import kind_of
from halopipe.training.reference import compare_losses
from planner.ir.graph import Graph
from planner.layers.boundary import Boundaries
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.memory import with_peak
from runtime.monitor.activity import Activity, StatusStore
from runtime.monitor.watch import SETUP_S
from runtime.numerics.compare import Difference
from runtime.stage.captured import captured_model
from runtime.stage.modes import cannot_evaluate
from runtime.transport.base import within

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from halopipe.training.checkpointing import Checkpoints
    from halopipe.training.resuming import Saved
    from halopipe.training.save_times import EndRequest

_log = logging.getLogger(__name__)


def work(
    job: Job,
    rank: int,
    store: Store,
    board: Store | StatusStore,
    open_transport: OpenTransport | None = None,
    after_step: AfterStep = lambda step, result, activity: None,
    *,
    device: torch.device | None = None,
    local_rank: int | None = None,
    event_log: EventLog | None = None,
) -> RankResult:
    """Do everything that ``rank`` does in ``job``.

    Args:
        store, board, open_transport, local_rank: as of :func:`halopipe.training.rank.open_rank`.
        after_step: told of each step.
        device: instead of what the job says.
        event_log: of what is done, for whoever goes on after a loss.
    """
    with open_rank(
        job_config_of(job),
        rank,
        store,
        board,
        device=job.options.device if device is None else device,
        local_rank=local_rank,
        open_transport=open_transport,
    ) as opened:
        if job.options.checkpoint:
            from halopipe.training.save_times import EndRequest  # late, as all that saves

            end = EndRequest(job.options.grace_s)
            with end.heard(ends=True):
                rank_result = _RankWork(job, opened, after_step, end, event_log).run()
        else:
            rank_result = _RankWork(job, opened, after_step, None, event_log).run()
        planned = next((one.kind for one in job.plan.prediction.ranks if one.rank == rank), "")
        return replace(rank_result, kind=kind_of(opened.context.device, planned))


class _RankWork:
    def __init__(
        self, job: Job, rank: Rank, after_step: AfterStep, end: EndRequest | None, event_log: EventLog | None = None
    ) -> None:
        self._job, self._rank, self._context, self._after_step = job, rank, rank.context, after_step
        self._end, self._event_log = end, event_log

    @property
    def _activity(self) -> Activity:
        return self._context.activity

    def run(self) -> RankResult:
        job, context, options = self._job, self._context, self._job.options
        planned = job.plan.inputs.model
        prepared = self._rank.prepare(
            lambda: load_model(planned, options.seed),
            None if job.source == planned else lambda: load_model(job.source, options.seed),
        )
        evaluation = prepared.captured.evaluation
        if evaluation and (options.eval_data or not job.plan.decision.trains):
            raise cannot_evaluate(evaluation)
        resuming = _Resuming(job, context, prepared.captured.graph)
        opened = self._rank.open(prepared, resuming.seed)
        saved = resuming.saved
        seed = options.seed if saved is None else saved.seed(options.seed)
        position = Position() if saved is None else saved.position
        self._activity.begin("opening the data")
        data_sources = DataSources(opened.consumer, options, prepared.model, seed)
        isolated_timer = self._isolated_timer(opened, prepared, 0 if saved is None else saved.step)
        del prepared
        gc.collect()  # what others train need not stay alive here; modules and graphs lie in cycles
        if saved is not None:
            self._activity.begin("reading the checkpoint")
            opened.engine.load_state(saved.checkpoint)
            self._warn(saved.other_micro_batches(opened.engine, job.plan.decision))
        if options.warmup and context.meter is None:
            with_peak(lambda: None)  # the profiler takes seconds to start
        self._activity.begin("waiting for the others")
        with within(opened.consumer.transport, SETUP_S):
            opened.consumer.transport.barrier()
        return self._steps(opened, data_sources, position, seed, isolated_timer, saved)

    def _warn(self, word: str) -> None:
        """Tells people before the first step, once for all ranks."""
        if word and self._context.rank == 0:
            _log.warning("%s", word)
            self._activity.tell(word)

    def _isolated_timer(self, opened: OpenedRank, prepared: RankModel, num_done: int) -> IsolatedTimer | None:
        """What times the stages of this rank alone; None where nobody is to."""
        plan, options, context = self._job.plan, self._job.options, self._context
        seconds = budget_s(plan, options, options.steps - num_done)
        if not seconds or options.compiler:
            return None
        from runtime.stage.alone import lone_stages  # most runs are too short for it

        model, decision = captured_model(prepared.captured), plan.decision
        program = Boundaries.of_decision(model.graph, decision).program(decision)
        stages_alone = lone_stages(decision, model, program, context.rank, prepared.model.tensors, context.device)
        return IsolatedTimer(stages_alone[0], seconds, opened.gather, self._activity, context.rank, stages_alone[1])

    def _steps(
        self,
        opened: OpenedRank,
        data_sources: DataSources,
        position: Position,
        seed: int,
        isolated_timer: IsolatedTimer | None,
        begun: Saved | None,
    ) -> RankResult:
        options, context, consumer, engine = self._job.options, self._context, opened.consumer, opened.engine
        teller, metrics = consumer.loss_rank, None
        if options.metrics:
            from halopipe.training.metrics import Metrics  # late: most runs write none

            metrics = Metrics(options.metrics, context.store, context.rank, teller, engine.num_steps)
        loop = Loop(
            options,
            engine,
            consumer,
            data_sources,
            data_sources.training(position, engine.num_steps),
            metrics,
            self._checkpoints(opened, seed, begun),
            self._after_step,
            self._activity,
            self._job.plan.decision.trains,
            isolated_timer=isolated_timer,
            event_log=self._event_log,
        )
        if self._job.is_compared:
            read = partial(read_when_written, self._job.reference_path)
            first = FirstStep(self._rank.config, context, read, options.check_numerics, self._explain)
            loop.compare = partial(first.compare, opened)
        with metrics or nullcontext(), self._rank.limited(options.memory_limit_bytes):
            result = loop.run()
        opened.meet()
        reference = loop.reference
        if reference is not None and context.rank == teller and options.check_numerics:
            later = compare_losses(reference, result.losses[: len(reference.losses)])[options.accumulate :]
            result = replace(result, compared=result.compared + later)
        return result

    def _checkpoints(self, opened: OpenedRank, seed: int, begun: Saved | None) -> Checkpoints | None:
        """What saves; None where nothing is to be saved."""
        if self._end is None:
            return None
        from halopipe.training.checkpointing import Checkpoints  # late: most runs save nothing

        return Checkpoints(
            self._job.options,
            opened,
            seed,
            (0, 0.0) if begun is None else begun.history,
            self._end,
        )

    def _explain(self, wrong: Sequence[Difference]) -> list[str]:
        """Loads the model again: this rank has trained what it had."""
        from halopipe.training.first_divergence import first_divergence  # late: most steps are right

        options, decision = self._job.options, self._job.plan.decision
        model: LoadedModel = load_model(self._job.source, options.seed)
        item = take(batches(options.data, model, decision.global_batch, options.seed), 0)
        return first_divergence(self._rank.config, model, capture(model), item, wrong)


class _Resuming:
    """The checkpoint that the job goes on from, chosen by rank 0 and told by the store, once the ranks agree.

    Attributes:
        saved: None where there is none, and before it was looked for.
    """

    def __init__(self, job: Job, context: RankContext, graph: Graph) -> None:
        self._options, self._context, self._graph = job.options, context, graph
        self.saved: Saved | None = None

    def seed(self) -> int:
        """Looks for it, and gives its seed, if there is one."""
        if not self._options.resume:
            return self._options.seed
        from halopipe.training.resuming import resumed  # most runs read no checkpoint

        self.saved = resumed(self._options, self._graph, self._context.store, self._context.rank)
        return self.saved.seed(self._options.seed)
