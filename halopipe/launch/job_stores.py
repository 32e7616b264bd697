"""Where the ranks of a job meet: the store at the address that a rank's environment says, whoever started it.

A launcher of this host hosts the store of its ranks; torchrun hosts one, as it likes; where processes were started in
another way, with the same variables, rank 0 hosts it at ``MASTER_ADDR``, on that address and no other.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from cuda_ops._torch import PrefixStore
from halopipe.launch.job_environment import ATTEMPT, GLOO, address_of, choose_gloo_interface, is_loopback
from planner.ir.errors import TransportError, UsageError
from runtime.monitor.activity import StatusStore
from runtime.monitor.watch import host_store, join_store, meet
from runtime.timeouts import SETUP_S

if TYPE_CHECKING:
    from cuda_ops._torch import Store


def job_stores(rank: int, num_ranks: int) -> tuple[Store, StatusStore]:
    """The store of this attempt of the job, once all ranks are there, to wait with; and another client of it, to talk.

    Raises:
        TransportError: there is no store, or it cannot be reached.
        DeadlineError: not all ranks came.
    """
    choose_gloo_interface(os.environ)
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise UsageError(
            "this job does not say where its ranks meet",
            [f"MASTER_ADDR is {address!r}, MASTER_PORT is {port!r}"],
            ["start with torchrun, or set both to an address and a free port of the host of rank 0"],
        )
    attempt = os.environ.pop(ATTEMPT, "")  # it is this process's alone: a job that it starts has stores of its own
    is_hosted = bool(attempt) or is_torchruns_store()
    if not is_hosted:
        address = _reached(address, rank)
    hosts_it = rank == 0 and not is_hosted
    store = host_store(address, int(port)) if hosts_it else join_store(address, int(port), SETUP_S)
    board = join_store(address, int(port))
    attempt = attempt or meet(store, rank, num_ranks)
    return PrefixStore(attempt, store), StatusStore(PrefixStore(attempt, board))


def is_torchruns_store() -> bool:
    """Whether torchrun's agent hosts the store of the job, which then outlives its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _reached(address: str, rank: int) -> str:
    """``MASTER_ADDR`` as a rank reaches it.

    On the host of rank 0 a host's own name may stand for the loopback interface, which other hosts do not reach.
    """
    try:
        resolved = socket.gethostbyname(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a..b
        if rank:
            return address
        raise TransportError(f"MASTER_ADDR {address!r} is no host", [str(error)]) from error
    if rank and not is_loopback(resolved):  # rank 0 is on another host
        return address
    interface = os.environ.get(GLOO, "")
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE") or interface in ("", "lo")
    return resolved if is_alone or not is_loopback(resolved) else address_of(interface)
