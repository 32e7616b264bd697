"""Plans and stages as flat rows: what tables print, frames hold and ``--json`` writes, under the same names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from planner import passes
from planner.ir.graph import SAMPLE
from planner.ir.layout import Layout
from planner.ir.plan import Block, Decision, Placement, Plan
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.ir.schedule import Action, Op
from planner.ir.timeline import Timeline
from planner.layers.boundary import Boundaries


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan in one line.

    Attributes:
        slower: how much longer a sample takes than with the fastest plan of the table (0 for that one).
        peak_bytes: predicted, of the fullest rank.
        micro_batches: such as ``4x2`` (four of two samples) or ``1x4+2x3``.
        measured_step_s, error: None until a run has measured; error is measured / predicted - 1.
        p10_s, p90_s: deciles of what the step may come to; 0 if not known.
        transport: that the prediction is of; empty if the profile does not say.
        sustained_per_s: samples a second of a stream, of forward passes alone; else 0.
    """

    plan: str
    step_s: float
    samples_per_s: float
    slower: float
    bubble_fraction: float
    peak_bytes: int
    schedule: str
    num_stages: int
    num_ranks: int
    micro_batches: str
    solver: str
    status: str
    bound_s: float
    measured_step_s: float | None
    error: float | None
    p10_s: float
    p90_s: float
    transport: str
    sustained_per_s: float


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """What a stage sends to another per micro-batch of the first (a full) size, between different ranks."""

    src: int
    dst: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage in one line; what only a profile knows is None without one.

    Attributes:
        samples: of a full micro-batch, by rank of the stage; of all, where layers are divided in unlike ways.
        layouts: how the stage's layers are divided over its ranks, in words, and how many layers each way.
        in_flight: most micro-batches between a forward and its backward, of the program.
        recompute: whether activations are computed again before the backward.
        recomputed: layers that alone are computed again, in the backward.
        sharded: whether its ranks divide the optimiser's state among them.
        zero: ZeRO's level (``Stage.level``).
        forward_s, backward_s: median per micro-batch, of the timeline given.
    """

    stage: int
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    samples: tuple[int, ...]
    num_layers: int
    first_layer: str
    last_layer: str
    layouts: Mapping[str, int]
    in_flight: int
    recompute: bool
    recomputed: int
    sharded: bool
    zero: int
    parameter_bytes: int | None
    forward_s: float | None
    backward_s: float | None
    sends: tuple[StageTransfer, ...] | None


def plan_rows(plans: Mapping[str, Plan]) -> tuple[PlanRow, ...]:
    """A row a plan, in the order given."""
    best_per_s = max((plan.prediction.samples_per_s for plan in plans.values()), default=0.0)
    return tuple(_plan_row(name, plan, best_per_s) for name, plan in plans.items())


def stage_rows(plan: Plan, profile: Profile | None = None, timeline: Timeline | None = None) -> tuple[StageRow, ...]:
    """A row a stage."""
    sends = stage_transfers(program_of(plan, profile)) if profile is not None else None
    times = stage_seconds(timeline) if timeline is not None else {}
    rows = []
    for index, stage in enumerate(plan.decision.stages):
        layers = plan.decision.layers_of(index)
        forward_s, backward_s = times.get(index, (None, None))
        rows.append(
            StageRow(
                stage=index,
                ranks=stage.ranks,
                devices=stage.devices,
                samples=_samples(plan.decision, layers),
                num_layers=len(layers),
                first_layer=layers[0] if layers else "",
                last_layer=layers[-1] if layers else "",
                layouts=stage_layouts(plan.decision, index),
                in_flight=in_flight(plan.decision, index),
                recompute=stage.recompute,
                recomputed=sum(map(len, stage.recomputed)),
                sharded=stage.sharded,
                zero=stage.level,
                parameter_bytes=profile.graph.parameter_bytes(frozenset(layers)) if profile is not None else None,
                forward_s=forward_s,
                backward_s=backward_s,
                sends=tuple(h for h in sends if h.src == index) if sends is not None else None,
            )
        )
    return tuple(rows)


def _samples(decision: Decision, layers: Sequence[str]) -> tuple[int, ...]:
    count = decision.micro_batches[0]
    of_layers = {decision.layers[name].layout.samples(count) for name in layers}
    return of_layers.pop() if len(of_layers) == 1 else (count,)


def program_of(plan: Plan, profile: Profile) -> Program:
    """The plan's action lists with the messages that they move."""
    return Boundaries.of_decision(profile.graph, plan.decision).program(plan.decision)


def stage_transfers(program: Program) -> tuple[StageTransfer, ...]:
    """What crosses each edge for the first micro-batch."""
    transfers = []
    for edge in program.stages.edges:
        messages = [m for m in program.messages[edge.src, edge.dst, 0] if m.src != m.dst]
        forward_bytes = sum(message.forward_bytes for message in messages)
        transfers.append(StageTransfer(edge.src, edge.dst, forward_bytes, sum(m.backward_bytes for m in messages)))
    return tuple(transfers)


def stage_seconds(timeline: Timeline) -> dict[int, tuple[float | None, float | None]]:
    """By stage, median seconds of a forward and of a whole backward (``B``, or ``I`` and ``W``); None if unseen."""
    durations: dict[int, dict[Op, list[float]]] = {}
    for span in timeline.spans:
        action = Action.parse(span.action)
        durations.setdefault(action.stage, {}).setdefault(action.op, []).append(span.stop_s - span.start_s)
    return {stage: _forward_and_backward(by_op) for stage, by_op in durations.items()}


def _forward_and_backward(by_op: Mapping[Op, list[float]]) -> tuple[float | None, float | None]:
    halves = [_median(by_op.get(op, ())) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    split_s = sum(half for half in halves if half is not None) if any(half is not None for half in halves) else None
    whole_s = _median(by_op.get(Op.BACKWARD, ()))
    return _median(by_op.get(Op.FORWARD, ())), whole_s if whole_s is not None else split_s


def _median(values: Iterable[float]) -> float | None:
    listed = list(values)
    return median(listed) if listed else None


def _plan_row(name: str, plan: Plan, best_per_s: float) -> PlanRow:
    decision = plan.decision
    prediction = plan.prediction
    measured = plan.measured
    return PlanRow(
        plan=name,
        step_s=prediction.step_s,
        samples_per_s=prediction.samples_per_s,
        slower=best_per_s / prediction.samples_per_s - 1 if prediction.samples_per_s else 0.0,
        bubble_fraction=prediction.bubble_fraction,
        peak_bytes=prediction.peak_bytes,
        schedule=decision.schedule,
        num_stages=len(decision.stages),
        num_ranks=len(decision.used_ranks),
        micro_batches="+".join(f"{len(list(run))}x{samples}" for samples, run in groupby(decision.micro_batches)),
        solver=plan.search.solver,
        status=plan.search.status,
        bound_s=plan.search.bound_s,
        measured_step_s=measured.step_s if measured is not None else None,
        error=measured.error if measured is not None else None,
        p10_s=prediction.p10_s,
        p90_s=prediction.p90_s,
        transport=prediction.transport,
        sustained_per_s=prediction.sustained_per_s,
    )


def stage_layouts(decision: Decision, stage: int) -> dict[str, int]:
    """How many layers of ``stage`` are divided in which way; nothing on a stage of one rank."""
    counts: dict[str, int] = {}
    if len(decision.stages[stage].ranks) > 1:
        for name in decision.layers_of(stage):
            layout = layout_text(decision.layers[name], decision.micro_batches[0])
            counts[layout] = counts.get(layout, 0) + 1
    return counts


def tiles_text(block: Block) -> str:
    """``each rank runs 8 tiles (height 4 x width 2)``."""
    if block.num_tiles == 1:
        return "each rank runs it in one piece"
    grid = " x ".join(f"{dim} {parts}" for dim, parts in block.tiles.items() if parts > 1)
    return f"each rank runs {block.num_tiles} tiles ({grid})"


def layout_text(placement: Placement, micro_batch: int) -> str:
    """``samples 3:1``, or ``samples 2:2 x height 28:28``: the parts along each dim; ``whole`` if nothing is cut.

    Beyond that ``(margin 2)``: rows that each rank works beyond its part; ``(2 ways)``: ranks that share channels.
    """
    parts = []
    for dim, points in placement.cuts.items():
        sizes = Layout({dim: points}).samples(micro_batch) if dim == SAMPLE else [b - a for a, b in pairwise(points)]
        parts.append(f"{'samples' if dim == SAMPLE else dim} {':'.join(map(str, sizes))}")
    more = [f"{placement.ways} ways"] if placement.ways > 1 else []
    more += [f"margin {placement.margin}"] if placement.margin else []
    return (" x ".join(parts) or "whole") + (f" ({', '.join(more)})" if more else "")


def in_flight(decision: Decision, stage: int) -> int:
    """Most micro-batches that the first rank of ``stage`` has forwarded and not yet gone back through.

    0 if the rank's row cannot be read.
    """
    rank = next(iter(decision.stages[stage].ranks), 0)
    try:
        row = [Action.parse(text) for text in decision.program[rank]]
        return passes.in_flight([row], len(decision.stages))[stage]
    except (IndexError, ValueError):
        return 0
