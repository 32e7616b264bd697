"""What the host adds to a step on a GPU, shared over the layers, so that layers add up to a step.

On a GPU the host runs ahead, and what a layer takes depends on its neighbours: behind long kernels its calls cost
nothing, behind short ones the GPU waits for them.  So no lap around one layer tells its share of a step.  Kernels
measured alone add up to less than a step that waits for the host, and calls measured alone to more: neither hides the
other there.  Hence

    layer = its kernels + share * its calls         share = (step - all kernels) / all calls, not below 0

with the forward and backward passes of a step, which are timed apart at the same size.  A step whose kernels keep the
GPU busy has a share of 0.  Halves of a backward and parts of layers have the share of the step at their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from profiler.measure.contention import spread
from profiler.measure.noise import CallClock, CudaClock, LapClock
from profiler.measure.timing import TimedLayer, TimingEffort

LEAST_SHARE = 0.01
"""Of a step: what the host adds less than that is left out."""
OF_CALLS = TimingEffort(num_warm_ups=0, min_runs=5, max_runs=5, split_runs=5)

TimedLayers = Mapping[str, TimedLayer]
TimeCalls = Callable[[CallClock], TimedLayers]
"""Times the same layers by another clock, with :data:`OF_CALLS`."""


def with_calls(
    kernels: TimedLayers, passes_s: float, clock: LapClock, time_calls: TimeCalls
) -> tuple[TimedLayers, float]:
    """The layers of a step whose forward and backward take ``passes_s``, and the share of their calls in it.

    Args:
        kernels: all layers by ``clock``; if that is not a GPU's they are given back as they are.
    """
    kernels_s = sum(each.forward_s + each.backward_s for each in kernels.values())
    if not isinstance(clock, CudaClock) or passes_s - kernels_s < LEAST_SHARE * passes_s:
        return kernels, 0.0
    calls = time_calls(CallClock(clock.device))
    share = (passes_s - kernels_s) / sum(each.forward_s + each.backward_s for each in calls.values())
    return added(kernels, calls, share), share


def added(kernels: TimedLayers, calls: TimedLayers, share: float) -> TimedLayers:
    """Each layer's kernels, and the share of its calls."""
    return {name: _added(each, calls[name], share) for name, each in kernels.items()}


def _added(kernels: TimedLayer, calls: TimedLayer, share: float) -> TimedLayer:
    whole_s = share * (calls.forward_s + calls.backward_s)
    raw_s = tuple(float(f"{seconds + whole_s:.4g}") for seconds in kernels.raw_s)
    return replace(
        kernels,
        forward_s=kernels.forward_s + share * calls.forward_s,
        backward_s=kernels.backward_s + share * calls.backward_s,
        backward_input_s=kernels.backward_input_s + share * calls.backward_input_s,
        backward_weight_s=kernels.backward_weight_s + share * calls.backward_weight_s,
        spread=round(spread(raw_s), 4) if raw_s else kernels.spread,
        raw_s=raw_s,
    )
