"""Where a layer runs, what it reads from other stages, and what it costs."""

from __future__ import annotations

from typing import Any

from halopipe import naming, splits, text, units
from planner.export.decisions import layout_text
from planner.ir.graph import producer
from planner.ir.plan import Plan
from planner.ir.profile import Profile


def describe_layer(plan: Plan, profile: Profile | None, name: str) -> str:
    """Where layer ``name`` runs, what it reads from other stages, what it costs, and how else it could be divided.

    Raises:
        UnknownNameError: the plan has no such layer.
    """
    naming.require_known("layer", [name], list(plan.decision.layers))
    placement = plan.decision.layers[name]
    stage = plan.decision.stages[placement.stage]
    lines = [f"{name}: stage {placement.stage}, on {', '.join(stage.devices)}"]
    if placement.cuts:
        lines.append(f"  divided over the ranks: {layout_text(placement, plan.decision.micro_batches[0])}")
    if placement.ways > 1:
        lines.append(f"  {placement.ways} ranks share its input channels and sum what they make of its filters")
    if placement.margin:
        lines.append(f"  each rank works {units.count(placement.margin, 'row')} beyond its part, which saves a halo")
    if stage.recompute:
        lines.append("  its activations are computed again before the backward")
    if stage.sharded:
        lines.append(f"  its {len(stage.ranks)} ranks divide the optimiser's state among them")
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
    others = splits.render(splits.splits_of(plan, profile, name), plan.prediction.step_s, len(stage.ranks))
    return "\n".join([*lines, "", _costs(profile, name), "", others])


def layer_data(plan: Plan, profile: Profile | None, name: str) -> dict[str, Any]:
    """The same for JSON: the lines, and every way to divide the layer with what it costs."""
    lines = describe_layer(plan, profile, name).splitlines()
    found = splits.data(splits.splits_of(plan, profile, name)) if profile is not None else {}
    return {"layer": lines, **found}


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
    return text.table(["device kind", "samples", "forward", "backward", "saved", "workspace", "spread"], cells)
