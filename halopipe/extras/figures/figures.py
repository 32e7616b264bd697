"""Figures: a step as a Gantt chart, memory by rank and over time, the network, predicted against measured.

Each function returns a matplotlib figure; nothing is shown and no global state is touched.  :func:`save` writes SVG or
PNG, the same bytes for the same figure.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from halopipe.extras.figures import graph_layout
from halopipe.extras.figures.colours import (  # noqa: F401 - who draws beside these figures takes their colours
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    OPERATIONS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WORDS,
    YELLOW,
    stage_colour,
)
from halopipe.terminal import units
from planner.ir.errors import UsageError
from planner.ir.files import write_bytes, write_text
from planner.ir.plan import Plan
from planner.ir.schedule import MESSAGE, PER_STEP, Action, Op
from planner.ir.timeline import Timeline

_LABEL_FROM = 0.012  # of the step; shorter actions carry no label
_MIB = 2**20
_LIMIT_IN_VIEW = 1.5
_MOST_NAMED = 12  # ranks, or stages, in a legend
_GRAPH_ASPECT = 1.6
_MOST_LETTERS = 15  # of a layer's name in its box
_LEAST_POINTS = 3.0  # of letters that are drawn


def gantt(*timelines: Timeline, devices: Sequence[str] = ()) -> Figure:
    """One panel a timeline (predicted, measured) over a common time axis; messages are not drawn, waiting is white."""
    ranks = max((span.rank for timeline in timelines for span in timeline.spans), default=0) + 1
    figure = Figure(figsize=(9.0, 0.9 + len(timelines) * (0.7 + 0.35 * ranks)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    drawn_ops: set[Op] = set()
    for axes, timeline in zip(panels, timelines, strict=True):
        drawn_ops |= _draw_timeline(axes, timeline)
        names = [f"rank {rank}" + (f"\n{devices[rank]}" if rank < len(devices) else "") for rank in range(ranks)]
        axes.set_yticks(range(ranks), names)
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_title(f"{timeline.source}: {units.seconds(timeline.step_s)}", loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms")
    handles = [Patch(color=OPERATIONS[op], label=WORDS[op]) for op in OPERATIONS if op in drawn_ops]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) or 1, frameon=False)
    return figure


def memory(plans: Mapping[str, Plan]) -> Figure:
    """Predicted peak of every rank of every plan, as bars, with what the rank may use as a line where it is in view."""
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    axes = figure.subplots()
    most = max((len(plan.prediction.ranks) for plan in plans.values()), default=1)
    width = 0.8 / most
    for position, plan in enumerate(plans.values()):
        for rank in plan.prediction.ranks:
            at = position + (rank.rank - (most - 1) / 2) * width
            axes.bar(at, rank.peak_bytes / _MIB, width * 0.92, color=stage_colour(rank.rank))
    limits = {r.memory_limit_bytes for plan in plans.values() for r in plan.prediction.ranks}
    top = axes.get_ylim()[1] * _MIB
    for limit in sorted(limit for limit in limits if limit <= _LIMIT_IN_VIEW * top):
        axes.axhline(limit / _MIB, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(plans)), list(plans))
    axes.set_ylabel("peak memory in MiB")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=stage_colour(rank), label=f"rank {rank}") for rank in range(most)]
    axes.legend(handles=handles, frameon=False)
    return figure


def memory_over_time(timelines: Sequence[Timeline], limits: Sequence[int] = (), devices: Sequence[str] = ()) -> Figure:
    """Bytes in use by rank, predicted as lines and measured dashed; limits as rules, where they are in view.

    Args:
        limits, devices: by rank.
    """
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    axes = figure.subplots()
    sampled_ranks = sorted({sample.rank for timeline in timelines for sample in timeline.memory})
    for timeline in timelines:
        for rank in sampled_ranks:
            samples = sorted((s.at_s, s.num_bytes) for s in timeline.memory if s.rank == rank)
            if samples:
                at = [1e3 * at_s for at_s, _ in samples] + [1e3 * timeline.step_s]
                held = [num_bytes / _MIB for _, num_bytes in samples] + [samples[-1][1] / _MIB]
                dashed = "--" if timeline.source == "measured" else "-"
                axes.step(at, held, dashed, where="post", color=stage_colour(rank), linewidth=1.3)
    axes.set_ylim(0, None)
    for limit in {limit for limit in limits if limit / _MIB <= _LIMIT_IN_VIEW * axes.get_ylim()[1]}:
        axes.axhline(limit / _MIB, color=GREY, linestyle=":", linewidth=1.2)
    axes.set_xlim(0, None)
    axes.set_xlabel("ms")
    axes.set_ylabel("memory in MiB")
    axes.set_title(" and ".join(_memory_title(timeline) for timeline in timelines), loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if len(sampled_ranks) <= _MOST_NAMED:
        names = [f"rank {rank}" + (f", {devices[rank]}" if rank < len(devices) else "") for rank in sampled_ranks]
        handles = [Patch(color=stage_colour(rank), label=name) for rank, name in zip(sampled_ranks, names, strict=True)]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)) or 1, frameon=False)
    return figure


def _memory_title(timeline: Timeline) -> str:
    return f"{timeline.source} {'(dashed)' if timeline.source == 'measured' else ''}".strip()


def graph(plan: Plan, edges: Sequence[tuple[int, int]]) -> Figure:
    """The network from left to right, row by row, in the colours of its stages.

    Args:
        edges: pairs of positions in the plan's layers (``halopipe.extras.figures.graph_layout.layer_edges``).
    """
    drawn = graph_layout.draw(len(plan.decision.layers), edges, _GRAPH_ASPECT)
    inches = 9.0 / max(1.0, drawn.width)  # of a column
    height = max(1.0, drawn.height * inches / graph_layout.LANES_PER_COLUMN)
    figure = Figure(figsize=(9.0, height + 0.5), layout="constrained")
    axes = figure.subplots()
    axes.add_collection(LineCollection([[(a, b), (c, d)] for a, b, c, d in drawn.lines], colors=GREY, linewidths=0.6))
    letters = 0.6 * _MOST_LETTERS  # each is 0.6 of its height wide
    points = min(7.0, 72 * inches * graph_layout.BOX_WIDTH / letters)
    for (name, placement), centre in zip(plan.decision.layers.items(), drawn.boxes, strict=True):
        _draw_layer(axes, name, stage_colour(placement.stage), centre, points)
    axes.set_xlim(0, drawn.width)
    axes.set_ylim(drawn.height, 0)
    axes.set_axis_off()
    stages = plan.decision.stages
    handles = [
        Patch(color=stage_colour(n), label=f"stage {n}: {', '.join(stage.devices)}")
        for n, stage in enumerate(stages[:_MOST_NAMED])
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=8)
    return figure


def _draw_layer(axes: Axes, name: str, colour: str, centre: tuple[float, float], points: float) -> None:
    """A box with the layer's name, in letters of ``points`` where these can be read."""
    x, y = centre
    width = graph_layout.BOX_WIDTH
    height = graph_layout.BOX_HEIGHT
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(Rectangle(corner, width, height, facecolor=to_rgba(colour, 0.25), edgecolor=colour))
    if points >= _LEAST_POINTS:
        text = name if len(name) <= _MOST_LETTERS else f"…{name[1 - _MOST_LETTERS :]}"
        axes.text(x, y, text, ha="center", va="center", fontsize=points)


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


def draw_step(folder: Path, timelines: Sequence[Timeline], devices: Sequence[str]) -> None:
    """Draws ``step.svg`` of a run, predicted and measured."""
    save(gantt(*timelines, devices=devices), folder / "step.svg")


def require_format(path: str | Path) -> None:
    """Whether figures are written in the format that the path's suffix says.

    Raises:
        UsageError: they are not.
    """
    if (suffix := Path(path).suffix) not in (".svg", ".png"):
        named = f"-o {Path(path).with_suffix('.svg')}" if Path(path).name else "-o step.svg"
        raise UsageError(f"figures are written as .svg or .png, not {suffix or 'without a suffix'!r}", [], [named])


def save(figure: Figure, path: str | Path) -> None:
    """Writes the figure; the suffix says whether as SVG or PNG.

    Raises:
        UsageError: another suffix.
        MissingFileError: the folder is missing or cannot be written.
    """
    require_format(path)
    if Path(path).suffix == ".svg":
        write_text(path, svg(figure))
    else:
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        write_bytes(path, buffer.getvalue())


def _draw_timeline(axes: Axes, timeline: Timeline) -> set[Op]:
    """Draws the actions of every rank; returns the operations seen."""
    drawn_ops = set()
    for span in timeline.spans:
        action = Action.parse(span.action)
        if action.op in MESSAGE:
            continue
        drawn_ops.add(action.op)
        start = 1e3 * span.start_s
        length = 1e3 * (span.stop_s - span.start_s)
        height, below = (0.14, 0.47) if action.op is Op.PREPARE else (0.8, 0.0)  # it may last while the rank computes
        colour = OPERATIONS[action.op]
        axes.barh(span.rank + below, length, left=start, height=height, color=colour, edgecolor="white", linewidth=0.4)
        if action.op is not Op.PREPARE and length > 1e3 * _LABEL_FROM * timeline.step_s and action.op not in PER_STEP:
            middle = start + length / 2
            axes.text(middle, span.rank, str(action.microbatch), ha="center", va="center", fontsize=7)
    return drawn_ops
