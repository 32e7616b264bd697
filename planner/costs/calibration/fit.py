"""From what runs of plans showed to corrections of a profile's costs.  Pure functions of the observations.

A class of costs (``CostClass``: backward on one kind of device in stages of one rank, say) has one factor.

    r_i   log(measured / predicted) of the class in plan i, i = 1 ... n
    m     their median, s a robust standard deviation (1.4826 x the median distance from m)
    v     variance of the r_i:  (NUM_PRIOR * PRIOR^2 + (n - 1) s^2) / (NUM_PRIOR + n - 1), and that of the runs' medians
    w     n PRIOR^2 / (n PRIOR^2 + v): the weight that a normal prior of mean 0 leaves to the observations
    factor = exp(w m), within RANGE

One plan that says 1.4 gives 1.18; ten that agree give 1.39.

Corrections count together or not at all.  Classes err in both directions and make up for one another in the step:
correcting one alone may make a step worse, moving all by like weights towards what was measured does not.  They count
if they make the predicted steps of plans better that they were not found from: each plan is left out in turn, its step
predicted with the factors of the others, and the mean error must fall by more than its standard error and by
LEAST_GAIN, with hardly a plan the worse for it.  Of one plan nothing can be left out: it counts if its step was out by
more than ONE_PLAN.  Where all corrections together do not help, those of devices alone may.

A step is the longest of many sums, hence convex in the factors.  What it would be is read off two tangents that are
kept with the observation, at no correction and at the plan's own ratios: it is at least the larger of the two.

Ignored: that machines change with time, costs that are no part of an action, and plans of a kind that was never run:
for classes that nobody saw nothing is known, and errors that made up for one another may show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from planner.costs.calibration.apply_corrections import Factors
from planner.ir.fingerprint import fingerprint
from planner.ir.profile import (
    BACKWARD,
    FORWARD,
    OVERHEAD,
    UPDATE,
    Calibration,
    Correction,
    CostClass,
    Observation,
    Profile,
)

RANGE = (0.5, 3.0)
PRIOR, NUM_PRIOR = 0.15, 1
LEAST_GAIN, ONE_PLAN = 0.005, 0.1
_WORSE, _MAY_BE_WORSE = 0.01, 5  # at most one plan in 5 may be out by a hundredth more than before
_NORMAL_IQR, _NORMAL_MAD = 1.349, 1.4826


def in_force(profile: Profile) -> Profile:
    """The profile with the corrections that count; none where it has changed since they were found."""
    found = profile.calibration
    return profile if not found.profile or found.profile == fingerprint(profile.bare) else profile.bare


def with_observation(profile: Profile, observation: Observation) -> Profile:
    """The profile with one observation more, in place of an older one of the same plan, and what follows from all."""
    others = [one for one in in_force(profile).calibration.observations if one.plan != observation.plan]
    observations = (*others, observation)
    calibration = Calibration(fingerprint(profile.bare), observations, corrections_from(observations))
    return replace(profile, calibration=calibration)


def corrections_from(observations: Sequence[Observation]) -> tuple[Correction, ...]:
    """The corrections that count; none if they would not make plans better that they were not found from."""
    for wanted in (_all, _of_devices):
        if _helps(observations, wanted):
            return _corrections(observations, wanted)
    return ()


def errors_left(observations: Sequence[Observation]) -> tuple[tuple[float, float], ...]:
    """By plan, the size of its error in log(predicted / measured): uncorrected, and corrected by what others say."""
    return tuple(_errors(observations, _all))


def on_other_machines(profile: Profile, of: Profile) -> Profile:
    """``profile``, made of the profile ``of`` for another cluster, with what is known of kinds of device alone."""
    corrections = in_force(of).calibration.corrections
    return profile.corrected_by(tuple(one for one in corrections if _of_devices(one.of)))


def corrected_step_s(observation: Observation, factors: Factors) -> float:
    """The predicted step of an observed plan under ``factors``: the larger of its two tangents."""
    plain_s, corrected_s = observation.predicted_s, observation.explained_s
    for seen in observation.seen:
        factor = factors(seen.of.what, seen.of.where, seen.of.shared)
        plain_s += (factor - 1) * seen.step_s
        corrected_s += (factor - clipped(seen.ratio)) * seen.corrected_step_s
    return max(plain_s, corrected_s, observation.predicted_s * RANGE[0])


def clipped(factor: float) -> float:
    """Within what a factor may be."""
    return min(max(factor, RANGE[0]), RANGE[1])


def factor_from(ratios: Sequence[float], noise: float = 0.0) -> float:
    """The factor of a class.

    Args:
        ratios: measured / predicted, by plan.
        noise: mean variance of a ratio's logarithm from what runs scatter by themselves.
    """
    logs, count = [math.log(ratio) for ratio in ratios], len(ratios)
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


def _corrections(observations: Iterable[Observation], wanted: Wanted) -> tuple[Correction, ...]:
    ratios: dict[CostClass, list[float]] = {}
    noises: dict[CostClass, list[float]] = {}
    for observation in observations:
        noise = (observation.spread / _NORMAL_IQR) ** 2 / max(1, observation.num_steps)
        for seen in observation.seen:
            if wanted(seen.of) and seen.predicted_s > 0 and seen.measured_s > 0:
                ratios.setdefault(seen.of, []).append(seen.measured_s / seen.predicted_s)
                noises.setdefault(seen.of, []).append(noise)
    found = (Correction(of, factor_from(each, fmean(noises[of])), len(each)) for of, each in ratios.items())
    return tuple(sorted(found, key=lambda one: (one.of.what, one.of.where, one.of.shared)))


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
    known = [one for one in observations if one.predicted_s > 0 and one.measured_s > 0]
    found = []
    for left_out in known:
        others = [one for one in known if one is not left_out] or [left_out]
        factors = Factors.of(_corrections(others, wanted))
        before, after = left_out.predicted_s, corrected_step_s(left_out, factors)
        found.append((abs(math.log(before / left_out.measured_s)), abs(math.log(after / left_out.measured_s))))
    return found
