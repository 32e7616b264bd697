"""What each layer takes: forward, backward, and the two halves of backward, each measured.

Many segmented passes by the device's clock, on the processor thread CPU time; of each layer's times the 20 %-trimmed
mean (Tukey), and the interquartile range over the median as spread.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from profiler.capture.graph import Captured
from profiler.measure.noise import Clock, ThreadClock
from profiler.measure.segments import BackwardTimes, Segment, SegmentedPass, segments

_TRIMMED = 0.2
_CHAIN = 20


@dataclass(frozen=True, slots=True)
class Effort:
    """How often to measure.

    Attributes:
        num_warm_ups: passes whose times are thrown away.
        min_runs, max_runs: passes; more than the least until the standard error of a pass is below ``error``.
        split_runs: passes for the halves of backward.
    """

    num_warm_ups: int = 3
    min_runs: int = 10
    max_runs: int = 20
    split_runs: int = 6
    error: float = 0.01


QUICK = Effort(num_warm_ups=1, min_runs=4, max_runs=4, split_runs=3)


def shared(effort: Effort, num_processes: int) -> Effort:
    """What each of several processes does, so that all together run about as many passes as one with ``effort``.

    One warm-up is enough: whole steps are timed before.  Medians want no fewer than 4 runs a process.
    """
    if num_processes == 1:
        return effort

    def share(runs: int, least: int) -> int:
        return max(least, math.ceil(1.5 * runs / num_processes))

    return replace(
        effort,
        num_warm_ups=1,
        min_runs=share(effort.min_runs, 4),
        max_runs=share(effort.max_runs, 4),
        split_runs=share(effort.split_runs, 3),
        error=effort.error * math.sqrt(num_processes),
    )


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer, and how they were found; ``raw_s`` as of :class:`planner.ir.profile.Measurement`."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    num_runs: int
    spread: float
    raw_s: tuple[float, ...] = ()


@dataclass(slots=True)
class _Samples:
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    input_s: list[float] = field(default_factory=list)
    weight_s: list[float] = field(default_factory=list)


def time_layers(
    captured: Captured,
    tensors: Mapping[str, Tensor],
    samples: int,
    effort: Effort,
    after_pass: Callable[[str, float, float], None],
    clock: Clock | None = None,
) -> dict[str, LayerTimes]:
    """The times of every layer for ``samples`` samples.

    Args:
        tensors: the graph's inputs by name.
        after_pass: called after every pass with the layer that takes longest, its seconds and its spread.
        clock: of the device that the tensors are on; by default that of the processor.
    """

    def start(split: bool) -> SegmentedPass:
        return SegmentedPass(captured, tensors, samples, clock, split)

    return time_segments(segments(captured), start, effort, after_pass, clock)


def time_segments(
    parts: Sequence[Segment],
    start: Callable[[bool], SegmentedPass],
    effort: Effort,
    after_pass: Callable[[str, float, float], None],
    clock: Clock | None = None,
) -> dict[str, LayerTimes]:
    """The times of ``parts``, run in passes that ``start`` makes, backward in halves or whole."""
    found = {part.name: _Samples() for part in parts}
    call_s = backward_call_s(clock)

    def once(split: bool) -> dict[str, tuple[float, BackwardTimes]]:
        return _pass(parts, start, split)

    for _ in range(effort.num_warm_ups):
        once(split=False)
        after_pass("warm-up", 0.0, 0.0)
    totals: list[float] = []
    while len(totals) < effort.min_runs or (len(totals) < effort.max_runs and _error(totals) > effort.error):
        times = once(split=False)
        for name, (forward_s, backward) in times.items():
            found[name].forward_s.append(forward_s)
            found[name].backward_s.append(max(0.0, backward.both_s - call_s))
        totals.append(sum(forward_s + backward.both_s for forward_s, backward in times.values()))
        after_pass(*_slowest(found))
    for index in range(effort.split_runs + 1):
        times = once(split=True)
        if index:  # the first one warms up
            for name, (_, backward) in times.items():
                found[name].input_s.append(max(0.0, backward.input_s - call_s))
                found[name].weight_s.append(backward.weight_s)
        after_pass(*_slowest(found))
    return {part.name: _summary(found[part.name]) for part in parts}


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the least and the greatest fifth of ``values``."""
    dropped = int(len(values) * _TRIMMED)
    kept = sorted(values)[dropped : len(values) - dropped]
    return statistics.fmean(kept)


def spread(values: Sequence[float]) -> float:
    """Interquartile range over the median; 0 for fewer than 4 values."""
    middle = statistics.median(values)
    if len(values) < 4 or middle <= 0:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def backward_call_s(clock: Clock | None = None) -> float:
    """What a call of autograd takes beside the operators: a stage makes one, a segmented pass one a layer.

    A chain of one view against a chain of many tells the call from the node.  Beside a GPU nothing: the call runs while
    the GPU works on what it was given before, and what of it shows in the time between events cannot be told.
    """
    if clock is not None and not isinstance(clock, ThreadClock):
        return 0.0
    one_s, many_s = _chain_s(1), _chain_s(_CHAIN)
    return max(0.0, one_s - (many_s - one_s) / (_CHAIN - 1))


def _chain_s(length: int) -> float:
    leaf = torch.ones(1, requires_grad=True)
    gradient = torch.ones(1)
    clock = ThreadClock()
    times = []
    for _ in range(30):
        value = leaf
        for _ in range(length):
            value = value.view_as(value)
        leaf.grad = None
        started = clock.start()
        torch.autograd.backward([value], [gradient])
        times.append(clock.seconds(clock.stop(started)))
    return statistics.median(times)


def _pass(
    parts: Sequence[Segment], start: Callable[[bool], SegmentedPass], split: bool
) -> dict[str, tuple[float, BackwardTimes]]:
    for part in parts:
        for parameter in part.parameters:
            parameter.grad = None
    gc.collect()
    gc.disable()
    try:
        run = start(split)
        for part in parts:
            run.forward(part)
        run.start_backward()
        for part in reversed(parts):
            run.backward(part)
        return run.times()
    finally:
        gc.enable()


def _error(totals: Sequence[float]) -> float:
    """Relative standard error of the median, from the interquartile range of a normal distribution."""
    return 1.25 * spread(totals) / 1.35 / math.sqrt(len(totals))


def _slowest(found: Mapping[str, _Samples]) -> tuple[str, float, float]:
    name = max(found, key=lambda layer: found[layer].forward_s[-1] + found[layer].backward_s[-1])
    whole = _whole(found[name])
    return name, statistics.median(whole), spread(whole)


def _whole(values: _Samples) -> list[float]:
    return [forward_s + backward_s for forward_s, backward_s in zip(values.forward_s, values.backward_s, strict=True)]


def _summary(values: _Samples) -> LayerTimes:
    backward_s = trimmed_mean(values.backward_s)
    input_s, weight_s = trimmed_mean(values.input_s), trimmed_mean(values.weight_s)
    if not weight_s:  # there is one half only, and it is the whole
        input_s = backward_s
    whole = _whole(values)
    return LayerTimes(
        trimmed_mean(values.forward_s),
        backward_s,
        input_s,
        weight_s,
        len(whole),
        round(spread(whole), 4),
        tuple(float(f"{value:.4g}") for value in whole),
    )
