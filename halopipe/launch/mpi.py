"""A job that mpiexec started, or srun with MPI: its processes get the variables that torchrun would give them.

mpiexec -n 4 halopipe run plan.json

What goes by these variables then works as under torchrun: ranks and hosts, the store of the job, which rank 0 hosts at
an address that it tells the others by MPI, errors, exit codes, scripts of one's own.  Only the transport is another.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from halopipe.launch.job_environment import GLOO, LOOPBACK, address_of, interface_towards, is_loopback
from halopipe.training.rank_device import MPI_JOB
from planner.ir.errors import TransportError, UsageError


def torchruns_variables(num_started: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What torchrun would say to this process; called by all of them.

    Args:
        num_started: processes, as the launcher says.

    Raises:
        UsageError: there is no MPI, or another one than the launcher's.
        DeadlineError: not all of them came.
    """
    from runtime.monitor.watch import SETUP_S  # late: loads torch
    from runtime.transport.mpi import load_mpi, meet

    try:
        mpi = load_mpi(SETUP_S)
    except TransportError as error:
        title = f"this process is one of {num_started} of an MPI job, and MPI cannot be loaded"
        raise UsageError(title, error.details, [*error.remedies, "torchrun needs no MPI"]) from error
    world = mpi.COMM_WORLD
    if world.size != num_started:
        raise UsageError(
            f"the launcher started {num_started} processes, MPI knows {world.size}",
            [f"mpi4py uses {mpi.Get_library_version().splitlines()[0]}"],
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
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(local.rank),
        "LOCAL_WORLD_SIZE": str(local.size),
        "GROUP_RANK": str(firsts.index(first)),
        "GROUP_WORLD_SIZE": str(len(firsts)),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
        MPI_JOB: "1",
    }


def _address(several_hosts: bool, environment: Mapping[str, str]) -> str:
    """Where the others reach this host."""
    if not several_hosts:
        return LOOPBACK
    if environment.get(GLOO):
        return address_of(environment[GLOO])
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        found = LOOPBACK
    return address_of(interface_towards(found, several_hosts=True)) if is_loopback(found) else found


def _free_port() -> int:
    """A port that nobody else is given before the store listens there: the socket stays bound, and never listens."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port = int(holder.getsockname()[1])
    holder.detach()
    return port
