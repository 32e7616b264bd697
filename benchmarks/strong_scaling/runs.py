"""What running a network divided over processes of this machine takes: a step, and every layer."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.devices.layer_clock import LayerClock
from benchmarks.devices.ranks import CapturedNetwork, on_ranks, sgd
from benchmarks.turns import no_collector
from planner.ir.plan import Decision
from runtime.engine import Engine
from runtime.optim.ties import groups_of
from runtime.rank import RankContext
from runtime.transport import Transport, open_shared

_WARM_UP = 2
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Ran:
    """What one rank saw, medians over steps.

    Attributes:
        step_s: from the common start to this rank's end.
        cpu_s: processor time of the process in a step, the moments in which it looks for a message included.
        loss: of the first step; nan on ranks that do not make it.
        layer_s: forward and backward of each layer, of other steps, in which every layer was timed.
    """

    step_s: float
    cpu_s: float
    loss: float
    layer_s: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, by rank."""

    ranks: tuple[Ran, ...]

    @property
    def step_s(self) -> float:
        """Of the slowest rank; means nothing where ranks share a core."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def cpu_s(self) -> float:
        """Of the busiest rank."""
        return max(rank.cpu_s for rank in self.ranks)

    @property
    def loss(self) -> float:
        """Of the first step."""
        return next(rank.loss for rank in self.ranks if not math.isnan(rank.loss))


class Network(CapturedNetwork):
    """A network that is run divided over ranks of this machine."""

    def run(self, decision: Decision, steps: int, timed_steps: int = 0) -> Measured:
        """``steps`` training steps on ranks of their own, then ``timed_steps`` in which every layer is timed."""
        groups = groups_of(decision, self.captured.graph)

        def work(transport: Transport) -> Ran:
            return self._run(decision, transport, steps, timed_steps)

        return Measured(tuple(on_ranks(decision.num_ranks, work, groups, opened=open_shared)))

    def _run(self, decision: Decision, transport: Transport, steps: int, timed_steps: int) -> Ran:
        rows = decision.global_batch
        batch = tuple(tuple(x[:rows] for x in tensors) for tensors in (self.model.inputs, self.model.targets))
        told = {"model": self.captured, "module": self.model.module, "transport": transport}
        engine = Engine(RankContext(decision, sgd, **told))  # type: ignore[arg-type]
        seconds, processor_s = [], []
        loss: float | None = None
        layer_s: Mapping[str, tuple[float, float]] = {}
        with no_collector():
            for step in range(_WARM_UP + steps):
                before_s = time.process_time()
                result = engine.step(*batch)
                if step >= _WARM_UP:
                    seconds.append(result.step_s)
                    processor_s.append(time.process_time() - before_s)
                loss = result.loss if step == 0 else loss
            if timed_steps:
                clock = LayerClock()
                with clock.watching():
                    watched = Engine(RankContext(decision, sgd, **told))  # type: ignore[arg-type]
                    for _ in range(_WARM_UP + timed_steps):
                        watched.step(*batch)
                        clock.next_step()
                layer_s = clock.medians(_WARM_UP)
        found = math.nan if loss is None else loss
        return Ran(statistics.median(seconds), statistics.median(processor_s), found, layer_s)


def require_equal_losses(losses: Mapping[str, float]) -> None:
    """Raises RuntimeError unless all ways of dividing a network compute the same loss."""
    first, expected = next(iter(losses.items()))
    for name, loss in losses.items():
        if abs(loss - expected) > _LOSS_TOLERANCE * abs(expected):
            raise RuntimeError(f"the loss is {expected} by {first}, and {loss} by {name}")
