"""What several processes, or several hosts, measured of the same, as one: medians of their trimmed means."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from planner.ir.profile import Measurement, MeasuringProcess, ParameterCost, PreparationCost
from profiler.finished import ModelCosts
from profiler.timing import spread

_SECONDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")


def merged(found: Iterable[Sequence[Measurement]]) -> tuple[Measurement, ...]:
    """The measurements, in the order of their first appearance: medians of the seconds, all the raw samples.

    Bytes and back ends are those of the first; they do not depend on the process.
    """
    alike: dict[tuple[str, int, tuple[int, ...]], list[Measurement]] = {}
    for measured in found:
        for one in measured:
            alike.setdefault((one.layer, one.samples, one.part), []).append(one)
    return tuple(_as_one(each) for each in alike.values())


def merged_parameters(found: Sequence[Mapping[str, ParameterCost]]) -> dict[str, ParameterCost]:
    """Medians by layer."""
    names = dict.fromkeys(name for costs in found for name in costs)
    return {name: _parameter_cost([costs[name] for costs in found if name in costs]) for name in names}


def merged_preparations(found: Iterable[Sequence[PreparationCost]]) -> tuple[PreparationCost, ...]:
    """Medians by name and number of samples."""
    alike: dict[tuple[str, int], list[PreparationCost]] = {}
    for costs in found:
        for cost in costs:
            alike.setdefault((cost.name, cost.samples), []).append(cost)
    return tuple(
        replace(
            each[0],
            seconds=statistics.median(cost.seconds for cost in each),
            shared_s=statistics.median(cost.shared_s for cost in each),
        )
        for each in alike.values()
    )


def merged_seconds(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians by name; names that are numbers ascend."""
    names = sorted({name for each in found for name in each}, key=int)
    return {name: statistics.median(each[name] for each in found if name in each) for name in names}


def process_of(costs: ModelCosts, repeated: bool) -> MeasuringProcess:
    """What is kept of a process beside its measurements."""
    rest = costs.rest
    steps = {str(size.samples): float(f"{size.step_s:.4g}") for size in costs.done.sizes if size.measurements}
    return MeasuringProcess(
        rest.canary_before_s,
        rest.canary_after_s,
        round(rest.run_delay, 5),
        rest.is_contended,
        dict(sorted(steps.items(), key=lambda step: int(step[0]))),
        repeated,
    )


def process_spread(processes: Sequence[MeasuringProcess]) -> dict[str, float]:
    """``Provenance.process_spread``; nothing of a single process."""
    if len(processes) < 2:
        return {}
    middle = merged_seconds([each.step_s for each in processes])
    found = {}
    for name, median_s in middle.items():
        steps = [each.step_s[name] for each in processes if name in each.step_s]
        found[name] = round((max(steps) - min(steps)) / median_s, 4) if median_s > 0 else 0.0
    return found


def _as_one(found: Sequence[Measurement]) -> Measurement:
    if len(found) == 1:
        return found[0]
    seconds = {name: statistics.median(getattr(one, name) for one in found) for name in _SECONDS}
    raw_s = tuple(value for one in found for value in one.raw_s)
    return replace(
        found[0],
        **seconds,
        num_runs=sum(one.num_runs for one in found),
        spread=round(spread(raw_s), 4) if raw_s else max(one.spread for one in found),
        raw_s=raw_s,
    )


def _parameter_cost(found: Sequence[ParameterCost]) -> ParameterCost:
    return ParameterCost(
        statistics.median(cost.accumulate_s for cost in found), statistics.median(cost.update_s for cost in found)
    )
