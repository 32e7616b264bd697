"""Why this plan: the step as a picture, stages, memory, what binds, how good it is, and what else there was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from halopipe.planning import calibration, plan_files, searched_space, solve
from halopipe.planning.compare import tie_text
from halopipe.planning.problem import standing_text
from halopipe.reports.predicted_vs_measured import apart_text
from halopipe.terminal import tables, units
from planner.costs.rows import StageRow, stage_rows, tiles_text
from planner.ir.cluster import DATASHEET, FAMILY, INTERPOLATED, KERNELS
from planner.ir.codec import plain
from planner.ir.graph import SAMPLE
from planner.ir.plan import UNCUT, Decision, Measured, Plan, Prediction, RankPrediction, Search
from planner.ir.problem import MEMORY, THROUGHPUT
from planner.ir.profile import ModelSource, Profile
from planner.ir.program import Program
from planner.ir.schedule import StageGraph
from planner.layers.division import overlap
from planner.passes import staleness
from planner.schedules import names, traits

_STALE = 1e-6
_LITTLE = 0.02
"""A share of memory not worth computing anything again for."""
_STATUS = {
    "proven": "proven: no plan of the searched space is faster in the simulator",
    "within gap": "the search ended once the plan was as close to the bound as was asked for",
    "searched": "all of the searched space was looked at, and the bound lies below the plan",
    "time limit": "the time limit ended the search; this is the best so far",
    "stopped": "the search was stopped by hand; this is the best so far",
    "heuristic": "made by a rule, not searched for: nothing is proved about it",
}


def explain(plan: Plan, profile: Profile | None = None, width: int = 96) -> str:
    """The plan in words and pictures; with its profile, also the Gantt chart and what crosses stage boundaries."""
    prediction, timeline = solve.predict_again(plan, profile) if profile is not None else (plan.prediction, None)
    blocks = [headline(plan, prediction, profile=profile), stale(plan.prediction, prediction)]
    if timeline is not None:
        picture = tables.gantt(timeline, plan_files.device_names(plan), width - 2)
        blocks.append("\n".join(["Step (predicted)", *(f"  {line}" for line in picture.splitlines())]))
    rows = stage_rows(plan, profile, timeline)
    others, other_cells = alternative_table(plan)
    blocks += [
        "\n".join(
            [
                "Stages",
                tables.table(*stage_table(rows)),
                *layout_lines(rows),
                *block_lines(plan, profile),
                *(recomputed_lines(plan, profile) if profile is not None else ()),
            ]
        ),
        _ranks(plan, prediction),
        _unflushed(plan, profile, prediction) if profile is not None else "",
        evidence_text(prediction),
        _titled("What binds", [f"- {line}" for line in plan.search.binding]),
        _titled("How good it is", certificate(plan, prediction)),
        f"Alternatives\n{tables.table(others, other_cells)}" if other_cells else "",
        _measured(plan.measured, prediction) if plan.measured is not None else "",
    ]
    if profile is None:
        blocks.append(
            "Not shown without the profile: the Gantt chart, times of stages, and what crosses between them.\n"
            "  try: halopipe explain PLAN --profile profile.json"
        )
    return "\n\n".join(block for block in blocks if block)


def data(plan: Plan, profile: Profile | None = None) -> dict[str, Any]:
    """The same as plain data for JSON."""
    prediction, timeline = solve.predict_again(plan, profile) if profile is not None else (plan.prediction, None)
    return {
        "prediction": plain(prediction),
        "stages": plain(stage_rows(plan, profile, timeline)),
        "corrections": plain(plan.inputs.corrections),
        "search": plain(plan.search),
        "alternatives": plain(plan.alternatives),
        "measured": plain(plan.measured),
        "timeline": plain(timeline),
    }


_EVIDENCE: Mapping[str, str] = {
    INTERPOLATED: "some layers are read between the sizes that were measured; halopipe plan PROFILE --measure-missing "
    "measures them",
    FAMILY: "some layers, or parts of them, are priced by a model of what was measured of layers like them; "
    "halopipe plan PROFILE --measure-missing measures them",
    KERNELS: "no device ran this network: its kernels were measured by others on such devices, or are like those",
    DATASHEET: "some figures are a datasheet's, and too fast by as much as devices fall short of their peaks",
}


def model_text(model: ModelSource) -> str:
    """``pkg.mod:factory(num_classes=10), input 8x3x64x64, float32``; ``float32 with autocast to bfloat16``."""
    arguments = ", ".join(f"{key}={value}" for key, value in model.arguments.items())
    shape = f", input {'x'.join(map(str, model.input_shape))}" if model.input_shape else ""
    autocast = f" with autocast to {model.autocast}" if model.autocast else ""
    return f"{model.factory}{f'({arguments})' if arguments else ''}{shape}, {model.dtype}{autocast}"


def headline(
    plan: Plan, fresh: Prediction | None = None, objective: str = THROUGHPUT, profile: Profile | None = None
) -> str:
    """What is decided, for what model, and the step that is predicted (``fresh`` if it was made anew).

    Args:
        objective: what the plan was to make small; one line more unless it is the step.
        profile: that the plan was made from; without it what its network has not is named as not tried, too.
    """
    decision = plan.decision
    prediction = fresh or plan.prediction
    speeds = plan.inputs.request.speeds
    over = f", messages over {prediction.transport}" if prediction.transport else ""
    peak = f": {units.size(prediction.peak_bytes)} on the fullest rank" if objective == MEMORY else ""
    facts = {
        "model": model_text(plan.inputs.model),
        "predicted": f"{within(prediction)} a step, {units.rate(prediction.samples_per_s)} samples/s, "
        f"bubble {units.percent(prediction.bubble_fraction)} (costs: {prediction.evidence}{over})",
        "gap": _gap(plan, profile),
        "not tried": f"\n{_LABEL.format('')}".join(searched_space.not_tried(plan, profile)),
        "divided": _division(decision),
        "stream": _stream(prediction),
        "changes": f"\n{_LABEL.format('changes')}".join(optimisation_changes(plan)),
        "prepares": "the next step's sites and maps during this one" if decision.prepares_next_step else "",
        "machines": standing_text(speeds) if speeds else "",
        "weights": _weights(plan, prediction),
        "a tie": _tie(plan),
        "uncut": _uncut(plan.search),
    }
    stages = units.count(len(decision.stages), "stage")
    devices = units.count(len(decision.used_ranks), "device")
    batches = units.micro_batches(decision.micro_batches) + units.token_slices(decision.token_slices)
    lines = [f"{stages} on {devices}, schedule {decision.schedule}, {batches}"]
    lines += [f"{_LABEL.format(name)}{text}" for name, text in facts.items() if text]
    calibrated = calibration.calibrated_by(plan.inputs.corrections)
    lines += [f"  {calibrated}"] if calibrated else []
    lines += [f"{_LABEL.format('objective')}{objective}{peak}"] if objective != THROUGHPUT else []
    return "\n".join(lines)


_LABEL = "  {:<10}"


def _gap(plan: Plan, profile: Profile | None) -> str:
    """How far from the best the plan can be, of which plans, and what ended the search."""
    search = plan.search
    if search.bound_s <= 0:
        return f"not known: {_STATUS.get(search.status, search.status)}"
    of = "" if search.tie is None else ", of the plan that is the fastest at the mean"
    return f"{units.percent(search.gap)} ({searched_space.best_of(plan, profile)}){of}"


def _division(decision: Decision) -> str:
    """Along which dims layers are divided over the ranks of their stages; nothing where samples alone are."""
    shared = [each for each in decision.layers.values() if len(decision.stages[each.stage].ranks) > 1]
    along = Counter(" x ".join("samples" if dim == SAMPLE else dim for dim in each.cuts) for each in shared)
    if not along.keys() - {"samples", ""}:
        return ""
    return ", ".join(
        f"{units.count(number, 'layer')} {f'along {dims}' if dims else 'not'}" for dims, number in along.most_common()
    )


def optimisation_changes(plan: Plan) -> list[str]:
    """Where the schedule, or a loss of each block, does not train as the model itself would."""
    decision = plan.decision
    blocks = plan.inputs.model.local_losses
    by_blocks = f"the optimisation: each of {blocks} blocks is trained by its own loss, no gradient passes between them"
    changes = [by_blocks] if blocks else []
    if decision.schedule not in names() or traits(decision.schedule).synchronous:
        return changes
    stages = StageGraph(len(decision.stages), len(decision.micro_batches), ())
    oldest = max(staleness(Program(decision.rows(), stages, tuple(stage.ranks for stage in decision.stages), {})))
    old = f"on weights up to {units.count(oldest, 'update')} old"
    return [*changes, f"the optimisation: {decision.schedule} updates within a step, {old}"]


def optimisation_lines(plan: Plan) -> list[str]:
    """The same as lines of a headline."""
    return [f"{_LABEL.format('changes')}{text}" for text in optimisation_changes(plan)]


def _unflushed(plan: Plan, profile: Profile, prediction: Prediction) -> str:
    """What a long run without a flush would take, of a schedule that needs none."""
    if plan.decision.schedule not in names() or traits(plan.decision.schedule).synchronous:
        return ""
    from planner.costs.predict import unflushed_step_s
    from planner.costs.pricing import Pricing

    step_s = unflushed_step_s(Pricing.of(plan.inputs.as_seen(profile)), plan.decision)
    less = units.percent(1 - step_s / prediction.step_s)
    return f"Without the flush between steps a step would take {units.seconds(step_s)}, {less} less"


_MOST_NAMED = 4


def _weights(plan: Plan, prediction: Prediction) -> str:
    """Of devices with two memories, which of them has parameters, gradients and optimiser state."""
    two = [one for one in prediction.ranks if one.on_chip_limit_bytes and plan.decision.program[one.rank]]
    if not two:
        return ""
    names = plan_files.device_names(plan)
    near = [
        f"{names[one.rank]} ({units.size(one.on_chip_bytes)} of {units.size(one.on_chip_limit_bytes)})"
        for one in two
        if one.on_chip_bytes
    ]
    far = [f"{names[one.rank]} (not in {units.size(one.on_chip_limit_bytes)})" for one in two if not one.on_chip_bytes]
    memories = ((near, "on chip"), (far, "off chip"))
    return "; ".join(f"{where} on {_some(those)}" for those, where in memories if those)


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many there are beside."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def evidence_text(prediction: Prediction) -> str:
    """How the costs are known that a plan was not measured for, and what makes them better; nothing if all were."""
    text = _EVIDENCE.get(prediction.evidence, "")
    return f"Costs: {text}" if text else ""


def within(prediction: Prediction) -> str:
    """The step, with the deciles of what it may come to: ``1.23 s (1.20-1.27)``."""
    return units.seconds_within(prediction.step_s, prediction.p10_s, prediction.p90_s)


def _stream(prediction: Prediction) -> str:
    """What an endless stream of batches comes to, of forward passes alone."""
    if not prediction.sustained_per_s:
        return ""
    low, high = (units.rate(rate) for rate in (prediction.sustained_p10_per_s, prediction.sustained_p90_per_s))
    within = f" ({low} to {high})" if prediction.sustained_p10_per_s else ""
    return f"{units.rate(prediction.sustained_per_s)} samples/s sustained{within}; a step is the latency"


def _tie(plan: Plan) -> str:
    """What the plan was taken for, where another is faster at the mean."""
    tie = plan.search.tie
    wanted = plan.inputs.request.confidence
    if tie is None:
        return ""
    return (
        f"{tie.over}, is the fastest at the mean, {units.seconds(tie.step_s)}, and the faster of the two "
        f"with a probability of {units.percent(tie.confidence)} (asked for: {units.percent(wanted)});\n"
        f"            this one {tie_text(plan, tie)}; --confidence 0 takes the other"
    )


def _uncut(search: Search) -> str:
    """Between which layers no cut was looked at; all of them are among the alternatives."""
    uncut = [rejected for rejected in search.rejected if rejected.what.startswith(UNCUT)]
    more = f" (and {units.count(len(uncut) - 1, 'more place')})" if len(uncut) > 1 else ""
    return f"{uncut[0].what}{more}: {uncut[0].why}" if uncut else ""


def stale(cached: Prediction, fresh: Prediction) -> str:
    """A note if the plan file's prediction is not the simulator's of today; else nothing."""
    if abs(cached.step_s - fresh.step_s) <= _STALE * fresh.step_s:
        return ""
    return (
        f"note: the plan file says {units.seconds(cached.step_s)} a step; its decision was edited since, "
        "and what is shown is computed again"
    )


def stage_table(rows: tuple[StageRow, ...]) -> tuple[list[str], list[list[str]]]:
    """(header, lines): a line a stage; times and messages if they are known."""
    has_costs = any(row.sends is not None for row in rows)
    recomputes = any(row.recompute or row.recomputed for row in rows)
    divided = any(row.sharded for row in rows)
    header = [
        "stage",
        "devices",
        "samples",
        "layers",
        "from",
        "to",
        "in flight",
        *(["recompute"] if recomputes else []),
    ]
    header += ["optimiser"] if divided else []
    if has_costs:
        header += ["F", "B", "parameters", "sends per micro-batch"]
    cells = []
    for row in rows:
        line = [
            str(row.stage),
            " ".join(row.devices),
            ":".join(map(str, row.samples)),
            str(row.num_layers),
            row.first_layer,
            row.last_layer,
            str(row.in_flight),
            *([_recomputed(row)] if recomputes else []),
            *(["divided" + f" (ZeRO-{row.zero})" * (row.zero > 1) if row.sharded else "whole"] if divided else []),
        ]
        if has_costs:
            sends = [f"{units.size(h.forward_bytes)} to stage {h.dst}" for h in row.sends or ()]
            line += [
                units.known_seconds(row.forward_s),
                units.known_seconds(row.backward_s),
                units.size(row.parameter_bytes or 0),
            ]
            line.append(", ".join(sends) or "nothing")
        cells.append(line)
    return header, cells


def _recomputed(row: StageRow) -> str:
    """What of a stage's activations is computed again, in a word or two."""
    if row.recompute:
        return "yes"
    return units.count(row.recomputed, "layer") if row.recomputed else "no"


def layout_lines(rows: tuple[StageRow, ...]) -> list[str]:
    """A line for each stage that divides its layers along more than samples, or in several ways."""
    return [
        f"  stage {row.stage} divides "
        + ", ".join(f"{units.count(number, 'layer')} by {layout}" for layout, number in row.layouts.items())
        for row in rows
        if len(row.layouts) > 1 or any(not layout.startswith("samples") or " x " in layout for layout in row.layouts)
    ]


def block_lines(plan: Plan, profile: Profile | None) -> list[str]:
    """A line for each block of layers that is run without exchanges inside, and what is computed more than once."""
    lines = []
    for number, stage in enumerate(plan.decision.stages):
        for block in stage.blocks:
            ends = f"{block.layers[0]} to {block.layers[-1]}"
            layers = units.count(len(block.layers), "layer")
            lines.append(f"  stage {number} exchanges nothing in a block of {layers}, {ends}: {tiles_text(block)}")
        if stage.blocks and profile is not None:
            share = units.percent(overlap(profile.graph, plan.decision, number))
            lines.append(f"  stage {number} computes {share} more than the work, where tiles and ranks overlap")
    return lines


def recomputed_lines(plan: Plan, profile: Profile) -> list[str]:
    """What is won and lost by spans of layers that are computed again; empty where there are none."""
    from planner import predict

    decision = plan.decision
    priced_profile = plan.inputs.as_seen(profile)
    if not any(stage.recomputed for stage in decision.stages):
        return []
    without = replace(decision, stages=tuple(replace(stage, recomputed=()) for stage in decision.stages))
    (now, _), (before, _) = (predict(priced_profile, each) for each in (decision, without))
    held, would_hold = (each.peak_bytes for each in (now, before))
    count = sum(len(stage.recomputed) for stage in decision.stages)
    longer = units.percent(now.step_s / before.step_s - 1) if before.step_s > 0 else "0 %"
    what = f"{units.count(count, 'span')} of layers computed again in the backward"
    lines = [f"  {what}: the fullest rank holds {units.size(held)} instead of {units.size(would_hold)}"]
    lines[0] += f", a step takes {longer} longer"
    if would_hold - held < _LITTLE * would_hold:
        lines.append("    that is little: attention that is one fused operator keeps no scores to drop")
    return lines


def _ranks(plan: Plan, prediction: Prediction) -> str:
    devices = plan_files.device_names(plan)
    step_s = prediction.step_s or 1.0  # of nothing each part is nothing
    header = ["rank", "device", "compute", "communication", "bubble", "idle", "memory"]
    cells = [
        [
            str(rank.rank),
            devices[rank.rank],
            units.percent(rank.compute_s / step_s),
            units.percent(rank.communication_s / step_s),
            units.percent(rank.bubble_s / step_s),
            units.percent(rank.idle_s / step_s),
            _memory(rank),
        ]
        for rank in prediction.ranks
    ]
    return "Devices\n" + tables.table(header, cells)


def _memory(rank: RankPrediction) -> str:
    filled = tables.bar(rank.peak_bytes / max(1, rank.memory_limit_bytes))
    return f"{filled} {units.size(rank.peak_bytes)} of {units.size(rank.memory_limit_bytes)}"


def certificate(plan: Plan, prediction: Prediction) -> list[str]:
    """How the plan was found, and of which plans it is how far from the best, in lines."""
    search = plan.search
    lines = [f"{search.method} ({search.solver}); {_STATUS.get(search.status, search.status)}"]
    if search.bound_s > 0:
        above = search.optimum_s(prediction.step_s) / search.bound_s - 1
        what = "the fastest at the mean" if search.tie is not None else "the plan"
        lines.append(
            f"bound {units.seconds(search.bound_s)} a step: {what} is "
            + (f"at most {units.percent(above)} above the best" if above > _STALE else "at the bound")
        )
        lines.append(f"the searched space: {searched_space.space(plan)}")
        if len(search.bounds_s) > 1:
            parts = [f"{name} {units.seconds(value)}" for name, value in search.bounds_s.items()]
            lines.append(f"the largest of: {', '.join(parts)}")
    if search.num_simulated:
        lines.append(f"{search.num_candidates:,} partial plans looked at, {search.num_simulated:,} plans simulated")
    return lines


def alternative_table(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """(header, lines): other plans, and what the search rejected unpriced, with why."""
    header = ["plan", "step", "peak memory", "why not"]
    cells = [
        [
            other.name,
            units.known_seconds(other.step_s),
            "–" if other.peak_bytes is None else units.size(other.peak_bytes),
            other.why_not,
        ]
        for other in plan.alternatives
    ]
    cells += [[rejected.what, "–", "–", rejected.why] for rejected in plan.search.rejected]
    return header, cells


def _measured(measured: Measured, prediction: Prediction) -> str:
    header = ["", "predicted", "measured", "difference"]
    ratio = units.signed_percent(measured.step_s / prediction.step_s - 1)
    row = ["step", within(prediction), units.seconds(measured.step_s), ratio]
    note = f"  median of {measured.num_steps} steps, spread {units.percent(measured.spread)}"
    if measured.transport:
        note += f", over {measured.transport}"
    if other := apart_text(prediction, measured.transport, measured.kinds):
        header = header[:-1]
        row = row[:-1]
        note = f"{note}\n  {other}"
    return "Measured\n" + tables.table(header, [row]) + "\n" + note


def _titled(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""
