"""Where a rank of a plan computes: on a core of its host (``n0/cpu0``), or the GPU that the plan names (``n0/gpu1``).

Plans are also made for machines that are not here, of the catalogue or of a cluster file.  What a rank may run on:

    planned for            runs on                 error of the prediction
    a core                 a core of this host     where the processor is the planned one
    a GPU                  a GPU of that number    where it is the planned one; without one the plan is refused
    anything else          nothing: it is refused (FPGAs, IPUs, TPUs, ...: no backend of ours drives them)
    any, --device cpu      a core of this host     none: the program is the plan's, the seconds are the host's

:func:`require_devices` says so for every way to start a plan: ``halopipe run`` and ``serve``, ``hp.run``,
``hp.parallelize``, ``hp.execute``, torchrun and mpiexec.

From that follow the cores of its process, the device of its tensors and the transport: NCCL where every rank has a GPU
of its own, MPI in a job that mpiexec started, else memory that ranks of a host share, and gloo between hosts (tensors
of GPUs then go by way of their hosts).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cuda_ops.device.gpus import num_gpus, why_no_gpu
from cuda_ops.device.host import core_of, cores_beside, device_description, prepare_process, spare_core
from halopipe.planning.plan_files import devices_of
from halopipe.run_spec.options import AUTO
from planner.ir.errors import MissingDeviceError, UsageError
from planner.ir.extras import extras
from planner.ir.plan import Decision, RankPrediction
from planner.ir.planner_extra import PlannerExtra
from planner.ir.program import Program

if TYPE_CHECKING:
    import torch

    from cuda_ops._torch import Store
    from runtime.transport import Transport

AS_PLANNED, ON_CPU = DEVICES = "", "cpu"
"""Where a run computes: on the devices that the plan names, or on the processors of their hosts."""

_GPU = re.compile(r"gpu(\d+)")
_DRIVEN = re.compile(r"(cpu\d*|gpu\d+)?")
"""What ranks can compute on, by the names of devices; plans made by hand may name none."""
_MOST_NAMED = 4
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Where one rank computes.

    Attributes:
        name: of the device in the plan.
        gpu: its number on the rank's host; None: a core.
        beside: GPUs of the plan on that host that come before it, and how many there are in all.
        over_nccl: whether all ranks exchange over NCCL.
        is_driven: whether there is a backend for such a device.
    """

    rank: int
    name: str
    gpu: int | None = None
    beside: tuple[int, int] = (0, 1)
    over_nccl: bool = False
    is_driven: bool = True


def device_assignment_of(decision: Decision, rank: int, on: str = AS_PLANNED) -> DeviceAssignment:
    """The device of ``rank``.

    Args:
        on: one of ``DEVICES``.
    """
    return device_assignments_of(decision, on)[rank]


def device_assignments_of(decision: Decision, on: str = AS_PLANNED) -> tuple[DeviceAssignment, ...]:
    """The devices of all ranks.

    Raises:
        UsageError: ``on`` is not known.
    """
    if on not in DEVICES:
        raise UsageError(f"device {on!r} is not known", [], ["cpu, or leave it out: the plan's devices"])
    names = devices_of(decision)
    numbers = [_gpu(name) if on == AS_PLANNED else None for name in names]
    places = [(name.rpartition("/")[0], number) for name, number in zip(names, numbers, strict=True)]
    over_nccl = None not in numbers and len(set(places)) == len(places)
    assignments = []
    for rank, (name, (host, number)) in enumerate(zip(names, places, strict=True)):
        mates = sorted({other for there, other in places if there == host and other is not None})
        beside = (0, 1) if number is None else (mates.index(number), len(mates))
        is_driven = on != AS_PLANNED or _DRIVEN.fullmatch(name.rpartition("/")[2]) is not None
        assignments.append(DeviceAssignment(rank, name, number, beside, over_nccl, is_driven))
    return tuple(assignments)


def on_gpus(assignments: Sequence[DeviceAssignment]) -> bool:
    """Whether a rank computes on a GPU."""
    return any(assignment.gpu is not None for assignment in assignments)


def require_devices(assignments: Sequence[DeviceAssignment], ranks: Sequence[RankPrediction] = ()) -> None:
    """Refuses devices of this host that it does not have.

    Args:
        ranks: what the plan predicts of all its ranks: they name the kind of each device.

    Raises:
        MissingDeviceError: a device is none that a rank can compute on, torch finds no GPU, or too few.
    """
    strange = [assignment for assignment in assignments if not assignment.is_driven]
    if strange:
        first = strange[0]
        kind = next((f", a device of kind {one.kind}" for one in ranks if one.rank == first.rank and one.kind), "")
        names = ", ".join(assignment.name for assignment in strange[:_MOST_NAMED]) + (
            ", ..." if strange[_MOST_NAMED:] else ""
        )
        raise MissingDeviceError(
            f"rank {first.rank} is to run on {first.name}{kind}: halopipe computes on CPU cores and GPUs alone",
            [f"the plan is for {len(strange)} of those: {names}", f"this host has {_here()}"],
            [
                "halopipe profile MODEL, and plan from that: a plan for this host",
                'halopipe explain PLAN --profile PROFILE --what-if "link within-host.speed=2": how it would do there',
                "halopipe export PLAN: its program and tables for another launcher",
                "--device cpu: the same program on the processor, to see that it computes the right thing",
            ],
        )
    if not on_gpus(assignments):
        return
    wanted = [assignment for assignment in assignments if assignment.gpu is not None]
    remedies = ["--device cpu: the same plan on the processor", "plan for the devices of this host"]
    if why := why_no_gpu():
        raise MissingDeviceError(f"rank {wanted[0].rank} is to run on {wanted[0].name}", [why], remedies)
    there = num_gpus()
    for assignment in wanted:
        if number_here(assignment, there) >= there:
            raise MissingDeviceError(
                f"rank {assignment.rank} is to run on {assignment.name}, this host has {there} GPUs",
                [f"the plan has {assignment.beside[1]} of them on that host", f"{_visible()}"],
                remedies,
            )


def number_here(assignment: DeviceAssignment, there: int, environment: Mapping[str, str] = os.environ) -> int:
    """What this process calls its assigned GPU, of ``there`` GPUs that it sees.

    A job whose launcher gives each rank a GPU of its own (Slurm's ``--gpus-per-task=1``) sees but that one.
    """
    number = assignment.gpu or 0
    return 0 if number >= there == 1 and "LOCAL_RANK" in environment else number


def prepare(assignment: DeviceAssignment, local_rank: int) -> None:
    """Make this process that of ``assignment``: its cores, and its allocator.  Call it before torch is loaded.

    Args:
        local_rank: among the ranks of this host: a rank that computes on a core has that of its number.
    """
    prepare_process(core_of(local_rank) if assignment.gpu is None else cores_beside(*assignment.beside))


def beside(assignment: DeviceAssignment, local_rank: int, decision: Decision) -> tuple[int | None, bool]:
    """Where a thread works beside the rank: (a core of this host that no rank has, or None; whether it gives way).

    It gives way where the plan means it to work while the rank waits, and has given the rank a core of its own; ranks
    that share cores take turns anyhow.  Call it before :func:`prepare`, which leaves the process one core.
    """
    if assignment.gpu is not None:
        return None, False
    hosts = hosts_of(decision)
    num_here = sum(host in ("", hosts[assignment.rank]) for host in hosts)
    core = spare_core(local_rank, num_here)
    return core, decision.prepares_next_step and core is None and num_here <= device_description().num_cores


def device_of(assignment: DeviceAssignment, ranks: Sequence[RankPrediction] = ()) -> torch.device | None:
    """Where the rank's stages compute, which is made the current device; None: on the processor.

    Args:
        ranks: as of :func:`require_devices`.

    Raises:
        MissingDeviceError: the device is not there.
    """
    require_devices([assignment], ranks)
    if assignment.gpu is None:
        return None
    import torch  # late: the process is prepared before

    device = torch.device("cuda", number_here(assignment, num_gpus()))
    torch.cuda.set_device(device)
    return device


def kind_of(device: torch.device | None, planned: str) -> str:
    """The kind of the device that a rank runs on: ``planned`` where it is that one, else as the driver calls it.

    Args:
        device: what :func:`device_of` gave.
        planned: a kind of a profile, or a name of the catalogue.
    """
    if device is None or device.type != "cuda":
        own = device_description().processor
        name_parts = _words(planned)
        return planned if planned and name_parts <= _words(own) | {"core"} else own
    import torch

    own = str(torch.cuda.get_device_name(device))
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    names = [extra.device_name(own, memory_bytes) for extra in extras(PlannerExtra)]
    return planned if planned in (own, *names) else own


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def opened(
    assignment: DeviceAssignment,
    device: torch.device | None,
    hosts: Sequence[str],
    store: Store,
    groups: tuple[tuple[int, ...], ...],
    program: Callable[[], Program],
    timeout_s: float,
    transport: str = AUTO,
    *,
    sleeps: bool = False,
) -> Transport:
    """The transport of a rank.

    Args:
        device: what :func:`device_of` gave.
        hosts: of each rank, in the plan.
        transport: one of ``TRANSPORTS``.
        program: asked where the transport must know it: NCCL has a communicator for each of its channels.
        sleeps: whether the rank's waits leave its core to another thread.
    """
    from halopipe.data.batch_sources import MESSAGE_KINDS
    from runtime.transport import open_named

    if transport or not assignment.over_nccl or device is None:
        return open_named(transport, assignment.rank, store, timeout_s, groups, hosts, sleeps=sleeps)
    interface = os.environ.get(_GLOO_INTERFACE, "")
    if interface not in ("", "lo"):
        os.environ.setdefault(_NCCL_INTERFACE, interface)
    from runtime.transport import channels_of, open_nccl

    channels = channels_of(program())
    return open_nccl(str(device), channels, assignment.rank, len(hosts), store, timeout_s, groups, MESSAGE_KINDS)


def hosts_of(decision: Decision) -> tuple[str, ...]:
    """The host of each rank; empty where the plan names none."""
    return tuple(name.rpartition("/")[0] for name in devices_of(decision))


def _gpu(name: str) -> int | None:
    match = _GPU.fullmatch(name.rpartition("/")[2])
    return int(match.group(1)) if match else None


def _here() -> str:
    """What a plan for this host could use, in words."""
    host = device_description()
    gpus = 0 if why_no_gpu() else num_gpus()
    cores = f"{host.num_cores} core{'s' if host.num_cores != 1 else ''} of {host.processor}"
    return f"{cores} and {gpus or 'no'} GPU{'s' if gpus != 1 else ''}"


def _visible() -> str:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if chosen is None else f"CUDA_VISIBLE_DEVICES is {chosen!r}"
