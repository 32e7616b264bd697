"""A GPU that is only a clock: what is launched takes a stated time on it, after what was launched before."""

from __future__ import annotations

import pytest

from profiler.measure import noise


class FakeGpu:
    """Simulated seconds of a host and of one stream; ``waits`` counts how often the host waited for the stream."""

    def __init__(self) -> None:
        self.host_s = self.stream_s = 0.0
        self.waits = self.num_events = 0

    @classmethod
    def installed(cls, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
        """In place of what :mod:`profiler.measure.noise` asks of torch and of the time."""
        gpu = cls()

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing, "an event without timing has no elapsed time"
                gpu.num_events += 1
                self.at_s: float | None = None

            def record(self, stream: object) -> None:
                gpu.stream_s = max(gpu.stream_s, gpu.host_s)
                self.at_s = gpu.stream_s

            def elapsed_time(self, other: Event) -> float:
                assert self.at_s is not None
                assert other.at_s is not None
                assert gpu.host_s >= other.at_s, "the event was not waited for"
                return 1e3 * (other.at_s - self.at_s)

        monkeypatch.setattr(noise.torch.cuda, "Event", Event)
        monkeypatch.setattr(noise.torch.cuda, "current_stream", lambda device: device)
        monkeypatch.setattr(noise.torch.cuda, "synchronize", gpu.synchronize)
        monkeypatch.setattr(noise, "occupy_gpu", lambda cycles: gpu.launch(cycles / noise._CYCLES_PER_S, 0.0))
        monkeypatch.setattr(noise.time, "perf_counter", lambda: gpu.host_s)
        return gpu

    def launch(self, kernel_s: float, call_s: float) -> None:
        """One call, which takes ``call_s``, and its kernel."""
        self.host_s += call_s
        self.stream_s = max(self.stream_s, self.host_s) + kernel_s

    def synchronize(self, device: object = None) -> None:
        """Until the stream has caught up."""
        self.waits += 1
        self.host_s = max(self.host_s, self.stream_s)
