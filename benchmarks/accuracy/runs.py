"""Steps of a plan on hosts of a testbed, one process a rank, each a virtual device."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.cases import CORE, STEADY, TIMED
from benchmarks.accuracy.profiles import entrance
from benchmarks.devices.ranks import WARM_UP, CapturedNetwork, RankStep, Step, on_ranks, sgd, timed_steps
from benchmarks.devices.testbed import Testbed
from benchmarks.devices.virtual_device import REHEARSALS, HeldTransport, SteadyDevice, VirtualDevice, hold, time_stages
from benchmarks.runs import ran
from cuda_ops.memory import available, install
from halopipe.run_spec.options import RunOptions
from planner.ir.plan import Decision, Plan
from planner.ir.timeline import Span
from runtime.engine import Engine
from runtime.memory import storage_bytes
from runtime.optim.ties import groups_of
from runtime.rank import RankContext
from runtime.transport import Transport

Rehearsed = list[list[float]]
"""On one rank: by step the seconds of each piece of work."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Steps that were run, and what steady devices rehearsed before, by rank."""

    steps: list[Step]
    rehearsed: list[Rehearsed]


def run_here(plan: Plan, steps: int, warm_up: int) -> Ran:
    """``steps`` training steps, as ``halopipe run`` does them on two cores of this host."""
    found = ran(plan, RunOptions(steps=steps + warm_up, warmup=warm_up, check_first_step=False))
    by_step = []
    for step_s, loss in zip(found.timed_seconds, found.losses[warm_up:], strict=True):
        ranks = (RankStep(0.0, step_s, 0.0, 0.0, 0.0, 0.0, (), peak, loss) for peak in found.peak_bytes)
        by_step.append(Step(tuple(ranks)))
    return Ran(by_step, [])


class Runner(CapturedNetwork):
    """A network whose plans are run on a testbed."""

    def run(
        self,
        decision: Decision,
        testbed: Testbed,
        host_of: Sequence[int],
        factors: Sequence[float],
        steps: int,
        device: str = CORE,
        spans: Sequence[Span] = (),
        before: Sequence[Rehearsed] = (),
    ) -> Ran:
        """``steps`` training steps on the same batch, after some to warm up; none: steady devices rehearse alone.

        Args:
            host_of: the host of each rank.
            factors: seconds of each rank's device for one of a core's.
            device: what the ranks compute on (:data:`benchmarks.accuracy.cases.CORE` and the like).
            spans: of a timed device: each action lasts as long as there.
            before: of steady devices, what they rehearsed in earlier runs of the plan, by rank.
        """
        groups = groups_of(decision, self.captured.graph)
        alone = multiprocessing.get_context("fork").Lock()

        def work(transport: Transport) -> tuple[list[RankStep], Rehearsed]:
            rank = transport.rank
            if device == STEADY:
                steady = SteadyDevice(factors[rank], alone, before[rank] if before else ())
                found = self._run(decision, steady, steps, transport, ())
                return found, steady.rehearsed
            timed = spans if device == TIMED else ()
            return self._run(decision, VirtualDevice(factors[rank]), steps, transport, timed), []

        found = on_ranks(len(factors), work, groups, enter=entrance(host_of, testbed))
        return Ran(
            [Step(ranks) for ranks in zip(*(steps for steps, _ in found), strict=True)],
            [rehearsed for _, rehearsed in found],
        )

    def _run(
        self, decision: Decision, device: VirtualDevice, steps: int, transport: Transport, timed: Sequence[Span]
    ) -> list[RankStep]:
        counter = install() if not available() else None
        held = HeldTransport(transport, device)
        context = RankContext(decision, sgd, model=self.captured, module=self.model.module, transport=held)  # type: ignore[arg-type]
        engine = Engine(context)
        if timed:
            time_stages(engine, timed)
        else:
            hold(engine, device)
        kept = [
            x for each in engine._local_stages.values() for x in (*each.parameters.values(), *each.buffers.values())
        ]
        there = storage_bytes(kept)  # made before the fork, hence not counted
        batch = (self.model.inputs, self.model.targets) if self.model.clouds is None else self.model.fed
        warm_up = REHEARSALS + min(1, steps) if isinstance(device, SteadyDevice) else WARM_UP
        found = timed_steps(engine, device, transport, [batch] * (warm_up + steps), counter)[warm_up:]
        return [replace(each, peak_bytes=each.peak_bytes + there if counter else 0) for each in found]
