"""The memory that layers need while they run, from torch's profiler: where nothing counts allocations."""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd.profiler import profile, record_function

from profiler.segments import Segment, SegmentedPass

_FORWARD, _BACKWARD = "forward of ", "backward of "


def recorded_workspace(parts: Sequence[Segment], run: SegmentedPass) -> dict[str, int]:
    """``Footprint.workspace_bytes`` (:mod:`profiler.footprint`) of ``parts``, which are run."""
    given: dict[str, int] = {}
    with profile(use_cpu=True, profile_memory=True) as watched:
        for part in parts:
            with record_function(_FORWARD + part.name):
                run.forward(part)
        run.start_backward()
        for part in reversed(parts):
            given[part.name] = sum(gradient.nbytes for gradient in run.gradients_of(part)[1])
            with record_function(_BACKWARD + part.name):
                run.backward(part)
    peaks = _peaks(watched)
    found = {}
    for part in parts:
        peak, rest = peaks.get(_FORWARD + part.name, (0, 0))
        forward = peak - max(0, rest)
        peak, _ = peaks.get(_BACKWARD + part.name, (0, 0))
        weights = sum(parameter.nbytes for parameter in part.parameters) if peak else 0
        found[part.name] = max(0, forward, given[part.name] + peak - weights)
    return found


def _peaks(watched: profile) -> dict[str, tuple[int, int]]:
    """For every range recorded: how far memory rose above its start, and how much more there was at its end."""
    events = watched.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    ranges = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.name().startswith((_FORWARD, _BACKWARD))
    )
    found = {}
    index = 0
    for start_ns, stop_ns, name in ranges:
        level = peak = 0
        while index < len(changes) and changes[index][0] < start_ns:
            index += 1
        while index < len(changes) and changes[index][0] <= stop_ns:
            level += changes[index][1]
            peak = max(peak, level)
            index += 1
        found[name] = (peak, level)
    return found
