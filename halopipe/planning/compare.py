"""Plans beside one another: a table, and what differs in meaning between two decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from halopipe.planning import searched_space
from halopipe.planning.solve import Baselines, ties_of
from halopipe.terminal import tables as text
from halopipe.terminal import units
from planner.check.structure import model_faults
from planner.costs.rows import PlanRow, in_flight, layout_text, plan_rows
from planner.ir.plan import Decision, Plan, Search, Stage, Tie
from planner.ir.problem import DEFAULT_CONFIDENCE, DIVIDED
from planner.ir.profile import Profile

if TYPE_CHECKING:
    import pandas as pd


_MOST_MOVES = 12
_LEAST_GAP = 1e-3
"""The least that is shown of a gap."""

_NEARLY_ALL = 0.9
"""Of a limit of time: a search that took so much of it may have been cut short."""


@dataclass(frozen=True)
class Comparison:
    """Plans by name; the first is the one that the others are held against.

    Attributes:
        profile: that the first was made from; without it nothing is known of ties.
        solved: the strategies among the plans, those that have none, and how long they took.
    """

    plans: Mapping[str, Plan]
    profile: Profile | None = None
    solved: Baselines = field(default_factory=lambda: Baselines({}, {}))

    def __str__(self) -> str:
        return self.render()

    def rows(self) -> tuple[PlanRow, ...]:
        """A row a plan."""
        return plan_rows(self.plans)

    def frame(self) -> pd.DataFrame:
        """A pandas frame, a row a plan; columns are the JSON keys."""
        import pandas as pd

        return pd.DataFrame(map(asdict, self.rows()), columns=[column.name for column in fields(PlanRow)]).set_index(
            "plan"
        )

    def data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "plans": [asdict(row) for row in self.rows()],
            "differences": {name: list(lines) for name, lines in self.differences().items()},
            "infeasible": dict(self.solved.infeasible),
            "planning_s": dict(self.solved.took_s),
            "ties": self.ties,
            "taken": self.taken,
        }

    @cached_property
    def fastest(self) -> str:
        """The plan that is predicted to be the fastest."""
        return next(row.plan for row in self.rows() if row.slower == 0)

    @property
    def ties(self) -> dict[str, float]:
        """By plan that cannot be told from the fastest at the mean: with what probability that one is the faster.

        Of plans of the same profile and global batch; what is no tie is by the confidence that the first was made with.
        """
        return self._judged[0]

    @property
    def taken(self) -> str:
        """Of the fastest at the mean and those that it ties with, the one that ``halopipe plan`` takes."""
        return self._judged[1]

    @cached_property
    def _judged(self) -> tuple[dict[str, float], str]:
        first = next(iter(self.plans.values()))
        alike = {
            name: plan.decision
            for name, plan in self.plans.items()
            if self.profile is not None
            and (plan.inputs.profile_fingerprint, plan.inputs.corrections, plan.decision.global_batch)
            == (first.inputs.profile_fingerprint, first.inputs.corrections, first.decision.global_batch)
            and not any(model_faults(plan.decision, self.profile.graph))
        }
        if self.profile is None or self.fastest not in alike:
            return {}, self.fastest
        judge = ties_of(self.profile)
        wanted = first.inputs.request.confidence or DEFAULT_CONFIDENCE
        best = alike[self.fastest]
        ties = {
            name: judge.confidence(best, other)
            for name, other in alike.items()
            if other != best and judge.is_tie(best, other, wanted)
        }
        preferred = judge.taken(best, [alike[name] for name in ties], wanted)
        return ties, next(name for name, decision in alike.items() if decision == preferred)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(header, lines): a line a plan."""
        rows = self.rows()
        named = ["plan", "step", "samples/s", "slower", "bubble", "peak memory", "stages", "schedule", "status"]
        proofs = [proof_text(plan.search) for plan in self.plans.values()]
        cells = [_cells(row, proof, is_tie=row.plan in self.ties) for row, proof in zip(rows, proofs, strict=True)]
        if any(row.measured_step_s is not None for row in rows):
            at = named.index("samples/s") + 1
            named[at:at] = ["measured step", "measured samples/s"]
            for plan, line in zip(self.plans.values(), cells, strict=True):
                line[at:at] = _measured_cells(plan)
        if any(row.sustained_per_s for row in rows):  # streams of forward passes
            at = named.index("samples/s") + 1
            named.insert(at, "sustained")
            for row, line in zip(rows, cells, strict=True):
                line.insert(at, units.rate(row.sustained_per_s) if row.sustained_per_s else "–")
        return named, cells

    def render(self) -> str:
        """The table, then the differences from the first plan."""
        lines = [text.table(*self.table())]
        lines += [f"  {name}: no plan: {why}" for name, why in self.solved.infeasible.items()]
        if self.solved.took_s:
            lines += ["", f"  planned in: {', '.join(map(self._planning, self.solved.took_s))}"]
        models = {plan.inputs.model_fingerprint for plan in self.plans.values()}
        if len(models) > 1:
            lines += ["", "  note: these plans are for different models"]
        if len(batches := {plan.decision.global_batch for plan in self.plans.values()}) > 1:
            sizes = ", ".join(map(str, sorted(batches)))
            lines += [
                "",
                f"  note: their global batches differ ({sizes}): 'slower' is of a sample, 'step' of all of them",
            ]
        lines += self._not_tried()
        over = {plan.prediction.transport for plan in self.plans.values()} - {""}
        if len(over) > 1:
            lines += ["", f"  note: they are predicted over different transports: {'; '.join(sorted(over))}"]
        if self.ties:
            named = ", ".join(f"{name} ({units.percent(confidence)})" for name, confidence in self.ties.items())
            lines += [
                "",
                f"  a tie: {self.fastest} is the fastest at the mean, and not surely faster than {named};",
                f"  of these {self.taken} is taken: the fastest at the mean of those on the fewest ranks",
            ]
        for name, plan in self.plans.items():
            if (tie := plan.search.tie) is not None:
                lines += ["", f"  {name} {tie_text(plan, tie)}: {tie.over}, is faster there"]
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, differences in self.differences().items():
            alike.setdefault(differences, []).append(name)
        for differences, names in alike.items():
            lines += ["", f"{', '.join(names)}, against {next(iter(self.plans))}:"]
            lines += [f"  {line}" for line in differences or ("the same decision",)]
        return "\n".join(lines)

    def _not_tried(self) -> list[str]:
        """What the searches left out that one may ask for, a line each, of all plans or of those named."""
        searched = [name for name, plan in self.plans.items() if plan.search.bound_s > 0]
        left_out: dict[str, list[str]] = {}
        for name in searched:
            for what in searched_space.not_tried(self.plans[name], self.profile):
                left_out.setdefault(what, []).append(name)
        lines = []
        for what, names in left_out.items():
            those = "" if names == searched else f" for {', '.join(names)}"
            lines.append(f"  not looked at{those}: {what}")
        return ["", *lines] if lines else []

    def _planning(self, name: str) -> str:
        """What a strategy took, and whether that was all it might."""
        took_s = self.solved.took_s[name]
        limit_s = self.solved.limits_s[name]
        all_of_it = f" (all of {units.seconds(limit_s)})" if took_s >= _NEARLY_ALL * limit_s else ""
        return f"{name} {units.seconds(took_s)}{all_of_it}"

    def differences(self) -> dict[str, tuple[str, ...]]:
        """What each other plan decides otherwise than the first."""
        (_, first), *others = self.plans.items()
        return {name: differences(first.decision, plan.decision) for name, plan in others}


def proof_text(search: Search) -> str:
    """How far from the best a plan can be: ``proven``, ``within 2.1 %``, ``time limit, within 12 %``."""
    if search.bound_s <= 0 or search.status == "proven":
        return search.status
    within = f"within {units.percent(max(search.gap, _LEAST_GAP))}"
    return within if search.status == "within gap" else f"{search.status}, {within}"


def tie_text(plan: Plan, tie: Tie) -> str:
    """What the plan was taken for rather than one that is faster at the mean, and what that costs."""
    num_ranks = len(plan.decision.used_ranks)
    if tie.num_ranks > num_ranks:
        why = f"uses {units.count(num_ranks, 'rank')} rather than {tie.num_ranks}"
    elif tie.num_ranks == num_ranks:
        why = "exchanges less on as many ranks"
    else:  # 0: a file of before, which does not say
        why = "is simpler"
    return f"{why}, and gives up {units.percent(tie.given_up)} at the mean"


def differences(a: Decision, b: Decision) -> tuple[str, ...]:
    """What ``b`` decides otherwise than ``a``, in words; empty if a run could not tell them apart.

    Stages are compared by their devices, since a stage's number says nothing across plans.
    """
    sentences = []
    if a.schedule != b.schedule:
        sentences.append(f"schedule: {b.schedule} instead of {a.schedule}")
    if a.global_batch != b.global_batch:
        sentences.append(f"global batch: {b.global_batch} instead of {a.global_batch}")
    if a.token_slices != b.token_slices:
        here, there = (" + ".join(map(str, each.token_slices)) or "none" for each in (b, a))
        sentences.append(f"token slices: {here} instead of {there}")
    if a.micro_batches != b.micro_batches:
        here = units.micro_batches(b.micro_batches)
        there = units.micro_batches(a.micro_batches)
        sentences.append(f"micro-batches: {here} instead of {there}")
    if len(a.stages) != len(b.stages):
        sentences.append(f"stages: {len(b.stages)} instead of {len(a.stages)}")
    sentences += _stage_changes(a, b)
    sentences += _moved(a, b)
    if not sentences and a.program != b.program:
        sentences.append("the order of actions differs")
    return tuple(sentences)


def _again(stage: Stage) -> str:
    if stage.recompute:
        return "computes activations again"
    count = sum(map(len, stage.recomputed))
    return f"computes those of {units.count(count, 'layer')} again" if count else "keeps its activations"


def _stage_changes(a: Decision, b: Decision) -> list[str]:
    """Stages on the same devices in both that keep more or fewer micro-batches, or compute activations again."""
    before = {stage.devices: number for number, stage in enumerate(a.stages)}
    lines = []
    for number, stage in enumerate(b.stages):
        if stage.devices not in before:
            where = f"stage {number} on {' and '.join(stage.devices)}"
            lines += [f"{where}: {_again(stage)}"] if stage.recompute or stage.recomputed else []
            lines += [f"{where}: its ranks divide {DIVIDED[stage.level]}"] if stage.sharded else []
            continue
        other = before[stage.devices]
        where = f"stage {number} on {' and '.join(stage.devices)}"
        if (stage.recompute, stage.recomputed) != (a.stages[other].recompute, a.stages[other].recomputed):
            lines.append(f"{where}: {_again(stage)}")
        if stage.level != a.stages[other].level:
            divided = f"divide {DIVIDED[stage.level]}" if stage.sharded else "keep the optimiser's state whole"
            lines.append(f"{where}: its ranks {divided}")
        here = in_flight(b, number)
        there = in_flight(a, other)
        if here != there and number == other:  # elsewhere in the pipeline it follows from the place
            kept = units.count(here, "micro-batch", "micro-batches")
            lines.append(f"{where}: {kept} in flight instead of {there}")
    return lines


def _moved(a: Decision, b: Decision) -> list[str]:
    """Runs of neighbouring layers that make the same move, in order."""
    runs: list[tuple[str, list[str]]] = []
    for name in a.layers:
        move = _move(a, b, name)
        if runs and runs[-1][0] == move:
            runs[-1][1].append(name)
        else:
            runs.append((move, [name]))
    lines = [f"{_span(names)}: {move}" for move, names in runs if move]
    if len(lines) > _MOST_MOVES:
        others = units.count(len(lines) - _MOST_MOVES, "stretch of layers moves", "stretches of layers move")
        lines = [*lines[:_MOST_MOVES], f"... and {others} too"]
    added = [name for name in b.layers if name not in a.layers]
    return lines + ([f"{_span(added)}: only in this plan"] if added else [])


def _move(a: Decision, b: Decision, layer: str) -> str:
    if layer not in b.layers:
        return "not in this plan"
    before = _place(a, layer)
    after = _place(b, layer)
    return "" if before == after else f"on {after} instead of {before}"


def _place(decision: Decision, layer: str) -> str:
    placement = decision.layers[layer]
    stage = decision.stages[placement.stage]
    devices = " and ".join(stage.devices)
    if len(stage.ranks) == 1:
        return devices
    return f"{devices} ({layout_text(placement, decision.micro_batches[0])})"


def _span(names: list[str]) -> str:
    return f"layer {names[0]}" if len(names) == 1 else f"{len(names)} layers {names[0]} ... {names[-1]}"


def _measured_cells(plan: Plan) -> list[str]:
    if plan.measured is None:
        return ["–", "–"]
    step_s = plan.measured.step_s
    return [units.seconds(step_s), units.rate(plan.decision.global_batch / step_s) if step_s else "–"]


def _cells(row: PlanRow, proof: str, *, is_tie: bool) -> list[str]:
    return [
        row.plan,
        units.seconds_within(row.step_s, row.p10_s, row.p90_s),
        units.rate(row.samples_per_s),
        "best" if row.slower == 0 else units.signed_percent(row.slower) + ", a tie" * is_tie,
        units.percent(row.bubble_fraction),
        units.size(row.peak_bytes),
        str(row.num_stages),
        f"{row.schedule} {row.micro_batches}",
        proof,
    ]
