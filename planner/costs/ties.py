"""Which of two plans is the faster, and how sure that is; where it is not, the one on fewer ranks is taken.

A plan's step is a random variable.  Two parts of it are drawn, the same draws for every plan:

    what the profile says       ``costs.uncertainty.paired_steps``: processes, passes, sizes that were not measured
    what the model leaves out   two factors, normal in their logarithms, median 1: one alike in all plans of a kind, one
                                of the plan's own; together as wide as the kind's range is beyond that of one device,
                                which all plans share (:data:`ERRORS`, or what runs have shown)

so that an error which two plans have in common makes neither the faster.  Plan A is the faster one with the probability
that its step is the shorter in a draw.

The confidence is asked for more ranks: devices are what a plan costs its user.  Of the plans that the fastest at the
mean is not surely faster than, those on the fewest ranks count; of these the fastest at the mean is taken, or, of plans
within ``ALIKE`` of it, the one with the fewest exchanges a step.

That two plans tie is no equivalence: A may tie with B and B with C, and A be surely faster than C.  So all are held
against one plan, the fastest at the mean, and what is taken ties with that one, whatever else there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.predict import paired_forecast
from planner.costs.pricing import Pricing
from planner.costs.simulator.replay import Draws
from planner.costs.uncertainty import keyed, kind_of, model_deviation
from planner.ir.codec import fingerprint
from planner.ir.lazy import once_by
from planner.ir.plan import Decision
from planner.ir.profile import ONE_DEVICE, PIPELINE, SHARING

DRAWS = 1000
ALIKE = 0.01
"""Plans on as many ranks whose steps are no further apart are equally good; the one with fewer exchanges is taken."""
ERRORS: Mapping[str, float] = {ONE_DEVICE: 0.06, PIPELINE: 0.1, SHARING: 0.14}
"""As ``costs.uncertainty.MODEL``, with the few plans that lie far outside of their ranges."""
OWN = 0.3
"""Of the variance that a kind of plans has beyond one device's, the part of each plan's own: of 63 plans that were
predicted before they were run, pipelines of a setting were 0.045 apart (0.062 by these figures), and 0.118 from one
device (0.08), plans with a stage of several ranks 0.117 (0.098) and 0.158 (0.126): "errors apart" of ``python -m
benchmarks.accuracy``."""


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A plan to choose from.

    Attributes:
        steps: seconds, by draw.
        sample_s: seconds of a sample, without noise.
        num_ranks: that have something to do.
        num_exchanges: a step.
    """

    steps: Draws
    sample_s: float
    num_ranks: int
    num_exchanges: int


@dataclass(eq=False)
class Ties:
    """Plans of one profile, held against one another; each is drawn once."""

    pricing: Pricing

    @once_by(lambda self, decision, candidate=None: fingerprint(decision))
    def judged(self, decision: Decision, candidate: Candidate | None = None) -> Judged:
        """The plan's draws; raises as ``predict``.

        Args:
            candidate: the decision in indices, from those who have it.
        """
        paired = paired_forecast(self.pricing, candidate or decision, DRAWS)
        normal = np.zeros(DRAWS)
        for what, deviation in self._errors(decision, fingerprint(decision)):
            normal += deviation * keyed(what).standard_normal(DRAWS)
        return Judged(
            paired.steps * np.exp(normal),
            paired.step_s / decision.global_batch,
            len(decision.used_ranks),
            paired.num_exchanges,
        )

    def confidence(self, faster: Decision, slower: Decision) -> float:
        """With what probability the first takes less time for a sample than the second."""
        steps = (self.judged(plan).steps / plan.global_batch for plan in (faster, slower))
        return float(np.mean(next(steps) < next(steps)))

    def is_tie(self, one: Decision, other: Decision, confidence: float) -> bool:
        """Whether neither is the faster with ``confidence``."""
        return max(self.confidence(one, other), self.confidence(other, one)) < confidence

    def taken(self, best: Decision, others: Sequence[Decision], confidence: float) -> Decision:
        """The plan to take of ``best`` and those that it ties with: on the fewest ranks, and of these the fastest.

        A plan that is no more than ``ALIKE`` slower than that one, and ties with it, is taken where it exchanges less.

        Args:
            best: the fastest at the mean.
            others: in whatever order; of plans that are equal in all of this the first is taken, ``best`` before all.
            confidence: what more ranks are used for only where they are the faster with this probability.
        """
        tied = [best, *(other for other in others if self.confidence(best, other) < confidence)]
        fewest = min(self.judged(one).num_ranks for one in tied)
        lean = [one for one in tied if self.judged(one).num_ranks == fewest]
        fastest = min(lean, key=lambda one: self.judged(one).sample_s)
        longest_s = self.judged(fastest).sample_s * (1 + ALIKE)
        alike = [
            one for one in lean if self.judged(one).sample_s <= longest_s and self.confidence(fastest, one) < confidence
        ]
        return min(alike, key=lambda one: (self.judged(one).num_exchanges, self.judged(one).sample_s))

    def _errors(self, decision: Decision, name: str) -> Iterator[tuple[str, float]]:
        """What is drawn for a plan, with its standard deviation."""
        kind = kind_of([stage.ranks for stage in decision.stages])
        if kind == ONE_DEVICE:
            return
        cost_model = self.pricing.cost_model
        own, of_all = (model_deviation(cost_model, each, ERRORS) for each in (kind, ONE_DEVICE))
        beyond = max(0.0, own**2 - of_all**2)
        yield kind, sqrt((1 - OWN) * beyond)
        yield f"own {name}", sqrt(OWN * beyond)
        for exchanges in cost_model.stage_exchanges if kind == SHARING else ():
            yield from exchanges.errors()
