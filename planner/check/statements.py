"""Whether what a plan states agrees with what else it states: numbers that can be reckoned from other numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from planner.costs.sentences import (
    IDLE,
    MESSAGES,
    NEARLY_FULL,
    SUMS,
    TIE,
    WORTH_NAMING,
    computes,
    full_text,
    needs_text,
    share_text,
    size_text,
    slower_text,
)
from planner.costs.ties import ALIKE
from planner.ir.cluster import DATASHEET, FAMILY, INTERPOLATED, KERNELS, MEASURED
from planner.ir.plan import HEURISTIC, PROVEN, SEARCHED, STATUSES, WITHIN_GAP, Alternative, Plan
from planner.ir.problem import MEMORY, THROUGHPUT
from planner.ir.schedule import FORWARD_PASS, Action

TOLERANCE = 1e-9
EVIDENCES = (MEASURED, INTERPOLATED, FAMILY, KERNELS, DATASHEET)

_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{16}")
_ROUNDING = 1e-8
"""So close to a half a share of a percent may be rounded either way."""


def close(a: float, b: float, tolerance: float = TOLERANCE) -> bool:
    """Whether two numbers are the same but for rounding."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def statement_faults(plan: Plan, rows: Sequence[Sequence[Action]]) -> Iterator[str]:
    """Everything that a plan says against itself.

    Args:
        rows: of the program.
    """
    yield from _input_faults(plan)
    yield from _prediction_faults(plan, any(action.op not in FORWARD_PASS for row in rows for action in row))
    yield from _rank_faults(plan)
    yield from _search_faults(plan)
    yield from _bound_faults(plan)
    yield from binding_faults(plan)
    for number, other in enumerate(plan.alternatives):
        yield from _alternative_faults(plan, other, f"alternatives[{number}]")
    yield from _measured_faults(plan)


def _input_faults(plan: Plan) -> Iterator[str]:
    for name in ("model_fingerprint", "profile_fingerprint", "cluster_fingerprint"):
        value = getattr(plan.inputs, name)
        if not _FINGERPRINT.fullmatch(value):
            yield f"inputs.{name}: {value!r} is not sha256: and 16 digits"
    yield from correction_faults(plan)


def correction_faults(plan: Plan) -> Iterator[str]:
    """Corrections that no profile can be seen under."""
    corrected = set()
    for number, one in enumerate(plan.inputs.corrections):
        path = f"inputs.corrections[{number}]"
        if one.num_plans < 1:
            yield f"{path}.num_plans: known from {one.num_plans} plans"
        if one.of in corrected:
            yield f"{path}.of: {one.of.what} of {one.of.where} is corrected twice"
        corrected.add(one.of)


def _prediction_faults(plan: Plan, trains: bool) -> Iterator[str]:
    stated = plan.prediction
    batch = plan.decision.global_batch
    if not stated.step_s:  # of costs that are all 0
        for name in ("samples_per_s", "bubble_fraction"):
            if getattr(stated, name):
                yield f"prediction.{name}: {getattr(stated, name)} of a step of 0 s; it is 0 then"
        return
    if not close(stated.samples_per_s * stated.step_s, batch):
        text = f"{stated.samples_per_s} samples/s for {stated.step_s} s is not the global batch of {batch}"
        yield f"prediction.samples_per_s: {text}"
    if stated.evidence not in EVIDENCES:
        yield f"prediction.evidence: {stated.evidence!r} is none of {', '.join(EVIDENCES)}"
    if (stated.p10_s > 0) != (stated.p90_s > 0) or stated.p10_s > stated.p90_s:
        yield f"prediction.p10_s: one step in ten is below {stated.p10_s} s, one above {stated.p90_s} s"
    slowest = stated.sustained_p10_per_s
    fastest = stated.sustained_p90_per_s
    if (slowest > 0) != (fastest > 0) or slowest > fastest:
        yield f"prediction.sustained_p10_per_s: one stream in ten is below {slowest} samples/s, one above {fastest}"
    if stated.sustained_per_s and stated.sustained_per_s * stated.step_s < batch * (1 - TOLERANCE):
        rate = f"{batch} at {stated.sustained_per_s} samples/s"
        yield f"prediction.sustained_per_s: a stream takes longer for a batch of {rate} than {stated.step_s} s"
    if stated.sustained_per_s and trains:
        yield "prediction.sustained_per_s: the program trains, a stream of forward passes is none of it"
    wanted = plan.inputs.request.rate_per_s
    if stated.sustained_per_s < wanted * (1 - TOLERANCE):
        yield f"inputs.request.rate_per_s: asked for {wanted} samples/s, {stated.sustained_per_s} are sustained"
    used = [rank for rank, row in zip(stated.ranks, plan.decision.program, strict=False) if row]
    lost_s = sum(rank.bubble_s + rank.idle_s for rank in used)
    bubble = lost_s / (stated.step_s * len(used)) if used else 0.0
    if abs(bubble - stated.bubble_fraction) > TOLERANCE:
        text = f"the bubble is {stated.bubble_fraction}, of the times of the ranks it is {bubble}"
        yield f"prediction.bubble_fraction: {text}"


def _rank_faults(plan: Plan) -> Iterator[str]:
    """The times of each rank add up to the step; what it holds is within its limit."""
    prediction = plan.prediction
    decision = plan.decision
    if len(prediction.ranks) != decision.num_ranks:
        yield f"prediction.ranks: {len(prediction.ranks)} ranks are predicted, the program has {decision.num_ranks}"
    for number, rank in enumerate(prediction.ranks):
        path = f"prediction.ranks[{number}]"
        if rank.rank != number:
            yield f"{path}.rank: number {number} is of rank {rank.rank}"
        total_s = rank.compute_s + rank.communication_s + rank.idle_s + rank.bubble_s
        if not close(total_s, prediction.step_s):
            step = f"the step is {prediction.step_s} s"
            yield f"{path}.compute_s: the times of rank {number} add up to {total_s} s, {step}"
        has_row = number < decision.num_ranks and decision.program[number]
        if not has_row and rank.compute_s + rank.communication_s + rank.bubble_s > 0:
            busy_s = rank.compute_s + rank.communication_s + rank.bubble_s
            yield f"{path}.compute_s: rank {number} is busy for {busy_s} s, with 0 actions"
        if rank.on_chip_bytes > rank.on_chip_limit_bytes:
            text = f"{rank.on_chip_bytes} bytes are on chip, where there is room for {rank.on_chip_limit_bytes}"
            yield f"{path}.on_chip_bytes: {text}"
        if rank.peak_bytes > rank.memory_limit_bytes:
            text = f"rank {number} holds {rank.peak_bytes} bytes, more than its limit of {rank.memory_limit_bytes}"
            yield f"{path}.peak_bytes: {text}"


def _search_faults(plan: Plan) -> Iterator[str]:
    """Status, bound and gap agree; they are about the plan that is fastest at the mean."""
    search = plan.search
    step_s = plan.search.optimum_s(plan.prediction.step_s)
    yield from _tie_faults(plan)
    if search.status not in STATUSES:
        yield f"search.status: status {search.status!r} is none of {', '.join(STATUSES)}"
    if search.bound_s > step_s * (1 + TOLERANCE):
        yield f"search.bound_s: the bound {search.bound_s} s is above the step {step_s} s"
    if search.bound_s > 0 and not close(search.gap + 1, step_s / search.bound_s):
        real = step_s / search.bound_s - 1
        yield f"search.gap: the gap {search.gap} is not step over bound - 1, {real}"
    if search.bound_s == 0 and search.gap != 0:
        yield f"search.gap: a gap of {search.gap} to a bound of 0 s, which says that nothing is known"
    reached = search.bound_s >= step_s * (1 - 1e-6)
    if search.status == PROVEN and not reached:
        text = f"called proven with a bound of {search.bound_s} s for a step of {step_s} s"
        yield f"search.status: {text}"
    if search.status == HEURISTIC and search.bound_s > 0:
        yield f"search.status: heuristic, with a bound of {search.bound_s} s: a heuristic has 0"
    if search.status in (WITHIN_GAP, SEARCHED) and search.bound_s >= step_s * (1 - TOLERANCE):
        yield f"search.status: {search.status}, with a bound of {search.bound_s} s, the step: that is proven"
    asked = plan.inputs.request.gap
    if search.status == WITHIN_GAP and step_s > search.bound_s * (1 + asked) * (1 + TOLERANCE):
        yield f"search.status: within gap, with a gap of {search.gap}, above the {asked} that was asked for"


def _tie_faults(plan: Plan) -> Iterator[str]:
    """A plan that was given up is faster at the mean, not so surely as was asked for, and uses more ranks.

    Or as many, where it is hardly faster.
    """
    tie = plan.search.tie
    step_s = plan.prediction.step_s
    wanted = plan.inputs.request.confidence
    used = len({rank for stage in plan.decision.stages for rank in stage.ranks})
    if tie is None:
        return
    if not 0 < tie.step_s < step_s:
        yield f"search.tie.step_s: {tie.step_s} s of a plan that was given up for one of {step_s} s"
    elif not close(tie.given_up + 1, step_s / tie.step_s):
        yield f"search.tie.given_up: {tie.given_up} is not step over step_s - 1, {step_s / tie.step_s - 1}"
    if not 0 <= tie.confidence < wanted:
        yield f"search.tie.confidence: {tie.confidence} is not below the {wanted} that was asked for"
    if tie.num_ranks and tie.num_ranks < used:
        yield f"search.tie.num_ranks: {tie.num_ranks} ranks of a plan that was given up for one on {used}"
    elif tie.num_ranks == used and tie.given_up > ALIKE * (1 + TOLERANCE):
        text = f"a plan on {used} ranks, which is {tie.given_up} faster, was given up for one on as many"
        yield f"search.tie.num_ranks: {text}: at most {ALIKE} is"


def _bound_faults(plan: Plan) -> Iterator[str]:
    """The bound is the largest of those by name."""
    search = plan.search
    most = max(search.bounds_s.values(), default=search.bound_s)
    for name, bound_s in search.bounds_s.items():
        if bound_s > search.bound_s * (1 + TOLERANCE):
            yield f"search.bounds_s.{name}: {bound_s} s is above the bound of {search.bound_s} s"
    if search.bounds_s and not close(most, search.bound_s):
        yield f"search.bounds_s: the largest is {most} s, the bound {search.bound_s} s"


def binding_faults(plan: Plan, sums: float | None = None, messages: float | None = None) -> Iterator[str]:
    """Sentences about what limits the step against those that its figures give.

    Args:
        sums, messages: shares of the step, where there is a forecast to ask; else any share of them will do.
    """
    stated = plan.prediction
    step_s = plan.prediction.step_s
    if not plan.search.binding or step_s <= 0 or not stated.ranks:
        return
    busiest_s = max(rank.compute_s for rank in stated.ranks)
    busiest = [rank.rank for rank in stated.ranks if close(rank.compute_s, busiest_s, 1e-6)]
    names = [computes(plan.decision.stages, rank) for rank in busiest]
    shares = dict.fromkeys(names, busiest_s / step_s) | {IDLE: stated.bubble_fraction}
    unknown = [label for label, share in ((SUMS, sums), (MESSAGES, messages)) if share is None]
    shares |= {label: share for label, share in ((SUMS, sums), (MESSAGES, messages)) if share is not None}
    place = {text: (1, -percent) for label, share in shares.items() for text, percent in _rounded(share, label)}
    place |= {share_text(n / 100, label): (1, -n) for label in unknown for n in range(101)}
    for rank in stated.ranks:
        full = rank.peak_bytes / max(1, rank.memory_limit_bytes)
        near = (full - _ROUNDING, full + _ROUNDING) if full >= NEARLY_FULL else ()
        place |= {full_text(rank.rank, share): (2, 0) for share in near}
    for number, line in enumerate(plan.search.binding):
        if line not in place and not _is_of_objective(plan, line):
            yield f"search.binding[{number}]: {line!r} is not what the figures of the plan give"
    places = [place.get(line, (0, 0)) for line in plan.search.binding]
    if places != sorted(places):
        yield "search.binding: not what is said of all plans first, then shares, the largest first, then of a rank"
    if len(set(plan.search.binding)) < len(plan.search.binding):
        yield f"search.binding: {len(plan.search.binding)} sentences, of which some are the same"
    for several in ([label for label in shares if label not in (IDLE, SUMS, MESSAGES)], [IDLE], [SUMS], [MESSAGES]):
        named = any(line.endswith(label) for line in plan.search.binding for label in several)
        share = shares.get(several[0], 0.0)
        if not named and share > WORTH_NAMING + TOLERANCE:
            yield f"search.binding: does not say that {share:.2%} {several[0]}"


def _rounded(share: float, label: str) -> Iterator[tuple[str, int]]:
    """The sentence and its percent; two where it is all but a half."""
    for near in (share - _ROUNDING, share + _ROUNDING):
        yield share_text(near, label), round(100 * near)


def _is_of_objective(plan: Plan, line: str) -> bool:
    """Whether it says how far from the best a plan of another objective is, of which the file has no figure."""
    if plan.inputs.request.objective == MEMORY:
        return line.startswith("memory: no ")
    is_stream = plan.inputs.request.objective == THROUGHPUT and plan.prediction.sustained_per_s > 0
    return is_stream and line.startswith("rate: no ")


def _alternative_faults(plan: Plan, other: Alternative, path: str) -> Iterator[str]:
    """It is no better than the decision, and its words are those of its figures."""
    search = plan.search
    step_s = plan.prediction.step_s
    if other.step_s is None:
        if not _is_reason(plan, other):
            yield f"{path}.why_not: {other.name}: {other.why_not!r} is no reason, or not that of its figures"
        return
    if not step_s:
        return
    if search.bound_s > 0 and other.step_s < search.bound_s * (1 - TOLERANCE):
        yield f"{path}.step_s: {other.name} takes {other.step_s} s, less than the bound of {search.bound_s} s"
    slowdown, _, _ = other.why_not.removesuffix(TIE).partition(": ")
    slowdowns = {slower_text(other.step_s * (1 + near), step_s) for near in (-_ROUNDING, 0.0, _ROUNDING)}
    if slowdown.removesuffix(TIE) not in slowdowns:
        yield f"{path}.step_s: {other.name} is {slower_text(other.step_s, step_s)}, {other.why_not!r}"


def _is_reason(plan: Plan, other: Alternative) -> bool:
    """Whether it says why a plan is none: it holds more than a rank may, or is too slow for a stream."""
    peak = other.peak_bytes
    reason = other.why_not
    if peak is None:
        return plan.prediction.sustained_per_s > 0 and reason.startswith("sustains ")
    for rank in plan.prediction.ranks:
        limit = rank.memory_limit_bytes
        if reason.startswith(needs_text(peak, rank.rank)):  # the limits of the objective memory were lower
            is_above = peak > limit and reason == needs_text(peak, rank.rank, limit)
            return is_above or plan.inputs.request.objective == MEMORY
    return reason.startswith(f"needs {size_text(peak)} on rank ")  # one that the plan leaves idle, without a limit here


def _measured_faults(plan: Plan) -> Iterator[str]:
    """What a run wrote: as many entries as there are stages and ranks, and its error."""
    run = plan.measured
    decision = plan.decision
    if run is None:
        return
    if run.num_steps < 1:
        yield f"measured.num_steps: {run.step_s} s over {run.num_steps} steps"
    if (run.error is not None) != plan.prediction.is_of(run.transport, run.kinds):
        compared = f"measured over {run.transport or 'none'}, predicted over {plan.prediction.transport or 'none'}"
        planned, used = plan.prediction.other_devices(run.kinds)
        on = f", measured on {used}, predicted for {planned}" if planned else ""
        yield f"measured.error: {run.error} of a step {compared}{on}"
    elif run.error is not None and plan.prediction.step_s > 0:
        real = run.step_s / plan.prediction.step_s - 1
        if not close(run.error + 1, real + 1):
            yield f"measured.error: {run.error} is not measured over predicted - 1, {real}"
    for name, count in (("peak_bytes", len(run.peak_bytes)), ("ranks", len(run.ranks))):
        if count and count != decision.num_ranks:
            yield f"measured.{name}: {count} ranks, the plan has {decision.num_ranks}"
    for number, rank in enumerate(run.ranks):
        if rank.rank != number:
            yield f"measured.ranks[{number}].rank: number {number} is of rank {rank.rank}"
