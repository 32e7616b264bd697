"""What the host adds to a step on a GPU is shared over the layers: they add up to the step."""

from __future__ import annotations

import pytest
import torch

from profiler.measure.host_time import with_calls
from profiler.measure.noise import CallClock, CudaClock, ThreadClock
from profiler.measure.timing import TimedLayer

CUDA = CudaClock(torch.device("cuda:0"))
KERNELS = {
    "conv": TimedLayer(4.0, 8.0, 5.0, 3.0, 2, 0.0, (12.0, 12.0)),
    "relu": TimedLayer(0.5, 1.0, 1.0, 0.0, 2, 0.0, (1.5, 1.5)),
}
CALLS = {
    "conv": TimedLayer(3.0, 9.0, 6.0, 4.0, 2, 0.0, (12.0, 12.0)),
    "relu": TimedLayer(2.0, 6.0, 6.0, 0.0, 2, 0.0, (8.0, 8.0)),
}


def calls(clock: CallClock) -> dict[str, TimedLayer]:
    return CALLS


def never(clock: CallClock) -> dict[str, TimedLayer]:
    raise AssertionError("calls are timed only where they matter")


def test_layers_add_up_to_a_step_that_waits_for_the_host() -> None:
    found, share = with_calls(KERNELS, 18.5, CUDA, calls)
    assert share == pytest.approx(5.0 / 20.0)
    assert sum(each.forward_s + each.backward_s for each in found.values()) == pytest.approx(18.5)
    conv = found["conv"]
    assert (conv.forward_s, conv.backward_s, conv.backward_input_s, conv.backward_weight_s) == (4.75, 10.25, 6.5, 4.0)
    assert conv.raw_s == (15.0, 15.0)
    assert found["relu"].backward_weight_s == 0
    assert found["relu"].backward_input_s == found["relu"].backward_s == 2.5


@pytest.mark.parametrize("passes_s", [10.0, 13.5, 13.6])
def test_a_step_that_kernels_fill_leaves_them_as_they_are(passes_s: float) -> None:
    assert with_calls(KERNELS, passes_s, CUDA, never) == (KERNELS, 0.0)


def test_on_the_processor_nothing_runs_ahead() -> None:
    assert with_calls(KERNELS, 18.5, ThreadClock(), never) == (KERNELS, 0.0)
