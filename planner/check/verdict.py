"""All faults of a plan, in words; each begins with its path in the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner import schedules
from planner.check.order import program_faults, rows_of, schedule_order, stated_program
from planner.check.request import request_faults
from planner.check.statements import binding_faults, close, statement_faults
from planner.check.structure import (
    device_faults,
    form_faults,
    model_faults,
    named_layer_faults,
    part_faults,
    recomputed_faults,
    structure_faults,
    token_faults,
)
from planner.costs.cost_model import PriceBook
from planner.costs.limits import longest_sum_s, most_messages_s
from planner.costs.predict import Forecast, forecast
from planner.costs.uncertainty import DRAWS
from planner.ir.cluster import DeviceSpec
from planner.ir.codec import fingerprint
from planner.ir.errors import HalopipeError
from planner.ir.plan import Alternative, Decision, Plan, Prediction
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.layers.boundary import Boundaries

_TIME_TOLERANCE = 1e-7
"""Of the times of a rank, which are sums of small differences, as a part of the step."""
_DRAWN_TOLERANCE, _RATE_TOLERANCE = 2e-6, 4e-6
"""Of deciles, which are rounded to six digits, and of the rates that are made of such."""


def check(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """Everything that is wrong with ``plan``, as "path in the file: what"; nothing if it is good.

    Args:
        profile: what the plan was made from; ``coverage.needs_profile`` says what is left unchecked without it.
    """
    decision = plan.decision
    faults = [*structure_faults(decision), *statement_faults(plan)]
    faults += form_faults(decision) if profile is None else ()
    rows, unreadable = rows_of(decision)
    faults += unreadable
    is_sound = not any(fault.startswith(("decision", "inputs.corrections")) for fault in faults)
    if profile is None:
        if is_sound:
            faults += [*request_faults(plan, None, rows), *program_faults(decision, stated_program(decision, rows))]
        return tuple(faults)
    if not any(fault.startswith("inputs.corrections") for fault in faults):
        profile = plan.inputs.as_seen(profile)
    faults += _input_faults(plan, profile)
    misplaced = [*model_faults(decision, profile.graph), *device_faults(decision, profile)]
    if is_sound and not misplaced:
        found_by_name = named_layer_faults(decision, profile.graph)
        misplaced = [f"decision.layers.{name}: {fault}" for name, fault in found_by_name]
        misplaced += part_faults(decision, profile.graph)
        misplaced += token_faults(decision, profile.graph)
        misplaced += recomputed_faults(decision, profile.graph)
    faults += misplaced
    if not is_sound or misplaced:
        return tuple(faults)  # a program can only be judged on stages that make sense
    faults += request_faults(plan, profile, rows)
    try:
        program = Boundaries.of_decision(profile.graph, decision).program(decision)
        illegal = list(program_faults(decision, program))
        faults += illegal
        if not any("not legal" in fault for fault in illegal):
            book = PriceBook(profile)
            request, stated = plan.inputs.request, plan.prediction
            num_draws = DRAWS if stated.p10_s or stated.p90_s else 0
            seen = forecast(book, decision, request.memory_margin, request.memory_bytes, num_draws)
            faults += _prediction_faults(plan, seen, profile.cluster.devices)
            faults += _alternative_faults(plan, book, program)
    except (ValueError, LookupError, HalopipeError) as error:
        faults.append(f"decision.program: the plan cannot be priced: {error}")
    return tuple(faults)


def _input_faults(plan: Plan, profile: Profile) -> Iterator[str]:
    for what, expected, value in (
        ("model", plan.inputs.model_fingerprint, profile.graph),
        ("profile", plan.inputs.profile_fingerprint, profile.bare),
        ("cluster", plan.inputs.cluster_fingerprint, profile.cluster),
    ):
        found = fingerprint(value)
        if found != expected:
            yield f"inputs.{what}_fingerprint: the {what} is another one: plan {expected}, here {found}"
    if plan.inputs.model != profile.model:
        yield f"inputs.model: the plan names another model source: {plan.inputs.model}, the profile {profile.model}"
    if plan.inputs.optimizer != profile.optimizer:
        there = profile.optimizer
        yield f"inputs.optimizer: the plan names another optimiser: {plan.inputs.optimizer}, the profile {there}"


def _prediction_faults(plan: Plan, seen: Forecast, devices: Sequence[DeviceSpec]) -> Iterator[str]:
    """Where the prediction differs from a new forecast of the same decision."""
    stated, again = plan.prediction, seen.prediction
    if not close(stated.step_s, again.step_s):
        yield f"prediction.step_s: the predicted step is {stated.step_s} s, recomputed {again.step_s} s"
    if abs(stated.bubble_fraction - again.bubble_fraction) > _TIME_TOLERANCE:
        bubbles = f"the predicted bubble is {stated.bubble_fraction}, recomputed {again.bubble_fraction}"
        yield f"prediction.bubble_fraction: {bubbles}"
    for rank, device in enumerate(devices[: len(stated.ranks)]):
        yield from _rank_faults(plan, again, rank, device.name)
    if stated.evidence != again.evidence:
        words = f"the prediction is called {stated.evidence!r}, its prices are {again.evidence!r}"
        yield f"prediction.evidence: {words}"
    if stated.transport != again.transport:
        words = f"{stated.transport!r}, the links were measured with {again.transport!r}"
        yield f"prediction.transport: {words}"
    for name in ("p10_s", "p90_s"):
        one, other = getattr(stated, name), getattr(again, name)
        if not close(one, other, _DRAWN_TOLERANCE):
            yield f"prediction.{name}: {one} s, drawn again {other} s"
    for name in ("sustained_per_s", "sustained_p10_per_s", "sustained_p90_per_s"):
        one, other = getattr(stated, name), getattr(again, name)
        if not close(one, other, _RATE_TOLERANCE):
            yield f"prediction.{name}: {one} samples/s, simulated again {other}"
    if again.step_s > 0:
        reduction, messages = longest_sum_s(seen) / again.step_s, most_messages_s(seen) / again.step_s
        known = set(binding_faults(plan))
        yield from (fault for fault in binding_faults(plan, reduction, messages) if fault not in known)


def _rounded_bytes(decision: Decision) -> int:
    """So far apart are equal peaks: of parts of a layer or a sample there are fractions of bytes, each rounded."""
    return 2 * len(decision.sizes) + 2


def _rank_faults(plan: Plan, forecast_again: Prediction, rank: int, device: str) -> Iterator[str]:
    stated, again, rounded = plan.prediction.ranks[rank], forecast_again.ranks[rank], _rounded_bytes(plan.decision)
    path = f"prediction.ranks[{rank}]"
    holds = f"rank {rank} is predicted to hold"
    if abs(stated.peak_bytes - again.peak_bytes) > rounded:
        yield f"{path}.peak_bytes: {holds} {stated.peak_bytes} bytes, recomputed {again.peak_bytes}"
    if stated.on_chip_bytes != again.on_chip_bytes:
        yield f"{path}.on_chip_bytes: {holds} {stated.on_chip_bytes} bytes on chip, recomputed {again.on_chip_bytes}"
    if again.peak_bytes > stated.memory_limit_bytes + rounded:
        limit = f"more than its limit of {stated.memory_limit_bytes}"
        yield f"{path}.peak_bytes: rank {rank} holds {again.peak_bytes} bytes, {limit}"
    if stated.kind and stated.kind != again.kind:
        yield f"{path}.kind: {stated.kind!r}, {device} is {again.kind!r}"
    if stated.on_chip_limit_bytes != again.on_chip_limit_bytes:
        room = f"{stated.on_chip_limit_bytes} bytes on chip, {device} has {again.on_chip_limit_bytes}"
        yield f"{path}.on_chip_limit_bytes: {room}"
    for name in ("compute_s", "communication_s", "bubble_s", "idle_s"):
        one, other = getattr(stated, name), getattr(again, name)
        if abs(one - other) > max(_TIME_TOLERANCE * forecast_again.step_s, 1e-9 * other):
            yield f"{path}.{name}: {one} s, recomputed {other} s"


def _alternative_faults(plan: Plan, book: PriceBook, program: Program) -> Iterator[str]:
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
        forecasts = (forecast(book, each, request.memory_margin, request.memory_bytes, 0) for each in decisions)
        yield from min((list(_differences(plan, other, each.prediction, path)) for each in forecasts), key=len)


def _differences(plan: Plan, other: Alternative, again: Prediction, path: str) -> Iterator[str]:
    """Where another schedule differs from its forecast."""
    if other.step_s is not None and not close(other.step_s, again.step_s):
        yield f"{path}.step_s: {other.name} takes {other.step_s} s, recomputed {again.step_s} s"
    if other.peak_bytes is None:
        return
    peaks, limits = (
        [getattr(rank, name) for rank in ranks]
        for name, ranks in (("peak_bytes", again.ranks), ("memory_limit_bytes", plan.prediction.ranks))
    )
    fullest = max(peaks)
    if other.step_s is None:  # the rank that lacks most, by its limit
        fullest = max(zip(peaks, limits, strict=False), key=lambda pair: pair[0] / max(1, pair[1]))[0]
    if abs(other.peak_bytes - fullest) > _rounded_bytes(plan.decision):
        yield f"{path}.peak_bytes: {other.name} holds {other.peak_bytes} bytes, recomputed {fullest}"
