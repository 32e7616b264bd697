"""What runs in a measuring process: the model is built, captured, and every layer measured at the sizes that matter.

Parts of layers come after the whole ones, so that what these say does not depend on whether parts are asked for.
"""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cuda_ops import prepare_process
from cuda_ops.device.host import die_with_parent
from planner.ir.codec import fingerprint
from planner.ir.errors import StaleFileError, UnsupportedModelError, UsageError
from planner.ir.extras import extras
from planner.ir.profile import Measurement, PartShape, Slowdown
from profiler.capture.graph import capture_for
from profiler.extra import ProfilerExtra
from profiler.measure import together
from profiler.measure.back_ends import back_end_keys
from profiler.measure.beside_layers import (
    StepSeconds,
    action_overhead_s,
    parameter_costs,
    step_seconds,
    still_optimizer,
)
from profiler.measure.child_process import Report
from profiler.measure.contention import RunDelay
from profiler.measure.deduplicated import FirstPasses, first_passes, time_deduplicated
from profiler.measure.devices import BACKENDS
from profiler.measure.host_time import OF_CALLS, with_calls
from profiler.measure.job import MeasuringJob
from profiler.measure.noise import LapClock, clock_for, reference_kernel_s
from profiler.measure.partial_results import (
    CapturedGraph,
    FinishedMeasurements,
    ModelCosts,
    PartCosts,
    Rest,
    SizeCosts,
)
from profiler.measure.progress import ProfileProgress, ProgressCounter
from profiler.measure.sizes import KeyChange, Limits, key_changes, likely_sizes, next_size, not_bracketed
from profiler.measure.timing import QUICK, TimedLayer, TimingEffort, shared, time_layers
from profiler.measure.together import QUICK_PAIRS, PairEffort, Signals, measure_slowdowns
from profiler.shards.measure import PartRounds, likely_rounds
from profiler.source.model import LoadedModel, PreparedExample, example_of, fed_example
from profiler.source.module_kinds import trained_parameters
from profiler.source.source import load_model
from runtime.captured import CapturedModule


def given_sizes(job: MeasuringJob, batch: int, polymorphic: bool) -> tuple[int, ...]:
    """The sizes that are known beforehand; empty if they are to be chosen as they are measured.

    Args:
        batch: of the example.
        polymorphic: whether the model runs with other numbers of samples.

    Raises:
        UsageError: the model cannot run at the sizes of ``job``.
    """
    if job.chosen is not None:
        return job.chosen.sizes
    wanted = job.sizes
    if not polymorphic:
        if wanted and wanted != (batch,):
            raise UsageError(
                f"the model runs with {batch} samples only",
                [f"asked for {', '.join(map(str, wanted))}"],
                ["leave out --sizes"],
            )
        return (batch,)
    if any(size < 1 for size in wanted):
        raise UsageError("a number of samples is below 1", [f"sizes: {', '.join(map(str, wanted))}"])
    if not wanted and job.read is None:
        return tuple(size for size in range(1, batch + 1) if batch % size == 0)
    return tuple(sorted(set(wanted)))


_START_S = 30.0
"""How much longer than this one another process of the host may take until it has the network."""
_OF_PARTS = TimingEffort(num_warm_ups=2, min_runs=6, max_runs=10, split_runs=4, error=0.02)
_MOST_SIZES = 12
_MOST_SIZES_QUICK = 6
_FIRST_PASSES = 2  # backward whole, and in halves


def measure_model(report: Report, job: MeasuringJob) -> ModelCosts:
    """Measures ``job``.

    Reports the :class:`CapturedGraph`, each :class:`SizeCosts` and :class:`PartCosts` once it is finished, and
    :class:`profiler.measure.progress.ProfileProgress` in between.

    Raises:
        HalopipeError: the model cannot be built, captured or run.
        StaleFileError: the graph is another one than ``job.graph``.
    """
    begun_s = time.monotonic()
    model, captured = _captured(report, job)
    gc.freeze()  # what there is now stays: collections between passes need not look at it
    for number, core in enumerate(job.cores_beside, 1):
        fork_beside(job, model, captured, number, core)
    signals = Signals(Path(job.signals), job.num_devices) if job.signals else None
    if signals is not None and not signals.wait_for_all(_START_S + time.monotonic() - begun_s):
        signals = None
    costs = _Measuring(report, job, model, captured, signals).run()
    if signals is not None:
        signals.end()
    return costs


def compute_beside(report: Report, job: MeasuringJob, number: int) -> None:
    """What the process of device ``number`` does beside the one that measures; as :func:`measure_model`."""
    model, captured = _captured(lambda _: None, job)  # nobody reads what it would say
    together.compute_beside(captured, model, Signals(Path(job.signals), job.num_devices), number)


def fork_beside(
    job: MeasuringJob, model: LoadedModel, captured: CapturedModule, number: int, core: int | Collection[int] | None
) -> None:
    """A process as :func:`compute_beside` is one, with the network that is here; it ends with this one.

    It has weights of its own, as a rank has: what two cores read in one place they need to fetch once.
    """
    first = os.getpid()
    if os.fork():
        return
    try:
        die_with_parent(first)
        prepare_process(core)
        for tensor in (*captured.graph_module.parameters(), *captured.graph_module.buffers()):
            tensor.data = tensor.data.clone()
        together.compute_beside(captured, model, Signals(Path(job.signals), job.num_devices), number)
    except BaseException:  # noqa: BLE001 - whatever it is, it is shown, and nothing of the first's goes on here
        traceback.print_exc()
    finally:
        os._exit(0)


def capture_model(report: Report, job: MeasuringJob) -> None:
    """Reports the graph alone; as ``measure_model``."""
    _captured(report, job)


def _captured(report: Report, job: MeasuringJob) -> tuple[LoadedModel, CapturedModule]:
    report(ProfileProgress("capture", 0.0, 0.0, 0.0, 0.0, None))
    model = load_model(job.source, job.seed)
    device = torch.device(job.device)
    still_optimizer(job.optimizer, trained_parameters(model.owners))  # a wrong name is said before anything is measured
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model, captured = capture_for(model, device)
    graph_now = fingerprint(captured.graph)
    if job.graph and job.graph != graph_now:
        raise StaleFileError(
            "the model changed while it was profiled", [f"graph before: {job.graph}", f"graph now: {graph_now}"]
        )
    report(CapturedGraph(captured.graph, captured.remarks))
    if model.clouds is not None:
        from profiler.measure.preparing import evenly_ordered  # late: others do without

        model = replace(model, clouds=evenly_ordered(model.clouds))
    return model, captured


class _Measuring:
    """One process's work on its job."""

    def __init__(
        self, report: Report, job: MeasuringJob, model: LoadedModel, captured: CapturedModule, signals: Signals | None
    ) -> None:
        self._signals = signals
        self._report = report
        self._job = job
        self._model = model
        self._captured = captured
        self._clock: LapClock = clock_for(job.device)
        self._effort = shared(QUICK if job.quick else TimingEffort(), 1 if job.quick else job.num_processes)
        self._of_parts = shared(QUICK if job.quick else _OF_PARTS, 1 if job.quick else job.num_processes)
        passes = num_passes(self._effort)
        self._limits = Limits(
            most_sizes=_MOST_SIZES_QUICK if job.quick else _MOST_SIZES, passes=passes * job.num_processes
        )
        self._given_sizes = given_sizes(job, captured.graph.samples, captured.polymorphic)
        self._last_canary_s = 0.0
        self._first: dict[int, FirstPasses] = {}
        self._changes: tuple[KeyChange, ...] = ()
        if not self._given_sizes:
            self._changes = key_changes(partial(back_end_keys, captured), captured.graph.samples)
        has_parts = bool(job.chosen.shapes) if job.chosen is not None else job.shapes is not None
        self._counter = ProgressCounter(report, passes, num_passes(self._of_parts), has_parts)

    def run(self) -> ModelCosts:
        """Everything that is not done yet."""
        device = torch.device(self._job.device)
        clocks_of = BACKENDS[device.type].clocks
        delay = RunDelay()
        before_s = reference_kernel_s(device)
        before = clocks_of(device.index or 0)
        self._last_canary_s = before_s
        sizes = self._measure_sizes()
        if not any(size.measurements for size in sizes):
            raise UnsupportedModelError("the model runs at no number of samples", [size.failure for size in sizes])
        parts = self._measure_parts(sizes)
        slowdowns = self._slowdowns(_running(sizes))
        costs = parameter_costs(self._captured, self._job.optimizer, self._effort.min_runs, self._clock)
        fewest = min(_running(sizes))
        tensors = example_of(self._captured.graph.inputs, self._model, fewest)
        overhead_s = action_overhead_s(self._captured, tensors, fewest, self._effort.min_runs, self._clock)
        after_s = reference_kernel_s(device)
        rest = Rest(
            costs,
            before_s,
            after_s,
            delay.share(),
            action_overhead_s=overhead_s,
            clocks_before=before,
            clocks_after=clocks_of(device.index or 0),
            slowdowns=slowdowns,
        )
        if self._model.clouds is not None:
            rest = self._with_preparations(rest, self._model.clouds, _running(sizes))
        by_size = {size.samples: size.measurements for size in sizes}
        left_out = tuple(
            f"{change.samples} to {change.samples + 1} samples, {len(change.layers)} layers"
            for change in not_bracketed(by_size, self._changes)
        )
        return ModelCosts(FinishedMeasurements(tuple(sizes), tuple(parts)), rest, left_out)

    def _measure_sizes(self) -> list[SizeCosts]:
        by_samples = {size.samples: size for size in self._job.done.sizes}
        self._expect(by_samples)
        for samples in self._sizes(by_samples):
            if samples not in by_samples:
                by_samples[samples] = replace(self._measure_size(samples), canaries_s=self._canaries_s())
                self._report(by_samples[samples])
            self._counter.end_size(samples)
            self._expect(by_samples)
        return list(by_samples.values())

    def _canaries_s(self) -> tuple[float, ...]:
        """Of the fixed kernel before and after what was just measured; none where it is not measured again."""
        if self._job.quick:
            return ()
        before_s = self._last_canary_s
        self._last_canary_s = reference_kernel_s(self._job.device)
        return before_s, self._last_canary_s

    def _expect(self, by_samples: Mapping[int, SizeCosts]) -> None:
        """Tells the progress what is likely to be measured still, by what was."""
        if self._given_sizes or self._job.read is None:
            sizes = tuple(size for size in self._given_sizes if size not in by_samples)
        else:
            measured = {samples: size.measurements for samples, size in by_samples.items()}
            batch = self._captured.graph.samples
            sizes = likely_sizes(batch, measured, self._changes, self._limits, self._job.read)
        running = [size for size in by_samples.values() if size.measurements]
        self._counter.expect(sizes, self._likely_rounds(running, sizes) if running else None)

    def _likely_rounds(self, running: list[SizeCosts], coming: tuple[int, ...]) -> list[float]:
        """What a pass over each round of parts takes, as far as the sizes tell."""
        sizes = tuple(sorted({*(size.samples for size in running), *coming}))
        wanted = self._wanted(sizes)
        tried = {shape for each in self._job.done.parts for shape in each.shapes}
        measured = [one for each in self._job.done.parts for one in each.measurements]
        exact = self._job.chosen is not None or self._job.read is None
        return likely_rounds(wanted, tried, measured, running, sizes, self._limits, None if exact else self._job.read)

    def _sizes(self, by_samples: Mapping[int, SizeCosts]) -> Iterator[int]:
        """Sizes, one after another, each once the one before is in ``by_samples``."""
        if self._given_sizes or self._job.read is None:
            yield from self._given_sizes
            return
        batch = self._captured.graph.samples
        while True:
            measured = {samples: size.measurements for samples, size in by_samples.items()}
            samples = next_size(batch, measured, self._changes, self._limits, self._job.read)
            if samples is None:
                return
            yield samples

    def _measure_size(self, samples: int) -> SizeCosts:
        self._counter.start_size(samples)
        delay = RunDelay()
        tensors = example_of(self._captured.graph.inputs, self._model, samples)
        values = tuple(tensors.values())
        count = len(self._model.inputs)
        try:
            step = self._whole_step((values[:count], values[count:]))
        except (RuntimeError, ValueError) as error:  # a batch norm of one value, for one
            return SizeCosts(samples, failure=f"{samples} samples: {type(error).__name__}: {error}")
        first = first_passes(self._captured, tensors, samples, self._clock, deduplicates=self._job.quick)
        passed = partial(self._counter.passed, samples)
        for _ in range(_FIRST_PASSES):
            passed("warm-up", 0.0, 0.0)
        kernels = time_deduplicated(self._captured, tensors, self._effort, passed, self._clock, first)
        self._first[samples] = first

        def time_calls(clock: LapClock) -> dict[str, TimedLayer]:
            return time_layers(self._captured, tensors, samples, OF_CALLS, lambda *slowest: None, clock)

        times, calls_share = with_calls(kernels, step.passes_s, self._clock, time_calls)
        bytes_of = first.footprints
        keys = back_end_keys(self._captured, samples)
        measurements = tuple(
            Measurement(
                layer=name,
                samples=samples,
                forward_s=layer_times.forward_s,
                backward_s=layer_times.backward_s,
                backward_input_s=layer_times.backward_input_s,
                backward_weight_s=layer_times.backward_weight_s,
                saved_bytes=bytes_of[name].saved_bytes,
                workspace_bytes=bytes_of[name].workspace_bytes,
                num_runs=layer_times.num_runs,
                spread=layer_times.spread,
                key=keys[name],
                raw_s=layer_times.raw_s,
                levels=bytes_of[name].levels,
                alike=layer_times.alike,
            )
            for name, layer_times in times.items()
        )
        return SizeCosts(samples, measurements, step.whole_s, calls_share=calls_share, run_delay=delay.share())

    def _whole_step(self, batch: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]) -> StepSeconds:
        # Of a process that has just forked the first pass copies the memory that it writes to.
        has_run = self._job.quick and self._job.device == "cpu" and bool(self._first)
        optimizer = self._job.optimizer
        return step_seconds(self._model, batch, optimizer, self._effort.min_runs, self._clock, has_run=has_run)

    def _measure_parts(self, sizes: list[SizeCosts]) -> list[PartCosts]:
        """Parts at the sizes at which the model runs."""
        costs_so_far = list(self._job.done.parts)
        wanted = self._wanted(_running(sizes))
        whole = [size for size in sizes if size.measurements]
        parts = PartRounds(self._captured, self._model, whole, self._of_parts, self._counter, self._clock)
        read = None if self._job.chosen is not None else self._job.read
        turns = (
            parts.every(wanted, costs_so_far)
            if read is None
            else parts.chosen(wanted, costs_so_far, self._limits, read)
        )
        for each, measured in turns:
            costs = replace(measured, canaries_s=self._canaries_s())
            self._report(costs)
            self._counter.end_round(len(each.shapes))
            costs_so_far.append(costs)
        return costs_so_far

    def _slowdowns(self, sizes: tuple[int, ...]) -> tuple[Slowdown, ...]:
        """What layers lose while all devices compute: at about as many samples as a rank of all would have."""
        if self._signals is None:
            return ()
        share = self._captured.graph.samples / self._job.num_devices
        samples = min(sizes, key=lambda size: abs(math.log(size / share)))
        tensors = example_of(self._captured.graph.inputs, self._model, samples)
        effort = QUICK_PAIRS if self._job.quick else PairEffort()
        first = self._first.get(samples, FirstPasses(samples))
        return measure_slowdowns(self._captured, tensors, first, self._signals, effort, self._clock)

    def _wanted(self, sizes: tuple[int, ...]) -> tuple[PartShape, ...]:
        if self._job.chosen is not None:
            return self._job.chosen.shapes
        return self._job.shapes(self._captured.graph, sizes) if self._job.shapes is not None else ()

    def _with_preparations(self, rest: Rest, example: PreparedExample, sizes: tuple[int, ...]) -> Rest:
        """With what the host prepares of users' batches."""
        from profiler.measure.preparing import preparation_costs, site_halos  # late: others do without

        graph = self._captured.graph
        raw = {samples: fed_example(self._model, samples) for samples in sizes}
        for extra in extras(ProfilerExtra):
            of_extra = [extra.preparation_cost(graph, example, raw[n], n) for n in sizes]
            if all(cost is not None for cost in of_extra):
                return replace(rest, preparations=tuple(cost for cost in of_extra if cost is not None))
        costs = [cost for samples in sizes for cost in preparation_costs(graph, example, raw[samples], samples)]
        halos = [halo for samples in sizes for halo in site_halos(graph, example, raw[samples], samples)]
        return replace(rest, preparations=tuple(costs), site_halos=tuple(halos))


def num_passes(effort: TimingEffort) -> int:
    """Passes over one size, if none is added."""
    return effort.num_warm_ups + effort.min_runs + effort.split_warm_ups + effort.split_runs


def _running(sizes: list[SizeCosts]) -> tuple[int, ...]:
    return tuple(sorted(size.samples for size in sizes if size.measurements))
