"""Figures: a step as a Gantt chart, memory by rank, predicted against measured.  Colours are Okabe and Ito's (2008).

Each function returns a matplotlib figure; nothing is shown and no global state is touched.  :func:`save` writes SVG or
PNG, the same bytes for the same figure.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from halopipe.terminal import units
from planner.ir.plan import Plan
from planner.ir.schedule import PER_STEP, Action, Op
from planner.ir.timeline import Timeline

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"

_COLOUR: Mapping[Op, str] = {
    Op.FORWARD: SKY,
    Op.BACKWARD: ORANGE,
    Op.BACKWARD_INPUT: YELLOW,
    Op.BACKWARD_WEIGHT: VERMILION,
    Op.REDUCE_GRAD: PURPLE,
    Op.UPDATE: GREEN,
    Op.PREPARE: GREY,
}
_WORDS: Mapping[Op, str] = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward for inputs",
    Op.BACKWARD_WEIGHT: "backward for weights",
    Op.REDUCE_GRAD: "gradient all-reduce",
    Op.UPDATE: "update",
    Op.PREPARE: "preparing on the host",
}
_LABEL_FROM = 0.012  # of the step; shorter actions carry no label
_MIB = 2**20


def gantt(*timelines: Timeline, devices: Sequence[str] = ()) -> Figure:
    """One panel a timeline (predicted, measured) over a common time axis; messages are not drawn, waiting is white."""
    ranks = max((span.rank for timeline in timelines for span in timeline.spans), default=0) + 1
    figure = Figure(figsize=(9.0, 0.9 + len(timelines) * (0.7 + 0.35 * ranks)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    seen: set[Op] = set()
    for axes, timeline in zip(panels, timelines, strict=True):
        seen |= _draw_timeline(axes, timeline)
        names = [f"rank {rank}" + (f"\n{devices[rank]}" if rank < len(devices) else "") for rank in range(ranks)]
        axes.set_yticks(range(ranks), names)
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_title(f"{timeline.source}: {units.seconds(timeline.step_s)}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms")
    handles = [Patch(color=_COLOUR[op], label=_WORDS[op]) for op in _COLOUR if op in seen]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    return figure


def memory(plans: Mapping[str, Plan]) -> Figure:
    """Predicted peak of every rank of every plan, as bars, with what the rank may use as a line where it is in view."""
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, YELLOW, GREY)
    most = max((len(plan.prediction.ranks) for plan in plans.values()), default=1)
    width = 0.8 / most
    for position, plan in enumerate(plans.values()):
        for rank in plan.prediction.ranks:
            at = position + (rank.rank - (most - 1) / 2) * width
            axes.bar(at, rank.peak_bytes / _MIB, width * 0.92, color=colours[rank.rank % len(colours)])
    limits = {r.memory_limit_bytes for plan in plans.values() for r in plan.prediction.ranks}
    top = axes.get_ylim()[1] * _MIB
    for limit in sorted(limit for limit in limits if limit <= 1.5 * top):
        axes.axhline(limit / _MIB, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(plans)), list(plans))
    axes.set_ylabel("peak memory in MiB")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colours[rank % len(colours)], label=f"rank {rank}") for rank in range(most)]
    axes.legend(handles=handles, frameon=False)
    return figure


def accuracy(points: Mapping[str, tuple[float, float]]) -> Figure:
    """(predicted, measured) step seconds by name, as points around the line of equality with a band of 5 %."""
    figure = Figure(figsize=(4.8, 4.5), layout="constrained")
    axes = figure.subplots()
    milliseconds = {name: (1e3 * a, 1e3 * b) for name, (a, b) in points.items()}
    values = [value for pair in milliseconds.values() for value in pair]
    low, high = (0.9 * min(values), 1.1 * max(values)) if values else (0.0, 1.0)
    axes.fill_between([low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high], color=SKY, alpha=0.25, lw=0)
    axes.plot([low, high], [low, high], color=GREY, linewidth=1)
    for name, (predicted, measured) in milliseconds.items():
        axes.plot(predicted, measured, "o", color=BLUE)
        axes.annotate(name, (predicted, measured), xytext=(5, -9), textcoords="offset points", fontsize=8)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("predicted step in ms")
    axes.set_ylabel("measured step in ms")
    axes.set_aspect("equal")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def svg(figure: Figure) -> str:
    """The figure as SVG text."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "halopipe", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> None:
    """Writes the figure; the suffix says whether as SVG or PNG.

    Raises:
        UsageError: another suffix.
        MissingFileError: the folder is missing or cannot be written.
    """
    from planner.ir.errors import UsageError
    from planner.ir.files import write_bytes, write_text

    match Path(path).suffix:
        case ".svg":
            write_text(path, svg(figure))
        case ".png":
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=150)
            write_bytes(path, buffer.getvalue())
        case suffix:
            raise UsageError(
                f"figures are written as .svg or .png, not {suffix or 'without a suffix'!r}", [], ["step.svg"]
            )


def _draw_timeline(axes: Axes, timeline: Timeline) -> set[Op]:
    """Draws the actions of every rank; returns the operations seen."""
    seen = set()
    for span in timeline.spans:
        action = Action.parse(span.action)
        if action.op not in _COLOUR:
            continue
        seen.add(action.op)
        start, length = 1e3 * span.start_s, 1e3 * (span.stop_s - span.start_s)
        height, below = (0.14, 0.47) if action.op is Op.PREPARE else (0.8, 0.0)  # it may last while the rank computes
        colour = _COLOUR[action.op]
        axes.barh(span.rank + below, length, left=start, height=height, color=colour, edgecolor="white", linewidth=0.4)
        if action.op is not Op.PREPARE and length > 1e3 * _LABEL_FROM * timeline.step_s and action.op not in PER_STEP:
            middle = start + length / 2
            axes.text(middle, span.rank, str(action.microbatch), ha="center", va="center", fontsize=7)
    return seen
