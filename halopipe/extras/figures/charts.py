"""The charts of a report, for bokeh: the step of every rank, memory over time, and plans by step and memory.

Each is drawn on canvas by bokeh's script when the reader comes near it: 128,000 bars are no trouble, and nothing has
to be fetched.  What is said where the pointer is, and what colours a theme has, is in ``report.js``; columns hold
numbers for it, and of names those of plans alone.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed.util import standalone_docs_json_and_render_items
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.models.annotations import Span
from bokeh.plotting import figure
from bokeh.resources import Resources

from halopipe.extras.figures.colours import COLOURS, OPERATIONS, WORDS, stage_colour
from planner.ir.plan import Decision
from planner.ir.schedule import COMPUTE, MESSAGE, Action, Op
from planner.ir.timeline import Timeline

STEP = "step-chart"
MEMORY = "memory-chart"
PLANS = "plans-chart"
"""Elements of the page that charts are put into."""

_MS = 1e3
_MIB = 2**20
_LANES_PX = 430
_LEAST_LANE_PX = 9
_MOST_LANE_PX = 40
_NONE = -1
_MOST_OUTLINED = 4000  # actions of a panel
_MOST_NUMBERED = 1000
_MOST_WITH_MESSAGES = 20000
_MOST_NAMED = 12
_LABEL_FROM = 0.014  # of the step
_LIMIT_IN_VIEW = 1.6  # times the most memory used; a limit beyond is said in words


@dataclass(frozen=True, slots=True)
class Charts:
    """What a page needs to draw them.

    Attributes:
        script: bokeh's own.
        documents: of bokeh, as plain data, by the element of the page that each is drawn into.
    """

    script: str
    documents: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChartPoint:
    """A plan among others; ``role`` is ``chosen``, ``alternative``, ``rival`` or ``front``."""

    name: str
    role: str
    step_s: float
    peak_bytes: int


def charts(
    timelines: Sequence[Timeline],
    decision: Decision,
    limits: Sequence[int],
    points: Sequence[ChartPoint],
    bound_s: float,
) -> Charts:
    """Those that there is something to show of.

    Args:
        timelines: predicted and measured, as far as they are known.
        limits: of memory, by rank.
        bound_s: no plan is faster; 0: not known.
    """
    made = {
        STEP: step_chart(timelines, decision),
        MEMORY: memory_chart(timelines, decision, limits),
        PLANS: plans_chart(points, bound_s),
    }
    script = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    return Charts(script, {element: _plain(chart) for element, chart in made.items() if chart is not None})


def _plain(chart: Any) -> Any:
    """A document that holds the chart, as plain data."""
    document = Document()
    document.add_root(chart)
    (plain,) = standalone_docs_json_and_render_items([chart])[0].values()
    return plain


def digest(script: str) -> str:
    """What a Content-Security-Policy calls the script."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode('ascii')}'"


def step_chart(timelines: Sequence[Timeline], decision: Decision) -> Any:
    """A panel a timeline over one time axis, a lane a rank; None where no action is timed.

    A bar is as high as its lane, what a host prepares is a line below it, and waiting for a message or sending one is
    a line above it, left out at first where there are very many.  Messages are drawn when somebody asks.
    """
    shown = [timeline for timeline in timelines if timeline.spans]
    if not shown:
        return None
    ranks = max(decision.num_ranks, *(span.rank + 1 for timeline in shown for span in timeline.spans))
    lane_px = min(_MOST_LANE_PX, max(_LEAST_LANE_PX, _LANES_PX // ranks))
    end = _MS * max(timeline.step_s for timeline in shown)
    x_range = Range1d(start=0, end=end, bounds=(0, end))
    y_range = Range1d(start=ranks - 0.5, end=-0.5)
    panels = []
    for timeline in shown:
        chart = _figure(
            height=ranks * lane_px + 62,
            x_range=x_range,
            y_range=y_range,
            x_axis_label=f"{timeline.source}: time in ms",
            y_axis_label="rank",
            name=timeline.source,
        )
        _actions(chart, timeline)
        every = max(1, -(-14 // lane_px))
        chart.yaxis.ticker = FixedTicker(ticks=list(range(0, ranks, every)))
        chart.ygrid.visible = False
        panels.append(chart)
    return column(panels, sizing_mode="stretch_width", spacing=4)


def memory_chart(timelines: Sequence[Timeline], decision: Decision, limits: Sequence[int]) -> Any:
    """Bytes over time, a line a rank in its stage's colour, measured ones dashed; None where they are not known."""
    shown = [timeline for timeline in timelines if timeline.memory]
    if not shown:
        return None
    most = max(sample.num_bytes for timeline in shown for sample in timeline.memory) / _MIB
    near = sorted({limit for limit in limits if 0 < limit / _MIB <= _LIMIT_IN_VIEW * most})
    end = _MS * max(timeline.step_s for timeline in shown)
    chart = _figure(
        height=330,
        x_range=Range1d(start=0, end=end, bounds=(0, end)),
        y_range=Range1d(start=0, end=1.06 * max([most, *(limit / _MIB for limit in near)])),
        x_axis_label="time in ms",
        y_axis_label="memory in MiB",
        name=MEMORY,
    )
    stage_of = {rank: number for number, stage in enumerate(decision.stages) for rank in stage.ranks}
    for timeline in shown:
        lines = dict(_stairs(timeline))
        source: dict[str, Any] = {
            "xs": [xs for xs, _ in lines.values()],
            "ys": [ys for _, ys in lines.values()],
            "rank": list(lines),
            "colour": [stage_colour(stage_of.get(rank, 0)) for rank in lines],
        }
        chart.multi_line(
            "xs",
            "ys",
            source=ColumnDataSource(source),
            line_color="colour",
            line_width=1.8,
            line_dash="solid" if timeline.source == "predicted" else "5 3",
            name=f"memory {timeline.source}",
        )
    for limit in near:
        chart.add_layout(
            Span(location=limit / _MIB, dimension="width", line_dash="dashed", line_width=1.5, name="rule")
        )
    return chart


def plans_chart(points: Sequence[ChartPoint], bound_s: float) -> Any:
    """Plans by step and memory of the fullest rank, those that no other beats joined; None for fewer than two."""
    if len(points) < 2:
        return None
    xs = np.array([_MS * p.step_s for p in points])
    ys = np.array([p.peak_bytes / _MIB for p in points])
    left = min([*xs, _MS * bound_s or xs[0]])
    right = xs.max()
    chart = _figure(
        height=330,
        x_range=Range1d(start=left - 0.06 * (right - left or right), end=right + 0.06 * (right - left or right)),
        y_range=Range1d(start=0, end=1.12 * ys.max()),
        x_axis_label="step in ms",
        y_axis_label="fullest rank in MiB",
        name=PLANS,
    )
    front = front_of(points)
    stairs_x = [x for number in front for x in (xs[number], xs[number])][1:]
    stairs_y = [y for number in front for y in (ys[number], ys[number])][:-1]
    chart.line([*stairs_x, right * 2], [*stairs_y, stairs_y[-1]], line_width=1.5, line_dash="dotted", name="rule")
    if bound_s > 0:
        chart.add_layout(
            Span(location=_MS * bound_s, dimension="height", line_dash="dashed", line_width=1.5, name="rule")
        )
    for role, (marker, colour, px) in _ROLES.items():
        mine = [number for number, point in enumerate(points) if point.role == role]
        if mine:
            source = ColumnDataSource({"x": xs[mine], "y": ys[mine], "point": np.array(mine, np.int32)})
            chart.scatter(
                "x",
                "y",
                source=source,
                marker=marker,
                size=px,
                fill_color=colour,
                line_color=colour,
                name=f"plans {role}",
            )
    _name_plans(chart, points, xs, ys, (left + right) / 2)
    return chart


def _name_plans(chart: Any, points: Sequence[ChartPoint], xs: Any, ys: Any, middle: float) -> None:
    """Names beside the plans that are no points of a front alone, unless they are too many."""
    places: set[tuple[float, int]] = set()
    named = []
    for number, point in sorted(enumerate(points), key=lambda pair: pair[1].role == "alternative"):  # a rival's first
        place = (round(point.step_s, 6), point.peak_bytes)
        if point.role != "front" and place not in places:
            places.add(place)
            named.append(number)
    if len(named) > _MOST_NAMED:
        return
    late = xs[named] > middle  # their names end where others begin
    texts: dict[str, Any] = {
        "x": xs[named],
        "y": ys[named],
        "text": [points[number].name for number in named],
        "align": ["right" if each else "left" for each in late],
        "aside": np.where(late, -9, 9),
    }
    chart.text(
        "x",
        "y",
        "text",
        source=ColumnDataSource(texts),
        text_align="align",
        x_offset="aside",
        y_offset=-5,
        text_font_size="11px",
        name="names",
        level="overlay",
    )


def front_of(points: Sequence[ChartPoint]) -> list[int]:
    """Numbers of the plans that no other beats in both step and memory, the fastest first."""
    front: list[int] = []
    for number in sorted(range(len(points)), key=lambda n: (points[n].step_s, points[n].peak_bytes)):
        if not front or points[number].peak_bytes < points[front[-1]].peak_bytes:
            front.append(number)
    return front


_Bar = tuple[float, float, int, int, int, int]
"""(start in ms, stop, rank, stage, micro-batch, other stage)."""

_ROLES: Mapping[str, tuple[str, str, int]] = {
    "alternative": ("circle", COLOURS[5], 10),
    "front": ("square", COLOURS[2], 10),
    "rival": ("triangle", COLOURS[1], 12),
    "chosen": ("star", COLOURS[4], 18),
}


def _figure(**options: Any) -> Any:
    """An empty chart that is as wide as its place, and shows the page behind it."""
    chart = figure(
        sizing_mode="stretch_width",
        tools="xpan,xbox_zoom,reset",
        active_drag="xpan",
        toolbar_location=None,
        output_backend="canvas",
        min_border_right=12,
        **options,
    )
    chart.background_fill_alpha = chart.border_fill_alpha = 0
    chart.outline_line_alpha = 0
    chart.add_tools(HoverTool(tooltips=None, mode="mouse"))
    chart.axis.minor_tick_line_alpha = 0
    return chart


def _actions(chart: Any, timeline: Timeline) -> None:
    """A renderer for each operation, so that a colour is said once; two for messages, filled when asked."""
    by_op: dict[Op, list[_Bar]] = {}
    for span in timeline.spans:
        action = Action.parse(span.action)
        number, peer = (_NONE if value is None else value for value in (action.microbatch, action.peer))
        row = (_MS * span.start_s, _MS * span.stop_s, span.rank, action.stage, number, peer)
        by_op.setdefault(action.op, []).append(row)
    for op in (op for op in OPERATIONS if op in by_op):
        rows = np.array(by_op[op], np.float64)
        above = -0.45 if op in MESSAGE else 0.45 if op is Op.PREPARE else 0.0
        source: dict[str, Any] = {
            "left": rows[:, 0].astype(np.float32),
            "right": rows[:, 1].astype(np.float32),
            "y": (rows[:, 2] + above).astype(np.float32),
            "rank": rows[:, 2].astype(np.int32),
            "stage": rows[:, 3].astype(np.int32),
            "microbatch": rows[:, 4].astype(np.int32),
            **({"peer": rows[:, 5].astype(np.int32)} if op in MESSAGE else {}),
        }
        bars = chart.hbar(
            y="y",
            left="left",
            right="right",
            height=0.1 if above else 0.8,
            source=ColumnDataSource(source),
            fill_color=OPERATIONS[op],
            line_color="white" if len(timeline.spans) <= _MOST_OUTLINED else None,
            line_width=0.6,
            name=f"action {op.value} {WORDS[op]}",
        )
        bars.visible = op not in MESSAGE or len(timeline.spans) <= _MOST_WITH_MESSAGES
    _numbers(chart, by_op, timeline.step_s)
    for name, width in (("messages", 0.8), ("pointed", 2.2)):
        ends = ColumnDataSource({key: [] for key in ("x0", "y0", "x1", "y1")})
        chart.segment("x0", "y0", "x1", "y1", source=ends, line_width=width, name=name)


def _numbers(chart: Any, by_op: Mapping[Op, list[_Bar]], step_s: float) -> None:
    """Micro-batches, in the bars that are wide enough for them."""
    wide = [
        row
        for op in COMPUTE & by_op.keys()
        for row in by_op[op]
        if row[1] - row[0] > _MS * _LABEL_FROM * step_s and row[4] != _NONE
    ]
    if wide and len(wide) <= _MOST_NUMBERED:
        source: dict[str, Any] = {
            "x": [(row[0] + row[1]) / 2 for row in wide],
            "y": [row[2] for row in wide],
            "text": [str(row[4]) for row in wide],
        }
        chart.text(
            "x",
            "y",
            "text",
            source=ColumnDataSource(source),
            text_align="center",
            text_baseline="middle",
            text_font_size="10px",
            text_color="#10151d",
            name="numbers",
        )


def _stairs(timeline: Timeline) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """By rank, the corners of its memory over time: (ms, MiB)."""
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for sample in timeline.memory:
        by_rank.setdefault(sample.rank, []).append((_MS * sample.at_s, sample.num_bytes / _MIB))
    for rank, samples in sorted(by_rank.items()):
        at, held = (np.array(values, np.float32) for values in zip(*sorted(samples), strict=True))
        xs = np.repeat(at, 2)
        ys = np.repeat(held, 2)
        yield rank, (np.append(xs[1:], np.float32(_MS * timeline.step_s)), ys)
