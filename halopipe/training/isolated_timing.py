"""When a run times its stages alone, how often, and what came of it: before its first timed step and after its last.

By then the run on one device that the first step is compared with has ended.  A run gives it at most ``LARGEST_SHARE``
of its time and ``LONGEST_S`` in all; one in which that is not enough for a few passes does without.  All ranks decide
alike, from the plan and the options, and begin at once, since in a step they compute side by side as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from halopipe.run_spec.options import ALWAYS, NEVER, RunOptions
from planner.ir.plan import Plan
from planner.ir.timeline import LonePasses
from runtime.engine import Engine
from runtime.rank import RankContext

if TYPE_CHECKING:
    from runtime.stage.alone import LoneStage

LARGEST_SHARE = 0.05
LONGEST_S = 2.0
LEAST_STEPS = 20
_TIMING_S = 600.0  # another rank is waited for so long
LEAST_PASSES = 4
MOST_PASSES = 200
"""The first of which does not count: memory is taken and caches are filled."""


def budget_s(plan: Plan, options: RunOptions, num_steps: int) -> float:
    """Seconds before the steps, and as many after them; 0: a run of ``num_steps`` does not time its stages alone."""
    if options.lone_passes == NEVER:
        return 0.0
    if options.lone_passes == ALWAYS:
        return LONGEST_S / 2
    ranks = plan.prediction.ranks
    busiest_s = max((rank.compute_s for rank in ranks), default=plan.prediction.step_s)
    pass_s = busiest_s / len(plan.decision.micro_batches)
    half_s = min(LONGEST_S, LARGEST_SHARE * plan.prediction.step_s * num_steps) / 2
    return half_s if num_steps >= LEAST_STEPS and half_s >= LEAST_PASSES * pass_s else 0.0


@dataclass(slots=True)
class IsolatedTimer:
    """Times the stages of one rank alone.

    Attributes:
        stages: of this rank; none if they cannot be run alone, while those of others are.
        skipped: why there are none, or why they failed.
    """

    context: RankContext
    stages: tuple[LoneStage, ...]
    budget_s: float
    skipped: str = ""
    _timed: list[list[tuple[float, ...]]] = field(default_factory=list)

    @property
    def passes(self) -> tuple[LonePasses, ...]:
        """What was found."""
        if self.skipped:
            return ()
        both = zip(self.stages, *self._timed, strict=True)
        return tuple(
            LonePasses(self.context.rank, each.number, each.share.num_samples, *seconds) for each, *seconds in both
        )

    def time(self, engine: Engine, *, forgets: bool) -> None:
        """Call before the first timed step, and after the last; ``forgets``: the last step's gradients are used up."""
        if forgets:
            engine.forget_step()  # the next step does; a pass has gradients of its own
        activity = self.context.activity
        activity.begin("timing its stages alone")
        activity.deadline_s = _TIMING_S
        self.context.wait_for_all()
        try:
            stages = () if self.skipped else self.stages
            self._timed.append([self._repeated(each.pass_s, self.budget_s / len(stages)) for each in stages])
        except Exception as error:  # noqa: BLE001  # the run goes on without: it needs no stage alone
            self.skipped = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        self.context.wait_for_all()

    def _repeated(self, pass_s: Callable[[], float], budget_s: float) -> tuple[float, ...]:
        passes_s = [pass_s()]
        ends_s = time.perf_counter() + budget_s
        while len(passes_s) < LEAST_PASSES or (len(passes_s) < MOST_PASSES and time.perf_counter() < ends_s):
            passes_s.append(pass_s())
        return tuple(passes_s[1:])
