"""Machines that are not as their profile says: every class of costs has a true factor, and steps scatter."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.chains import chain_profile
from planner.costs.observe import as_run, observe
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.plan import Decision
from planner.ir.profile import Correction, CostClass, Observation, Profile
from planner.ir.timeline import Timeline
from tests.planner.corrections import classes
from tests.planner.factories import chain_decision

NUM_STEPS = 5


def step_of(profile: Profile, decision: Decision) -> Timeline:
    """As it is predicted, without a range."""
    return forecast(Pricing.of(profile), decision, 0.0, num_draws=0).timeline


@dataclass(frozen=True)
class Machine:
    """What a profile believes, and the truth; logarithms of each step's factors scatter by ``noise``."""

    profile: Profile
    truth: Mapping[CostClass, float]
    noise: float

    def step_s(self, decision: Decision) -> float:
        """Of a step without noise."""
        return step_of(self._with(self.truth), decision).step_s

    def runs(self, decision: Decision, draw: random.Random) -> list[Timeline]:
        """What a run measures."""
        scattered = (
            {of: factor * math.exp(draw.gauss(0.0, self.noise)) for of, factor in self.truth.items()}
            for _ in range(NUM_STEPS)
        )
        profiles = [self._with(truth) for truth in scattered]
        return [as_run(step_of(profile, decision), profile) for profile in profiles]

    def observation(self, decision: Decision, draw: random.Random) -> Observation:
        """What a run shows."""
        timelines = self.runs(decision, draw)
        steps = sorted(timeline.step_s for timeline in timelines)
        return observe(self.profile, decision, timelines, median(steps), (steps[-2] - steps[1]) / median(steps))

    def _with(self, truth: Mapping[CostClass, float]) -> Profile:
        return self.profile.corrected_by(tuple(Correction(of, factor, 1) for of, factor in truth.items()))


def machine(draw: random.Random, spread: float, noise: float, middle: float = 0.1) -> Machine:
    """Three devices of one kind and a chain of six layers; logarithms of factors are around ``middle``."""
    profile = chain_profile(
        6,
        3,
        forward_s=[draw.uniform(0.5e-3, 3e-3) for _ in range(6)],
        parameter_bytes=2**20,
        activation_bytes=2**16,
        update_s=3e-4,
        accumulate_s=1e-4,
        action_overhead_s=5e-5,
        latency_s=5e-4,
    )
    return Machine(profile, {of: math.exp(draw.gauss(middle, spread)) for of in classes(profile)}, noise)


MICRO_BATCHES = ((2, 2), (4, 4), (2, 2, 2, 2), (8,), (4, 4, 4, 4))
SHAPES = ("two stages", "three stages", "data parallel", "hybrid")


def decision(draw: random.Random, profile: Profile, shape: str) -> Decision:
    """A plan of a shape, with any cuts, micro-batches and schedule."""
    layers = len(profile.graph.layers) - 1
    batches = draw.choice(MICRO_BATCHES)
    schedule = draw.choice(("1f1b", "gpipe"))
    halves = (batches[0] // 2,) * 2
    cuts: Sequence[int] = sorted(draw.sample(range(1, layers), 2))
    match shape:
        case "two stages":
            return chain_decision(profile, cuts[:1], batches, schedule=schedule)
        case "three stages":
            return chain_decision(profile, cuts, batches, schedule=schedule)
        case "data parallel":
            return chain_decision(profile, (), batches, [(0, 1)], [halves], schedule)
        case _:
            return chain_decision(profile, cuts[:1], batches, [(0, 1), (2,)], [halves, batches[:1]], schedule)
