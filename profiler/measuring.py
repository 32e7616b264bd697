"""What runs in the measuring process: the model is built, captured, and every layer measured at every size.

Parts of layers come after the whole ones, so that what these say does not depend on whether parts are asked for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import Graph
from planner.ir.profile import (
    Measurement,
    ModelSource,
    Optimizer,
    ParameterCost,
    PartShape,
    PreparationCost,
    SiteHalo,
)
from profiler.backends import back_end_keys
from profiler.capture import Captured, capture
from profiler.child import Report
from profiler.counter import Counter, ProfileProgress
from profiler.example import example_of, fed_example
from profiler.footprint import footprints
from profiler.kinds import Rules
from profiler.model import CloudExample
from profiler.parts import measure_round, rounds, whole_values
from profiler.preparations import preparation_costs, site_halos
from profiler.quiet import RunDelay, canary_s
from profiler.source import LoadedModel, load_model
from profiler.timing import QUICK, Effort, time_layers
from profiler.updates import iteration_s, parameter_costs, still_optimizer

Shapes = Callable[[Graph, tuple[int, ...]], tuple[PartShape, ...]]
"""Which parts of layers to measure for micro-batches of these sizes; a function that another process can import."""

_OF_PARTS = Effort(num_warm_ups=2, min_runs=6, max_runs=10, split_runs=4, error=0.02)


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        sizes: numbers of samples; empty for the divisors of the example's.
        shapes: parts of layers to be measured at their own shapes; None for whole layers alone.
    """

    source: ModelSource
    optimizer: Optimizer
    sizes: tuple[int, ...]
    quick: bool
    seed: int = 0
    shapes: Shapes | None = None


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What was measured of a model in one process; as in :class:`planner.ir.profile.Profile`."""

    graph: Graph
    measurements: tuple[Measurement, ...]
    parameters: Mapping[str, ParameterCost]
    iteration_s: Mapping[str, float]
    canary_before_s: float
    canary_after_s: float
    run_delay: float
    parts: tuple[Measurement, ...] = ()
    preparations: tuple[PreparationCost, ...] = ()
    site_halos: tuple[SiteHalo, ...] = ()


def measure_model(report: Report, job: Job) -> ModelCosts:
    """Measures ``job``, reporting :class:`profiler.counter.ProfileProgress`.

    Raises:
        HalopipeError: the model cannot be built, captured or run.
    """
    effort = QUICK if job.quick else Effort()
    report(ProfileProgress("capture", 0.0, 0.0, 0, 1, 0.0))
    model = load_model(job.source, job.seed)
    still_optimizer(job.optimizer, model.module.parameters())  # a wrong name is said before anything is measured
    captured = capture(model, Rules(model.elementwise))
    gc.freeze()  # what there is now stays: collections between passes need not look at it
    sizes = _sizes(captured, job.sizes)
    shapes = job.shapes(captured.graph, sizes) if job.shapes is not None else ()
    delay, before_s = RunDelay(), canary_s()
    counter = Counter(report, sizes, _num_passes(effort), rounds(shapes, sizes), _num_passes(_of_parts(job)))
    measurements: list[Measurement] = []
    iterations: dict[str, float] = {}
    failures = []
    for samples in sizes:
        tensors = example_of(captured.graph.inputs, model, samples)
        try:
            iterations[str(samples)] = _iteration_s(model, tensors, job.optimizer, effort)
        except (RuntimeError, ValueError) as error:  # a batch norm of one value, for one
            failures.append(f"{samples} samples: {type(error).__name__}: {error}")
            counter.skip(samples)
            continue
        measurements += _measure_size(captured, tensors, samples, effort, counter)
    if not measurements:
        raise UnsupportedModelError("the model runs at no number of samples", failures)
    parts = _measure_parts(captured, model, shapes, measurements, _of_parts(job), counter)
    costs = parameter_costs(captured, job.optimizer, effort.min_runs)
    found = ModelCosts(
        captured.graph, tuple(measurements), costs, iterations, before_s, canary_s(), delay.share(), parts
    )
    return found if model.clouds is None else _with_preparations(found, model, model.clouds)


def _with_preparations(costs: ModelCosts, model: LoadedModel, example: CloudExample) -> ModelCosts:
    """With what the host prepares of the clouds, at the sizes at which the model runs."""
    sizes = tuple(sorted({one.samples for one in costs.measurements}))
    raw = {samples: fed_example(model, samples) for samples in sizes}
    preparations = [
        cost for samples in sizes for cost in preparation_costs(costs.graph, example, raw[samples], samples)
    ]
    halos = [halo for samples in sizes for halo in site_halos(costs.graph, example, raw[samples], samples)]
    return replace(costs, preparations=tuple(preparations), site_halos=tuple(halos))


def _sizes(captured: Captured, wanted: tuple[int, ...]) -> tuple[int, ...]:
    batch = captured.graph.samples
    if not captured.polymorphic:
        if wanted and wanted != (batch,):
            raise UsageError(
                f"the model runs with {batch} samples only",
                [f"asked for {', '.join(map(str, wanted))}"],
                ["leave out --sizes"],
            )
        return (batch,)
    if any(size < 1 for size in wanted):
        raise UsageError("a number of samples is below 1", [f"sizes: {', '.join(map(str, wanted))}"])
    return tuple(sorted(set(wanted))) or tuple(size for size in range(1, batch + 1) if batch % size == 0)


def _measure_size(
    captured: Captured, tensors: Mapping[str, Tensor], samples: int, effort: Effort, counter: Counter
) -> list[Measurement]:
    times = time_layers(captured, tensors, samples, effort, lambda *slowest: counter.passed(samples, *slowest))
    bytes_of = footprints(captured, tensors, samples)
    keys = back_end_keys(captured, samples)
    return [
        Measurement(
            layer=name,
            samples=samples,
            forward_s=found.forward_s,
            backward_s=found.backward_s,
            backward_input_s=found.backward_input_s,
            backward_weight_s=found.backward_weight_s,
            saved_bytes=bytes_of[name].saved_bytes,
            workspace_bytes=bytes_of[name].workspace_bytes,
            num_runs=found.num_runs,
            spread=found.spread,
            key=keys[name],
        )
        for name, found in times.items()
    ]


def _measure_parts(
    captured: Captured,
    model: LoadedModel,
    shapes: tuple[PartShape, ...],
    whole: list[Measurement],
    effort: Effort,
    counter: Counter,
) -> tuple[Measurement, ...]:
    """Parts at the sizes at which the model runs."""
    sizes = tuple(sorted({one.samples for one in whole}))
    wanted = rounds(shapes, sizes)
    counter.start_parts(wanted)
    found: list[Measurement] = []
    for size in sizes:
        mine = [each for each in wanted if each.samples == size]
        if not mine:
            continue
        value_of = whole_values(captured, example_of(captured.graph.inputs, model, size), size)
        of_size = {one.layer: one for one in whole if one.samples == size}
        for each in mine:
            found += measure_round(captured, value_of, each, of_size, effort, counter.passed_part)
            counter.end_round(each)
    return tuple(found)


def _of_parts(job: Job) -> Effort:
    return QUICK if job.quick else _OF_PARTS


def _num_passes(effort: Effort) -> int:
    return effort.num_warm_ups + effort.min_runs + effort.split_runs + 1


def _iteration_s(model: LoadedModel, tensors: Mapping[str, Tensor], optimizer: Optimizer, effort: Effort) -> float:
    values = tuple(tensors.values())
    count = len(model.inputs)
    return iteration_s(model, values[:count], values[count:], optimizer, effort.min_runs)
