"""The results of all ranks as one run: its timelines, and where its steps went, by rank and once a step by stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, fields
from statistics import median

from halopipe.run_spec.job import RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunNotes, RunProgress, RunResult, ShowRun
from halopipe.training.resuming import ResumePoint
from planner.ir.plan import Decision, Plan, RankMeasured
from planner.ir.schedule import Action, Op
from planner.ir.timeline import MemorySample, Timeline
from runtime.numerics.compare import NumericsReport, report


def combine(plan: Plan, options: RunOptions, results: list[RankResult], progress: ShowRun | None) -> RunResult:
    """The run as a whole; NumericsError if it is not what one device computes."""
    seconds = tuple(max(each) for each in zip(*(result.step_seconds for result in results), strict=True))
    losses = next((result.losses for result in results if result.losses), ())
    timelines = {step: _timeline(results, step, seconds[step]) for step in results[0].spans}
    timed = [step for step in timelines if step >= options.warmup] or list(timelines)
    typical = sorted(timed, key=seconds.__getitem__)[len(timed) // 2]
    num_stages = len(plan.decision.stages)
    shown = [timelines[step] for step in timed]
    notes = {each.name: getattr(results[0], each.name) for each in fields(RunNotes)}
    result = RunResult(
        losses,
        seconds,
        options.warmup,
        timelines[typical],
        stage_medians(shown, num_stages, (Op.FORWARD,)),
        stage_medians(shown, num_stages, (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)),
        tuple(result.peak_bytes for result in results),
        _numerics(options, plan, results),
        tuple(shown),
        stage_once_s(shown, plan.decision, Op.UPDATE),
        stage_once_s(shown, plan.decision, Op.REDUCE_GRAD),
        ranks_measured(shown, plan.decision),
        kinds=tuple(result.kind for result in results),
        **notes
        | {
            "isolated_passes": tuple(each for result in results for each in result.isolated_passes),
            "why_not_isolated": next((each.why_not_isolated for each in results if each.why_not_isolated), ""),
            "saves": max((result.saves for result in results), key=lambda saves: saves.seconds),
        },
    )
    if progress is not None:
        latest = (losses[-1] if losses else None, seconds[-1], result.slow, result.left_out)
        progress(RunProgress(result.first_step + len(seconds), options.steps, *latest))
    return result


def nothing_left(start: ResumePoint) -> RunResult:
    """The result of a run all of whose steps were done before it."""
    timeline = Timeline("measured", 0.0, ())
    return RunResult((), (), start.options.warmup, timeline, (), (), (), first_step=start.step, end=start.end)


def _timeline(results: list[RankResult], step: int, step_s: float) -> Timeline:
    spans = tuple(span for result in results for span in result.spans[step])
    memory = tuple(sample for result in results for sample in _samples(result, step))
    return Timeline("measured", step_s, spans, memory)


def _samples(result: RankResult, step: int) -> list[MemorySample]:
    """The most in use from the start of each action on."""
    if step not in result.memory:
        return [MemorySample(result.rank, 0.0, result.peak_bytes)] if result.peak_bytes else []
    spans = result.spans[step]
    starts = [*(span.start_s for span in spans), spans[-1].stop_s if spans else 0.0]
    pairs = zip(starts, result.memory[step], strict=True)
    return [MemorySample(result.rank, start_s, num_bytes) for start_s, num_bytes in pairs]


def _numerics(options: RunOptions, plan: Plan, results: list[RankResult]) -> NumericsReport | None:
    if not options.check_numerics and not options.check_first_step:
        return None
    model = plan.inputs.model
    dtype = options.dtype or model.autocast or model.dtype
    skipped = results[0].skipped
    if options.resume:
        skipped = "the job goes on from a checkpoint"
    elif options.steps < options.accumulate:
        skipped = f"its {options.steps} steps make no update"
    if skipped:
        return NumericsReport(dtype, 0, 0, {}, skipped=skipped)
    differences = (each for result in results for each in result.compared)
    return report(differences, dtype, witness=results[0].witness, strict=options.check_numerics)


def stage_medians(timelines: list[Timeline], num_stages: int, ops: tuple[Op, ...]) -> tuple[float, ...]:
    """By stage, the median duration of actions of the given ops; several ops (``I`` and ``W``) add up."""
    durations: dict[tuple[int, Op], list[float]] = {}
    for timeline in timelines:
        for span in timeline.spans:
            action = Action.parse(span.action)
            durations.setdefault((action.stage, action.op), []).append(span.stop_s - span.start_s)
    return tuple(
        sum(median(durations[stage, op]) for op in ops if (stage, op) in durations) for stage in range(num_stages)
    )


def ranks_measured(timelines: Sequence[Timeline], decision: Decision) -> tuple[RankMeasured, ...]:
    """By rank, where the time of a step went, means over the steps; nothing if there are none."""
    if not timelines:
        return ()
    from planner.costs.simulator.breakdown import breakdown, mean_parts  # late: a rank prices nothing

    steps = (breakdown(timeline, decision.num_ranks) for timeline in timelines)
    parts = map(mean_parts, zip(*steps, strict=True))
    return tuple(RankMeasured(rank, *astuple(of_rank)) for rank, of_rank in enumerate(parts))


def stage_once_s(timelines: Sequence[Timeline], decision: Decision, op: Op) -> tuple[float, ...]:
    """By stage, the median over steps of ``UPDATE`` (its slowest rank's) or ``REDUCE_GRAD`` (from the last arrival)."""
    by_stage: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        lengths: dict[int, list[float]] = defaultdict(list)
        for span in timeline.spans:
            action = Action.parse(span.action)
            if action.op is op:
                lengths[action.stage].append(span.stop_s - span.start_s)
        for stage, each in lengths.items():
            by_stage[stage].append(min(each) if op is Op.REDUCE_GRAD else max(each))
    return tuple(median(by_stage[stage]) if stage in by_stage else 0.0 for stage in range(len(decision.stages)))
