"""Whether a plan's prediction is what the cost model forecasts of its decision: each field against the same field.

A forecast that is made again on another machine differs by rounding alone, so tolerances are of rounding: 1e-9 of a
step; 1e-7 of the step for the times of a rank and the bubble; two bytes for each micro-batch of a peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner import schedules
from planner.check.order import schedule_order
from planner.check.statements import binding_faults, close
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.costs.sentences import longest_sum_s, most_messages_s
from planner.costs.uncertainty import DRAWS
from planner.ir.plan import Alternative, Decision, Plan, Prediction
from planner.ir.program import Program

_TIME_TOLERANCE = 1e-7
"""Of the times of a rank, which are sums of small differences, as a part of the step."""
_DRAWN_TOLERANCE = 2e-6
_RATE_TOLERANCE = 4e-6
"""Of deciles, which are rounded to six digits, and of the rates that are made of such."""


def prediction_faults(plan: Plan, pricing: Pricing) -> Iterator[str]:
    """Where the prediction differs from a new forecast of the same decision."""
    request = plan.inputs.request
    stated = plan.prediction
    num_draws = DRAWS if stated.p10_s or stated.p90_s else 0
    new_forecast = forecast(pricing, plan.decision, request.memory_margin, request.memory_bytes, num_draws)
    fresh = new_forecast.prediction
    if not close(stated.step_s, fresh.step_s):
        yield f"prediction.step_s: the predicted step is {stated.step_s} s, recomputed {fresh.step_s} s"
    if abs(stated.bubble_fraction - fresh.bubble_fraction) > _TIME_TOLERANCE:
        bubbles = f"the predicted bubble is {stated.bubble_fraction}, recomputed {fresh.bubble_fraction}"
        yield f"prediction.bubble_fraction: {bubbles}"
    for rank, device in enumerate(pricing.cost_model.cluster.devices[: len(stated.ranks)]):
        yield from _rank_faults(plan, fresh, rank, device.name)
    if stated.evidence != fresh.evidence:
        prices = f"its prices are {fresh.evidence!r}"
        yield f"prediction.evidence: the prediction is called {stated.evidence!r}, {prices}"
    if stated.transport != fresh.transport:
        links = f"the links were measured with {fresh.transport!r}"
        yield f"prediction.transport: {stated.transport!r}, {links}"
    for name in ("p10_s", "p90_s"):
        one = getattr(stated, name)
        other = getattr(fresh, name)
        if not close(one, other, _DRAWN_TOLERANCE):
            yield f"prediction.{name}: {one} s, drawn again {other} s"
    for name in ("sustained_per_s", "sustained_p10_per_s", "sustained_p90_per_s"):
        one = getattr(stated, name)
        other = getattr(fresh, name)
        if not close(one, other, _RATE_TOLERANCE):
            yield f"prediction.{name}: {one} samples/s, simulated again {other}"
    if fresh.step_s > 0:
        sums = longest_sum_s(new_forecast) / fresh.step_s
        messages = most_messages_s(new_forecast) / fresh.step_s
        without_profile = set(binding_faults(plan))
        yield from (fault for fault in binding_faults(plan, sums, messages) if fault not in without_profile)


def _rounded_bytes(decision: Decision) -> int:
    """So far apart are equal peaks: of parts of a layer or a sample there are fractions of bytes, each rounded."""
    return 2 * len(decision.sizes) + 2


def _rank_faults(plan: Plan, prediction: Prediction, rank: int, device: str) -> Iterator[str]:
    stated = plan.prediction.ranks[rank]
    fresh = prediction.ranks[rank]
    rounded = _rounded_bytes(plan.decision)
    path = f"prediction.ranks[{rank}]"
    holds = f"rank {rank} is predicted to hold"
    if abs(stated.peak_bytes - fresh.peak_bytes) > rounded:
        yield f"{path}.peak_bytes: {holds} {stated.peak_bytes} bytes, recomputed {fresh.peak_bytes}"
    if stated.on_chip_bytes != fresh.on_chip_bytes:
        yield f"{path}.on_chip_bytes: {holds} {stated.on_chip_bytes} bytes on chip, recomputed {fresh.on_chip_bytes}"
    if fresh.peak_bytes > stated.memory_limit_bytes + rounded:
        limit = f"more than its limit of {stated.memory_limit_bytes}"
        yield f"{path}.peak_bytes: rank {rank} holds {fresh.peak_bytes} bytes, {limit}"
    if stated.kind and stated.kind != fresh.kind:
        yield f"{path}.kind: {stated.kind!r}, {device} is {fresh.kind!r}"
    if stated.on_chip_limit_bytes != fresh.on_chip_limit_bytes:
        room = f"{stated.on_chip_limit_bytes} bytes on chip, {device} has {fresh.on_chip_limit_bytes}"
        yield f"{path}.on_chip_limit_bytes: {room}"
    for name in ("compute_s", "communication_s", "bubble_s", "idle_s"):
        one = getattr(stated, name)
        other = getattr(fresh, name)
        if abs(one - other) > max(_TIME_TOLERANCE * prediction.step_s, 1e-9 * other):
            yield f"{path}.{name}: {one} s, recomputed {other} s"


def alternative_faults(plan: Plan, pricing: Pricing, program: Program) -> Iterator[str]:
    """Other schedules of the same stages are forecast as the plan itself is."""
    request = plan.inputs.request
    for number, other in enumerate(plan.alternatives):
        name = other.name.removeprefix("schedule ")
        if name == other.name:
            continue
        path = f"alternatives[{number}]"
        if name not in schedules.names() or name == plan.decision.schedule:
            yield f"{path}.name: {other.name!r} is no other schedule than {plan.decision.schedule}"
            continue
        decision = schedule_order(plan.decision, program, name)
        decisions = [decision]
        if program.stages.prepares:  # another schedule may pay where the next step is prepared otherwise
            decisions.append(replace(decision, prepares_next_step=not decision.prepares_next_step))
        forecasts = (forecast(pricing, each, request.memory_margin, request.memory_bytes, 0) for each in decisions)
        yield from min((list(_differences(plan, other, each.prediction, path)) for each in forecasts), key=len)


def _differences(plan: Plan, other: Alternative, fresh: Prediction, path: str) -> Iterator[str]:
    """Where another schedule differs from its forecast."""
    if other.step_s is not None and not close(other.step_s, fresh.step_s):
        yield f"{path}.step_s: {other.name} takes {other.step_s} s, recomputed {fresh.step_s} s"
    if other.peak_bytes is None:
        return
    peaks, limits = (
        [getattr(rank, name) for rank in ranks]
        for name, ranks in (("peak_bytes", fresh.ranks), ("memory_limit_bytes", plan.prediction.ranks))
    )
    fullest = max(peaks)
    if other.step_s is None:  # the rank that lacks most, by its limit
        fullest = max(zip(peaks, limits, strict=False), key=lambda pair: pair[0] / max(1, pair[1]))[0]
    if abs(other.peak_bytes - fullest) > _rounded_bytes(plan.decision):
        yield f"{path}.peak_bytes: {other.name} holds {other.peak_bytes} bytes, recomputed {fullest}"
