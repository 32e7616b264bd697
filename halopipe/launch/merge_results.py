"""The results of all ranks as one."""

from __future__ import annotations

from halopipe.run_spec.job import RankResult
from halopipe.run_spec.options import Progress, RunOptions, RunProgress, RunResult, stage_medians
from halopipe.training.time_breakdown import ranks_measured, stage_once_s
from planner.ir.codec import plain
from planner.ir.plan import Plan
from planner.ir.schedule import Op
from planner.ir.timeline import MemorySample, Timeline
from runtime.numerics.compare import Difference, NumericsReport, report


def combine(plan: Plan, options: RunOptions, results: list[RankResult], progress: Progress | None) -> RunResult:
    """The run as a whole; NumericsError if it is not what one device computes."""
    seconds = tuple(max(each) for each in zip(*(result.step_seconds for result in results), strict=True))
    losses = next((result.losses for result in results if result.losses), ())
    timelines = {step: _timeline(results, step, seconds[step]) for step in results[0].spans}
    timed = [step for step in timelines if step >= options.warmup] or list(timelines)
    median = sorted(timed, key=seconds.__getitem__)[len(timed) // 2]
    num_stages = len(plan.decision.stages)
    shown = [timelines[step] for step in timed]
    result = RunResult(
        losses,
        seconds,
        options.warmup,
        timelines[median],
        stage_medians(shown, num_stages, (Op.FORWARD,)),
        stage_medians(shown, num_stages, (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)),
        tuple(result.peak_bytes for result in results),
        _numerics(options, plan, results),
        results[0].first_step,
        results[0].scores,
        results[0].trained,
        tuple(shown),
        stage_once_s(shown, plan.decision, Op.UPDATE),
        stage_once_s(shown, plan.decision, Op.REDUCE_GRAD),
        ranks_measured(shown, plan.decision),
    )
    if progress is not None:
        progress(RunProgress(result.first_step + len(seconds), options.steps, losses[-1], seconds[-1]))
    return result


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
    found = (Difference(**plain(each)) for result in results for each in result.compared)
    return report(found, dtype, witness=results[0].witness, strict=options.check_numerics)
