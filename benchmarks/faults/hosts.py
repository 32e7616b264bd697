"""Jobs on several hosts that lose one of them, the store, or a link.

The hosts are network namespaces of a testbed (:mod:`benchmarks.devices.testbed`), each with a name of its own; ranks
are those of :mod:`benchmarks.faults.jobs`.  All hosts share the folder of checkpoints.  At a random moment of training
a host loses its power (its cable is cut, then all of its processes are killed), or its cable is cut, for good or for
some seconds.  Some jobs are started by torchrun, and a random rank is killed: its agents start all ranks again, and the
job goes on, bit for bit.

Where the link is back in time, the job goes on as if nothing had been.  Else all ranks that are left, on either side of
a cut, end with exit code 5, each within the deadline and two seconds, and one of them names a rank beyond the link.
Then the same command is started again: on all hosts, which are there again, or with ``--replan`` on those that are
left.  The curve is that of an undisturbed job on these hosts: bit for bit, or to 1e-6 under another plan.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import memory
from benchmarks.accuracy.cases import HYBRID, Network, case
from benchmarks.devices.testbed import RATES, Testbed
from benchmarks.faults import victim
from benchmarks.faults.jobs import EVERY, Job, Outcome, last_words, own_folder
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.codec import dump
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, Optimizer, Profile
from runtime.checkpoint import complete_steps

STEPS = 30
PAUSE_S = 0.1
DEADLINE_S = 3.0
"""Of a job; before each step; of its waits."""

BACK_S = 5.0
LONG_DEADLINE_S = 20.0
"""A link that comes back: after so long, and the deadline of that job."""

PLANS: Mapping[str, tuple[int, ...]] = {"1f1b/2": (0, 1, 2), HYBRID: (0, 0, 1, 1), "naive/4": (0, 1)}
"""The host of each rank, by plan: a pipeline over three hosts, one of replicas within hosts, two stages by turns."""

LOST_HOST = "loss of a host"
LOST_STORE = "loss of the store"
CUT = "cut link"
BACK = "link back after 5 s"
TORCHRUN = "SIGKILL under torchrun"
KINDS = (LOST_HOST, LOST_STORE, CUT, BACK, TORCHRUN)
SAVED = "saved"
SAME = "same hosts again"
REPLANNED = "re-planned for what is left"

_LIMIT_S = 300.0
"""Of a job that nothing disturbs: a busy machine takes minutes to start its ranks.  What is over is not waited for."""

_FAILED = 5


@dataclass(frozen=True, slots=True)
class HostTrial:
    """One job that loses a host or link.

    Attributes:
        moment: how it goes on, :data:`SAME` or :data:`REPLANNED`; it comes at a random time of training.
        host: whose cable is cut.
        at: when, as the share of the time of training.
    """

    plan: str
    deed: str
    moment: str
    host: int
    at: float

    def __str__(self) -> str:
        return f"{self.deed}, host {self.host}, {self.moment}, {self.plan} on {len(set(PLANS[self.plan]))} hosts"


def drawn(count: int, seed: int) -> Iterator[HostTrial]:
    """Trials: every kind of loss equally often."""
    numbers = random.Random(f"hosts {seed}")
    for number in range(count):
        deed = KINDS[number % len(KINDS)]
        plan = numbers.choice(list(PLANS))
        last = max(PLANS[plan])
        host = {LOST_HOST: numbers.randint(1, last), LOST_STORE: 0}.get(deed, numbers.randint(0, last))
        is_lost = deed in (LOST_HOST, LOST_STORE)
        yield HostTrial(plan, deed, numbers.choice((SAME, REPLANNED)) if is_lost else SAME, host, numbers.random())


@functools.cache
def _watched(factory: str) -> Profile:
    source = ModelSource(f"benchmarks.faults.victim:{factory}")
    found = memory.profile_of(Network(source, victim.SAMPLES, (1, 2, 4, victim.SAMPLES)))
    return replace(found, optimizer=Optimizer("Adam", {"lr": 1e-2}, 2.0))


def profile_of(host_of: Sequence[int], bytes_per_s: float = 1e8, factory: str = "network") -> Profile:
    """A profile of a network of :mod:`benchmarks.faults.victim`, whose seconds are nobody's, for devices on hosts.

    Args:
        bytes_per_s: of the links between hosts.
    """
    devices = tuple(
        DeviceSpec(f"n{host}/cpu{list(host_of[:rank]).count(host)}", "cpu", f"n{host}", 1 << 40)
        for rank, host in enumerate(host_of)
    )
    cluster = Cluster(devices, {WITHIN_HOST: Link(1e-5, 1e10), ACROSS_HOSTS: Link(1e-4, bytes_per_s)})
    return replace(_watched(factory), cluster=cluster)


def plan_of(profile: Profile, name: str) -> Plan:
    """The plan of that name in :mod:`benchmarks.accuracy.cases`."""
    return case(Problem(profile, victim.SAMPLES), name, pads=False).plan


def lay_out(folder: Path, plan: Plan, profile: Profile) -> None:
    """What a job of ``run`` needs in its folder."""
    dump(plan, folder / "plan.json")
    dump(profile, folder / "profile.json")


def run_words(steps: int = STEPS, deadline_s: float = DEADLINE_S, *more: str) -> tuple[str, ...]:
    """``run`` of ``plan.json`` in the folder of a trial."""
    named = {
        "--steps": steps,
        "--data": "benchmarks.faults.victim:data",
        "--optimizer": "benchmarks.faults.victim:optimiser",
        "--eval-data": "benchmarks.faults.victim:held_out",
        "--eval-every": EVERY,
        "--checkpoint": SAVED,
        "--checkpoint-every": EVERY,
        "--resume": "auto",
        "--metrics": "metrics.jsonl",
        "--deadline": deadline_s,
        "--profile": "profile.json",
    }
    options = [str(part) for pair in named.items() for part in pair]
    return "run", "plan.json", *options, "--no-check-first-step", "--no-learn", "--json", *more


Curve = Mapping[tuple[int, str], float]
"""By step and kind, losses."""


def curve(folder: Path) -> Curve:
    """What the metrics of a job say, whichever start of it computed them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], kind): line[kind] for line in lines for kind in ("loss", "eval_loss") if kind in line}


class Hosts:
    """Runs trials; plans, and what undisturbed jobs do, are made when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Plan, Profile]] = {}
        self._expected: dict[str, tuple[Curve, float]] = {}
        self._beds: dict[int, Testbed] = {}

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for testbed in self._beds.values():
            testbed.close()

    def tried(self, trial: HostTrial) -> Outcome:
        """The job under the fault, what became of it, and of its second start."""
        testbed = self._testbed(trial.plan)
        host_of = dict(enumerate(PLANS[trial.plan]))
        expected, training_s = self._undisturbed(trial.plan)
        goes_on = trial.deed == BACK
        if trial.deed == TORCHRUN:
            return Outcome(trial, self._under_torchrun(trial, host_of, testbed, expected, training_s))
        with own_folder() as folder:
            self._write(trial.plan, folder)
            words = run_words(STEPS, LONG_DEADLINE_S if goes_on else DEADLINE_S)
            job = Job.start(folder, host_of, words, testbed)
            try:
                begun = job.wait(_LIMIT_S, lambda: victim.has_begun(folder))
                if not begun or job.ended:
                    return Outcome(trial, f"it did not begin to train: {job.codes()} {last_words(job, 0)}")
                time.sleep(trial.at * training_s)
                lost = [rank for rank, host in host_of.items() if host == trial.host]
                cut_s = time.monotonic()
                testbed.cut(trial.host)
                if goes_on:
                    time.sleep(BACK_S)
                    testbed.mend(trial.host)
                    job.wait(_LIMIT_S)
                    return Outcome(trial, _went_on(job, expected, bit_for_bit=True))
                is_power = trial.deed != CUT
                if is_power:
                    job.kill(lost)
                job.wait(DEADLINE_S + 15.0)
                wrong, ended_s = _ended(job, lost, lost if is_power else [])
            finally:
                job.kill()
                testbed.mend(trial.host)
            beyond_s = ended_s - cut_s - DEADLINE_S
            if not wrong:
                wrong = self._again(trial, folder, host_of, testbed, expected)
            return Outcome(trial, wrong, beyond_s=beyond_s)

    def _under_torchrun(
        self, trial: HostTrial, host_of: Mapping[int, int], testbed: Testbed, expected: Curve, training_s: float
    ) -> str:
        """Why a job that torchrun starts does not go on; empty: it does."""
        with own_folder() as folder:
            self._write(trial.plan, folder)
            job = Job.start_agents(folder, host_of, run_words(), testbed)
            try:
                if not job.wait(_LIMIT_S, lambda: victim.has_begun(folder)) or job.ended:
                    return f"it did not begin to train: {job.codes()} {last_words(job, 0)}"
                time.sleep(trial.at * training_s)
                has_saved = bool(complete_steps(folder / SAVED))
                ranks = [pid for pid in testbed.processes(trial.host) if _is_rank(pid)]
                os.kill(random.Random(str(trial)).choice(ranks), signal.SIGKILL)
                job.wait(2 * _LIMIT_S)
            finally:
                job.kill()
            started = sum("going on from" in job.output(host) for host in job.pids)
            lacks = has_saved and not started
            return _went_on(job, expected, bit_for_bit=True) or ("it went on from no checkpoint" if lacks else "")

    def _again(
        self, trial: HostTrial, folder: Path, host_of: Mapping[int, int], testbed: Testbed, expected: Curve
    ) -> str:
        words = run_words()
        if trial.moment == REPLANNED:
            words = (*words, "--replan")
            host_of = {rank: host for rank, host in host_of.items() if host != trial.host}
        job = Job.start(folder, host_of, words, testbed)
        job.wait(_LIMIT_S)
        job.kill()
        return _went_on(job, expected, bit_for_bit=trial.moment == SAME)

    def _undisturbed(self, plan: str) -> tuple[Curve, float]:
        if plan not in self._expected:
            with own_folder() as folder:
                self._write(plan, folder)
                job = Job.start(folder, dict(enumerate(PLANS[plan])), run_words(), self._testbed(plan))
                job.wait(_LIMIT_S, lambda: victim.has_begun(folder))
                began_s = time.monotonic()
                job.wait(_LIMIT_S)
                job.kill()
                if set(job.codes().values()) != {0}:
                    raise RuntimeError(f"{plan} fails undisturbed: {job.codes()} {last_words(job, 0)}")
                self._expected[plan] = curve(folder), 0.8 * (time.monotonic() - began_s)
        return self._expected[plan]

    def _write(self, name: str, folder: Path) -> None:
        if name not in self._made:
            profile = profile_of(PLANS[name])
            self._made[name] = plan_of(profile, name), profile
        lay_out(folder, *self._made[name])
        victim.slow_data(folder, PAUSE_S)

    def _testbed(self, plan: str) -> Testbed:
        count = len(set(PLANS[plan]))
        if count not in self._beds:
            self._beds[count] = Testbed.build(count, RATES["1gbit"], f"{os.getpid()}-faults{count}")
        return self._beds[count]


def _ended(job: Job, lost: Sequence[int], killed: Sequence[int]) -> tuple[str, float]:
    """Why the ranks that were not killed did not end as they should, and when the last of them ended."""
    left = [rank for rank in job.pids if rank not in killed]
    running = [rank for rank in left if rank not in job.ended]
    if running:
        return f"ranks {running} still run; {last_words(job, running[0])}", time.monotonic()
    codes = {rank: code for rank, code in job.codes().items() if rank in left}
    ended_s = max(job.ended[rank][1] for rank in left)
    if set(codes.values()) != {_FAILED}:
        return f"exit codes {codes} for {_FAILED}: {last_words(job, left[0])}", ended_s
    sides = [[rank for rank in left if rank not in lost], [rank for rank in left if rank in lost]]
    for side in filter(None, sides):
        beyond = [rank for rank in job.pids if rank not in side]
        said = [line for rank in side for line in job.output(rank).splitlines()]
        if not any(f"rank {rank}" in line for rank in beyond for line in said):
            return f"ranks {side} name none of {beyond}: {last_words(job, side[0])}", ended_s
    return "", ended_s


def _went_on(job: Job, expected: Curve, *, bit_for_bit: bool) -> str:
    """Why the job did not end well with that curve; empty: it did."""
    bad = [rank for rank in job.pids if job.codes().get(rank) != 0]
    if bad:
        return f"exit codes {job.codes()}: {last_words(job, bad[0])}"
    found = curve(job.folder)
    if found.keys() != expected.keys():
        return f"steps {sorted(found.keys() ^ expected.keys())} are in one curve alone"
    apart = 0.0 if bit_for_bit else 1e-6
    for key, value in expected.items():
        other = found[key]
        if other is None or abs(other - value) > apart * abs(value):
            return f"step {key[0]}: {key[1]} {other}, undisturbed {value}"
    return ""


def _is_rank(pid: int) -> bool:
    """Whether torchrun's agent made this process a rank."""
    with contextlib.suppress(OSError):
        return b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False
