"""All faults of a plan, in words; each begins with its path in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner import schedules
from planner.check.drawn import drawn
from planner.check.order import program_faults, rows_of, schedule_order, stated_program
from planner.check.recompute import Reckoning, reckon
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
from planner.costs.communication.links import transport_of
from planner.costs.cost_model import PriceBook
from planner.ir.codec import fingerprint
from planner.ir.errors import HalopipeError
from planner.ir.plan import Alternative, Decision, Plan
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.layers.boundary import Boundaries

_TIME_TOLERANCE = 1e-7
"""Of the times of a rank, which are sums of small differences, as a part of the step."""


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
            faults += _prediction_faults(plan, book, reckon(book, decision, program))
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


def _prediction_faults(plan: Plan, book: PriceBook, found: Reckoning) -> Iterator[str]:
    said = plan.prediction
    if not close(said.step_s, found.step_s):
        yield f"prediction.step_s: the predicted step is {said.step_s} s, recomputed {found.step_s} s"
    if abs(said.bubble_fraction - found.bubble_fraction) > _TIME_TOLERANCE:
        again = f"recomputed {found.bubble_fraction}"
        yield f"prediction.bubble_fraction: the predicted bubble is {said.bubble_fraction}, {again}"
    yield from _memory_faults(plan, found)
    for rank, (one, device) in enumerate(zip(said.ranks, book.profile.cluster.devices, strict=False)):
        if one.kind and one.kind != device.kind:
            yield f"prediction.ranks[{rank}].kind: {one.kind!r}, {device.name} is {device.kind!r}"
        if one.on_chip_limit_bytes != device.on_chip_bytes:
            room = f"{one.on_chip_limit_bytes} bytes on chip, {device.name} has {device.on_chip_bytes}"
            yield f"prediction.ranks[{rank}].on_chip_limit_bytes: {room}"
    yield from _time_faults(plan, found)
    simulated = drawn(plan, book)
    if said.evidence != simulated.evidence:
        yield f"prediction.evidence: the prediction is called {said.evidence!r}, its prices are {simulated.evidence!r}"
    cluster = book.profile.cluster
    transport = transport_of(cluster, sorted(rank for stage in plan.decision.stages for rank in set(stage.ranks)))
    if said.transport != transport:
        yield f"prediction.transport: {said.transport!r}, the links were measured with {transport!r}"
    for name in ("p10_s", "p90_s"):
        if not close(getattr(said, name), getattr(simulated, name), 2e-6):  # they are rounded to six digits
            yield f"prediction.{name}: {getattr(said, name)} s, drawn again {getattr(simulated, name)} s"
    for name in ("sustained_per_s", "sustained_p10_per_s", "sustained_p90_per_s"):
        if not close(getattr(said, name), getattr(simulated, name), 4e-6):
            yield f"prediction.{name}: {getattr(said, name)} samples/s, simulated again {getattr(simulated, name)}"
    if found.step_s > 0:
        reduction, messages = found.longest_sum_s / found.step_s, found.most_messages_s / found.step_s
        known = set(binding_faults(plan))
        yield from (fault for fault in binding_faults(plan, reduction, messages) if fault not in known)


def _memory_faults(plan: Plan, found: Reckoning) -> Iterator[str]:
    # Between sizes measured, of parts of a layer or of a sample there are fractions of bytes, which are rounded for
    # each micro-batch that is held.
    rounded = 2 * len(plan.decision.sizes) + 2
    for rank, (said, peak) in enumerate(zip(plan.prediction.ranks, found.peak_bytes, strict=False)):
        path = f"prediction.ranks[{rank}].peak_bytes"
        if abs(said.peak_bytes - peak) > rounded:
            yield f"{path}: rank {rank} is predicted to hold {said.peak_bytes} bytes, recomputed {peak}"
        on_chip = found.on_chip_bytes[rank]
        if said.on_chip_bytes != on_chip:
            where = f"prediction.ranks[{rank}].on_chip_bytes"
            yield f"{where}: rank {rank} is predicted to hold {said.on_chip_bytes} bytes on chip, recomputed {on_chip}"
        if peak > said.memory_limit_bytes + rounded:
            yield f"{path}: rank {rank} holds {peak} bytes, more than its limit of {said.memory_limit_bytes}"


def _time_faults(plan: Plan, found: Reckoning) -> Iterator[str]:
    for rank, (said, times) in enumerate(zip(plan.prediction.ranks, found.times, strict=False)):
        for name in ("compute_s", "communication_s", "bubble_s", "idle_s"):
            stated, again = getattr(said, name), getattr(times, name)
            if abs(stated - again) > max(_TIME_TOLERANCE * found.step_s, 1e-9 * again):
                yield f"prediction.ranks[{rank}].{name}: {stated} s, recomputed {again} s"


def _alternative_faults(plan: Plan, book: PriceBook, program: Program) -> Iterator[str]:
    """Other schedules of the same stages are reckoned as the plan itself is."""
    for number, other in enumerate(plan.alternatives):
        name = other.name.removeprefix("schedule ")
        if name == other.name:
            continue
        path = f"alternatives[{number}]"
        if name not in schedules.names() or name == plan.decision.schedule:
            yield f"{path}.name: {other.name!r} is no other schedule than {plan.decision.schedule}"
            continue
        decision, ordered = schedule_order(plan.decision, program, name)
        ways = [decision]
        if ordered.stages.prepares:  # another schedule may pay where the next step is prepared otherwise
            ways.append(replace(decision, prepares_next_step=not decision.prepares_next_step))
        faults = (
            list(_reckoned_alternative_faults(plan, other, reckon(book, each, ordered), path, each)) for each in ways
        )
        yield from min(faults, key=len)


def _reckoned_alternative_faults(
    plan: Plan, other: Alternative, found: Reckoning, path: str, decision: Decision
) -> Iterator[str]:
    rounded = 2 * len(decision.sizes) + 2
    limits = [rank.memory_limit_bytes for rank in plan.prediction.ranks]
    if other.step_s is not None and not close(other.step_s, found.step_s):
        yield f"{path}.step_s: {other.name} takes {other.step_s} s, recomputed {found.step_s} s"
    if other.peak_bytes is None:
        return
    peaks = found.peak_bytes
    if other.step_s is not None and abs(other.peak_bytes - max(peaks)) > rounded:
        yield f"{path}.peak_bytes: {other.name} holds {other.peak_bytes} bytes, recomputed {max(peaks)}"
    if other.step_s is None:
        fullest = max(range(len(peaks)), key=lambda rank: peaks[rank] / max(1, limits[rank]))
        if abs(other.peak_bytes - peaks[fullest]) > rounded:
            yield f"{path}.peak_bytes: {other.name} holds {other.peak_bytes} bytes, recomputed {peaks[fullest]}"
