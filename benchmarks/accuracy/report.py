"""How true predictions were: errors, order, regret.

The committed results of :mod:`benchmarks.accuracy`, read back.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, log
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.accuracy.cases import CHOSEN, NEW, ONE, SETTINGS, TIMED
from benchmarks.report import Row, at_least, at_most, error_within
from planner.costs.uncertainty import kind_of
from planner.ir.profile import ONE_DEVICE, PIPELINE

FAST = ("1gbit", "4gbit")
HELD = 0.85
"""Of plans that are measured, so many are to lie in the ranges that were printed."""
_ALIKE = 0.01
"""Two plans whose measured steps differ by less have no order."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan, predicted and measured.

    Attributes:
        p10_s, p90_s: the range in which four of five steps were predicted to lie.
        step_s: median of those measured.
        peak_bytes: by rank: (predicted, measured); none where devices compute nothing.
        rounds_s: what the same work took in each round, some ten minutes apart.
        kind: as :func:`planner.costs.uncertainty.kind_of`.
        speed_up: over one device, predicted; 0 where one device was not run.
        speed_ups: measured, by turn: one device's step, in the turns before and behind, over the plan's.
    """

    setting: str
    network: str
    rate: str
    plan: str
    predicted_s: float
    p10_s: float
    p90_s: float
    step_s: float
    peak_bytes: tuple[tuple[int, int], ...]
    rounds_s: tuple[float, ...]
    kind: str = PIPELINE
    speed_up: float = 0.0
    speed_ups: tuple[float, ...] = ()

    @property
    def apart(self) -> float:
        """By how much two rounds differ, on average: that is the machine itself."""
        pairs = list(combinations(self.rounds_s, 2))
        return statistics.fmean(max(pair) / min(pair) - 1 for pair in pairs) if pairs else 0.0

    @property
    def beyond(self) -> float:
        """The error's size, as far as it is beyond what the plan's own rounds differ by."""
        return max(0.0, abs(self.error) - self.apart)

    @property
    def speed_up_error(self) -> float | None:
        """Of the predicted speed-up over one device; None where one device was not run beside, or is meant itself."""
        if not self.speed_ups or self.is_one_device:
            return None
        return self.speed_up / statistics.median(self.speed_ups) - 1

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.step_s - 1

    @property
    def is_one_device(self) -> bool:
        """Whether nothing is sent."""
        return self.kind == ONE_DEVICE


def rows(found: Sequence[Outcome]) -> Iterator[Row]:
    """Every plan, then what is asked of all together; plans of the same decision count once there."""
    by_setting = {each.setting: [other for other in found if other.setting == each.setting] for each in found}
    for each in found:
        name = f"{each.setting} {each.network} {each.rate}, {each.plan}"
        yield Row(f"{name}: measured step", 1e3 * each.step_s, "ms")
        yield Row(f"{name}: error", 100 * each.error, "%")
        yield Row(f"{name}: own rounds apart", 100 * each.apart, "%")
        yield at_most(f"{name}: error beyond that", 100 * each.beyond, "%", 15.0)
        error = each.speed_up_error
        if error is not None:
            yield Row(f"{name}: predicted speed-up", each.speed_up, "times")
            yield Row(f"{name}: measured speed-up", statistics.median(each.speed_ups), "times")
            turns = max(each.speed_ups) / min(each.speed_ups) - 1
            yield Row(f"{name}: speed-up, own turns apart", 100 * turns, "%")
            yield error_within(f"{name}: error of the speed-up", 1 + error, 10)
    found = list({(each.setting, each.predicted_s, each.step_s, each.peak_bytes): each for each in found}.values())
    speed_ups = [abs(error) for each in found if (error := each.speed_up_error) is not None]
    if speed_ups:
        yield at_most("speed-ups over one device, mean error", 100 * statistics.fmean(speed_ups), "%", 4.0)
        yield at_most("speed-ups over one device, largest error", 100 * max(speed_ups), "%", 10.0)
    fast = [each for each in found if each.rate in FAST]
    yield Row("plans", len(found), "plans")
    if fast:
        yield Row("MAPE, links from 1 Gbit", 100 * mape(fast), "%")
        yield at_most("MAPE beyond own rounds, links from 1 Gbit", 100 * mape(fast, beyond=True), "%", 3.0)
    yield Row("MAPE, all plans", 100 * mape(found), "%")
    yield at_most("MAPE beyond own rounds, all plans", 100 * mape(found, beyond=True), "%", 5.0)
    yield Row("largest error", 100 * max(abs(each.error) for each in found), "%")
    yield at_most("largest error beyond own rounds", 100 * max(each.beyond for each in found), "%", 15.0)
    taus = [tau for group in by_setting.values() if (tau := kendall_tau(group)) is not None]
    if taus:
        yield at_least("Kendall tau of the plans of a setting, mean", statistics.fmean(taus), "", 0.9)
    regrets = {name: regret(group) for name, group in by_setting.items()}
    yield at_most("regret of the chosen plan, mean", 100 * statistics.fmean(regrets.values()), "%", 3.0)
    yield Row("regret of the chosen plan, largest", 100 * max(regrets.values()), "%")
    alone = [each for each in found if each.is_one_device]
    if alone:
        yield at_most("MAPE, one device across processes", 100 * mape(alone), "%", 3.0)
    for kinds, deviation in errors_apart(found).items():
        yield Row(f"errors apart, {' and '.join(kinds)}", deviation, "of the logarithm")
    inside = sum(each.p10_s <= each.step_s <= each.p90_s for each in found) / len(found)
    yield Row("measured median within p10 and p90", 100 * inside, "%")
    held = held_out(found)
    if held is not None:
        yield Row("within the width of other networks' plans, of which 85 % lie in it", 100 * held, "%")
    apart = [100 * each.apart for each in found]
    yield Row("the same work in another round, mean difference", statistics.fmean(apart), "%")
    yield Row("the same work in another round, largest difference", max(apart), "%")
    memory = [(predicted, seen) for each in found for predicted, seen in each.peak_bytes if predicted and seen]
    if memory:
        errors = [predicted / seen - 1 for predicted, seen in memory]
        yield at_most("peak memory, MAPE", 100 * statistics.fmean(map(abs, errors)), "%", 3.0)
        yield at_most("peak memory, largest under-prediction", 100 * max(0.0, -min(errors)), "%", 1.0)


def mape(found: Sequence[Outcome], *, beyond: bool = False) -> float:
    """Mean absolute error, relative to what was measured; or that beyond what plans' own rounds differ by."""
    return statistics.fmean(each.beyond if beyond else abs(each.error) for each in found) if found else 0.0


def errors_apart(found: Sequence[Outcome]) -> dict[tuple[str, str], float]:
    """Root mean square of how far log(predicted / measured) of two plans of a setting is apart, by their kinds.

    That is what ``planner.costs.ties`` takes the model's errors from.
    """
    squares: dict[tuple[str, str], list[float]] = {}
    for a, b in combinations(found, 2):
        if a.setting == b.setting and not (a.is_one_device and b.is_one_device):
            first, second = sorted((a.kind, b.kind))
            squares.setdefault((first, second), []).append(log((1 + a.error) / (1 + b.error)) ** 2)
    return {kinds: statistics.fmean(each) ** 0.5 for kinds, each in sorted(squares.items())}


def held_out(found: Sequence[Outcome]) -> float | None:
    """The share of plans whose errors are no larger than those of ``HELD`` of their kind on other networks are.

    None where a kind was run on one network alone.
    """
    inside = []
    for each in found:
        others = [other for other in found if other.kind == each.kind and other.network != each.network]
        if not others:
            return None
        sizes = sorted(abs(log(1 + other.error)) for other in others)
        inside.append(abs(log(1 + each.error)) <= sizes[ceil(HELD * len(sizes)) - 1])
    return statistics.fmean(inside)


def speed_ups_of(turns: Sequence[tuple[int, str, float]]) -> dict[str, tuple[float, ...]]:
    """By plan, for each of its turns: one device's step, its mean in the turns before and behind, over the plan's.

    Args:
        turns: of a setting: (round, plan, seconds of a step), in order.
    """
    found: dict[str, list[float]] = {}
    for place, (number, plan, step_s) in enumerate(turns):
        beside = [s for r, other, s in turns[max(0, place - 1) : place + 2] if other == ONE and r == number]
        if plan != ONE and beside:
            found.setdefault(plan, []).append(statistics.fmean(beside) / step_s)
    return {plan: tuple(each) for plan, each in found.items()}


def kendall_tau(found: Sequence[Outcome]) -> float | None:
    """Pairs in the order that was predicted, less those in the other, over all pairs that have an order.

    (Kendall 1938; pairs within a hundredth of one another are left out.)  None where there is no such pair.
    """
    signs = [
        1 if (a.predicted_s - b.predicted_s) * (a.step_s - b.step_s) > 0 else -1
        for a, b in combinations(found, 2)
        if abs(a.step_s / b.step_s - 1) > _ALIKE
    ]
    return statistics.fmean(signs) if signs else None


def regret(found: Sequence[Outcome]) -> float:
    """By how much the planner's choice took longer than the best of the plans that were run; 0 if it was not run."""
    chosen = [each.step_s for each in found if each.plan == CHOSEN]
    return chosen[0] / min(each.step_s for each in found) - 1 if chosen else 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the time of a plan went: seconds of a step by action (stage and kind), by rank; measured: medians."""

    predicted_by_action_s: tuple[Mapping[str, float], ...]
    measured_by_action_s: tuple[Mapping[str, float], ...]


def outcomes(folder: Path) -> list[Outcome]:
    """Every plan, predicted and measured."""
    predicted, measured = _read(folder)
    return outcomes_of(predicted, measured["settings"], measured.get("turns", {}))


def outcomes_of(
    predicted: Mapping[str, Any], measured: Mapping[str, Any], turns: Mapping[str, Any] = MappingProxyType({})
) -> list[Outcome]:
    """The same from what the two files hold, by setting; without turns (older results) all of a setting's are one."""
    setting_of = {setting.name: setting for setting in (*SETTINGS, *NEW)}
    found = []
    for name, plans in predicted.items():
        medians = {
            plan: statistics.median(step["seconds"] for step in seen["steps"]) for plan, seen in measured[name].items()
        }
        of = {each["plan"]: each for each in plans}
        ups = speed_ups_of(turns[name]) if name in turns else {}
        if name not in turns and ONE in medians:
            ups = {plan: (medians[ONE] / step_s,) for plan, step_s in medians.items()}
        ran_as = {each["decision"]: each["plan"] for each in reversed(plans) if each["plan"] in ups}
        for each in plans:
            seen = measured[name][each["plan"]]
            said = each["prediction"]
            steps = seen["steps"]
            ranks = range(0 if setting_of[name].device == TIMED else len(said["ranks"]))
            peaks = [max(step["ranks"][rank]["peak_bytes"] for step in steps) for rank in ranks]
            found.append(
                Outcome(
                    name,
                    setting_of[name].network,
                    setting_of[name].rate,
                    each["plan"],
                    said["step_s"],
                    said["p10_s"],
                    said["p90_s"],
                    medians[each["plan"]],
                    tuple((rank["peak_bytes"], peak) for rank, peak in zip(said["ranks"], peaks, strict=False)),
                    tuple(seen["rounds_s"]),
                    kind_of(each["stages"]),
                    of[ONE]["prediction"]["step_s"] / said["step_s"] if ONE in of else 0.0,
                    ups.get(ran_as.get(each["decision"], ""), ()),
                )
            )
    return found


def steps_of(folder: Path, setting: str, plan: str) -> Parts:
    """Where the time of a plan went."""
    predicted, measured = _read(folder)
    measured = measured["settings"]
    said = next(each for each in predicted[setting] if each["plan"] == plan)
    steps = measured[setting][plan]["steps"]
    found = []
    for rank in range(len(said["by_action_s"])):
        actions = steps[0]["ranks"][rank]["by_action_s"]
        found.append(
            {a: statistics.median(step["ranks"][rank]["by_action_s"].get(a, 0.0) for step in steps) for a in actions}
        )
    return Parts(tuple(said["by_action_s"]), tuple(found))


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    predicted = json.loads((folder / "predictions.json").read_text(encoding="utf-8"))
    return predicted, json.loads((folder / "measured.json").read_text(encoding="utf-8"))
