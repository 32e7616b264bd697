"""Questions about a plan: why not another one, and what if something were otherwise; answered by searching again."""

from __future__ import annotations

import difflib
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from halopipe.planning import edits, problem, searched_space, solve
from halopipe.planning.compare import differences, proof_text
from halopipe.terminal import units
from planner.ir.cluster import DATASHEET
from planner.ir.codec import plain
from planner.ir.constraints import FAMILY_OF, CutDegrees, cut_named
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from planner.ir.problem import Problem
    from planner.solvers import Progress

_SEARCHED = (
    "schedule=..., micro-batch=..., stages=..., dp=..., ranks=..., recompute=..., shard=..., spatial, height=2, "
    "PATTERN=spatial:2, a solver's name; several with commas"
)
_SAME = 5e-4  # relative; smaller differences are not shown in the digits printed


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """What a question about a plan comes to.

    Attributes:
        base: the plan that is asked about.
        other: the best plan under the condition; None if there is none, or it was not searched for.
        reasons: why there is none, or what is known without searching.
        evidence: how well the other plan's prediction is known.
        is_tie: whether neither is surely the faster (``planner.costs.ties``), on the same machines.
    """

    question: str
    base: Plan
    other: Plan | None = None
    reasons: tuple[str, ...] = ()
    evidence: str = ""
    is_tie: bool = False

    def __str__(self) -> str:
        return self.render()

    @property
    def slower(self) -> float | None:
        """How much longer the other plan takes for a sample; negative if it is faster."""
        if self.other is None:
            return None
        other_per_s = self.other.prediction.samples_per_s
        return self.base.prediction.samples_per_s / other_per_s - 1 if other_per_s else 0.0

    def render(self) -> str:
        """The answer in words: step, memory, decision, what binds, how sure it is."""
        if self.other is None:
            return "\n".join(self.reasons)
        ratio = self.slower or 0.0
        verdict = (
            "as fast" if abs(ratio) < _SAME else f"{units.percent(abs(ratio))} {'slower' if ratio > 0 else 'faster'}"
        )
        verdict += ", a tie" * self.is_tie
        memory = f"{units.size(self.other.prediction.peak_bytes)} against {units.size(self.base.prediction.peak_bytes)}"
        return "\n".join(
            [
                f"{self.question}: {verdict} ({_times(self.other, self.base)})",
                f"  memory   {memory} on the fullest rank",
                *(
                    f"  decides  {line}"
                    for line in differences(self.base.decision, self.other.decision) or ("the same",)
                ),
                *(f"  binds    {line}" for line in self.other.search.binding),
                f"  known    {_certainty(self.other)}; costs: {self.evidence}",
            ]
        )

    def data(self) -> dict[str, Any]:
        """The answer as plain data for JSON."""
        other = self.other
        return {
            "question": self.question,
            "step_s": self.base.prediction.step_s,
            "peak_bytes": self.base.prediction.peak_bytes,
            "other": None
            if other is None
            else {
                "step_s": other.prediction.step_s,
                "peak_bytes": other.prediction.peak_bytes,
                "slower": self.slower,
                "is_tie": self.is_tie,
                "differences": list(differences(self.base.decision, other.decision)),
                "evidence": self.evidence,
                "search": plain(other.search),
            },
            "reasons": list(self.reasons),
        }


def why_not(plan: Plan, profile: Profile | None, question: str, progress: Progress | None = None) -> PlanAnswer:
    """Why the plan is not another one.

    Args:
        question: a solver's name, such as a baseline's; part of the name of an alternative that the plan file lists; or
            conditions as in :mod:`halopipe.planning.edits`: ``dp=4``, ``stages=4,schedule=gpipe,micro-batch=8``; or
            what layers may be cut along: ``spatial``, ``height``.
            Conditions and solvers are searched for again, which needs the profile.

    Raises:
        UsageError: nothing is known of it; the text lists what may be asked.
    """
    asked = question.strip()
    if profile is not None and asked in _solvers():
        return _search(plan, profile, asked, f"solver={asked}", progress)
    listed = {other.name: other.why_not for other in plan.alternatives}
    listed |= {rejected.what: rejected.why for rejected in plan.search.rejected}
    matches = {name: why for name, why in listed.items() if asked and asked.lower() in name.lower()}
    if matches:
        return PlanAnswer(asked, plan, reasons=tuple(f"{name}: {why}" for name, why in matches.items()))
    if cut := cut_named(asked):
        along = [dims for each in plan.decision.layers.values() if (dims := _dims_of(cut, each.cuts))]
        if along:
            all_dims = " or ".join(dict.fromkeys(itertools.chain(*along)))
            cut_layers = f"the plan cuts {units.count(len(along), 'layer')} along {all_dims}"
            return PlanAnswer(asked, plan, reasons=(cut_layers,))
        if profile is not None:
            return _search(plan, profile, asked, _cutting(problem.problem_of(plan, profile), cut), progress)
    if profile is not None and "=" in asked:
        return _search(plan, profile, asked, asked, progress)
    needs = " (needs --profile)" if profile is None else ""
    near = difflib.get_close_matches(asked, [*listed, *(_solvers() if profile is not None else ())], n=1)
    raise UsageError(
        f"nothing is known of {question!r}",
        [
            f"listed in the plan: {', '.join(listed) or 'nothing'}",
            f"searched again{needs}: {_SEARCHED}",
        ],
        [
            *(f"--why-not {shlex.quote(each)} (did you mean that?)" for each in near),
            *(["--why-not one-device", "--why-not schedule=gpipe,micro-batch=4"] if profile is not None else [_SEARCH]),
        ],
    )


_SEARCH = "--profile PROFILE, to search for it"


def what_if(plan: Plan, profile: Profile, question: str, progress: Progress | None = None) -> PlanAnswer:
    """What the best plan would be if machines or demands were otherwise.

    Args:
        question: changes as in :mod:`halopipe.planning.edits`: ``n1/gpu0.memory=32GiB``, ``devices=8``,
            ``link across-hosts.bandwidth=25GB/s,global-batch=64``.

    Raises:
        UsageError, UnknownNameError: a change is not understood, or about nothing that there is.
    """
    return _search(plan, profile, question.strip(), question, progress)


def _search(plan: Plan, profile: Profile, question: str, text: str, progress: Progress | None) -> PlanAnswer:
    asked = problem.problem_of(plan, profile)
    at = edits.changed(asked, text)
    try:
        other = solve.solve(at.problem, at.solver, progress)
    except InfeasibleError as error:
        return PlanAnswer(
            question, plan, reasons=(f"{question}: {error.title}", *(f"  {line}" for line in error.details))
        )
    evidence = DATASHEET if at.assumed else other.prediction.evidence
    same_machines = at.problem.profile is asked.profile and plan.decision != other.decision
    ones = plan.decision, other.decision
    is_tie = same_machines and solve.ties_of(asked.profile).is_tie(*ones, asked.confidence)
    return PlanAnswer(question, plan, other, (), evidence, is_tie)


def _dims_of(cut: str, cuts: Mapping[str, Sequence[int]]) -> list[str]:
    """The dims that a layer is cut along, of what is asked for: a family, or one of them."""
    return [dim for dim, points in cuts.items() if CutDegrees.of({dim: points}).along(cut) > 1]


def _cutting(asked: Problem, cut: str) -> str:
    """The condition that lets a plan cut layers so; where it might and does not, that has it do so."""
    if FAMILY_OF[cut] != cut or cut in asked.allow:
        return f"{cut}={len(asked.ranks)}"
    return f"allow={'+'.join(edits.also_allowed(asked.allow, [cut]))}"


def _times(other: Plan, base: Plan) -> str:
    """What a step of each takes; of unlike batches what a sample does, which alone can be compared."""
    steps = [units.seconds(plan.prediction.step_s) for plan in (other, base)]
    batches = [plan.decision.global_batch for plan in (other, base)]
    if batches[0] == batches[1]:
        return f"{steps[0]} against {steps[1]} a step"
    samples = [units.seconds(1 / plan.prediction.samples_per_s) for plan in (other, base)]
    whole = f"{steps[0]} a step of {batches[0]}, {steps[1]} of {batches[1]}"
    return f"{samples[0]} against {samples[1]} a sample; {whole}"


def _solvers() -> tuple[str, ...]:
    from planner import solvers

    return solvers.names()


def _certainty(plan: Plan) -> str:
    search = plan.search
    if search.status == "proven":
        return f"proven the best under this condition, of: {searched_space.space(plan)}"
    if search.bound_s <= 0:
        return search.status
    return f"{proof_text(search)}: no plan takes less than {units.seconds(search.bound_s)} a step"
