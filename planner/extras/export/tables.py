"""Plans, stages, layers and timelines as pandas frames; column names are the JSON keys, units included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import pandas as pd

from planner.extras.export.rows import LayerRow, PlanRow, StageRow, layer_rows, plan_rows, stage_rows
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.ir.schedule import Action
from planner.ir.timeline import Timeline


def plans(named: Mapping[str, Plan]) -> pd.DataFrame:
    """A row a plan, indexed by its name."""
    return _frame(plan_rows(named), PlanRow).set_index("plan")


def stages(plan: Plan, profile: Profile | None = None, timeline: Timeline | None = None) -> pd.DataFrame:
    """A row a stage, indexed by its number."""
    return _frame(stage_rows(plan, profile, timeline), StageRow).set_index("stage")


def layers(profile: Profile, plan: Plan | None = None) -> pd.DataFrame:
    """A row a layer, kind of device and number of samples."""
    return _frame(layer_rows(profile, plan), LayerRow)


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
