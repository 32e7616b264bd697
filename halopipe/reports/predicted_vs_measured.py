"""Predicted beside measured: the step, its stages, and where the time of their ranks goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import isclose
from typing import TYPE_CHECKING

from halopipe.terminal import units
from planner.ir.cluster import GLOO, MPI
from planner.ir.plan import Prediction, RankPrediction
from planner.ir.timeline import Timeline

if TYPE_CHECKING:
    from planner.costs.simulator.breakdown import Parts

_ALIKE = 1e-9
"""Of seconds that were added in another order."""

_TOGETHER = "compute + communication"

BothSeconds = tuple[str, float | None, float | None]
"""A line: its name, seconds predicted, seconds measured; None: not known."""


def timeline_cells(
    predicted: Timeline,
    measured: Timeline,
    step_s: float,
    ranks: Sequence[Sequence[int]],
    rank_predictions: Sequence[RankPrediction] = (),
    *,
    alike: bool = True,
) -> tuple[list[str], list[list[str]]]:
    """The step, then for each stage a forward, a backward, and the parts of its ranks' step (their mean).

    Parts that are nothing in both are left out.  What ranks exchange inside their actions is communication, and a run
    does not tell it from the computing around it: of stages that may do so, compute and communication are measured
    together.

    Args:
        step_s: measured (a median over steps, where ``measured`` is one of them).
        ranks: of each stage.
        rank_predictions: the parts that are predicted of the same step; empty: as far as its actions say.
        alike: whether both are of one transport and kind of device; if not, their difference says nothing.
    """
    lines: list[BothSeconds] = [("step", predicted.step_s or None, step_s)]
    for stage, rows in enumerate(_stages(predicted, measured, ranks, rank_predictions)):
        lines += [(f"stage {stage} {name}", a, b) for name, a, b in rows]
    header = ["", "predicted", "measured", "difference"]
    cells = [_row(*line) for line in lines]
    return (header, cells) if alike else (header[:-1], [row[:-1] for row in cells])


def _stages(
    predicted: Timeline,
    measured: Timeline,
    ranks: Sequence[Sequence[int]],
    rank_predictions: Sequence[RankPrediction],
) -> Iterator[Iterator[BothSeconds]]:
    """Of each stage a forward, a backward, and the parts of its ranks' step."""
    from planner.costs.rows import stage_seconds

    times = [stage_seconds(timeline) for timeline in (predicted, measured)]
    parts = [_by_rank(timeline, ranks) for timeline in (predicted, measured)]
    for stage, of_stage in enumerate(ranks):
        before, after = (seconds.get(stage, (None, None)) for seconds in times)
        passes = zip(("forward", "backward"), before, after, strict=True)
        by_actions, measured_parts = (_parts(by_rank, of_stage) for by_rank in parts)
        predicted_parts = _predicted_parts(rank_predictions, of_stage) or by_actions
        is_told_apart = len(of_stage) == 1 or _is_alike(by_actions, predicted_parts)
        yield chain(passes, _beside(predicted_parts, measured_parts, is_told_apart=is_told_apart))


def _row(name: str, predicted_s: float | None, measured_s: float | None) -> list[str]:
    """The cells of a line, with how far the two are apart where both are known."""
    difference = "–"
    if predicted_s and measured_s is not None:
        difference = units.signed_percent(measured_s / predicted_s - 1)
    return [name, units.known_seconds(predicted_s), units.known_seconds(measured_s), difference]


def apart_text(prediction: Prediction, used: str, kinds: Sequence[str]) -> str:
    """That a run does not tell how good the prediction is; empty if it does.

    Args:
        used: the transport of the run.
        kinds: of device that its ranks ran on.
    """
    says_nothing = "this says nothing of how good the prediction is"
    planned, ran = prediction.other_devices(kinds)
    if planned:
        return f"predicted for {planned}, run on {ran}: {says_nothing}; a plan from a profile of {ran} would"
    other = prediction.other_transport(used)
    if not other:
        return ""
    option = next((name for name in (GLOO, MPI) if name == used), "shared")
    return (
        f"predicted for messages over {other}, run over {used}: {says_nothing}; "
        f"a plan from a profile with --transport {option} would"
    )


def _is_alike(by_actions: Parts | None, predicted: Parts | None) -> bool:
    """Whether a stage computes all the time of its actions, as far as is known."""
    if by_actions is None or predicted is None:
        return False
    return isclose(by_actions.compute_s, predicted.compute_s, rel_tol=_ALIKE)


def _beside(predicted: Parts | None, measured: Parts | None, *, is_told_apart: bool) -> Iterator[BothSeconds]:
    both = [] if is_told_apart or measured is None else [_TOGETHER]
    for part in ("compute", "communication", *both, "bubble", "idle"):
        a, b = (None if parts is None else parts.seconds(part) for parts in (predicted, measured))
        if a or b:
            yield part, a, None if both and part in _TOGETHER.split(" + ") else b


def _by_rank(timeline: Timeline, stages: Sequence[Sequence[int]]) -> dict[int, Parts]:
    """Of the ranks of those stages that did anything."""
    from planner.costs.simulator.breakdown import breakdown

    active = {span.rank for span in timeline.spans}
    ranks = [rank for stage in stages if active & set(stage) for rank in stage]
    by_rank = breakdown(timeline, 1 + max([*ranks, *active])) if ranks else ()
    return {rank: by_rank[rank] for rank in ranks}


def _parts(by_rank: Mapping[int, Parts], ranks: Sequence[int]) -> Parts | None:
    """The mean of ranks; None where it is not known what they did."""
    from planner.costs.simulator.breakdown import mean_parts

    return mean_parts([by_rank[rank] for rank in ranks]) if by_rank.keys() >= set(ranks) else None


def _predicted_parts(rank_predictions: Sequence[RankPrediction], ranks: Sequence[int]) -> Parts | None:
    from planner.costs.simulator.breakdown import Parts, mean_parts

    mine = [rank for rank in rank_predictions if rank.rank in ranks]
    parts = [Parts(rank.compute_s, rank.communication_s, rank.bubble_s, rank.idle_s) for rank in mine]
    return mean_parts(parts) if parts else None
