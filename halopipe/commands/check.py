"""``halopipe check``: the independent checker on a plan."""

from __future__ import annotations

from halopipe.commands.options import ClusterOption, Json, PlanPath, ProfileOption


def check(plan: PlanPath, profile: ProfileOption = None, cluster: ClusterOption = None, json: Json = False) -> None:
    """Check a plan without devices: its structure and program; with its profile also memory and predictions."""
    import planner.check
    from halopipe import console, planning
    from planner.ir.errors import PlanCheckError

    found = planning.load_plan(plan)
    if profile is not None:  # of whatever profile: the checker says itself if it is another one
        source = planning.load_profile(profile, cluster=cluster)
    else:
        source = planning.profile_of(found, plan, None, cluster)
    faults = planner.check.check(found, source)
    if json:
        console.emit_json({"plan": str(plan), "faults": list(faults)})
    if faults:
        raise PlanCheckError(f"{plan} has {len(faults)} fault{'s' if len(faults) > 1 else ''}", faults)
    if not json:
        scope = "" if source is not None else " (structure and program; more is checked with --profile)"
        console.emit(f"{plan} is good{scope}")
