"""``halopipe check``: the checker on a plan, and the verifier on its proof."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli.options import ClusterOption, JsonOption, PlanPath, ProfileOption
from halopipe.terminal import console, units
from planner.ir.errors import PlanCheckError, UsageError

if TYPE_CHECKING:
    from planner.ir.profile import Profile
    from planner.ir.proof import Proof


_UNDO = "or undo what was edited by hand, where that is named above"


def check(
    plan: PlanPath,
    profile: ProfileOption = None,
    cluster: ClusterOption = None,
    proof: Annotated[
        Path | None,
        typer.Option(
            "--proof",
            metavar="FILE",
            help="Verify the plan's proof too, as written by 'halopipe plan --proof'.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check a plan without devices: its program, request and figures; with its profile all that it states."""
    from halopipe.planning import plan_files
    from planner import faults_of
    from planner.check import needs_profile, not_checked
    from planner.ir.codec import fingerprint, load
    from planner.ir.proof import Proof

    loaded = plan_files.load_plan(plan)
    stated = load(proof, Proof) if proof is not None else None
    source: Profile | None
    if profile is not None or cluster is not None:  # of whatever profile: the checker says itself if it is another one
        source = plan_files.load_profile(profile or plan_files.places(loaded, plan)[0], cluster=cluster)
    else:
        beside = plan_files.found_profile(loaded, plan)
        source = beside[1] if beside is not None else None
    if stated is not None and source is None:
        raise UsageError("a proof is verified with a profile", [f"none is beside {plan}"], ["--profile PROFILE"])
    faults = faults_of(loaded, source)
    unchecked = not_checked(source is not None)
    of_proof: tuple[str, ...] = ()
    if stated is not None and source is not None and not faults:
        from planner.proof.verify import verify

        of_proof = verify(stated, loaded, source)
    if json:
        bound = {} if stated is None else {"proof": str(proof), "bound_s": stated.bound_s}
        listed = {"faults": [*faults, *of_proof], "not_checked": list(unchecked)}
        console.emit_json({"plan": str(plan), **bound, **listed})
    if faults:
        plan_anew = f"plan again: {console.command('plan', profile or 'PROFILE')}"
        remedies = [plan_anew, _UNDO]
        if source is not None and cluster is None and loaded.inputs.cluster_fingerprint != fingerprint(source.cluster):
            remedies.append("with --cluster FILE, if it was planned for machines that the profile was not measured on")
        raise PlanCheckError(f"{plan} has {len(faults)} fault{'s' if len(faults) > 1 else ''}", faults, remedies)
    if of_proof:
        raise PlanCheckError(
            f"{proof} is no proof of {plan}",
            of_proof,
            [f"make it again: {console.command('plan', profile or 'PROFILE', '-o', plan, '--proof', proof)}"],
        )
    if json:
        return
    if source is None:
        console.emit(f"{plan} is good as far as it goes without a profile")
        console.emit(f"not checked, or in part, without --profile: {', '.join(needs_profile())}")
        return
    console.emit(f"{plan} is good")
    if stated is not None:
        for line in _claim(stated):
            console.emit(line)


def _claim(proof: Proof) -> list[str]:
    """What a proof that holds says."""
    space = proof.space
    gap = units.percent(proof.gap)
    bound = units.seconds(proof.bound_s)
    step = units.seconds(proof.step_s)
    cuts = "all" if space.any_cut else "between two layers of the network's order"
    repeated = [name for name in space.recompute if name != "nothing"]
    return [
        f"its proof holds: no plan of its space takes less than {bound}, this one takes {step} (gap {gap})",
        f"  micro-batches of {', '.join(map(str, space.micro_batches))}; schedules {', '.join(space.schedules)}",
        f"  {space.num_cuts} places to cut ({cuts}); stages on any of {', '.join(space.pools)}, divided by samples",
        f"  computed again for the backward: {', '.join(repeated) if repeated else 'nothing'}",
    ]
