"""How plans and timelines show themselves in a notebook: the headline, the step, and a table of stages or steps.

``import halopipe`` asks IPython for it where a notebook is running; types know nothing of it, and nothing is loaded
before something is shown.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.ir.plan import Plan
    from planner.ir.timeline import Timeline, TimelineFile


def register(shell: Any) -> None:
    """Tells IPython's ``shell`` how to show them as HTML.

    Args:
        shell: as ``IPython.get_ipython()`` gives it; None outside of it.
    """
    formatter = getattr(shell, "display_formatter", None)
    if formatter is None:
        return
    to_html = formatter.formatters["text/html"]
    to_html.for_type_by_name("planner.ir.plan", "Plan", plan_html)
    to_html.for_type_by_name("planner.ir.timeline", "Timeline", timeline_html)
    to_html.for_type_by_name("planner.ir.timeline", "TimelineFile", timeline_file_html)


def plan_html(plan: Plan) -> str:
    """Headline, the step if the plan's profile is remembered, else memory by rank; and its stages."""
    from halopipe import api
    from halopipe.planning import solve
    from halopipe.reports import explain, figures
    from planner.export.rows import stage_rows

    profile = api.remembered(plan)
    timeline = solve.predict_again(plan, profile)[1] if profile is not None else None
    if timeline is not None:
        figure = figures.gantt(timeline, devices=solve.device_names(plan))
    else:
        figure = figures.memory({"predicted": plan})
    header, cells = explain.stage_table(stage_rows(plan, profile, timeline))
    return f"<pre>{html.escape(explain.headline(plan))}</pre>{figures.svg(figure)}{_table(header, cells)}"


def timeline_html(timeline: Timeline) -> str:
    """The step, and memory over time where it is known."""
    from halopipe.reports import figures

    shown = figures.svg(figures.gantt(timeline))
    return shown + (figures.svg(figures.memory_over_time([timeline])) if timeline.memory else "")


def timeline_file_html(file: TimelineFile) -> str:
    """The step predicted and measured."""
    from statistics import median

    from halopipe.reports import figures
    from halopipe.terminal import units

    timelines = [timeline for timeline in (file.predicted, file.measured) if timeline.spans]
    step_s = median(file.step_seconds or (file.measured.step_s,))
    text = f"{units.count(len(file.step_seconds), 'step')}, median {units.seconds(step_s)}"
    return f"<pre>{html.escape(text)}</pre>{figures.svg(figures.gantt(*timelines))}"


def _table(header: list[str], cells: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
