"""What torchrun, or MPI, says to a process: its rank, and where ranks meet; which interface of this host leads there.

RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_ADDR=node07 MASTER_PORT=29500

Processes that mpiexec started, or srun with MPI, give themselves these variables, by what MPI says of them; what goes
by the variables then works as under torchrun: hosts, the store of the job, errors, exit codes, scripts of one's own.

Gloo connects to the address that a host's own name resolves to, which on many hosts is the loopback interface's; hence
every process is told the interface that leads to the job's store.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import shlex
import socket
import struct
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.device.host import MPI_JOB
from halopipe.planning.plan_files import devices_of
from planner.ir.errors import RankCountError, TransportError, UsageError
from planner.ir.plan import Decision
from planner.ir.validation import MOST_DEVICES
from runtime.timeouts import SETUP_S

LOOPBACK = "127.0.0.1"
GLOO = "GLOO_SOCKET_IFNAME"
ATTEMPT = "HALOPIPE_ATTEMPT"
"""The prefix of this attempt's keys, where a launcher hosts its store; else its ranks agree on one."""

PORT = 29500
"""Where ranks meet, in the commands that we show."""

_SRUN = (
    "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node N --rdzv-backend c10d "
    f"--rdzv-endpoint FIRST_HOST:{PORT} --rdzv-id $SLURM_JOB_ID -m halopipe ..."
)

_MPI_LAUNCHERS = (
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray, and srun --mpi=pmi2
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),  # srun --mpi=pmix: PMIx itself tells the size only to MPI
)
"""Variables of a process's number, and of how many there are."""

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ANYWHERE = "192.0.2.1"  # for documentation (RFC 5737): nobody is there, and nothing is sent


@dataclass(frozen=True, slots=True)
class JobRank:
    """One process of a job, as torchrun numbers them: host by host.

    Attributes:
        local_rank, num_local: among those of its host; 0: how many these are is not said.
        host, num_hosts: number of its host.
        over_mpi: mpiexec started it.
    """

    rank: int
    num_ranks: int
    local_rank: int = 0
    num_local: int = 0
    host: int = 0
    num_hosts: int = 1
    over_mpi: bool = False

    def variables(self, address: str, port: int) -> dict[str, str]:
        """What the environment of this rank says, where the job's store is at ``address``."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.num_local,
            "GROUP_RANK": self.host,
            "GROUP_WORLD_SIZE": self.num_hosts,
            "MASTER_PORT": port,
        }
        return {"MASTER_ADDR": address, **{name: str(number) for name, number in numbers.items()}}

    def require_size(self, decision: Decision) -> None:
        """Raises :class:`RankCountError` where the job has another number of ranks than the plan."""
        if self.num_ranks != decision.num_ranks:
            hosts = ranks_by_host(decision)
            shown = torchrun_commands(list(hosts), [len(ranks) for ranks in hosts.values()])
            if self.over_mpi:
                shown = [f"mpiexec -n {decision.num_ranks} halopipe run PLAN"]
            raise RankCountError(
                f"the plan is for {decision.num_ranks} ranks, the job has {self.num_ranks}",
                [f"WORLD_SIZE is {self.num_ranks}"],
                [*shown, f"halopipe plan PROFILE --ranks {self.num_ranks}"],
            )

    def planned_rank(self, decision: Decision) -> int:
        """The rank of the plan that this process is.

        Where the job has as many hosts as the plan, the plan's first host is the job's first: its ranks run there, in
        order.  Else ranks are those of the job, as for a plan for several hosts that is tried on one.

        Raises:
            RankCountError: this host of the job has another number of ranks than the plan's.
        """
        hosts = ranks_by_host(decision)
        if self.num_hosts == 1 or self.num_hosts != len(hosts):
            return self.rank
        name, ranks = list(hosts.items())[self.host]
        if self.num_local != len(ranks):
            start = "mpiexec with so many slots for" if self.over_mpi else f"torchrun --nproc-per-node {len(ranks)} on"
            raise RankCountError(
                f"the plan has {len(ranks)} ranks on {name}, host {self.host} of the job has {self.num_local}",
                [f"ranks {', '.join(map(str, ranks))}", f"LOCAL_WORLD_SIZE is {self.num_local}"],
                [f"{start} that host", "plan for the devices that there are"],
            )
        return ranks[self.local_rank]


def job_rank(environment: MutableMapping[str, str] = os.environ) -> JobRank | None:
    """The rank that torchrun or mpiexec made of this process; None: it is no rank.

    What torchrun says is in ``environment`` afterwards, also of a rank that mpiexec started.

    Raises:
        UsageError: rank, size or port are no numbers that fit together; MPI cannot be loaded, or is not the launcher's;
            or Slurm started this process as one of several tasks, without torchrun or MPI.
        DeadlineError: not all processes of an MPI job came.
    """
    if not ("RANK" in environment and "WORLD_SIZE" in environment):
        started = num_started_by_mpi(environment)
        if started == 1:
            _require_no_slurm_task(environment)
            return None
        environment.update(_torchruns_variables(started, environment))
    ranks = _number(environment, "WORLD_SIZE", 1, MOST_DEVICES)
    rank = _number(environment, "RANK", 0, ranks - 1)
    _number(environment, "MASTER_PORT", 0, 65_535, 0)
    hosts = _number(environment, "GROUP_WORLD_SIZE", 1, ranks, 1)
    return JobRank(
        rank,
        ranks,
        _number(environment, "LOCAL_RANK", 0, ranks - 1, rank),
        _number(environment, "LOCAL_WORLD_SIZE", 1, ranks, 0),
        _number(environment, "GROUP_RANK", 0, hosts - 1, 0),
        hosts,
        MPI_JOB in environment,
    )


def num_started_by_mpi(environment: Mapping[str, str]) -> int:
    """How many processes mpiexec, or srun with MPI, started together with this one; 1 also where neither did."""
    for rank, size in _MPI_LAUNCHERS:
        if rank in environment and size in environment:
            return _number(environment, size, 1, MOST_DEVICES, teller="the launcher of MPI")
    return 1


def _torchruns_variables(num_started: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would say to this process; called by all of them.

    Args:
        num_started: processes, as the launcher says.

    Raises:
        UsageError: there is no MPI, or another one than the launcher's.
        DeadlineError: not all of them came.
    """
    from runtime.transport.mpi_requests import library, load_mpi, meet

    try:
        mpi = load_mpi(SETUP_S)
    except TransportError as error:
        title = f"this process is one of {num_started} of an MPI job, and MPI cannot be loaded"
        raise UsageError(title, error.details, [*error.remedies, "torchrun needs no MPI"]) from error
    world = mpi.COMM_WORLD
    if world.size != num_started:
        raise UsageError(
            f"the launcher started {num_started} processes, MPI knows {world.size}",
            [f"mpi4py uses {library(mpi)}"],
            [
                "start with the mpiexec of that MPI; the one of a wheel lies beside python",
                "under Slurm: srun --mpi=pmix, or --mpi=pmi2 for MPICH",
            ],
        )
    meet(world, SETUP_S)
    local = world.Split_type(mpi.COMM_TYPE_SHARED, world.rank)
    first = local.bcast(world.rank)
    firsts = sorted(set(world.allgather(first)))  # of each host
    meeting = world.bcast((_address(len(firsts) > 1, environment), _free_port()) if world.rank == 0 else None)
    here = JobRank(world.rank, world.size, local.rank, local.size, firsts.index(first), len(firsts))
    return {**here.variables(*meeting), MPI_JOB: "1"}


def _address(several_hosts: bool, environment: Mapping[str, str]) -> str:
    """Where the others reach this host."""
    if not several_hosts:
        return LOOPBACK
    if environment.get(GLOO):
        return address_of(environment[GLOO])
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = LOOPBACK
    return address_of(interface_towards(address, several_hosts=True)) if is_loopback(address) else address


def _free_port() -> int:
    """A port that nobody else is given before the store listens there: the socket stays bound, and never listens."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port = int(holder.getsockname()[1])
    holder.detach()
    return port


def ranks_by_host(decision: Decision) -> dict[str, tuple[int, ...]]:
    """The plan's hosts in the order of their first ranks, each with its ranks; a rank without a device joins the last.

    The host of device ``n0/cpu1`` is ``n0``.
    """
    hosts: dict[str, list[int]] = {}
    host = ""
    for rank, device in enumerate(devices_of(decision)):
        host = device.rpartition("/")[0] if device else host
        hosts.setdefault(host, []).append(rank)
    return {name: tuple(ranks) for name, ranks in hosts.items()}


def torchrun_commands(hosts: Sequence[str], num_ranks: Sequence[int], verb_line: str = "run PLAN") -> list[str]:
    """What starts a job of ``num_ranks`` on ``hosts``, a command for each."""
    if len(hosts) == 1:
        return [f"torchrun --nproc-per-node {num_ranks[0]} -m halopipe {verb_line}"]
    meeting = f"--master-addr {shlex.quote(hosts[0].rpartition('@')[2])} --master-port {PORT}"
    return [
        f"on {shlex.quote(host)}: torchrun --nnodes {len(hosts)} --node-rank {number} --nproc-per-node {count} "
        f"{meeting} -m halopipe {verb_line}"
        for number, (host, count) in enumerate(zip(hosts, num_ranks, strict=True))
    ]


def hosts_refused(path: Path, verb_line: str, decision: Decision | None = None) -> UsageError:
    """What ``--hosts FILE`` is answered with: the commands that torchrun needs in its place.

    Args:
        verb_line: the command line, from the verb on.
        decision: says how many ranks each host has; None: the file does, by ``slots=N``.
    """
    counts = [] if decision is None else [len(ranks) for ranks in ranks_by_host(decision).values()]
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text(encoding="utf-8").splitlines()]
        hosts = [(line[0], line[-1].removeprefix("slots=")) for line in lines if line]
    except (OSError, UnicodeDecodeError):
        hosts = []
    names = [name for name, _ in hosts] or ["HOST0", "HOST1"]
    if not counts:
        counts = [int(slots) if slots.isdecimal() else 1 for _, slots in hosts] or [1, 1]
    names += [f"HOST{number}" for number in range(len(names), len(counts))]
    shown = torchrun_commands(names[: len(counts)], counts[: len(names)], verb_line)
    return UsageError("--hosts starts nothing: torchrun starts the ranks of several hosts", [], shown)


def _require_no_slurm_task(environment: Mapping[str, str]) -> None:
    """Raises where ``srun`` started several of this process; a batch script has the same variables, but no step."""
    is_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    if "SLURM_PROCID" in environment and not is_script and tasks != "1":
        raise UsageError(
            f"Slurm started this process as one of {tasks} tasks, and none of them knows the others",
            [f"SLURM_PROCID is {environment['SLURM_PROCID']}, and RANK is not set"],
            [f"start torchrun, once a host: {_SRUN}", "with MPI: srun --mpi=pmix halopipe ..."],
        )


def _number(
    environment: Mapping[str, str],
    name: str,
    least: int,
    most: int,
    otherwise: int | None = None,
    teller: str = "torchrun",
) -> int:
    if otherwise is not None and name not in environment:
        return otherwise
    text = environment[name]
    if not (text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        expected = f"a number from {least} to {most} is expected of {teller}"
        raise UsageError(f"{name} is {text!r}", [expected], [f"unset {name}, to run outside of a job"])
    return int(text)


def interfaces() -> dict[str, str]:
    """IPv4 addresses by name of interface; those without one are left out."""
    addresses = {}
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def address_of(interface: str) -> str:
    """The address to bind to: that of an interface of this host, or ``interface`` itself if it is such an address.

    Raises:
        UsageError: this host has no such interface.
    """
    addresses = interfaces()
    if interface in addresses.values():
        return interface
    if interface not in addresses:
        raise UsageError(
            f"this host has no interface {interface}",
            [f"it has {', '.join(f'{name} ({address})' for name, address in addresses.items())}"],
            [f"name one of these: {GLOO}=..."],
        )
    return addresses[interface]


def interface_towards(host: str, several_hosts: bool = False) -> str:
    """The name of the interface that leads to ``host``; empty if it cannot be told.

    Args:
        several_hosts: the others are not all on this host, so that the loopback interface cannot be meant: a host's own
            name often resolves to it.
    """
    names = {address: name for name, address in reversed(interfaces().items())}
    for target in (host, _ANYWHERE):
        with contextlib.suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # chooses a route; a datagram socket sends nothing by that
            address = probe.getsockname()[0]
            if not (several_hosts and is_loopback(address)):
                return names.get(address, "lo" if is_loopback(address) else "")  # 127.0.1.1 is on no list
    return next((name for address, name in reversed(names.items()) if not is_loopback(address)), "")


def choose_gloo_interface(environment: MutableMapping[str, str]) -> None:
    """Tell gloo the interface that leads to ``MASTER_ADDR``, where the job's environment does not name one."""
    master = environment.get("MASTER_ADDR", "")
    if environment.get(GLOO) or not master:
        return
    is_spread = environment.get("LOCAL_WORLD_SIZE", "") not in ("", environment.get("WORLD_SIZE"))
    interface = interface_towards(master, several_hosts=is_spread)
    if interface:
        environment[GLOO] = interface


def is_loopback(address: str) -> bool:
    """Whether only this host can reach the address."""
    return ipaddress.ip_address(address).is_loopback
