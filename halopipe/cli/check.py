"""``halopipe check``: the independent checker on a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halopipe.cli.options import ClusterOption, Json, PlanPath, ProfileOption
from planner.ir.errors import PlanCheckError

if TYPE_CHECKING:
    from planner.ir.profile import Profile


_UNDO = "or undo what was edited by hand, where that is named above"


def check(plan: PlanPath, profile: ProfileOption = None, cluster: ClusterOption = None, json: Json = False) -> None:
    """Check a plan without devices: its program, request and figures; with its profile all that it states."""
    import planner.check
    from halopipe.planning import plan_files
    from halopipe.terminal import console
    from planner.ir.codec import fingerprint

    found = plan_files.load_plan(plan)
    source: Profile | None
    if profile is not None or cluster is not None:  # of whatever profile: the checker says itself if it is another one
        source = plan_files.load_profile(profile or plan_files.places(found, plan)[0], cluster=cluster)
    else:
        beside = plan_files.found_profile(found, plan)
        source = beside[1] if beside is not None else None
    faults = planner.check.check(found, source)
    unchecked = planner.check.not_checked(source is not None)
    if json:
        console.emit_json({"plan": str(plan), "faults": list(faults), "not_checked": list(unchecked)})
    if faults:
        again = f"plan again: {console.command('plan', profile or 'PROFILE')}"
        remedies = [again, _UNDO]
        if source is not None and cluster is None and found.inputs.cluster_fingerprint != fingerprint(source.cluster):
            remedies.append("with --cluster FILE, if it was planned for machines that the profile was not measured on")
        raise PlanCheckError(f"{plan} has {len(faults)} fault{'s' if len(faults) > 1 else ''}", faults, remedies)
    if json:
        return
    if source is not None:
        console.emit(f"{plan} is good")
        return
    console.emit(f"{plan} is good as far as it goes without a profile")
    console.emit(f"not checked, or in part, without --profile: {', '.join(planner.check.needs_profile())}")
