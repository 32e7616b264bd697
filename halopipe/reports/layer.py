"""Where a layer runs, what it reads from other stages, and what it costs.

How else a layer of a plan could be divided over the ranks of its stage, and what each way would cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halopipe.terminal import tables, units
from planner.costs.cost_model import CostModel
from planner.costs.rows import layout_text, tiles_text
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.constraints import FAMILIES
from planner.ir.graph import producer
from planner.ir.plan import Decision, Plan
from planner.ir.problem import DIVIDED, Problem
from planner.ir.profile import Profile
from planner.ir.schedule import Op
from planner.layers.receptive_field import ReceptiveField
from planner.passes import in_flight
from planner.solvers.layouts.stage import LEAST, NONE, WHOLE, Question, Rival, rivals


def describe_layer(plan: Plan, profile: Profile | None, name: str) -> str:
    """Where layer ``name`` runs, what it reads from other stages, what it costs, and how else it could be divided.

    Raises:
        UnknownNameError: the plan has no such layer.
    """
    units.require_known("layer", [name], list(plan.decision.layers))
    placement = plan.decision.layers[name]
    stage = plan.decision.stages[placement.stage]
    lines = [f"{name}: stage {placement.stage}, on {', '.join(stage.devices)}"]
    if placement.cuts:
        lines.append(f"  divided over the ranks: {layout_text(placement, plan.decision.micro_batches[0])}")
    if placement.ways > 1:
        lines.append(f"  {placement.ways} ranks share its input channels and sum what they make of its filters")
    if placement.margin:
        lines.append(f"  each rank works {units.count(placement.margin, 'row')} beyond its part, which saves a halo")
    for block in stage.blocks:
        if name in block.layers:
            lines.append(f"  in a block of {len(block.layers)} layers, from {block.layers[0]} to {block.layers[-1]}:")
            lines.append(f"    {tiles_text(block)}; nothing is exchanged inside")
    if stage.recompute:
        lines.append("  its activations are computed again before the backward")
    for span in stage.recomputed:
        if name in span:
            ends = f"{len(span)} layers, {span[0]} to {span[-1]}" if len(span) > 1 else "by itself"
            lines.append(f"  its activations are computed again when the backward comes to it: {ends}")
    if stage.sharded:
        lines.append(f"  its {len(stage.ranks)} ranks divide {DIVIDED[stage.level]} among them")
    if profile is None:
        return "\n".join([*lines, "  what it costs is in the profile: add --profile profile.json"])
    layer = profile.graph.by_name()[name]
    lines.append(f"  {layer.kind} ({layer.attributes.get('op', 'no operator')})")
    lines += [f"  reads {value}{_origin(plan, value, placement.stage)}" for value in layer.inputs]
    for spec in layer.outputs:
        dims = ", ".join(f"{dim} {extent}" for dim, extent in zip(spec.dims, spec.shape, strict=True))
        lines.append(f"  makes {spec.dtype} ({dims or 'a scalar'}) for {profile.graph.samples} samples")
    parameter_bytes = profile.graph.parameter_bytes(frozenset({name}))
    lines.append(f"  parameters {units.size(parameter_bytes)}")
    others = render(splits_of(plan, profile, name), plan.prediction.step_s, len(stage.ranks))
    return "\n".join([*lines, "", _costs(profile, name), "", others])


def layer_data(plan: Plan, profile: Profile | None, name: str) -> dict[str, Any]:
    """The same for JSON: the lines, and every way to divide the layer with what it costs."""
    lines = describe_layer(plan, profile, name).splitlines()
    split_data = data(splits_of(plan, profile, name)) if profile is not None else {}
    return {"layer": lines, **split_data}


def _origin(plan: Plan, value: str, stage: int) -> str:
    placement = plan.decision.layers.get(producer(value))
    if placement is None:
        return ", an input of the step"
    return "" if placement.stage == stage else f" from stage {placement.stage}"


def _costs(profile: Profile, name: str) -> str:
    cells = [
        [
            kind,
            str(m.samples),
            units.seconds(m.forward_s),
            units.seconds(m.backward_s),
            units.size(m.saved_bytes),
            units.size(m.workspace_bytes),
            units.percent(m.spread),
        ]
        for kind, measurements in profile.measurements.items()
        for m in measurements
        if m.layer == name
    ]
    table = tables.table(["device kind", "samples", "forward", "backward", "saved", "workspace", "spread"], cells)
    alike = {m.alike: None for each in profile.measurements.values() for m in each if m.layer == name and m.alike}
    return "\n".join([table, *(f"  seconds measured on {other}, which is alike" for other in alike)])


MOST_SHOWN = 8
"""Layouts that a table shows; JSON has all."""


@dataclass(frozen=True, slots=True)
class Split:
    """A way to divide the layer.

    Attributes:
        is_allowed: whether the plan was asked for with ``--allow`` of its dims.
    """

    rival: Rival
    is_allowed: bool

    @property
    def layout(self) -> str:
        """Parts by dim."""
        return str(self.rival.option)

    @property
    def note(self) -> str:
        """Why it cannot be had, or that it is as planned; empty for others."""
        if self.rival.is_chosen:
            return "as planned"
        if not self.is_allowed:
            return "not allowed (--allow)"
        return "" if self.rival.fits else "does not fit"

    def data(self) -> dict[str, Any]:
        """For JSON."""
        rival = self.rival
        option = self.rival.option
        return {
            "layout": self.layout,
            "cuts": {dim: list(points) for dim, points in option.cuts},
            "ways": option.ways,
            "margin": option.margin,
            "total_s": rival.total_s,
            "compute_s": rival.compute_s,
            "messages_s": rival.messages_s,
            "statistics_s": rival.statistics_s,
            "reduction_s": rival.reduction_s,
            "update_s": rival.update_s,
            "memory_bytes": rival.memory_bytes,
            "fits": rival.fits,
            "allowed": self.is_allowed,
            "chosen": rival.is_chosen,
        }


def splits_of(plan: Plan, profile: Profile, name: str) -> tuple[Split, ...]:
    """Every way to divide layer ``name``, all other layers as planned, the cheapest first; none on one rank.

    Raises:
        MissingMeasurementError: the profile does not say what the layer costs as planned.
    """
    from halopipe.planning.problem import problem_of
    from planner.costs.stages.placement import LayoutCosts

    decision = plan.decision
    number = decision.layers[name].stage
    stage = decision.stages[number]
    if len(stage.ranks) < 2:
        return ()
    problem = problem_of(plan, profile)
    index = {layer.name: position for position, layer in enumerate(profile.graph.layers)}
    recomputed = {name for span in stage.recomputed for name in span}
    chosen = {
        index[each]: ShardingSpec.placed(decision.layers[each], stage.recompute or each in recomputed)
        for each in decision.layers_of(number)
    }
    layouts = LayoutCosts(CostModel(profile), tuple(FAMILIES), problem.halo_depth)
    prices = layouts.prices(stage.ranks, max(decision.micro_batches))
    rival_options = rivals(prices, chosen, index[name], _question(problem, decision, number, tuple(sorted(chosen))))
    return tuple(Split(rival, _is_allowed(rival, plan.inputs.request.allow)) for rival in rival_options)


def render(splits: tuple[Split, ...], step_s: float, ranks: int) -> str:
    """A table of the cheapest, and which wins by how much."""
    if not splits:
        return "its stage has one device: nothing is divided"
    shown = [split for place, split in enumerate(splits) if place < MOST_SHOWN or split.rival.is_chosen]
    header = ["layout", "a step", "compute", "messages", "sums", "gradients", "update", "memory", ""]
    cells = [
        [
            split.layout,
            *(
                units.seconds(value)
                for value in (
                    split.rival.total_s,
                    split.rival.compute_s,
                    split.rival.messages_s,
                    split.rival.statistics_s,
                    split.rival.reduction_s,
                    split.rival.update_s,
                )
            ),
            units.size(split.rival.memory_bytes),
            split.note,
        ]
        for split in shown
    ]
    left = len(splits) - len(shown)
    return "\n".join(
        [
            f"Layouts of this layer on {units.count(ranks, 'device')}, all others as planned",
            tables.table(header, cells),
            *([f"  and {units.count(left, 'more layout')}, each slower"] if left else []),
            *(f"  {line}" for line in verdict(splits, step_s)),
        ]
    )


def verdict(splits: tuple[Split, ...], step_s: float) -> list[str]:
    """Which of the layouts wins, by how much, and the runner-up."""
    best = splits[0]
    chosen = next(split for split in splits if split.rival.is_chosen)
    if len(splits) == 1:
        return [f"{best.layout}: no other way to divide it is known"]
    second = splits[1]
    less_s = second.rival.total_s - best.rival.total_s
    lines = [f"{best.layout} wins, by {_share(less_s, step_s)}; runner-up {second.layout}"]
    if best is not chosen:
        less_s = chosen.rival.total_s - best.rival.total_s
        why = f": {best.note}" if best.note else ", which other micro-batches, stages or layers outweigh"
        lines.append(f"as planned ({chosen.layout}) takes {_share(less_s, step_s)} more than that{why}")
    return lines


def data(splits: tuple[Split, ...]) -> dict[str, Any]:
    """For JSON: all of them, the winner, and the runner-up."""
    lead_s = splits[1].rival.total_s - splits[0].rival.total_s if len(splits) > 1 else None
    return {
        "layouts": [split.data() for split in splits],
        "winner": splits[0].layout if splits else None,
        "runner_up": splits[1].layout if len(splits) > 1 else None,
        "lead_s": lead_s,
    }


def _share(seconds: float, step_s: float) -> str:
    return f"{units.seconds(seconds)} a step ({units.percent(seconds / step_s if step_s > 0 else 0.0)} of it)"


def _question(problem: Problem, decision: Decision, stage: int, layers: tuple[int, ...]) -> Question:
    """What is asked of a stage of a plan."""
    rows = decision.rows()
    ops = {action.op for row in rows for action in row if action.stage == stage}
    backward = WHOLE if Op.BACKWARD in ops else LEAST if Op.BACKWARD_INPUT in ops else NONE
    return Question(
        layers,
        decision.global_batch / max(decision.micro_batches),
        max(1, in_flight(rows, len(decision.stages))[stage]),
        tuple(problem.memory_limit_bytes(rank) for rank in decision.stages[stage].ranks),
        backward=backward,
    )


def _is_allowed(rival: Rival, allow: tuple[str, ...]) -> bool:
    """Whether its dims are among the families that may be cut."""
    dims = {dim for dim, points in rival.option.cuts if len(points) > 2}
    return all(family in allow for family, names in FAMILIES.items() if dims & set(names))


def describe_field(field: ReceptiveField) -> str:
    """What an output reads of each input, by dim: the box; and far from the edges size, stride and offset."""
    lines = [f"{field.value} ({', '.join(map(str, field.box))}) reads"]
    for name, box in field.inputs.items():
        rows = [
            [
                one.dim,
                f"{part.start} to {part.stop}",
                str(one.extent),
                str(one.size),
                "–" if one.stride is None else str(one.stride),
                "–" if one.offset is None else str(one.offset),
            ]
            for one, part in zip(field.along[name], box, strict=True)
        ]
        header = ["dim", "rows", "of", "an output reads", "and the next begins later by", "output 0 begins at"]
        lines += [f"  {name}", tables.table(header, rows, indent=4)]
    return "\n".join(lines)


def field_data(field: ReceptiveField) -> dict[str, Any]:
    """The same for JSON; strides are fractions as text, null where outputs follow no rule."""
    return {
        "value": field.value,
        "box": [[part.start, part.stop] for part in field.box],
        "inputs": {
            name: [
                {
                    "dim": one.dim,
                    "start": part.start,
                    "stop": part.stop,
                    "extent": one.extent,
                    "size": one.size,
                    "stride": None if one.stride is None else str(one.stride),
                    "offset": one.offset,
                }
                for one, part in zip(field.along[name], box, strict=True)
            ]
            for name, box in field.inputs.items()
        },
    }


def parse_box(text: str) -> dict[str, tuple[int, int]]:
    """``height=0:4,width=8`` (one row): where a box starts and stops, by dim.

    Raises:
        UsageError: it is none of that.
    """

    def rows(_: str, value: str) -> tuple[int, int]:
        start, colon, stop = value.partition(":")
        return units.whole(start, 0), units.whole(stop, 0) if colon else int(start) + 1

    return units.parse_pairs(text, rows, "says no rows", "--box height=0:4,width=8")
