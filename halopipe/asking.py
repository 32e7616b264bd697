"""Questions about a plan: why not another one, and where a layer runs and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halopipe import planning, text, units
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.graph import producer
from planner.ir.plan import Plan
from planner.ir.profile import Profile

_QUESTIONS = {"schedule": str, "micro-batch": int, "ranks": int, "stages": int, "solver": str}
_SAME = 5e-4  # relative; smaller differences are not shown in the digits printed


def why_not(plan: Plan, profile: Profile | None, question: str) -> str:
    """Why the plan is not another one.

    Args:
        question: part of the name of an alternative that the plan file lists, or ``key=value`` with one of schedule,
            micro-batch, ranks, stages (at most so many), solver: the search is then done again that way.

    Raises:
        UsageError: nothing is known of it; the text lists what may be asked.
    """
    asked = question.strip().lower()
    listed = {other.name: other.why_not for other in plan.alternatives}
    listed.update({rejected.what: rejected.why for rejected in plan.search.rejected})
    found = {name: why for name, why in listed.items() if asked and asked in name.lower()}
    if found:
        return "\n".join(f"{name}: {why}" for name, why in found.items())
    key, equals, value = (part.strip() for part in asked.partition("="))
    if equals and key in _QUESTIONS and profile is not None:
        return _search_again(plan, profile, key, _parsed(key, value))
    needs = " (needs --profile)" if profile is None else ""
    raise UsageError(
        f"nothing is known of {question!r}",
        [
            f"listed in the plan: {', '.join(listed) or 'nothing'}",
            f"searched again{needs}: {', '.join(f'{name}=...' for name in _QUESTIONS)}",
        ],
    )


def describe_layer(plan: Plan, profile: Profile | None, name: str) -> str:
    """Where layer ``name`` runs, what it reads from other stages, and what it costs.

    Raises:
        UnknownNameError: the plan has no such layer.
    """
    planning.require_known("layer", [name], list(plan.decision.layers))
    placement = plan.decision.layers[name]
    stage = plan.decision.stages[placement.stage]
    lines = [f"{name}: stage {placement.stage}, on {', '.join(stage.devices)}"]
    if len(stage.ranks) > 1:
        shares = placement.layout.samples(plan.decision.micro_batches[0])
        lines.append(f"  samples of a micro-batch by rank: {':'.join(map(str, shares))}")
    if profile is None:
        return "\n".join([*lines, "  what it costs is in the profile: add --profile profile.json"])
    layer = profile.graph.by_name()[name]
    lines.append(f"  {layer.kind} ({layer.attributes.get('op', 'no operator')})")
    lines += [f"  reads {value}{_origin(plan, value, placement.stage)}" for value in layer.inputs]
    for spec in layer.outputs:
        dims = ", ".join(f"{dim} {extent}" for dim, extent in zip(spec.dims, spec.shape, strict=True))
        lines.append(f"  makes {spec.dtype} ({dims or 'a scalar'}) for {profile.graph.samples} samples")
    parameter_bytes = profile.graph.parameter_bytes(frozenset({name}))
    lines.append(f"  parameters {units.size(parameter_bytes)}")
    return "\n".join([*lines, "", _costs(profile, name)])


def _origin(plan: Plan, value: str, stage: int) -> str:
    placement = plan.decision.layers.get(producer(value))
    if placement is None:
        return ", an input of the step"
    return "" if placement.stage == stage else f" from stage {placement.stage}"


def _costs(profile: Profile, name: str) -> str:
    cells = [
        [
            kind,
            str(m.samples),
            units.seconds(m.forward_s),
            units.seconds(m.backward_s),
            units.size(m.saved_bytes),
            units.size(m.workspace_bytes),
            units.percent(m.spread),
        ]
        for kind, measurements in profile.measurements.items()
        for m in measurements
        if m.layer == name
    ]
    return text.table(["device kind", "samples", "forward", "backward", "saved", "workspace", "spread"], cells)


def _parsed(key: str, value: str) -> Any:
    if _QUESTIONS[key] is str:
        return value
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{key}={value} is not a positive integer", [], [f"--why-not {key}=2"])
    return int(value)


def _search_again(plan: Plan, profile: Profile, key: str, value: Any) -> str:
    options: Mapping[str, dict[str, Any]] = {
        "schedule": {"schedules": [value]},
        "micro-batch": {"micro_batch": [value]},
        "ranks": {"num_ranks": value},
        "stages": {"max_stages": value},
        "solver": {},
    }
    problem = planning.make_problem(profile, global_batch=plan.decision.global_batch, **options[key])
    try:
        other = planning.solve(problem, value if key == "solver" else planning.DEFAULT_SOLVER)
    except InfeasibleError as error:
        return "\n".join([f"{key}={value}: {error.title}", *(f"  {line}" for line in error.details)])
    ratio = other.prediction.step_s / plan.prediction.step_s - 1
    if abs(ratio) < _SAME:
        verdict = "the same step time"
    else:
        verdict = f"{units.percent(abs(ratio))} {'slower' if ratio > 0 else 'faster'}"
    step = f"{units.seconds(other.prediction.step_s)} against {units.seconds(plan.prediction.step_s)} a step"
    binding = [f"  {line}" for line in other.search.binding]
    return "\n".join([f"{key}={value}: {verdict} ({step})", *binding])
