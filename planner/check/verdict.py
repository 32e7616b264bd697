"""All faults of a plan, in words; each begins with its path in the file.

Would its file be read (``planner.ir.validation``)?  Is it legal (``structure``, ``order``), as asked (``request``), of
one mind (``statements``), and what the cost model forecasts of its decision (``prediction``)?
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.check.order import illegal_program, misplaced_actions, schedule_faults, stated_program
from planner.check.prediction import alternative_faults, prediction_faults
from planner.check.request import request_faults
from planner.check.statements import correction_faults, statement_faults
from planner.check.structure import (
    added_faults,
    device_faults,
    form_faults,
    model_faults,
    named_layer_faults,
    part_faults,
    recomputed_faults,
    structure_faults,
)
from planner.costs.pricing import Pricing
from planner.ir import validation
from planner.ir.codec import fingerprint
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.layers.boundary import Boundaries


def faults_of(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """Everything that is wrong with ``plan``, as "path in the file: what"; nothing if it is good.

    Args:
        profile: what the plan was made from; ``coverage.needs_profile`` says what is left unchecked without it.
    """
    malformed = validation.faults(plan)
    if malformed:  # no file of such a plan would be read
        return malformed
    decision = plan.decision
    rows = plan.decision.rows()
    misshapen = list(structure_faults(decision))
    corrections = list(correction_faults(plan))
    misshapen += [*(form_faults(decision) if profile is None else ()), *misplaced_actions(decision, rows)]
    faults = [*misshapen, *statement_faults(plan, rows)]
    is_sound = not (misshapen or corrections)
    if profile is None:
        if is_sound:
            faults += request_faults(plan, None, rows)
            program = stated_program(decision, rows)
            faults += list(illegal_program(decision, program)) or schedule_faults(decision, program)
        return tuple(faults)
    if not corrections:
        profile = plan.inputs.as_seen(profile)
    faults += _input_faults(plan, profile)
    misplaced = [*model_faults(decision, profile.graph), *device_faults(decision, profile)]
    if is_sound and not misplaced:
        by_name = named_layer_faults(decision, profile.graph)
        misplaced = [f"decision.layers.{name}: {fault}" for name, fault in by_name]
        for faults_of in (part_faults, added_faults, recomputed_faults):
            misplaced += faults_of(decision, profile.graph)
    faults += misplaced
    if not is_sound or misplaced:
        return tuple(faults)  # a program can only be judged on stages that make sense
    faults += request_faults(plan, profile, rows)
    try:
        program = Boundaries.of_decision(profile.graph, decision).program(decision)
        illegal = list(illegal_program(decision, program))
        faults += illegal or schedule_faults(decision, program)
        if not illegal:
            pricing = Pricing.of(profile)
            faults += [*prediction_faults(plan, pricing), *alternative_faults(plan, pricing, program)]
    except (ValueError, LookupError, HalopipeError) as error:
        faults.append(f"decision.program: the plan cannot be priced: {error}")
    return tuple(faults)


def _input_faults(plan: Plan, profile: Profile) -> Iterator[str]:
    for what, expected, value in (
        ("model", plan.inputs.model_fingerprint, profile.graph),
        ("profile", plan.inputs.profile_fingerprint, profile.bare),
        ("cluster", plan.inputs.cluster_fingerprint, profile.cluster),
    ):
        if (here := fingerprint(value)) != expected:
            yield f"inputs.{what}_fingerprint: the {what} is another one: plan {expected}, here {here}"
    if plan.inputs.model != profile.model:
        yield f"inputs.model: the plan names another model source: {plan.inputs.model}, the profile {profile.model}"
    if plan.inputs.optimizer != profile.optimizer:
        there = profile.optimizer
        yield f"inputs.optimizer: the plan names another optimiser: {plan.inputs.optimizer}, the profile {there}"
