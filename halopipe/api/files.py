"""Profiles and plans as objects or by the names of their files, and which profile a plan was made from.

A plan remembers its profile, as long as the process lasts: what asks about a plan needs no profile if the plan was made
here, or was read from a file that has its ``profile.json`` beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.api.arguments import checked
from halopipe.planning import plan_files
from planner.ir import codec
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from planner.ir.timeline import TimelineFile

PlanOrPath = Plan | str | Path
ProfileOrPath = Profile | str | Path

_MOST_REMEMBERED = 8
_made_from: dict[str, Profile | Path] = {}
"""By the fingerprint that plans have of it: the profile, or the file of a plan that was made from it."""


@checked
def load(path: str | Path) -> Profile | Plan | TimelineFile:
    """What a file holds that halopipe wrote: a profile, a plan, or the timelines of a run.

    Args:
        path: of the file.

    Raises:
        MissingFileError, CorruptFileError, NewerFileError: the file cannot be used; the text says why.
    """
    content: Profile | Plan | TimelineFile = codec.load_any(path)
    if isinstance(content, Plan):
        remember(content, Path(path))
    return content


@checked
def save(thing: Profile | Plan | TimelineFile, path: str | Path) -> None:
    """Writes a profile, a plan or timelines: the file that the commands read.

    Args:
        thing: to write.
        path: of the file, which is replaced in one move if it is there.

    Raises:
        UsageError: it is something else.
        MissingFileError: the folder is missing or cannot be written.
    """
    if type(thing) not in [cls for cls, _ in codec.FORMATS.values()]:
        kinds = ", ".join(codec.FORMATS)
        raise UsageError(f"a {type(thing).__name__} is not kept in a file", [f"files hold: {kinds}"])
    codec.dump(thing, path)


def profile_in(profile: ProfileOrPath) -> Profile:
    """The profile, read where its file is named."""
    return profile if isinstance(profile, Profile) else plan_files.load_profile(profile)


def plan_in(plan: PlanOrPath) -> Plan:
    """The plan, read where its file is named; its profile is then looked for beside the file."""
    return plan if isinstance(plan, Plan) else remember(plan_files.load_plan(plan), Path(plan))


def remember(plan: Plan, profile: Profile | Path) -> Plan:
    """The plan, of which is known from now on where its profile is: itself, rather than the plan's file."""
    key = plan.inputs.profile_fingerprint
    earlier = _made_from.pop(key, None)
    _made_from[key] = earlier if isinstance(earlier, Profile) else profile
    while len(_made_from) > _MOST_REMEMBERED:
        _made_from.pop(next(iter(_made_from)))
    return plan


def profile_of(plan: PlanOrPath, profile: ProfileOrPath | None = None) -> Profile | None:
    """The one given, else the one remembered, if there is one; under the corrections that the plan was made under."""
    plan = plan_in(plan)
    if profile is not None:
        return plan_files.require_profile(
            profile_in(profile), plan, profile if isinstance(profile, (str, Path)) else "PROFILE"
        )
    remembered = _made_from.get(plan.inputs.profile_fingerprint)
    if isinstance(remembered, Path):
        return plan_files.profile_of(plan, remembered, None)
    return None if remembered is None else plan_files.as_priced(remembered, plan, "the plan")


def needed(plan: PlanOrPath, profile: Profile | None) -> Profile:
    """The plan's profile, for what searches again.

    Raises:
        UsageError: it is not known.
    """
    if profile is None:
        where = "made by another process" if isinstance(plan, Plan) else f"no profile.json beside {plan} is its own"
        raise UsageError(
            "this searches again, which needs the profile that the plan was made from",
            [f"none is given, and none is remembered: {where}"],
            ["give the profile, or the name of its file, behind the plan"],
        )
    return profile
