"""Ranks and links that are slow while a job runs, and what another plan for the devices that are left costs.

*Ranks* are processes of this host whose layers sleep as long as their profile says, so that what a step takes does not
depend on the machine; everything else is the runtime's own.  In one half of the jobs a rank takes 1.3 times its
seconds from some step on: it is to be named, alone, when three such steps are done.  In the other half the seconds of
every rank vary from step to step by 10 % (standard deviation): none is to be named.  Jobs run several at once, and
begin to train together.

*Links* are those of a testbed; while the job runs, that of one host gets a tenth of its bandwidth.

*Another plan* is searched for where devices are gone or slow, as ``--replan`` does.  Its step is compared with the
least that the search shows possible: where it proves its plan the best, that is the plan's own.
"""

from __future__ import annotations

import os
import random
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from benchmarks import memory
from benchmarks.accuracy.cases import NETWORKS as KNOWN
from benchmarks.accuracy.cases import Network, case
from benchmarks.devices.testbed import RATES, Rate, Testbed
from benchmarks.faults import victim
from benchmarks.faults.hosts import lay_out, plan_of, profile_of
from benchmarks.faults.jobs import Job, last_words, own_folder
from benchmarks.faults.victim import Pace
from benchmarks.report import Row, at_least, at_most
from halopipe.planning.replan import replan
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile

RANKS = 3
FACTOR = 1.3
NOISE = 0.1
WITHIN = 3
AT_ONCE = 10
"""Jobs that run together; sleeping takes no core."""

SLOWED = (0.05, 10, 15)
NOISY = (0.015, 0, 40)
"""Seconds of a layer's forward, steps before the slow ones, steps: of jobs with a slow rank, and of those with noise.

Ranks tell of their steps twice a second and are compared every second, so a step takes a little more than that.
"""

GOAL_BEST = 0.95
NETWORKS = ("GNMT", "VGG-16")
GONE = {"without a device of 4": {"n0/cpu3": 0.0}, "without two of 4": {"n0/cpu1": 0.0, "n0/cpu3": 0.0}}
SLOWER = {"with one of 4 at 2/3 of its speed": {"n0/cpu1": 0.667}}

_MICRO_BATCHES = 4
_LIMIT_S = 240.0
_LINK_FORWARD_S = 0.01
_LINK_AFTER_S = 3.0
_LINK_LIMIT_S = 60.0
_LINK_RATE = "200mbit"


def rank_rows(runs: int, seed: int) -> Iterator[Row]:
    """Ranks at 1.3 times their prediction, and noise, in so many jobs each."""
    numbers = random.Random(f"slow {seed}")
    forward_s, since, _ = SLOWED
    slowed = [
        Pace(forward_s, rank=numbers.randrange(RANKS), since=since + numbers.randrange(2), factor=FACTOR, seed=job)
        for job in range(runs)
    ]
    noisy = [Pace(NOISY[0], noise=NOISE, seed=job) for job in range(runs)]
    latest = 0
    good = 0
    for pace, named in zip(slowed, _named(slowed, SLOWED[2]), strict=True):
        ranks = {rank for rank, _ in named}
        after = named[0][1] - pace.since if named else 0
        good += ranks == {pace.rank} and after <= WITHIN
        latest = max(latest, after)
    yield at_least(
        f"ranks at {FACTOR:g} times their prediction, of {runs}: named within {WITHIN} steps", good, "", runs
    )
    yield Row("slow steps until a rank was named, most", latest, "")
    found = sum(bool(named) for named in _named(noisy, NOISY[2]))
    yield at_most(f"jobs with {100 * NOISE:.0f} % of noise, of {runs}: a rank was named", found, "", 0)


def _named(paces: Sequence[Pace], steps: int) -> list[list[tuple[int, int]]]:
    """Of each job the ranks that were named, and at which step, counted from 1."""
    found = []
    for first in range(0, len(paces), AT_ONCE):
        with ExitStack() as stack:
            jobs = [_started(pace, steps, stack) for pace in paces[first : first + AT_ONCE]]
            _until_all_train(jobs)
            found += [_slow_ranks(job) for job in jobs]
    return found


def _started(pace: Pace, steps: int, stack: ExitStack) -> Job:
    folder = stack.enter_context(own_folder())
    profile = paced(profile_of((0,) * RANKS), pace.forward_s)
    lay_out(folder, plan_of(profile, "1f1b/2"), profile)
    pace.plant(folder)
    victim.hold(folder)
    words = ("run", "plan.json", "--steps", str(steps), "--data", "benchmarks.faults.victim:data", "--calibrate", "off")
    more = ("--profile", "profile.json", "--no-check-first-step", "--no-learn", "--json")
    job = Job.start(folder, dict.fromkeys(range(RANKS), 0), (*words, *more), port=free_port())
    stack.callback(job.kill)
    return job


def _until_all_train(jobs: Sequence[Job]) -> None:
    """Then they begin, together: what one does to start is no noise of the others."""
    for job in jobs:
        if not job.wait(_LIMIT_S, lambda job=job: victim.has_begun(job.folder)) or job.ended:  # type: ignore[misc]
            raise RuntimeError(f"a job did not begin: {last_words(job, 0)}")
    time.sleep(1.0)
    for job in jobs:
        victim.let_go(job.folder)


def _slow_ranks(job: Job) -> list[tuple[int, int]]:
    job.wait(_LIMIT_S)
    if set(job.codes().values()) != {0}:
        raise RuntimeError(f"a job failed: {job.codes()} {last_words(job, 0)}")
    return [
        (each["rank"], each["step"]) for each in job.result()["slow"] if each["peer"] is None and each["factor"] != 1.0
    ]


def paced(profile: Profile, forward_s: float) -> Profile:
    """The profile of a network whose layers sleep."""
    sleeping = {layer.name for layer in profile.graph.layers if "victim" in str(layer.attributes.get("op", ""))}
    if not sleeping:
        raise RuntimeError("the network has no layer that sleeps")
    both = {"forward_s": forward_s, "backward_s": 2 * forward_s}
    parts = {"backward_input_s": 2 * forward_s, "backward_weight_s": 0.0}
    of_kind = profile.measurements["cpu"]
    timed = tuple(replace(each, **both, **parts) if each.layer in sleeping else each for each in of_kind)
    return replace(profile, measurements={"cpu": timed})


def link_rows(runs: int) -> Iterator[Row]:
    """A link at a tenth of its bandwidth, while a job runs over it."""
    rate = RATES[_LINK_RATE]
    tenth = Rate(rate.bits_per_s / 10, rate.burst_bytes)
    good = 0
    seconds = list[float]()
    with Testbed.build(2, rate, f"{os.getpid()}-slow") as testbed:
        for run in range(runs):
            named_s = _link_named_s(testbed, run % 2, tenth, rate)
            good += named_s is not None
            seconds += [] if named_s is None else [named_s]
    yield at_least(f"links at a tenth of their bandwidth, of {runs}: named", good, "", runs)
    if seconds:
        yield Row("seconds until a link was named, most", max(seconds), "s")


def _link_named_s(testbed: Testbed, host: int, tenth: Rate, rate: Rate) -> float | None:
    """How long it took until the link was named, and no rank was; None: it was not, or the job failed."""
    with own_folder() as folder:
        profile = paced(profile_of((0, 1), rate.payload_bytes_per_s, "wide"), _LINK_FORWARD_S)
        lay_out(folder, plan_of(profile, "1f1b/2"), profile)
        Pace(_LINK_FORWARD_S).plant(folder)
        words = ("run", "plan.json", "--steps", "100000", "--calibrate", "off", "--profile", "profile.json")
        words = (*words, "--data", "benchmarks.faults.victim:wide_data")
        job = Job.start(folder, {0: 0, 1: 1}, (*words, "--no-check-first-step", "--no-learn"), testbed)
        try:
            if not job.wait(_LIMIT_S, lambda: "step" in job.output(0)):
                return None
            job.wait(_LINK_AFTER_S)
            before = job.output(0)
            began_s = time.monotonic()
            testbed.limit(host, tenth)
            is_named = job.wait(_LINK_LIMIT_S, lambda: bool(re.search(r"the link .* is slow", job.output(0))))
            took_s = time.monotonic() - began_s
            is_rank = re.search(r"^rank \d+ is slow", job.output(0), re.MULTILINE)
            return took_s if is_named and " is slow" not in before and not is_rank else None
        finally:
            job.kill()
            testbed.limit(host, rate)


def plan_rows(names: Sequence[str]) -> Iterator[Row]:
    """Another plan against the least that is possible for what is left, network by network."""
    for name in names:
        plan, profile = _planned(KNOWN[name])
        for what, speeds in {**GONE, **SLOWER}.items():
            found = replan(plan, profile, speeds)
            search = found.plan.search
            step_s = found.after_s
            share = 1.0 if search.status == "proven" else search.bound_s / step_s
            yield at_least(f"re-plan, {name} {what}: the least step possible / its own", share, "", GOAL_BEST)


def _planned(network: Network) -> tuple[Plan, Profile]:
    profile = _in_milliseconds(replace(memory.profile_of(network), cluster=memory.cluster_of(4)))
    problem = Problem(profile, network.samples, micro_batch_sizes=(network.samples // _MICRO_BATCHES,))
    return case(problem, f"1f1b/{network.samples // _MICRO_BATCHES}", pads=False).plan, profile


def _in_milliseconds(profile: Profile) -> Profile:
    """The same with all seconds of layers 100 times as long: those of a core rather than of nobody."""
    names = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
    of_kind = tuple(replace(m, **{name: 100 * getattr(m, name) for name in names}) for m in profile.measurements["cpu"])
    return replace(profile, measurements={"cpu": of_kind})


def free_port() -> int:
    """Of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
