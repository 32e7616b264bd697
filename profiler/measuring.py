"""What runs in the measuring process: the model is built, captured, and every layer measured at every size."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import Graph
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost
from profiler.apart import example_of
from profiler.backends import back_end_keys
from profiler.capture import Captured, capture
from profiler.child import Report
from profiler.footprint import footprints
from profiler.quiet import RunDelay, canary_s
from profiler.source import LoadedModel, load_model
from profiler.timing import QUICK, Effort, time_layers
from profiler.updates import iteration_s, parameter_costs, still_optimizer

_BASE = 2  # a pass takes about as long as for so many samples more, since parameters are read and written


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure; ``sizes`` are numbers of samples, empty for the divisors of the example's."""

    source: ModelSource
    optimizer: Optimizer
    sizes: tuple[int, ...]
    quick: bool
    seed: int = 0


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


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """How far a profile is.

    Attributes:
        layer: the one that takes longest, or what else is being done.
        seconds, spread: of that layer, at ``samples`` samples.
        done, total: passes, weighted by samples.
        eta_s: seconds to go, as far as the passes so far tell.
    """

    layer: str
    seconds: float
    spread: float
    done: int
    total: int
    eta_s: float
    samples: int = 0


def measure_model(report: Report, job: Job) -> ModelCosts:
    """Measures ``job``, reporting :class:`ProfileProgress`.

    Raises:
        HalopipeError: the model cannot be built, captured or run.
    """
    effort = QUICK if job.quick else Effort()
    report(ProfileProgress("capture", 0.0, 0.0, 0, 1, 0.0))
    model = load_model(job.source, job.seed)
    still_optimizer(job.optimizer, model.module.parameters())  # a wrong name is said before anything is measured
    captured = capture(model)
    gc.freeze()  # what there is now stays: collections between passes need not look at it
    sizes = _sizes(captured, job.sizes)
    delay, before_s = RunDelay(), canary_s()
    counter = _Counter(report, effort, sizes)
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
    costs = parameter_costs(captured, job.optimizer, effort.min_runs)
    return ModelCosts(captured.graph, tuple(measurements), costs, iterations, before_s, canary_s(), delay.share())


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
    captured: Captured, tensors: Mapping[str, Tensor], samples: int, effort: Effort, counter: _Counter
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


def _iteration_s(model: LoadedModel, tensors: Mapping[str, Tensor], optimizer: Optimizer, effort: Effort) -> float:
    values = tuple(tensors.values())
    count = len(model.inputs)
    return iteration_s(model, values[:count], values[count:], optimizer, effort.min_runs)


class _Counter:
    """Turns finished passes into progress."""

    def __init__(self, report: Report, effort: Effort, sizes: tuple[int, ...]) -> None:
        self._report = report
        self._passes = effort.num_warm_ups + effort.min_runs + effort.split_runs + 1
        self._left = dict.fromkeys(sizes, self._passes)
        self._start_s = time.monotonic()

    def passed(self, samples: int, layer: str, seconds: float, spread: float) -> None:
        self._left[samples] = max(0, self._left[samples] - 1)  # some sizes need more passes than planned
        total = sum((size + _BASE) * self._passes for size in self._left)
        done = total - sum((size + _BASE) * left for size, left in self._left.items())
        elapsed_s = time.monotonic() - self._start_s
        eta_s = elapsed_s * (total - done) / max(1, done)
        self._report(ProfileProgress(layer, seconds, spread, done, total, eta_s, samples))

    def skip(self, samples: int) -> None:
        self._left[samples] = 0
