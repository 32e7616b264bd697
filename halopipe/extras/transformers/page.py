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

from halopipe.extras.transformers.ways import WaysReport, shares_s
from halopipe.terminal import units
from planner.costs.simulator.events import execute
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.extras.transformers.cluster import FRAGMENTED, RESERVED_BYTES, GpuCluster
from planner.extras.transformers.fits import least
from planner.extras.transformers.passes import OPTIMISER
from planner.extras.transformers.pipeline import Chunks, chunked
from planner.extras.transformers.search import PricedDegrees, search
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import GRADIENTS, StepPrediction, hops_of, stage_layers
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.files import write_text
from planner.ir.program import Message, Part
from planner.ir.schedule import MESSAGE, PER_STEP, Action, Op, Pipeline, StageGraph
from planner.ir.timeline import Span, Timeline
from planner.passes import lower
from planner.schedules import positions, schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30
MOST_LIMITS = 6
MOST_ACTIONS = 1200
"""Of a step that is drawn: more are no longer told apart."""
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
    """The best way's step in the simulator, with the sums and the optimiser behind it."""
    ways = report.sweep.best.ways
    prediction = report.sweep.best.prediction
    chunks = _chunks(report)
    per_micro_batch = 2 * len(chunks.forward_s)
    some = max(1, MOST_ACTIONS // per_micro_batch // ways.pipeline) * ways.pipeline
    shown = min(prediction.micro_batches, some)
    name = "interleaved" if ways.interleave > 1 else ways.schedule
    compiled = _program(name, ways.pipeline, ways.interleave, shown)
    seconds = [_action_s(slot.action, chunks) for slot in compiled.actions]
    transfers = [chunks.overlapped_s] * len(compiled.transfers)
    trace = execute(compiled, SlotPrices(seconds, transfers, range(len(compiled.channels))))
    spans = [
        Span(rank, str(action), start, stop)
        for rank, row in enumerate(compiled.grid)
        for action, start, stop in zip(row, trace.starts[rank], trace.stops[rank], strict=True)
        if action.op not in MESSAGE and action.op not in PER_STEP
    ]
    end_s = trace.step_s
    for op, took_s in _behind_passes(prediction, chunks, ways.schedule).items():
        spans += [Span(stage, str(Action(stage, op)), end_s, end_s + took_s) for stage in range(ways.pipeline)]
        end_s += took_s
    return DrawnStep(Timeline("predicted", end_s, tuple(spans)), shown)


def _behind_passes(prediction: StepPrediction, chunks: Chunks, schedule_name: str) -> dict[Op, float]:
    """Seconds of the sums of gradients and of the update: what of the step is behind the pipeline's."""
    count = prediction.micro_batches
    behind_s = prediction.step.seconds - max(chunks.least_s(count), chunks.step_s(count, schedule_name))
    if not prediction.parts.get(GRADIENTS):
        return {Op.UPDATE: behind_s}
    update_s = min(behind_s, prediction.parts.get(OPTIMISER, 0.0))
    return {Op.REDUCE_GRAD: behind_s - update_s, Op.UPDATE: update_s}


def _chunks(report: WaysReport) -> Chunks:
    """Passes of the best way's chunks, as :func:`planner.extras.transformers.step.predict` has them."""
    shape = report.shape
    ways = report.sweep.best.ways
    cluster = report.cluster.alone(ways)
    p = ways.pipeline
    stages = [stage_layers(shape, cluster.at(ways, stage), ways.at(stage)) for stage in range(p)]
    passes = []
    for chunk, number in enumerate(ways.chunks(shape.layers)):
        block = stages[chunk % p].block
        passes.append((number * block.forward.seconds, number * block.backward.seconds))
    for chunk, layer in ((0, stages[0].embedding), (-1, stages[-1].head)):
        ahead_s, back_s = passes[chunk]
        passes[chunk] = ahead_s + layer.forward.seconds, back_s + layer.backward.seconds
    return chunked(passes, [hop.seconds for hop in hops_of(shape, cluster, ways)], ways.sends, p)


def _action_s(action: Action, chunks: Chunks) -> float:
    if action.op in MESSAGE or action.op in PER_STEP:
        return 0.0
    return (chunks.forward_s if action.op is Op.FORWARD else chunks.backward_s)[action.stage]


def _program(name: str, stages: int, interleave: int, micro_batches: int) -> CompiledProgram:
    """Chunk c on rank c mod stages, one message from each to the next."""
    number = stages * interleave
    graph = StageGraph.chain(number, micro_batches)
    placed = positions(name, stages, interleave)[:number]
    part = (Part("activation", (), 1),)
    messages = {
        (chunk, chunk + 1, micro_batch): (Message(placed[chunk], placed[chunk + 1], part, part),)
        for chunk in range(number - 1)
        for micro_batch in range(micro_batches)
    }
    rows = schedule(name)(Pipeline(graph, placed))
    program = lower(rows, graph, tuple((position,) for position in placed), messages, stages)
    return compile_program(program, (1,) * micro_batches)


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
        facts=report.network.lines(report.cluster),
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

    from halopipe.extras.figures.figures import BLUE, GREY, ORANGE

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
