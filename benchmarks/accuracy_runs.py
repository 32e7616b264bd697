"""Steps of a plan on hosts of a testbed, one process a rank, each a virtual device."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.accuracy_profiles import entrance
from benchmarks.ranks import on_ranks
from benchmarks.testbed import Testbed
from benchmarks.timed_device import time_stages
from benchmarks.virtual_device import HeldTransport, VirtualDevice, hold
from cuda_ops.memory import available, install
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.schedule import Action
from planner.ir.timeline import Span
from profiler import capture, load_model
from profiler.capture import Captured
from profiler.quiet import RunDelay
from profiler.source import LoadedModel
from runtime.build import groups_of
from runtime.engine import Engine
from runtime.memory import storage_bytes
from runtime.stages.captured import captured_model
from runtime.transport import Transport

_WARM_UP = 2
_BARRIER_S = 60.0


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step on one rank.

    Attributes:
        start_s, stop_s: on the clock that all hosts of a testbed share.
        busy_s: of the device, in which it worked.
        late_s: by how much its work took longer than the device's time, since something else had the core.
        delay: share of the time in which the process was ready and had no core.
        by_action_s: seconds by stage and kind of action, such as ``1B``.
        peak_bytes: of tensors, the most in use at once; 0 where memory cannot be counted.
    """

    start_s: float
    stop_s: float
    busy_s: float
    late_s: float
    delay: float
    by_action_s: Mapping[str, float]
    peak_bytes: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Step:
    """A step, by rank."""

    ranks: tuple[RankStep, ...]

    @property
    def seconds(self) -> float:
        """From the common start to the end of the last rank."""
        return max(rank.stop_s for rank in self.ranks) - min(rank.start_s for rank in self.ranks)

    @property
    def loss(self) -> float:
        """Of the batch."""
        return next(rank.loss for rank in self.ranks if rank.loss is not None)


class Runner:
    """A network of which steps are run; captured once, in this process, which never computes anything of it."""

    def __init__(self, source: ModelSource) -> None:
        torch.set_num_threads(1)  # an OpenMP team does not survive a fork
        self.model: LoadedModel = load_model(source)
        self.captured: Captured = capture(self.model)

    def run(
        self,
        decision: Decision,
        testbed: Testbed,
        host_of: Sequence[int],
        factors: Sequence[float],
        steps: int,
        timed: Sequence[Span] = (),
    ) -> list[Step]:
        """``steps`` training steps on the same batch, after some to warm up.

        Args:
            host_of: the host of each rank.
            factors: seconds of each rank's device for one of a core's.
            timed: predicted spans; given these, devices compute nothing and each action lasts as long as there.
        """
        groups = groups_of(decision, self.captured.graph)

        def work(transport: Transport) -> list[RankStep]:
            return self._run(decision, factors[transport.rank], steps, transport, timed)

        found = on_ranks(len(factors), work, groups, enter=entrance(host_of, testbed))
        return [Step(ranks) for ranks in zip(*found, strict=True)]

    def _run(
        self, decision: Decision, factor: float, steps: int, transport: Transport, timed: Sequence[Span]
    ) -> list[RankStep]:
        device = VirtualDevice(factor)
        counter = install() if not available() else None
        held = HeldTransport(transport, device)
        model = captured_model(self.captured)
        engine = Engine(decision, model, self.model.module, held, _optimizer)  # type: ignore[arg-type]
        if timed:
            time_stages(engine, timed)
        else:
            hold(engine, device)
        kept = [x for each in engine._residents.values() for x in (*each.parameters.values(), *each.buffers.values())]
        there = storage_bytes(kept)  # made before the fork, hence not counted
        batch = (self.model.inputs, self.model.targets) if self.model.clouds is None else self.model.fed
        found = []
        gc.collect()
        gc.disable()
        for number in range(_WARM_UP + steps):
            transport.barrier(_BARRIER_S)
            before = device.busy_s, device.late_s
            if counter is not None:
                counter.reset_peak()
            delay, start_s = RunDelay(), time.perf_counter()
            result = engine.step(*batch)
            stop_s = time.perf_counter()
            if number >= _WARM_UP:
                busy_s, late_s = device.busy_s - before[0], device.late_s - before[1]
                peak_bytes = 0 if counter is None else there + counter.peak_bytes
                sums = by_action(result.spans)
                step = RankStep(start_s, stop_s, busy_s, late_s, delay.share(), sums, peak_bytes, result.loss)
                found.append(step)
        gc.enable()
        return found


def by_action(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by stage and kind of action, messages too."""
    found: dict[str, float] = {}
    for span in spans:
        action = Action.parse(span.action)
        key = f"{action.stage}{action.op.value}"
        found[key] = found.get(key, 0.0) + span.stop_s - span.start_s
    return found


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
