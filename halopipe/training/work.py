"""One rank's work: load and capture the model, meet the others, train, measure, compare with one device."""

from __future__ import annotations

import gc
import logging
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from halopipe.data.shared_source import DataSources
from halopipe.run_spec.event_log import EventLog
from halopipe.run_spec.job import Job, RankResult
from halopipe.training.isolated_timing import IsolatedTimer, budget_s
from halopipe.training.loop import AfterStep, Loop
from halopipe.training.rank import JobMember, OpenTransport, member_of
from halopipe.training.rank_device import kind_of
from halopipe.training.shared_capture import load
from runtime.captured import CapturedModule
from runtime.memory import with_peak
from runtime.monitor.activity import StatusStore
from runtime.stage.modes import cannot_evaluate
from runtime.timeouts import SETUP_S
from runtime.transport.base import within

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from halopipe.training.resuming import Saved
    from halopipe.training.save_times import EndRequest

_log = logging.getLogger(__name__)


def work(
    job: Job,
    rank: int,
    store: Store,
    board: Store | StatusStore,
    open_transport: OpenTransport | None = None,
    after_step: AfterStep | None = None,
    *,
    device: torch.device | None = None,
    local_rank: int | None = None,
    event_log: EventLog | None = None,
) -> RankResult:
    """Do everything that ``rank`` does in ``job``.

    Args:
        store, board, open_transport, local_rank: as of :meth:`halopipe.training.rank.JobMember.opened`.
        after_step: told of each step; None: nobody is.
        device: instead of what the job says.
        event_log: of what is done, for whoever goes on after a loss.
    """
    member = member_of(job, rank)
    end = None
    member.device = member.device if device is None else device
    with ExitStack() as stack:
        stack.enter_context(member.opened(store, board, local_rank=local_rank, open_transport=open_transport))
        where = member.context.device
        if job.options.checkpoint:
            from halopipe.training.save_times import EndRequest  # late, as all that saves

            end = EndRequest(job.options.grace_s)
            stack.enter_context(end.heard(ends=True))
        rank_result = _worked(job, member, after_step, end, event_log)
        planned = next((one.kind for one in job.plan.prediction.ranks if one.rank == rank), "")
        return replace(rank_result, kind=kind_of(where, planned))


def _worked(
    job: Job, member: JobMember, after_step: AfterStep | None, end: EndRequest | None, event_log: EventLog | None
) -> RankResult:
    options = job.options
    context = member.context
    planned = job.plan.inputs.model
    member.prepare(
        lambda: load(planned, options.seed),
        None if job.source == planned else lambda: load(job.source, options.seed),
    )
    captured = context.model
    model = member.model
    if captured.evaluation and (options.eval_data or not job.plan.decision.trains):
        raise cannot_evaluate(captured.evaluation)
    member.agree()
    saved: Saved | None = None
    if options.resume:
        from halopipe.training.resuming import resumed  # most runs read no checkpoint

        saved = resumed(options, context.graph, member.store, context.rank)
        context.seed = saved.seed(options.seed)
    member.join()
    context.activity.begin("opening the data")
    data_sources = DataSources(context, options, model, context.seed)
    timer = _isolated_timer(job, member, captured, 0 if saved is None else saved.step)
    del captured, model, member.model
    gc.collect()  # what others train need not stay alive here; modules and graphs lie in cycles
    engine = member.engine
    if saved is not None:
        context.activity.begin("reading the checkpoint")
        engine.load_state(saved.checkpoint)
        remark = saved.other_micro_batches(engine, job.plan.decision)
        if remark and context.rank == 0:  # tells people before the first step, once for all ranks
            _log.warning("%s", remark)
            context.activity.tell(remark)
    if options.warmup and context.meter is None:
        with_peak(lambda: None)  # the profiler takes seconds to start
    context.activity.begin("waiting for the others")
    with within(context.transport, SETUP_S):
        context.transport.barrier()
    loop = Loop(job, member, data_sources, saved, end)
    loop.isolated_timer = timer
    loop.event_log = event_log
    loop.after_step = after_step
    with loop.metrics or nullcontext(), member.limited(options.tensors_limit_bytes):
        result = loop.run()
    context.meet()
    return result


def _isolated_timer(job: Job, member: JobMember, captured: CapturedModule, num_done: int) -> IsolatedTimer | None:
    """What times the stages of this rank alone; None where nobody is to."""
    seconds = budget_s(job.plan, job.options, job.options.steps - num_done)
    if not seconds or job.options.compiler:
        return None
    from runtime.stage.alone import lone_stages  # most runs are too short for it

    stages, why_not = lone_stages(member.context, captured, member.model.tensors)
    return IsolatedTimer(member.context, stages, seconds, why_not)
