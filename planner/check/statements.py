"""Whether what a plan states agrees with what else it states: numbers that can be reckoned from other numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields

from planner.ir.cluster import DATASHEET, FAMILY, INTERPOLATED, KERNELS, MEASURED
from planner.ir.plan import Alternative, Plan, Prediction, Tie
from planner.ir.problem import MEMORY, THROUGHPUT
from planner.ir.schedule import FORWARD_PASS

TOLERANCE = 1e-9
_HARDLY = 0.01
"""So much slower, and no more, is a plan that is taken because it exchanges less than one on as many ranks."""
STATUSES = ("proven", "within gap", "searched", "time limit", "stopped", "heuristic")
EVIDENCES = (MEASURED, INTERPOLATED, FAMILY, KERNELS, DATASHEET)

_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{16}")
_BOTTLENECK = re.compile(r"of the step rank (\d+) \((.*)\) computes (?:stage (\d+)|no stage)")
_FULL = re.compile(r"memory: rank (\d+) holds (\d+)% of what it may")
_TOO_SLOW = re.compile(r"sustains ([0-9.e+-]+) samples/s, asked: ([0-9.e+-]+)")
_MOST_RATE = re.compile(r"rate: no plan sustains more than ([0-9.e+-]+) samples/s")
_NEEDS = re.compile(r"needs ([\d.]+ \w+) on rank (\d+), limit ([\d.]+ \w+)")
_SLOWER = re.compile(r"(\d+\.\d)% (slower|faster)(?:, a tie)?(?:: .+)?")
_SHARE = re.compile(r"(\d+)% (.+)")
BUBBLE = "of the ranks' time is idle (bubble)"
REDUCTION = "of the step sums gradients (all-reduce and wait)"
MESSAGES = "of the step moves activations, gradients or statistics"
_WORTH_NAMING, _NEARLY_FULL = 0.01, 0.9


def close(a: float, b: float, tolerance: float = TOLERANCE) -> bool:
    """Whether two numbers are the same but for rounding."""
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def statement_faults(plan: Plan) -> Iterator[str]:
    """Everything that a plan says against itself."""
    not_numbers = list(_not_finite(plan))
    yield from not_numbers
    if not_numbers:
        return
    yield from _input_faults(plan)
    yield from _prediction_faults(plan)
    yield from _rank_faults(plan)
    yield from _search_faults(plan)
    yield from _bound_faults(plan)
    yield from binding_faults(plan)
    for number, other in enumerate(plan.alternatives):
        yield from _alternative_faults(plan, other, f"alternatives[{number}]")
    yield from _measured_faults(plan)


def _not_finite(plan: Plan) -> Iterator[str]:
    for path, value in (
        *((f"prediction.{one.name}", getattr(plan.prediction, one.name)) for one in fields(Prediction)),
        *((f"search.{name}", getattr(plan.search, name)) for name in ("bound_s", "gap")),
        *((f"search.tie.{one.name}", getattr(plan.search.tie, one.name)) for one in fields(Tie) if plan.search.tie),
        *((f"search.bounds_s.{name}", bound) for name, bound in plan.search.bounds_s.items()),
        *(
            (f"prediction.ranks[{number}].{one.name}", getattr(rank, one.name))
            for number, rank in enumerate(plan.prediction.ranks)
            for one in fields(rank)
        ),
    ):
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            yield f"{path}: {value} is not a number from 0 on"


def _input_faults(plan: Plan) -> Iterator[str]:
    for name in ("model_fingerprint", "profile_fingerprint", "cluster_fingerprint"):
        value = getattr(plan.inputs, name)
        if not _FINGERPRINT.fullmatch(value):
            yield f"inputs.{name}: {value!r} is not sha256: and 16 digits"
    seen = set()
    for number, one in enumerate(plan.inputs.corrections):
        path = f"inputs.corrections[{number}]"
        if not (math.isfinite(one.factor) and one.factor > 0):
            yield f"{path}.factor: {one.factor} is not above 0"
        if one.num_plans < 1:
            yield f"{path}.num_plans: known from {one.num_plans} plans"
        if one.of in seen:
            yield f"{path}.of: {one.of.what} of {one.of.where} is corrected twice"
        seen.add(one.of)
    state = plan.inputs.optimizer.state_bytes_per_parameter_byte
    if state < 0:
        yield f"inputs.optimizer.state_bytes_per_parameter_byte: {state} is below 0"


def _prediction_faults(plan: Plan) -> Iterator[str]:
    said, batch = plan.prediction, plan.decision.global_batch
    if not said.step_s:  # of costs that are all 0
        for name in ("samples_per_s", "bubble_fraction"):
            if getattr(said, name):
                yield f"prediction.{name}: {getattr(said, name)} of a step of 0 s; it is 0 then"
        return
    if not close(said.samples_per_s * said.step_s, batch):
        text = f"{said.samples_per_s} samples/s for {said.step_s} s is not the global batch of {batch}"
        yield f"prediction.samples_per_s: {text}"
    if said.evidence not in EVIDENCES:
        yield f"prediction.evidence: {said.evidence!r} is none of {', '.join(EVIDENCES)}"
    if (said.p10_s > 0) != (said.p90_s > 0) or said.p10_s > said.p90_s:
        yield f"prediction.p10_s: one step in ten is below {said.p10_s} s, one above {said.p90_s} s"
    slowest, fastest = said.sustained_p10_per_s, said.sustained_p90_per_s
    if (slowest > 0) != (fastest > 0) or slowest > fastest:
        yield f"prediction.sustained_p10_per_s: one stream in ten is below {slowest} samples/s, one above {fastest}"
    if said.sustained_per_s and said.sustained_per_s * said.step_s < batch * (1 - TOLERANCE):
        text = f"a stream takes longer for a batch of {batch} at {said.sustained_per_s} samples/s than {said.step_s} s"
        yield f"prediction.sustained_per_s: {text}"
    if said.sustained_per_s and any(action.op not in FORWARD_PASS for row in plan.decision.rows() for action in row):
        yield "prediction.sustained_per_s: the program trains, a stream of forward passes is none of it"
    wanted = plan.inputs.request.rate_per_s
    if said.sustained_per_s < wanted * (1 - TOLERANCE):
        yield f"inputs.request.rate_per_s: asked for {wanted} samples/s, {said.sustained_per_s} are sustained"
    used = [rank for rank, row in zip(said.ranks, plan.decision.program, strict=False) if row]
    lost_s = sum(rank.bubble_s + rank.idle_s for rank in used)
    bubble = lost_s / (said.step_s * len(used)) if used else 0.0
    if abs(bubble - said.bubble_fraction) > TOLERANCE:
        text = f"the bubble is {said.bubble_fraction}, of the times of the ranks it is {bubble}"
        yield f"prediction.bubble_fraction: {text}"


def _rank_faults(plan: Plan) -> Iterator[str]:
    """The times of each rank add up to the step; what it holds is within its limit."""
    said, decision = plan.prediction, plan.decision
    if len(said.ranks) != decision.num_ranks:
        yield f"prediction.ranks: {len(said.ranks)} ranks are predicted, the program has {decision.num_ranks}"
    for number, rank in enumerate(said.ranks):
        path = f"prediction.ranks[{number}]"
        if rank.rank != number:
            yield f"{path}.rank: number {number} is of rank {rank.rank}"
        total_s = rank.compute_s + rank.communication_s + rank.idle_s + rank.bubble_s
        if not close(total_s, said.step_s):
            yield f"{path}.compute_s: the times of rank {number} add up to {total_s} s, the step is {said.step_s} s"
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
    search, step_s = plan.search, plan.search.optimum_s(plan.prediction.step_s)
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
    if search.status == "proven" and not reached:
        text = f"called proven with a bound of {search.bound_s} s for a step of {step_s} s"
        yield f"search.status: {text}"
    if search.status == "heuristic" and search.bound_s > 0:
        yield f"search.status: heuristic, with a bound of {search.bound_s} s: a heuristic has 0"
    if search.status in ("within gap", "searched") and search.bound_s >= step_s * (1 - TOLERANCE):
        yield f"search.status: {search.status}, with a bound of {search.bound_s} s, the step: that is proven"
    asked = plan.inputs.request.gap
    if search.status == "within gap" and step_s > search.bound_s * (1 + asked) * (1 + TOLERANCE):
        yield f"search.status: within gap, with a gap of {search.gap}, above the {asked} that was asked for"
    if search.num_simulated < 0 or search.num_candidates < 0:
        counts = f"{search.num_simulated} plans simulated, {search.num_candidates} looked at"
        yield f"search.num_simulated: {counts}"


def _tie_faults(plan: Plan) -> Iterator[str]:
    """A plan that was given up is faster at the mean, not so surely as was asked for, and uses more ranks.

    Or as many, where it is hardly faster.
    """
    tie, step_s, wanted = plan.search.tie, plan.prediction.step_s, plan.inputs.request.confidence
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
    elif tie.num_ranks == used and tie.given_up > _HARDLY * (1 + TOLERANCE):
        text = f"a plan on {used} ranks, which is {tie.given_up} faster, was given up for one on as many"
        yield f"search.tie.num_ranks: {text}: at most {_HARDLY} is"


def _bound_faults(plan: Plan) -> Iterator[str]:
    """The bound is the largest of those by name."""
    search = plan.search
    most = max(search.bounds_s.values(), default=search.bound_s)
    for name, bound_s in search.bounds_s.items():
        if bound_s > search.bound_s * (1 + TOLERANCE):
            yield f"search.bounds_s.{name}: {bound_s} s is above the bound of {search.bound_s} s"
    if search.bounds_s and not close(most, search.bound_s):
        yield f"search.bounds_s: the largest is {most} s, the bound {search.bound_s} s"


def binding_faults(plan: Plan, reduction: float | None = None, messages: float | None = None) -> Iterator[str]:
    """Sentences about what limits the step, each held against the numbers it speaks of.

    Args:
        reduction, messages: shares of the step, where they were reckoned.
    """
    said, step_s = plan.prediction, plan.prediction.step_s
    if not plan.search.binding or step_s <= 0 or not said.ranks:
        return
    busiest_s = max(rank.compute_s for rank in said.ranks)
    known = {BUBBLE: said.bubble_fraction}
    if reduction is not None and messages is not None:
        known.update({REDUCTION: reduction, MESSAGES: messages})
    named, shares = set(), []
    for number, line in enumerate(plan.search.binding):
        path, match = f"search.binding[{number}]", _SHARE.fullmatch(line)
        if match is None:
            yield from _memory_line_faults(plan, line, path)
            continue
        percent, words = int(match[1]), match[2]
        shares.append(percent)
        bottleneck = _BOTTLENECK.fullmatch(words)
        if bottleneck is not None:
            named.add("compute")
            rank = int(bottleneck[1])
            compute_s = said.ranks[rank].compute_s if rank < len(said.ranks) else 0.0
            if not close(compute_s, busiest_s, 1e-6):
                yield f"{path}: rank {rank} computes {compute_s} s, the busiest {busiest_s} s"
            elif not _rounds_to(compute_s / step_s, percent):
                yield f"{path}: {percent}% of the step, of the times of the ranks it is {compute_s / step_s:.2%}"
            stages = [number for number, stage in enumerate(plan.decision.stages) if rank in stage.ranks]
            names = {d for s in stages for r, d in _devices(plan, s) if r == rank}
            if stages and (bottleneck[2] not in names or bottleneck[3] != str(stages[0])):
                where = f"rank {rank} is {', '.join(sorted(names))} in stage {stages[0]}"
                yield f"{path}: {bottleneck[2]} in stage {bottleneck[3]}; {where}"
        elif words not in (BUBBLE, REDUCTION, MESSAGES):
            yield f"{path}: nothing is known by the words {words!r}"
        else:
            named.add(words)
            if words in known and not _rounds_to(known[words], percent):
                yield f"{path}: {percent}% {words}; reckoned {known[words]:.2%}"
    places = [_place_of(line) for line in plan.search.binding]
    if places != sorted(places):
        yield "search.binding: what is said of memory as a whole is not first, or of a rank not last"
    if len(set(plan.search.binding)) < len(plan.search.binding):
        yield f"search.binding: {len(plan.search.binding)} sentences, of which some are the same"
    if shares != sorted(shares, reverse=True):
        yield f"search.binding: shares of {shares} percent are not the largest first"
    for words, share in (*known.items(), ("compute", busiest_s / step_s)):
        if words not in named and share > _WORTH_NAMING + TOLERANCE:
            yield f"search.binding: does not say that {share:.2%} {words}"


def _place_of(line: str) -> int:
    return 1 if _SHARE.fullmatch(line) else 2 if _FULL.fullmatch(line) else 0


def _memory_line_faults(plan: Plan, line: str, path: str) -> Iterator[str]:
    match = _FULL.fullmatch(line)
    if match is not None:
        rank, percent = int(match[1]), int(match[2])
        found = plan.prediction.ranks[rank] if rank < len(plan.prediction.ranks) else None
        full = found.peak_bytes / max(1, found.memory_limit_bytes) if found is not None else 0.0
        if not _rounds_to(full, percent) or full < _NEARLY_FULL:
            yield f"{path}: rank {rank} holds {percent}% of what it may; of its bytes it is {full:.2%}"
    elif line.startswith("rate: no "):
        yield from _rate_faults(plan, line, path)
    elif plan.inputs.request.objective != MEMORY or not line.startswith("memory: no "):
        yield f"{path}: nothing is known by the words {line!r}"


def _rate_faults(plan: Plan, line: str, path: str) -> Iterator[str]:
    """Of the highest rate of a stream: the plan's own is not above it."""
    said, found = plan.prediction.sustained_per_s, _MOST_RATE.fullmatch(line)
    if not said or plan.inputs.request.objective != THROUGHPUT:
        yield f"{path}: nothing is known by the words {line!r}"
    elif found is not None and float(found[1]) < said * (1 - 1e-4):
        yield f"{path}: {line!r}, and the plan sustains {said}"


def _devices(plan: Plan, stage: int) -> Sequence[tuple[int, str]]:
    found = plan.decision.stages[stage]
    return tuple(zip(found.ranks, found.devices, strict=False))


def _rounds_to(share: float, percent: int) -> bool:
    return abs(100 * share - percent) <= 0.5 + 1e-6


def _alternative_faults(plan: Plan, other: Alternative, path: str) -> Iterator[str]:
    """It is no better than the decision, and its words say its numbers."""
    search, step_s, ranks = plan.search, plan.prediction.step_s, plan.prediction.ranks
    needs, slower = _NEEDS.fullmatch(other.why_not), _SLOWER.fullmatch(other.why_not)
    if other.peak_bytes is not None and other.peak_bytes < 0:
        yield f"{path}.peak_bytes: {other.peak_bytes} is below 0"
    slow = _TOO_SLOW.fullmatch(other.why_not)
    if other.step_s is None and slow is not None:
        if not (plan.prediction.sustained_per_s and float(slow[1]) < float(slow[2])):
            yield f"{path}.why_not: {other.name}: {other.why_not!r} is no reason"
        return
    if other.step_s is None:
        if needs is None:
            yield f"{path}.step_s: {other.name} has none, and {other.why_not!r} does not say what it lacks"
        elif other.peak_bytes is not None and size_text(other.peak_bytes) != needs[1]:
            yield f"{path}.peak_bytes: {other.name} holds {size_text(other.peak_bytes)}, {other.why_not!r}"
        elif needs is not None and plan.inputs.request.objective != MEMORY:
            rank = int(needs[2])
            limit = ranks[rank].memory_limit_bytes if rank < len(ranks) else None
            if limit is not None and size_text(limit) != needs[3]:
                yield f"{path}.why_not: a limit of {needs[3]} on rank {rank}, which has {size_text(limit)}"
            elif limit is not None and other.peak_bytes is not None and other.peak_bytes <= limit:
                yield f"{path}.why_not: {other.peak_bytes} bytes fit into the {limit} of rank {rank}"
        return
    if not step_s:
        return
    ratio = other.step_s / step_s - 1
    if search.bound_s > 0 and other.step_s < search.bound_s * (1 - TOLERANCE):
        yield f"{path}.step_s: {other.name} takes {other.step_s} s, less than the bound of {search.bound_s} s"
    if slower is None and other.why_not != "as fast":
        yield f"{path}.why_not: {other.why_not!r} does not say how much slower {other.name} is than the plan"
    elif abs(100 * ratio - _signed(slower)) > 0.05 + 1e-6 if slower is not None else ratio > 1e-9:
        yield f"{path}.step_s: {other.name} is {ratio:.2%} slower, {other.why_not!r}"
    limit = max((rank.memory_limit_bytes for rank in ranks), default=0)
    if other.peak_bytes is not None and other.peak_bytes > limit:
        yield f"{path}.peak_bytes: {other.name} holds {other.peak_bytes} bytes, no rank may hold more than {limit}"


def _signed(slower: re.Match[str]) -> float:
    return float(slower[1]) * (1 if slower[2] == "slower" else -1)


def size_text(num_bytes: float) -> str:
    """Bytes as people read them."""
    size, unit = float(num_bytes), "bytes"
    for name in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, name
    return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


def _measured_faults(plan: Plan) -> Iterator[str]:
    """What a run wrote: as many entries as there are stages and ranks, and its error."""
    run, decision = plan.measured, plan.decision
    if run is None:
        return
    if run.step_s <= 0 or run.num_steps < 1 or run.spread < 0:
        yield f"measured.step_s: {run.step_s} s over {run.num_steps} steps, spread {run.spread}"
        return
    if (run.error is not None) != plan.prediction.is_of(run.transport, run.kinds):
        compared = f"measured over {run.transport or 'none'}, predicted over {plan.prediction.transport or 'none'}"
        planned, used = plan.prediction.other_devices(run.kinds)
        on = f", measured on {used}, predicted for {planned}" if planned else ""
        yield f"measured.error: {run.error} of a step {compared}{on}"
    elif run.error is not None and plan.prediction.step_s > 0:
        real = run.step_s / plan.prediction.step_s - 1
        if not close(run.error + 1, real + 1):
            yield f"measured.error: {run.error} is not measured over predicted - 1, {real}"
    for name in ("stage_forward_s", "stage_backward_s", "stage_update_s", "stage_reduction_s"):
        found = getattr(run, name)
        if found and len(found) != len(decision.stages):
            yield f"measured.{name}: {len(found)} stages, the plan has {len(decision.stages)}"
        if any(seconds < 0 for seconds in found):
            yield f"measured.{name}: {min(found)} s is below 0"
    for name, count in (("peak_bytes", len(run.peak_bytes)), ("ranks", len(run.ranks))):
        if count and count != decision.num_ranks:
            yield f"measured.{name}: {count} ranks, the plan has {decision.num_ranks}"
    for number, rank in enumerate(run.ranks):
        if rank.rank != number:
            yield f"measured.ranks[{number}].rank: number {number} is of rank {rank.rank}"
        if min(rank.compute_s, rank.communication_s, rank.bubble_s, rank.idle_s) < 0:
            yield f"measured.ranks[{number}].compute_s: a part of the step of rank {number} is below 0"
