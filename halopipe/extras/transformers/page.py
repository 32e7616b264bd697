"""A page of what ``halopipe ways`` answers: time against memory, the best way's step, what limits it, and its evidence.

    front   the fastest way under each of ``MOST_LIMITS`` limits of memory, from what the best way holds down to the
            least that any way holds: each is a search of its own; of unlike devices the divisions that were met
    step    lanes are stages, whose ranks are alike; the first micro-batches alone, where all would be too many to see
    shares  :func:`halopipe.extras.transformers.ways.shares_s`

Everything is in the file, and nothing is fetched or run (a Content-Security-Policy says so).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from halopipe.extras.transformers.ways import GIB, WaysReport, shares_s
from halopipe.terminal import units
from planner.extras.transformers.cluster import FRAGMENTED, RESERVED_BYTES, GpuCluster
from planner.extras.transformers.fits import least
from planner.extras.transformers.search import PricedDegrees, search
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import GRADIENTS, timing_of
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.files import write_text
from planner.ir.schedule import MESSAGE, PER_STEP, Action, Op
from planner.ir.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LIMITS = 6
MOST_ACTIONS = 1200
"""Of a step that is drawn: more are no longer told apart."""
_SHOWN = 0.0005
"""Smaller shares of the step are not told."""
_GAP = 0.01
_LIMIT_S = 10.0
"""How near the best a point of the front is proven, and how long it is searched for."""


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """The step of a way: ``micro_batches`` of all that it has."""

    timeline: Timeline
    micro_batches: int


def write(report: WaysReport, space: DegreesSpace, path: Path) -> None:
    """Writes :func:`page`.

    Raises:
        UsageError: jinja2 or matplotlib is not installed.
    """
    write_text(path, page(report, front(report, space)))


def front(report: WaysReport, space: DegreesSpace) -> tuple[PricedDegrees, ...]:
    """Ways of which none is both faster and smaller than another, the fastest first.

    Args:
        space: what was searched.
    """
    choices = [report.sweep.best, *report.sweep.rivals]
    if isinstance(report.cluster, GpuCluster):
        choices += _under_limits(report, report.cluster, space)
    points: list[PricedDegrees] = []
    for choice in sorted(choices, key=lambda choice: (choice.prediction.step.seconds, choice.prediction.memory.total)):
        if not points or choice.prediction.memory.total < points[-1].prediction.memory.total:
            points.append(choice)
    return tuple(points)


def _under_limits(report: WaysReport, cluster: GpuCluster, space: DegreesSpace) -> Iterator[PricedDegrees]:
    """The fastest under each limit below what the best way holds."""
    asked = report.devices, report.global_batch
    smallest = least(report.shape, cluster, *asked, space)
    most = report.sweep.best.prediction.memory.total
    lowest = most if smallest is None else smallest.memory.total
    for number in range(1, MOST_LIMITS):
        limit_bytes = most - number * (most - lowest) / (MOST_LIMITS - 1)
        whole_bytes = limit_bytes * (1 + 1e-9) / (1 - FRAGMENTED) + RESERVED_BYTES
        under = replace(cluster, memory_bytes=whole_bytes)
        try:
            yield search(report.shape, under, *asked, space, gap=_GAP, time_limit_s=_LIMIT_S, rivals=0).best
        except InfeasibleError:
            return


def drawn_step(report: WaysReport) -> DrawnStep:
    """The best way's step in the simulator, with the sums and the optimiser after it."""
    ways = report.sweep.best.ways
    timing = timing_of(report.shape, report.cluster, ways, report.global_batch)
    per_micro_batch = 2 * len(timing.chunks.forward_s)
    most = max(1, MOST_ACTIONS // per_micro_batch // ways.pipeline) * ways.pipeline
    shown = min(timing.micro_batches, most)
    compiled, trace = timing.chunks.simulated(shown, ways.schedule)
    spans = [
        Span(rank, str(action), start, stop)
        for rank, row in enumerate(compiled.grid)
        for action, start, stop in zip(row, trace.starts[rank], trace.stops[rank], strict=True)
        if action.op not in MESSAGE and action.op not in PER_STEP
    ]
    end_s = trace.step_s + timing.messages.latency_s
    sums_s = timing.after.by_what.get(GRADIENTS, 0.0)
    for op, took_s in ((Op.REDUCE_GRAD, sums_s), (Op.UPDATE, timing.after.seconds - sums_s)):
        spans += [Span(stage, str(Action(stage, op)), end_s, end_s + took_s) for stage in range(ways.pipeline)]
        end_s += took_s
    return DrawnStep(Timeline("predicted", end_s, tuple(spans)), shown)


def page(report: WaysReport, points: Sequence[PricedDegrees]) -> str:
    """The page as HTML.

    Args:
        points: of the front.
    """
    try:
        import jinja2

        from halopipe.extras.figures import figures
    except ImportError as error:
        raise UsageError(
            f"a page needs jinja2 and matplotlib: {error}",
            ["they fill the page in and draw its charts"],
            ["pip install 'halopipe[report]'", "leave --report out"],
        ) from None
    best = report.sweep.best
    step = drawn_step(report)
    low_s, high_s = report.range_s(best)
    folder = files("halopipe.extras.figures") / "page"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    lanes = [f"stage {stage}" for stage in range(best.ways.pipeline)]
    return environment.from_string((folder / "ways.html.j2").read_text("utf-8")).render(
        title=f"{report.shape.name} on {report.devices} {report.cluster.device}",
        facts=report.network.lines(report.cluster, best.ways.precision),
        way=str(best.ways),
        step=units.seconds_within(best.prediction.step.seconds, low_s, high_s),
        memory=f"{best.prediction.memory.total / GIB:.1f} GiB",
        usable=f"{report.sweep.usable_bytes / GIB:.1f}",
        dollars=report.dollars_text(best),
        front_picture=_inline(figures.svg(_front_figure(report, points))),
        front=[_point(report, point) for point in points],
        searched=isinstance(report.cluster, GpuCluster),
        step_picture=_inline(figures.svg(figures.gantt(step.timeline, devices=lanes))),
        shown=step.micro_batches,
        micro_batches=best.prediction.micro_batches,
        shares=[
            (name, units.seconds(spent_s), f"{100 * spent_s / best.prediction.step.seconds:.1f}")
            for name, spent_s in shares_s(best.prediction).items()
            if spent_s > _SHOWN * best.prediction.step.seconds
        ],
        kernels=best.prediction.step.evidence,
        runs=report.evidence_text(best),
        proof=report.proof(),
        style=(folder / "report.css").read_text("utf-8"),
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'",
    )


def _point(report: WaysReport, choice: PricedDegrees) -> tuple[str, str, str, str]:
    """(way, step, memory, price)."""
    prediction = choice.prediction
    memory = f"{prediction.memory.total / GIB:.1f} GiB"
    return str(choice.ways), units.seconds(prediction.step.seconds), memory, report.dollars_text(choice)


def _front_figure(report: WaysReport, points: Sequence[PricedDegrees]) -> Figure:
    """Step against memory; above them what a billion tokens cost, where a price is known."""
    from matplotlib.figure import Figure

    from halopipe.extras.figures.colours import BLUE, GREY, ORANGE

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots()
    steps_s = [point.prediction.step.seconds for point in points]
    held = [point.prediction.memory.total / GIB for point in points]
    axes.step(steps_s, held, where="post", color=GREY, linestyle=":", linewidth=1)
    axes.plot(steps_s, held, "s", color=BLUE, label="fastest of those that hold no more")
    axes.plot(steps_s[:1], held[:1], "*", color=ORANGE, markersize=16, label="the best way")
    axes.axhline(report.sweep.usable_bytes / GIB, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("step in s")
    axes.set_ylabel("fullest rank in GiB")
    axes.set_ylim(0, None)
    axes.spines[["right"]].set_visible(False)
    axes.legend(frameon=False)
    if report.price_per_hour:
        dollars = report.dollars_per_s * 1e9 / (report.global_batch * report.shape.seq)
        above = axes.secondary_xaxis(
            "top", functions=(lambda x: np.multiply(x, dollars), lambda x: np.divide(x, dollars))
        )
        above.set_xlabel("dollars for a billion tokens")
    else:
        axes.spines[["top"]].set_visible(False)
    return figure


def _inline(svg: str) -> str:
    """The picture without what a file begins with."""
    return svg[svg.index("<svg") :]
