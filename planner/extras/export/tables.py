"""Plans, stages, layers and timelines as pandas frames; column names are the JSON keys, units included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import pandas as pd

from planner.costs.rows import PlanRow, StageRow, plan_rows, stage_rows
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.ir.schedule import Action
from planner.ir.timeline import Timeline


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A layer of a profile at one number of samples on one kind of device; ``stage`` is None without a plan."""

    layer: str
    kind: str
    stage: int | None
    device_kind: str
    samples: int
    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    saved_bytes: int
    workspace_bytes: int
    parameter_bytes: int
    spread: float
    evidence: str


def plans(named: Mapping[str, Plan]) -> pd.DataFrame:
    """A row a plan, indexed by its name."""
    return _frame(plan_rows(named), PlanRow).set_index("plan")


def stages(plan: Plan, profile: Profile | None = None, timeline: Timeline | None = None) -> pd.DataFrame:
    """A row a stage, indexed by its number."""
    return _frame(stage_rows(plan, profile, timeline), StageRow).set_index("stage")


def layers(profile: Profile, plan: Plan | None = None) -> pd.DataFrame:
    """A row a layer, kind of device and number of samples."""
    return _frame(layer_rows(profile, plan), LayerRow)


def layer_rows(profile: Profile, plan: Plan | None = None) -> tuple[LayerRow, ...]:
    """A row a measurement."""
    layers = profile.graph.by_name()
    placed = plan.decision.layers if plan is not None else {}
    return tuple(
        LayerRow(
            layer=m.layer,
            kind=layers[m.layer].kind,
            stage=placed[m.layer].stage if m.layer in placed else None,
            device_kind=device_kind,
            samples=m.samples,
            forward_s=m.forward_s,
            backward_s=m.backward_s,
            backward_input_s=m.backward_input_s,
            backward_weight_s=m.backward_weight_s,
            saved_bytes=m.saved_bytes,
            workspace_bytes=m.workspace_bytes,
            parameter_bytes=profile.graph.parameter_bytes(frozenset({m.layer})),
            spread=m.spread,
            evidence=m.evidence,
        )
        for device_kind, measurements in profile.measurements.items()
        for m in measurements
    )


def ranks(plan: Plan) -> pd.DataFrame:
    """A row a rank: predicted compute, communication, bubble and idle time, and memory."""
    rows = [{name.name: getattr(rank, name.name) for name in fields(rank)} for rank in plan.prediction.ranks]
    return pd.DataFrame(rows).set_index("rank")


def spans(*timelines: Timeline) -> pd.DataFrame:
    """A row an action, of predicted and measured timelines alike."""
    columns = ["source", "rank", "action", "stage", "op", "microbatch", "start_s", "stop_s"]
    rows = []
    for timeline in timelines:
        for span in timeline.spans:
            action = Action.parse(span.action)
            rows.append(
                (
                    timeline.source,
                    span.rank,
                    span.action,
                    action.stage,
                    action.op.value,
                    action.microbatch,
                    span.start_s,
                    span.stop_s,
                )
            )
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"microbatch": "Int64"})


def _frame(rows: Sequence[object], cls: type) -> pd.DataFrame:
    names = [field.name for field in fields(cls)]
    return pd.DataFrame([[getattr(row, name) for name in names] for row in rows], columns=names)
