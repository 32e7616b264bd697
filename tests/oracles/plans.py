"""The checker of the product, and the figures of a plan against the oracles: what solvers' plans are held against."""

from __future__ import annotations

from collections.abc import Iterator

from planner import faults_of
from planner.costs.cost_model import CostModel
from planner.ir.plan import Plan, Prediction
from planner.ir.profile import Profile
from tests.oracles.evaluation import Evaluation, evaluate

_TIMES = ("compute_s", "communication_s", "bubble_s", "idle_s")


def check(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """The faults that the product's checker names; of a plan without any, what the oracles make otherwise."""
    faults = faults_of(plan, profile)
    if faults or profile is None:
        return faults
    cost_model = CostModel(plan.inputs.as_seen(profile))
    rounded_bytes = 2 * len(plan.decision.sizes) + 2  # of fractions of bytes, for each micro-batch that is held
    return tuple(differences(plan.prediction, evaluate(cost_model, plan.decision), rounded_bytes))


def differences(stated: Prediction, plain: Evaluation, rounded_bytes: int) -> Iterator[str]:
    """Where a prediction differs from the plain evaluation of its decision, by more than rounding."""
    if abs(stated.step_s - plain.step_s) > 1e-9 * max(stated.step_s, plain.step_s):
        yield f"oracle: the step is {stated.step_s} s, plainly {plain.step_s} s"
    if abs(stated.bubble_fraction - plain.bubble_fraction) > 1e-7:
        yield f"oracle: the bubble is {stated.bubble_fraction}, plainly {plain.bubble_fraction}"
    for rank, (one, times) in enumerate(zip(stated.ranks, plain.times, strict=True)):
        if abs(one.peak_bytes - plain.peak_bytes[rank]) > rounded_bytes:
            yield f"oracle: rank {rank} holds {one.peak_bytes} bytes, plainly {plain.peak_bytes[rank]}"
        if one.on_chip_bytes != plain.on_chip_bytes[rank]:
            yield f"oracle: rank {rank} holds {one.on_chip_bytes} bytes on chip, plainly {plain.on_chip_bytes[rank]}"
        for name in _TIMES:
            seconds = getattr(one, name)
            again_s = getattr(times, name)
            if abs(seconds - again_s) > max(1e-7 * plain.step_s, 1e-9 * again_s):
                yield f"oracle: {name} of rank {rank} is {seconds} s, plainly {again_s} s"
