"""A sparse VGG-16 on two unequal workers: our plan and SparsePipe's, predicted beside measured.

    python -m benchmarks.sparse_vgg [--quick] [--json]

Two processes on this machine, each with a core of its own, over gloo, are *virtual devices* of a third and a sixth of
a core's speed (:mod:`benchmarks.devices.virtual_device`): one is twice as fast as the other, and neither needs its core
all the time, so that what else runs here matters little.  Cores that slept would be woken on one physical core, maybe,
where two ranks that compute at once slow each other: they are kept awake (:func:`benchmarks.devices.ranks.awake`, which
takes root), as in :mod:`benchmarks.accuracy`.  The network is profiled once, on clouds of 3,224 voxels, and
the profile's seconds are made three and six times as long.  All plans are made and their predictions written down
first; then every plan trains on the same batches, plan after plan, several times over.  Clouds have from 800 to 6,000
voxels, batches 3,224 a sample on the mean (:mod:`benchmarks.sparse_vgg.plans`).  The network is SparsePipe's, half as
wide, with 512 numbers between the linear layers: a step takes a second or two.

    ours                 the planner's choice
    SparsePipe           its stages by its own formula, published restrictions and all: with two devices that leaves one
                         stage on both, each with half of the samples, whatever their speeds and the samples' sizes
    ... in any order     the best stages by its formula without those restrictions
    one device           the faster one alone
    one stage, shared    one stage on both, sites cut by predicted work and speed

What SparsePipe leaves open is chosen in its favour: the size of micro-batches by our simulator.  Its kernel maps are
made when features have arrived, and not ahead, by each rank of its own samples alone.  It is executed by the same
runtime, so normalisation is over the whole micro-batch, which its own training leaves to each rank.

Steps in which a process waited for its core more than 2 % of the time are left out, as long as enough are left.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.devices.ranks import Step, awake, hide_gpus
from benchmarks.devices.virtual_device import with_devices
from benchmarks.report import Row, at_least, run
from benchmarks.sparse_vgg.plans import ONE, OURS, SHARED, SPARSEPIPE, UNRESTRICTED, Case, Network, batches, cases
from planner.ir.problem import DEFAULT_CONFIDENCE, Problem
from planner.ir.profile import ModelSource
from profiler import profile

FACTORS = (3.0, 6.0)
"""Seconds of each rank's device for one of a core's."""
NUM_CLASSES = 40
MOST_DELAY, FEWEST = 0.02, 3
GOAL_PERCENT = 10.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How large it is.

    Attributes:
        voxels: mean of a sample; least and most of one.
        rounds: how often every plan is run, of ``steps`` steps each.
    """

    width: int
    hidden: int
    samples: int
    voxels: tuple[int, int, int]
    rounds: int
    steps: int

    @property
    def source(self) -> ModelSource:
        """The network."""
        arguments = {"width": str(self.width), "hidden": str(self.hidden), "num_classes": str(NUM_CLASSES)}
        return ModelSource("profiler.models.sparse_vgg:sparse_vgg16", arguments, (self.samples, self.voxels[0], 1))


FULL = Setting(32, 512, 16, (3224, 800, 6000), 3, 4)
QUICK = Setting(4, 16, 8, (400, 100, 750), 1, 3)


def measure(quick: bool) -> list[Row]:
    """Profile, plan, then run; the cores are kept awake throughout."""
    setting = QUICK if quick else FULL
    load = os.getloadavg()[0]
    with awake() as are_awake:
        found = with_devices(profile(setting.source, num_workers=2, quick=True), FACTORS)
        planned = cases(Problem(found, setting.samples, confidence=DEFAULT_CONFIDENCE))
        steps = _run(setting, planned)
    return [
        Row("load of the machine before and after, larger of both", max(load, os.getloadavg()[0]), "processes"),
        Row("cores kept awake", float(are_awake), "1: yes"),
        *rows(planned, {name: undisturbed(each) for name, each in steps.items()}),
    ]


def _run(setting: Setting, planned: Sequence[Case]) -> dict[str, list[Step]]:
    """Steps by plan, all plans by turns."""
    network = Network(setting.source, FACTORS)
    mean, least, most = setting.voxels
    data = batches(setting.steps, setting.samples, NUM_CLASSES, least, most, mean)
    steps: dict[str, list[Step]] = {case.name: [] for case in planned}
    for _ in range(setting.rounds):
        for case in planned:
            steps[case.name] += network.run(case, data)
    return steps


def undisturbed(steps: Sequence[Step]) -> list[Step]:
    """Those in which no process waited for its core; if they are too few, the third that waited least."""
    quiet = [step for step in steps if step.delay <= MOST_DELAY]
    if len(quiet) >= FEWEST:
        return quiet
    return sorted(steps, key=lambda step: step.delay)[: max(FEWEST, len(steps) // 3)]


def rows(planned: Sequence[Case], steps: Mapping[str, Sequence[Step]]) -> Iterator[Row]:
    """Of every plan, then what is compared."""
    measured_s = {name: statistics.median(step.seconds for step in each) for name, each in steps.items()}
    predicted_s = {case.name: case.predicted_s for case in planned}
    for case in planned:
        seconds = measured_s[case.name]
        error = seconds / case.predicted_s - 1
        yield Row(f"{case.name}: predicted step", 1e3 * case.predicted_s, "ms")
        yield Row(f"{case.name}: measured step", 1e3 * seconds, "ms")
        holds = abs(error) <= GOAL_PERCENT / 100
        yield Row(f"{case.name}: error", 100 * error, "%", f"within {GOAL_PERCENT:g}", holds)
        yield Row(f"{case.name}: balance", statistics.median(s.balance for s in steps[case.name]), "max/mean")
        yield Row(f"{case.name}: steps counted", len(steps[case.name]), "steps")
        yield Row(f"{case.name}: longest wait for a core", 100 * max(s.delay for s in steps[case.name]), "%")
    for name in (SPARSEPIPE, UNRESTRICTED, ONE, SHARED):
        yield at_least(f"{name} / {OURS}, measured", measured_s[name] / measured_s[OURS], "ratio", 1.0)
        yield Row(f"{name} / {OURS}, predicted", predicted_s[name] / predicted_s[OURS], "ratio")


main = partial(run, str(__doc__).splitlines()[0], measure)

if __name__ == "__main__":
    hide_gpus()
    sys.exit(main())
