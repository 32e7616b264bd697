"""How fast the machine is now, told apart from what is wrong with the model of it.

A run times the stages of its ranks alone (``runtime.stage.alone``).  The profile prices the same layers at the same
samples; what they take now over that price is how much slower the machine has become since, for each kind of device:

    speed     sum of the median passes of its ranks / sum of their prices
    noise     how far the profile's own processes were apart for one network, or the passes after the run from those
              before it, whichever is more
    changed   speeds that differ from 1 by more than ``LEAST_CHANGE`` and by more than the noise

What has changed re-scales forward, backward and update of that kind (``MACHINE`` corrections), until another run says
otherwise; the rest of a run's error is the model's.  Ignored: that layers differ in how much a slower memory or cache
slows them, and that links change with the machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.costs.pricing import Pricing
from planner.ir.plan import Decision
from planner.ir.profile import MACHINE, Correction, CostClass, Profile
from planner.ir.timeline import Drift, LonePasses

LEAST_CHANGE = 0.05


@dataclass(frozen=True, slots=True)
class MachineSpeeds:
    """What stages alone say of the machine.

    Attributes:
        alone_s, priced_s: of all ranks together: the median pass of each of their stages, and the price of these.
        of: by kind of device, seconds now over those of the profile.
        noise: by which these differ by chance.
        during: by how much passes after the run took longer than before it.
    """

    alone_s: float
    priced_s: float
    of: Mapping[str, float]
    noise: float
    during: float

    @property
    def changed(self) -> Mapping[str, float]:
        """Those that differ from 1 by more than chance."""
        return {kind: speed for kind, speed in self.of.items() if is_change(speed, self.noise)}

    @property
    def corrections(self) -> tuple[Correction, ...]:
        """That re-scale the profile to the machine as it is now."""
        return tuple(Correction(CostClass(MACHINE, kind), of, 1) for kind, of in sorted(self.changed.items()))


def is_change(speed: float, noise: float) -> bool:
    """Whether a device's seconds over those of the profile differ from 1 by more than chance."""
    least = max(LEAST_CHANGE, noise)
    return not 1 / (1 + least) <= speed <= 1 + least


def speeds(profile: Profile, decision: Decision, passes: Sequence[LonePasses]) -> MachineSpeeds | None:
    """What the passes of a run say; None if there are none.

    Args:
        profile: that the plan was made from; its corrections are not looked at.

    Raises:
        MissingMeasurementError: the profile does not say what a layer costs at that many samples.
    """
    if not passes:
        return None
    cost_model = CostModel(profile.bare)
    candidate = candidate_of(profile.graph, decision)
    placed = Pricing(cost_model).stages(candidate)
    trains = candidate.trains
    now: dict[str, float] = defaultdict(float)
    then: dict[str, float] = defaultdict(float)
    for each in passes:
        kind = cost_model.kind(each.rank)
        stage = placed[each.stage]
        sums = cost_model.sums(kind, each.samples, False, trains and stage.recompute_mask)
        forward_s, backward_s, *_ = sums.passes_s(stage.runs)
        priced_s = forward_s + trains * backward_s
        alone_s = median((*each.before_s, *each.after_s))
        now[kind] += alone_s
        then[kind] += priced_s
    before_s, after_s = (sum(median(getattr(each, at)) for each in passes) for at in ("before_s", "after_s"))
    slowdowns = {kind: now[kind] / then[kind] for kind in now if then[kind] > 0}
    during = after_s / before_s - 1
    noise = max(_between_processes(profile, passes), abs(during))
    return MachineSpeeds(sum(now.values()), sum(then.values()), slowdowns, noise, during)


def drift(
    profile: Profile, decision: Decision, machine_speeds: MachineSpeeds, counted: Sequence[Correction], step_s: float
) -> Drift:
    """Splits the error of a prediction.

    Args:
        counted: the corrections under which the step was predicted.
        step_s: measured.
    """
    rest = tuple(one for one in counted if one.of.what != MACHINE)
    now = tuple(Correction(CostClass(MACHINE, kind), of, 1) for kind, of in sorted(machine_speeds.of.items()))
    before_s, now_s = (
        predict(profile.corrected_by(each), decision)[0].step_s for each in (tuple(counted), (*now, *rest))
    )
    return Drift(
        machine_speeds.alone_s,
        machine_speeds.priced_s,
        dict(machine_speeds.of),
        machine_speeds.noise,
        machine_speeds.during,
        now_s / before_s - 1,
        step_s / now_s - 1,
    )


def _between_processes(profile: Profile, passes: Sequence[LonePasses]) -> float:
    """Of the processes that measured the number of samples that is nearest to that of the passes."""
    spread = profile.provenance.process_spread
    most = max(each.samples for each in passes)
    nearest = min((int(name) for name in spread if name.isdecimal()), key=lambda at: abs(at - most), default=None)
    return 0.0 if nearest is None else spread[str(nearest)]
