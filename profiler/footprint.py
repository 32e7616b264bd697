"""What each layer keeps between forward and backward, and what it needs besides while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile, record_function

from profiler.capture import Captured
from profiler.segments import Segment, SegmentedPass, segments

_FORWARD, _BACKWARD = "forward of ", "backward of "


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one layer.

    Attributes:
        saved_bytes: what autograd keeps for its backward that no earlier layer keeps, parameters, buffers and the
            graph's inputs aside: over layers these add up to what is held.
        workspace_bytes: the peak beyond what stays: of forward, beyond its result; of backward, beyond the parameters'
            gradients (so the gradients of its inputs and outputs are in it).
    """

    saved_bytes: int
    workspace_bytes: int


class SavedStorages:
    """Counts the memory behind saved tensors, each storage once.

    Args:
        known: tensors whose memory is accounted for elsewhere.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._seen = {tensor.untyped_storage().data_ptr(): tensor for tensor in known}
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts ``tensor`` and gives it back; it is kept alive, so that its address stays its own."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = tensor
            self.num_bytes += storage.nbytes()
        return tensor

    def hooks(self) -> saved_tensors_hooks:
        """A context in which everything autograd saves is counted."""
        return saved_tensors_hooks(self.pack, lambda tensor: tensor)


def footprints(captured: Captured, tensors: Mapping[str, Tensor], samples: int) -> dict[str, Footprint]:
    """The bytes of every layer for ``samples`` samples; parameters are left without gradients."""
    saved = saved_bytes(captured, tensors, samples)
    run = SegmentedPass(captured, tensors, samples, time.thread_time)
    workspace = workspace_bytes(segments(captured), run)
    for parameter in captured.graph_module.parameters():
        parameter.grad = None
    return {name: Footprint(saved[name], workspace[name]) for name in saved}


def saved_bytes(captured: Captured, tensors: Mapping[str, Tensor], samples: int) -> dict[str, int]:
    """``Footprint.saved_bytes`` by layer."""
    module = captured.graph_module
    counter = SavedStorages((*module.parameters(), *module.buffers(), *tensors.values()))
    run = SegmentedPass(captured, tensors, samples, time.thread_time)
    found = {}
    for part in segments(captured):
        before = counter.num_bytes
        with counter.hooks():
            run.forward(part)
        found[part.name] = counter.num_bytes - before
    return found


def workspace_bytes(parts: Sequence[Segment], run: SegmentedPass) -> dict[str, int]:
    """``Footprint.workspace_bytes`` of ``parts``, which are run."""
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
