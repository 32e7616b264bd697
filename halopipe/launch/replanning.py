"""Jobs whose machines come and go: which devices are there, and the plan for them (``--replan``).

A device counts as gone for good where

    this host has it no more      a GPU that the driver does not show, a core that this process may no longer use
    it is lost again and again    its rank died, hung or could not be reached ``--gone-after`` times in succession
    its host did not come         a job of torchrun or MPI that has fewer ranks than the plan

The first and the last may come back for ``--patience`` seconds.  What a rank raises itself, such as an error of the
model or too little memory, is no loss of its device.  A device that a host has again is planned with again at the next
start of the job; under torchrun that is when its host joins.

On one host a launcher asks between its attempts (:meth:`Replanner.decide`).  Ranks of torchrun have no launcher: those
that came say where they are, rank 0 decides for all (:func:`ranks_assigned`).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cuda_ops import device_description
from cuda_ops.device.gpus import num_gpus
from halopipe.launch.job_environment import JobRank, ranks_by_host
from halopipe.planning import plan_files
from halopipe.planning.replan import HeardSpeeds, Replan, is_worth, replan
from halopipe.run_spec.options import FREE, RunOptions
from halopipe.run_spec.result import RunProgress, ShowRun
from halopipe.terminal import console, units
from halopipe.training.rank_device import DeviceAssignment, device_assignments_of
from planner.ir.cluster import Cluster
from planner.ir.codec import dump, dumps, from_json, load, loads
from planner.ir.errors import DeadlineError, HalopipeError, TransportError, UsageError, WorkerDiedError, WorkerError
from planner.ir.files import read_plain, write_text
from planner.ir.plan import Decision, Plan
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from halopipe.launch.restart import LostAttempt

PLAN = "plan.json"
HOSTS = "hosts.json"
"""In the folder of checkpoints: the plan that was made for what was left, and which host was which of the plan."""

_OF_DEVICES = (WorkerDiedError, DeadlineError, TransportError)
"""What a device that fails is seen by."""

_POLL_S = 0.5


def num_cores() -> int:
    """Cores that this process may use."""
    return device_description().num_cores


@dataclass(slots=True)
class Replanner:
    """The plans of one job, as its machines come and go.

    Attributes:
        first: the plan that was given, for all machines.
        profile: that it was made from.
        plan: in force.
        changes: all that were made.
        num_cores, num_gpus: of this host, now.
    """

    first: Plan
    profile: Profile
    options: RunOptions
    say: Callable[[str], None] = console.remark
    num_cores: Callable[[], int] = num_cores
    num_gpus: Callable[[], int] = num_gpus
    plan: Plan = field(init=False)
    changes: list[Replan] = field(init=False, default_factory=list)
    _cores_before: int = field(init=False)
    _lost: set[str] = field(init=False, default_factory=set)
    _speeds: HeardSpeeds = field(init=False, default_factory=HeardSpeeds)
    _began_s: float = field(init=False)
    _start_s: float | None = field(init=False, default=None)
    _heard_step: int = field(init=False, default=0)
    _num_lost_attempts: int = field(init=False, default=0)
    _checkpoint: int | None = field(init=False, default=None)
    _better: Replan | None = field(init=False, default=None)
    _thread: threading.Thread | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.plan = self.first
        self._cores_before = self.num_cores()
        self._began_s = time.monotonic()

    def require_restarts(self) -> None:
        """Raises :class:`UsageError` where no launcher starts the ranks again."""
        if not self.options.restarts:
            raise UsageError(
                "--replan needs --restarts: a plan is changed where the job starts again",
                ["the first loss would end it"],
                [
                    "--restarts 3" + " --checkpoint checkpoints" * (not self.options.checkpoint),
                    "torchrun --max-restarts 3 ... -m halopipe run ... --replan",
                ],
            )

    def decide(self, attempt: LostAttempt) -> Plan | None:
        """The plan of the next attempt; None: the same.

        Raises:
            InfeasibleError: nothing fits on what is left.
        """
        self._num_lost_attempts = attempt.number + 1
        self._began_s = time.monotonic()
        self._heard_step = 0
        better = self._better
        self._better = None
        self._checkpoint = None
        self._lost |= lost_in_succession((*attempt.before, attempt), self.options.gone_after)
        gone = dict.fromkeys((*sorted(self._lost), *self._absent()), 0.0)
        speeds = {**gone, **{name: speed for name, speed in self._speeds.planned.items() if speed and name not in gone}}
        if better is not None and not gone.keys() - better.speeds.keys():
            return self._take(better, better.speeds)
        return None if speeds == self._speeds.planned else self.change(speeds)

    def change(self, speeds: Mapping[str, float]) -> Plan:
        """The plan for the machines as they stand, in force from now on; the first one where they are whole.

        Raises:
            InfeasibleError: nothing fits on what is left.
        """
        if speeds:
            chosen = self._kept(speeds) or self._search(speeds)
        else:
            chosen = Replan(self.plan, self.first, {}, self.plan.prediction.step_s)
        return self._take(chosen, speeds)

    def watching(self, progress: ShowRun | None) -> ShowRun:
        """``progress``, which also hears of devices that run at another speed; it ends an attempt for a better plan.

        That is right after a checkpoint, and only where it saves more over the rest of the job than it costs.

        Raises:
            WorkerError: of the callback: the attempt is to end, :meth:`decide` has the plan of the next one.
        """

        def show(at: RunProgress) -> None:
            if progress is not None:
                progress(at)
            self._hear(at)

        return show

    def _search(self, speeds: Mapping[str, float]) -> Replan:
        return replan(self.first, self.profile, speeds, in_force=self.plan, free=self.options.replan == FREE)

    def _take(self, change: Replan, speeds: Mapping[str, float]) -> Plan:
        self.plan = change.plan
        self._speeds.plan_with(speeds)
        self.changes.append(change)
        for line in change.lines():
            self.say(line)
        if self.options.checkpoint and speeds:
            self._keep()
        return change.plan

    def _keep(self) -> None:
        """Writes the plan in force, to look at, and for attempts on the same devices."""
        folder = Path(self.options.checkpoint)
        folder.mkdir(parents=True, exist_ok=True)
        dump(self.plan, folder / PLAN)

    def _kept(self, speeds: Mapping[str, float]) -> Replan | None:
        """The plan for these machines that an earlier attempt made."""
        path = Path(self.options.checkpoint) / PLAN
        if not self.options.checkpoint or not path.exists():
            return None
        try:
            plan = load(path, Plan)
        except HalopipeError:
            return None
        earlier = plan.inputs.request
        asked = self.first.inputs.request
        one, other = (
            replace(each, speeds={}, micro_batch_sizes=(), num_ranks=0, forbid=())  # what another plan may differ in
            for each in (earlier, asked)
        )
        alike = one == other and earlier.speeds == {**asked.speeds, **speeds}
        ours = self.first.decision
        theirs = plan.decision
        same = ours.global_batch == theirs.global_batch
        if self.options.replan != FREE:
            same = ours.micro_batches == theirs.micro_batches
        if not alike or not same:
            return None
        if not plan_files.is_of(self.profile, plan):
            return None
        return Replan(self.plan, plan, dict(speeds), self.plan.prediction.step_s)

    def _absent(self) -> list[str]:
        """Devices of the first plan that this host has no more, once patience is at its end."""
        end_s = time.monotonic() + self.options.patience_s
        assignments = device_assignments_of(self.first.decision, self.options.device)
        is_announced = False
        while True:
            missing = absent(assignments, self._cores_before, self.num_cores(), self.num_gpus)
            new = [name for name in missing if name not in self._speeds.planned]
            if not new or time.monotonic() >= end_s:
                return missing
            if not is_announced:
                self.say(f"{', '.join(new)} is gone; it may come back for {units.seconds(self.options.patience_s)}")
                is_announced = True
            time.sleep(_POLL_S)

    def _hear(self, at: RunProgress) -> None:
        if at.word:
            return
        if self._start_s is None and at.step:
            self._start_s = time.monotonic() - self._began_s
        if self._better is not None:
            self._end_at_checkpoint()
            return
        if at.step <= self._heard_step or self._thread is not None:
            return
        self._heard_step = at.step
        newest = {each.rank: each.factor for each in at.slow if each.peer is None}
        devices = {
            assignment.rank: assignment.name
            for assignment in device_assignments_of(self.plan.decision, self.options.device)
        }
        for rank, factor in newest.items():
            self._speeds.hear(devices[rank], factor)
        changed = self._speeds.changed()
        if changed and self._num_lost_attempts < self.options.restarts and self.options.checkpoint_every:
            speeds = {**self._speeds.planned, **changed}
            self._thread = threading.Thread(target=self._look, args=(speeds, at), name="another plan", daemon=True)
            self._thread.start()

    def _look(self, speeds: Mapping[str, float], at: RunProgress) -> None:
        """Beside the ranks, which go on: whether another plan is worth it at these speeds."""
        number = self._num_lost_attempts
        try:
            change = self._search(speeds)
            after_s = at.step_s * change.after_s / change.before_s if change.before_s else at.step_s
            is_better = is_worth(at.step_s, after_s, at.num_steps - at.step, self._start_s or 0.0)
            if number == self._num_lost_attempts and is_better:
                self._better = change
            else:
                self._speeds.dismiss(speeds)
        except HalopipeError:
            self._speeds.dismiss(speeds)
        finally:
            self._thread = None

    def _end_at_checkpoint(self) -> None:
        """Where a checkpoint was written since the better plan was found: few steps are done again."""
        from runtime.checkpoint import complete_steps  # late: it loads torch

        newest = max(complete_steps(self.options.checkpoint), default=0)
        if self._checkpoint is None:
            self._checkpoint = newest
        elif newest > self._checkpoint and self._better is not None:
            raise WorkerError("the job goes on under another plan", [self._better.headline()])


def lost_in_succession(attempts: Sequence[LostAttempt], gone_after: int) -> set[str]:
    """Devices that each of the last attempts lost; none where one of them lost no device."""
    last = attempts[-gone_after:]
    if len(last) < gone_after or not all(isinstance(attempt.error, _OF_DEVICES) for attempt in last):
        return set()
    return set.intersection(*(set(attempt.devices) for attempt in last))


def absent(
    assignments: Sequence[DeviceAssignment], cores_before: int, cores: int, gpus: Callable[[], int]
) -> list[str]:
    """Devices of a plan that this host has no more.

    Args:
        cores_before: that it had when the job began; ranks on processors have one each, as far as there are enough.
    """
    on_cores = [assignment.name for assignment in assignments if assignment.gpu is None]
    missing = on_cores[cores:] if cores < cores_before else []
    on_gpus = [assignment for assignment in assignments if assignment.gpu is not None]
    there = gpus() if on_gpus else 0
    return [
        *missing,
        *(assignment.name for assignment in on_gpus if assignment.gpu is not None and assignment.gpu >= there),
    ]


def replanner(plan: Plan, profile: Profile | None, options: RunOptions) -> Replanner | None:
    """What decides for a job that was asked to plan anew; None: nobody asked.

    Raises:
        UsageError: the profile is not there.
    """
    if not options.replan:
        return None
    if profile is None:
        raise UsageError(
            "--replan plans again, which needs the profile that the plan was made from",
            ["none is given, and none lies where the plan remembers it"],
            ["--profile PROFILE"],
        )
    return Replanner(plan, profile, options)


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Who does what in a job that torchrun started.

    Attributes:
        planned_ranks: the plan's rank of each rank of the job that has something to do.
    """

    plan: Plan
    planned_ranks: Mapping[int, int]


def ranks_assigned(job: JobRank, store: Store, own: Replanner) -> RankAssignment:
    """The plan for the ranks that came, the same on all of them.

    Raises:
        InfeasibleError: nothing fits on their devices.
    """
    from halopipe.training.resuming import said_by_rank_0

    store.set(f"place/{job.rank}", json.dumps([socket.gethostname(), job.host, job.local_rank]))

    def settle() -> str:
        places = [json.loads(store.get(f"place/{rank}").decode()) for rank in range(job.num_ranks)]
        names = {
            JobRank(rank, job.num_ranks, local_rank, host=host): name
            for rank, (name, host, local_rank) in enumerate(places)
        }
        assignment = _assigned(own, names)
        return json.dumps([dumps(assignment.plan), list(assignment.planned_ranks.items())])

    text, pairs = json.loads(said_by_rank_0(store, "seats", job.rank, settle))
    own.plan = loads(text, Plan)
    return RankAssignment(own.plan, dict(pairs))


def _assigned(own: Replanner, arrivals: Mapping[JobRank, str]) -> RankAssignment:
    """Rank 0's word: the first plan where all of its devices came, else another one.

    Args:
        arrivals: the name of each rank's host.
    """
    decision = own.first.decision
    cluster = own.profile.cluster
    hosts: dict[int, list[JobRank]] = {}
    for each in sorted(arrivals, key=lambda each: (each.host, each.local_rank)):
        hosts.setdefault(each.host, []).append(each)
    names = [arrivals[ranks[0]] for ranks in hosts.values()]
    path = Path(own.options.checkpoint) / HOSTS if own.options.checkpoint else None
    counts = [len(ranks) for ranks in hosts.values()]
    there = devices_there(list(zip(names, counts, strict=True)), decision, cluster, _known_hosts(path))
    device_of = {
        each.rank: device
        for ranks, devices in zip(hosts.values(), there, strict=True)
        for each, device in zip(ranks, devices, strict=False)
    }
    left = set(device_of.values())
    used = [assignment.name for assignment in device_assignments_of(decision) if assignment.name]
    missing = [name for name in used if name not in left]
    if missing:
        plan = _without(own, missing, left)
    else:
        plan = own.first
        if path is not None and len(set(names)) == len(names):
            path.parent.mkdir(parents=True, exist_ok=True)
            whose = {name: devices[0].rpartition("/")[0] for name, devices in zip(names, there, strict=True) if devices}
            write_text(path, json.dumps(whose))
    rank_with = {device: rank for rank, device in device_of.items()}
    planned_ranks = {rank_with[assignment.name]: assignment.rank for assignment in device_assignments_of(plan.decision)}
    idle = [rank for rank in range(len(arrivals)) if rank not in planned_ranks]
    if idle:
        own.say(
            f"{units.count(len(idle), 'rank')} of the job {'has' if len(idle) == 1 else 'have'} nothing to do: {idle}"
        )
    return RankAssignment(plan, planned_ranks)


def _without(own: Replanner, missing: Sequence[str], left: Container[str]) -> Plan:
    """The plan for the devices that are left, once those that did not come have had time to."""
    speeds = {device.name: 0.0 for device in own.profile.cluster.devices if device.name not in left}
    patience_s = own.options.patience_s
    if patience_s and own._kept(speeds) is None:
        own.say(f"{', '.join(missing)} did not come; the job waits for {units.seconds(patience_s)}")
        time.sleep(patience_s)  # torchrun ends this rank where they join meanwhile
    return own.change(speeds)


def _known_hosts(path: Path | None) -> dict[str, str]:
    """The plan's host of each host of the job, as it was when all were there."""
    try:
        return from_json(read_plain(path), dict[str, str]) if path is not None else {}
    except (OSError, ValueError):
        return {}


def devices_there(
    hosts: Sequence[tuple[str, int]], decision: Decision, cluster: Cluster, host_names: Mapping[str, str]
) -> list[list[str]]:
    """The devices of each host of a job, by its local ranks; those beyond have none.

    A host is the one of the plan that it was before, else the first that has as many ranks, else the first with more,
    else the first that is left.  A job on one host has the devices of all, as a plan for several that is tried there.

    Args:
        hosts: name and number of ranks, in the job's order.
        host_names: the plan's host by a host's name, as far as that is known.
    """
    assignments = device_assignments_of(decision)
    used = {name: [assignments[rank].name for rank in ranks] for name, ranks in ranks_by_host(decision).items()}
    if len(hosts) == 1 < len(used) and hosts[0][1] > max(map(len, used.values())):
        return [[name for names in used.values() for name in names][: hosts[0][1]]]
    for device in cluster.devices:
        of_host = used.setdefault(device.host, [])
        of_host += [device.name] if device.name not in of_host else []
    sizes = {name: len(ranks) for name, ranks in ranks_by_host(decision).items()}
    free = list(used)
    by_host = list[list[str]]()
    for name, count in hosts:
        before = host_names.get(name)
        ways = (
            [before] if before in free else [],
            [each for each in free if sizes.get(each) == count],
            [each for each in free if sizes.get(each, 0) > count],
            free,
        )
        host = next((way[0] for way in ways if way), None)
        if host is None:
            by_host.append([])
            continue
        free.remove(host)
        by_host.append(used[host][:count])
    return by_host
