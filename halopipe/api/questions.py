"""What one may ask about plans: why, what else, what if, and how they compare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.api.arguments import checked
from halopipe.api.files import PlanOrPath, ProfileOrPath, needed, plan_in, profile_in, profile_of
from halopipe.extra import FaceExtra
from halopipe.planning.compare import Comparison
from planner.ir.errors import UsageError
from planner.ir.extras import extras, required
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from halopipe.planning.shadow_prices import ShadowPrices
    from halopipe.planning.what_if import PlanAnswer
    from planner.ir.timeline import TimelineFile
    from planner.layers.receptive_field import ReceptiveField


@checked
def explain(plan: PlanOrPath, profile: ProfileOrPath | None = None) -> str:
    """Why this plan, in words and pictures; more of it where its profile is known.

    Args:
        plan: or the name of its file.
        profile: that it was made from, or the name of its file; None: the one remembered, or beside the plan's file.

    Raises:
        StaleFileError: the plan was made from another profile than the one given.
    """
    from halopipe.reports import explain as explaining

    return explaining.explain(plan_in(plan), profile_of(plan, profile))


@checked
def compare(*plans: PlanOrPath, **named: PlanOrPath) -> Comparison:
    """Plans beside one another, the first as the reference; those without a name get that of their solver.

    Args:
        plans: plans or their files.
        named: the same, by the names that they are shown under.

    Raises:
        UsageError: there is none.
    """
    if not plans and not named:
        raise UsageError("hp.compare has nothing to compare", [], ["hp.compare(plan, *others)"])
    by_name: dict[str, Plan] = {}
    for one in map(plan_in, plans):
        name = one.search.solver
        number = 2
        while name in by_name:
            name = f"{one.search.solver} {number}"
            number = number + 1
        by_name[name] = one
    by_name.update({name: plan_in(one) for name, one in named.items()})
    first = next(iter((*plans, *named.values())))
    return Comparison(by_name, profile=profile_of(first))


@checked
def why_not(plan: PlanOrPath, *asked: ProfileOrPath | None) -> PlanAnswer:
    """Why the plan is not another one; see :func:`halopipe.planning.what_if.why_not`.

    Args:
        asked: ``question``, such as ``dp=4``; or ``profile, question``.

    Raises:
        UsageError: the question is not understood; the text lists what may be asked.
    """
    from halopipe.planning import what_if as asking

    profile, question = _question(plan, asked)
    return asking.why_not(plan_in(plan), profile, question)


@checked
def what_if(plan: PlanOrPath, *asked: ProfileOrPath | None) -> PlanAnswer:
    """What would be best if; see :func:`halopipe.planning.what_if.what_if`.

    Args:
        asked: ``question``, such as ``n1/gpu0.memory=32GiB``; or ``profile, question``.

    Raises:
        UsageError: the question is not understood, or the plan's profile is not known.
    """
    from halopipe.planning import what_if as asking

    profile, question = _question(plan, asked)
    return asking.what_if(plan_in(plan), needed(plan, profile), question)


@checked
def prices(plan: PlanOrPath, profile: ProfileOrPath | None = None, time_limit_s: float = 60.0) -> ShadowPrices:
    """What one more GiB, one more device, a link twice as fast would save.

    See :func:`halopipe.planning.shadow_prices.prices`.

    Args:
        plan: or the name of its file.
        profile: that it was made from; None: the one remembered, or beside the plan's file.
        time_limit_s: seconds that all searches together may take.

    Raises:
        UsageError: the plan's profile is not known.
    """
    from halopipe.planning import shadow_prices

    return shadow_prices.prices(plan_in(plan), needed(plan, profile_of(plan, profile)), time_limit_s)


@checked
def receptive_field(
    of: ProfileOrPath | Graph, layer: str, box: Mapping[str, tuple[int, int]] | None = None
) -> ReceptiveField:
    """What an output of a network reads of its inputs; see :func:`planner.layers.receptive_field.receptive_field`.

    Args:
        of: a profile, its file, or a graph (``profile.graph``).
        layer: its name; ``layer:1`` for its second output.
        box: by dim of the output where it starts and stops, ``{"height": (0, 4), "width": (0, 4)}``; of dims left out
            the one element in the middle.

    Raises:
        UnknownNameError: no layer makes that.
        UsageError: the box does not lie in the output, or neighbours depend on the data.
    """
    from planner.layers import receptive_field as fields

    return fields.receptive_field(of if isinstance(of, Graph) else profile_in(of).graph, layer, box)


@checked
def report(plan: PlanOrPath, *others: PlanOrPath | Profile | TimelineFile, output: str | Path = "report.html") -> None:
    """Writes one offline page about a plan: network, step, memory, rivals, proof, how each figure is known.

    Args:
        plan: or the name of its file.
        others: the plan's profile, if it is not remembered; the timelines of a run; rivals, in any order.
        output: the page to write.

    Raises:
        UsageError: bokeh is not installed, or a timeline is of another plan.
    """
    remembered = profile_of(plan)
    written = (extra.write_report([plan, *others], output, remembered) or None for extra in extras(FaceExtra))
    required(written, "halopipe", "reports")


def _question(plan: PlanOrPath, asked: tuple[ProfileOrPath | None, ...]) -> tuple[Profile | None, str]:
    """The profile that is given or remembered, and the question."""
    match asked:
        case (str() as question,):
            return profile_of(plan), question
        case (profile, str() as question):
            return profile_of(plan, profile), question
    raise UsageError(
        "a question about a plan is text, behind the plan or behind its profile",
        [f"given behind the plan: {', '.join(type(each).__name__ for each in asked) or 'nothing'}"],
        ["hp.what_if(plan, 'devices=4')", "hp.what_if(plan, profile, 'devices=4')"],
    )
