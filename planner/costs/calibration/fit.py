"""From what runs of plans showed to corrections of a profile's costs.  Pure functions of the observations.

A class of costs (``CostClass``: backward on one kind of device in stages of one rank, say) has one factor.

    r_i   log(measured / predicted) of the class in plan i, i = 1 ... n
    m     their median, s a robust standard deviation (1.4826 x the median distance from m)
    v     variance of the r_i:  (NUM_PRIOR * PRIOR^2 + (n - 1) s^2) / (NUM_PRIOR + n - 1), and that of the runs' medians
    w     n PRIOR^2 / (n PRIOR^2 + v): the weight that a normal prior of mean 0 leaves to the observations
    factor = exp(w m), within RANGE

One plan that says 1.4 gives 1.18; ten that agree give 1.39.  A plan that was run again speaks with the median of its
last ``RUNS_KEPT`` runs, each beyond the first adding ``REPEAT`` to n: five runs of one plan that say 1.4 give 1.31.

Corrections count together or not at all.  Classes err in both directions and make up for one another in the step:
correcting one alone may make a step worse, moving all by like weights towards what was measured does not.  They count
if they make the predicted steps of plans better that they were not found from: each plan is left out in turn, its step
predicted with the factors of the others, and the mean error must fall by more than its standard error and by
LEAST_GAIN, with hardly a plan the worse for it.  Of one plan runs are left out in turn; of one run nothing can be left
out, and it counts if its step was out by more than ONE_PLAN.  Where all corrections together do not help, those of
devices alone may.

A step is the longest of many sums, hence convex in the factors.  What it would be is read off two tangents that are
kept with the observation, at no correction and at the plan's own ratios: it is at least the larger of the two.

How wide the range of a step is (``STEP_RANGE``) follows from what is left of the errors e_i of the n plans of a kind,
each predicted from the others, with the standard deviation s_0 assumed before (``costs.uncertainty.MODEL``):

    (NUM_MODEL s_0^2 + sum e_i^2) / (NUM_MODEL + n)      the variance of log(measured / predicted)
    + sum d_j^2 / (NUM_MODEL + N)                        that of the machine from a run to the next

where d_j is by how much the logarithm of the machine's part changed between runs j - 1 and j of N, of all kinds of
plans; before the first is the profile.

Ignored: that links change with time, costs that are no part of an action, and plans of a kind that was never run:
for classes that nobody saw nothing is known, and errors that made up for one another may show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median, stdev

from planner.costs.calibration.apply_corrections import Factors
from planner.costs.uncertainty import MODEL
from planner.ir.codec import fingerprint
from planner.ir.profile import (
    BACKWARD,
    FORWARD,
    MACHINE,
    OVERHEAD,
    STEP_RANGE,
    UPDATE,
    Calibration,
    Correction,
    CostClass,
    Observation,
    Profile,
)

RANGE = (0.5, 3.0)
PRIOR = 0.15
NUM_PRIOR = 1
NUM_MODEL = 2
RUNS_KEPT = 5
REPEAT = 0.25
LEAST_GAIN = 0.005
ONE_PLAN = 0.1
_WORSE = 0.01  # at most one plan in 5 may be out by a hundredth more than before
_MAY_BE_WORSE = 5
_NORMAL_IQR = 1.349
_NORMAL_MAD = 1.4826


def in_force(profile: Profile) -> Profile:
    """The profile with the corrections that count; none where it has changed since they were found."""
    calibration = profile.calibration
    return profile if not calibration.profile or calibration.profile == fingerprint(profile.bare) else profile.bare


def with_observation(
    profile: Profile, observation: Observation, machine: tuple[Correction, ...] | None = None
) -> Profile:
    """The profile with one observation more, and what follows from all; of a plan the newest are kept.

    Args:
        machine: how fast the machine was; None: as it was before, as far as that is known.
    """
    current = in_force(profile).calibration
    if machine is None:
        machine = machine_of(current.corrections)
    numbers = [number for number, one in enumerate(current.observations) if one.plan == observation.plan]
    dropped = numbers[: max(0, len(numbers) + 1 - RUNS_KEPT)]
    observations = (*(one for number, one in enumerate(current.observations) if number not in dropped), observation)
    corrections = (*machine, *corrections_from(observations), *ranges_from(observations))
    return replace(profile, calibration=Calibration(fingerprint(profile.bare), observations, corrections))


def machine_of(corrections: Iterable[Correction]) -> tuple[Correction, ...]:
    """Those of the machine's speed."""
    return tuple(one for one in corrections if one.of.what == MACHINE)


def ranges_from(observations: Sequence[Observation]) -> tuple[Correction, ...]:
    """How wide the ranges of those kinds of plans are that were run."""
    wanted = _counted(observations)
    by_kind: dict[str, list[float]] = {}
    for plan, (before, after) in zip(_by_plan(observations), _errors(observations, wanted or _all), strict=False):
        by_kind.setdefault(plan[0].kind, []).append(before if wanted is None else after)
    ranges = []
    states = [0.0, *(math.log(one.machine) for one in observations if one.machine > 0)]
    moved = sum((b - a) ** 2 for a, b in pairwise(states)) / (NUM_MODEL + len(observations))
    for kind, errors in sorted(by_kind.items()):
        if kind in MODEL:
            assumed = NUM_MODEL * MODEL[kind] ** 2
            variance = (assumed + sum(e * e for e in errors)) / (NUM_MODEL + len(errors)) + moved
            ranges.append(Correction(CostClass(STEP_RANGE, kind), math.exp(math.sqrt(variance)), len(errors)))
    return tuple(ranges)


def corrections_from(observations: Sequence[Observation]) -> tuple[Correction, ...]:
    """The corrections that count; none if they would not make plans better that they were not found from."""
    wanted = _counted(observations)
    return _corrections(_by_plan(observations), wanted) if wanted is not None else ()


def errors_left(observations: Sequence[Observation]) -> tuple[tuple[float, float], ...]:
    """By plan, the size of its error in log(predicted / measured): uncorrected, and corrected by what others say."""
    return tuple(_errors(observations, _all))


def on_other_machines(profile: Profile, of: Profile) -> Profile:
    """``profile``, made of the profile ``of`` for another cluster, with what is known of kinds of device and plan."""
    corrections = in_force(of).calibration.corrections
    return profile.corrected_by(tuple(one for one in corrections if _of_devices(one.of) or one.of.what == STEP_RANGE))


def corrected_step_s(observation: Observation, factors: Factors) -> float:
    """The predicted step of an observed plan under ``factors``: the larger of its two tangents."""
    plain_s = observation.predicted_s
    corrected_s = observation.explained_s
    for observed in observation.seen:
        factor = factors(observed.of.what, observed.of.where, observed.of.shared)
        plain_s += (factor - 1) * observed.step_s
        corrected_s += (factor - clipped(observed.ratio)) * observed.corrected_step_s
    return max(plain_s, corrected_s, observation.predicted_s * RANGE[0])


def clipped(factor: float) -> float:
    """Within what a factor may be."""
    return min(max(factor, RANGE[0]), RANGE[1])


def factor_from(ratios: Sequence[float], noise: float = 0.0, num_repeats: int = 0) -> float:
    """The factor of a class.

    Args:
        ratios: measured / predicted, by plan.
        noise: mean variance of a ratio's logarithm from what runs scatter by themselves.
        num_repeats: runs beyond the first of each plan.
    """
    logs = [math.log(ratio) for ratio in ratios]
    count = len(ratios) + REPEAT * num_repeats
    middle = median(logs)
    apart = _NORMAL_MAD * median(abs(each - middle) for each in logs)
    variance = (NUM_PRIOR * PRIOR**2 + (count - 1) * apart**2) / (NUM_PRIOR + count - 1) + noise
    weight = count * PRIOR**2 / (count * PRIOR**2 + variance)
    return clipped(math.exp(weight * middle))


Wanted = Callable[[CostClass], bool]


def _all(_: CostClass) -> bool:
    return True


def _of_devices(of: CostClass) -> bool:
    return of.what in (FORWARD, BACKWARD, UPDATE, OVERHEAD)


def _by_plan(observations: Iterable[Observation]) -> list[list[Observation]]:
    """The runs of each plan, as far as they can be held against a prediction."""
    runs: dict[str, list[Observation]] = {}
    for one in observations:
        if one.predicted_s > 0 and one.measured_s > 0:
            runs.setdefault(one.plan, []).append(one)
    return list(runs.values())


def _corrections(plans: Iterable[Sequence[Observation]], wanted: Wanted) -> tuple[Correction, ...]:
    ratios: dict[CostClass, list[list[float]]] = {}
    noises: dict[CostClass, list[float]] = {}
    for runs in plans:
        of_plan: dict[CostClass, list[float]] = {}
        for run in runs:
            noise = (run.spread / _NORMAL_IQR) ** 2 / max(1, run.num_steps)
            for observed in run.seen:
                if wanted(observed.of) and observed.predicted_s > 0 and observed.measured_s > 0:
                    of_plan.setdefault(observed.of, []).append(math.log(observed.measured_s / observed.predicted_s))
                    noises.setdefault(observed.of, []).append(noise)
        for of, of_class in of_plan.items():
            ratios.setdefault(of, []).append(of_class)
    corrections = []
    for of, plan_logs in ratios.items():
        num_repeats = sum(map(len, plan_logs)) - len(plan_logs)
        factor = factor_from([math.exp(median(logs)) for logs in plan_logs], fmean(noises[of]), num_repeats)
        corrections.append(Correction(of, factor, len(plan_logs)))
    return tuple(sorted(corrections, key=lambda one: (one.of.what, one.of.where, one.of.shared)))


def _counted(observations: Sequence[Observation]) -> Wanted | None:
    """The classes whose corrections count; None if none would make plans better."""
    return next((wanted for wanted in (_all, _of_devices) if _helps(observations, wanted)), None)


def _helps(observations: Sequence[Observation], wanted: Wanted) -> bool:
    errors = _errors(observations, wanted)
    if not errors:
        return False
    gains = [before - after for before, after in errors]
    if len(errors) == 1:
        return errors[0][0] > ONE_PLAN and gains[0] > 0
    doubt = stdev(gains) / math.sqrt(len(gains))
    worse = sum(gain < -_WORSE for gain in gains)
    return fmean(gains) > max(LEAST_GAIN, doubt) and worse <= len(gains) // _MAY_BE_WORSE


def _errors(observations: Sequence[Observation], wanted: Wanted) -> list[tuple[float, float]]:
    """By plan, or by run where there is but one plan."""
    plans = _by_plan(observations)
    parts = [[run] for run in plans[0]] if len(plans) == 1 else plans
    errors = []
    for left_out in parts:
        others = [part for part in parts if part is not left_out] or parts
        others = [[run for part in others for run in part]] if len(plans) == 1 else others
        factors = Factors.of(_corrections(others, wanted))
        of_runs = [
            (
                abs(math.log(run.predicted_s / run.measured_s)),
                abs(math.log(corrected_step_s(run, factors) / run.measured_s)),
            )
            for run in left_out
        ]
        errors.append((fmean(before for before, _ in of_runs), fmean(after for _, after in of_runs)))
    return errors
