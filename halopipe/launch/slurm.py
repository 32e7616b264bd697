"""Slurm's variables as those that torchrun sets: ``srun halopipe run plan.json`` needs nothing else.

SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_NODELIST=node[07,09-11] SLURM_JOB_ID=4711
-> RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=node07 MASTER_PORT=14711
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from planner.ir.errors import UsageError

FIRST_PORT, NUM_PORTS = 10_000, 20_000
"""Ports of stores: above those of services, below those that hosts choose by themselves (32768 up)."""

_GROUP = re.compile(r"([^,\[\]]*)\[([^\[\]]*)\]")


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process; the batch script itself has the same variables, but no step's number."""
    has_rank = "SLURM_PROCID" in environment and _num_tasks(environment) != ""
    is_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    return has_rank and not is_script


def job_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set; empty outside a Slurm step, or where ``RANK`` is set already.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are kept where set; else the first host, and a port by the job's number.

    Raises:
        UsageError: a variable is missing or cannot be read.
    """
    if "RANK" in environment or not is_task(environment):
        return {}
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    first = environment.get("MASTER_ADDR") or next(expand(hosts), "")
    if not first:
        raise UsageError("Slurm does not say on which hosts this job runs", ["SLURM_JOB_NODELIST is empty"])
    number = _number(environment, "SLURM_JOB_ID") + _number(environment, "SLURM_STEP_ID")
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": _num_tasks(environment),
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "GROUP_RANK": environment.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": first,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(FIRST_PORT + number % NUM_PORTS),
    }
    local = _tasks_here(environment)
    return {**found, "LOCAL_WORLD_SIZE": local} if local else found


def expand(nodelist: str) -> Iterator[str]:
    """The hosts of a list such as ``gpu[01-03,07],login``, in order; numbers keep their zeros.

    Raises:
        UsageError: it is no such list.
    """
    for part in _parts(nodelist):
        yield from _expand(part, nodelist)


def _parts(nodelist: str) -> Iterator[str]:
    """Split at commas outside brackets."""
    depth, start = 0, 0
    for index, letter in enumerate(nodelist):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            yield nodelist[start:index].strip()
            start = index + 1
    if depth:
        raise _unreadable(nodelist)
    if nodelist[start:].strip():
        yield nodelist[start:].strip()


def _expand(part: str, nodelist: str) -> Iterator[str]:
    match = _GROUP.match(part)
    if match is None:
        if not part or "[" in part or "]" in part:
            raise _unreadable(nodelist)
        yield part
        return
    rest = part[match.end() :]
    endings = list(_expand(rest, nodelist)) if rest else [""]
    for number in _numbers(match.group(2), nodelist):
        yield from (f"{match.group(1)}{number}{ending}" for ending in endings)


def _numbers(text: str, nodelist: str) -> Iterator[str]:
    for item in text.split(","):
        first, dash, last = (piece.strip() for piece in item.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) < int(first):
            raise _unreadable(nodelist)
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))


def _unreadable(nodelist: str) -> UsageError:
    return UsageError(f"cannot read Slurm's list of hosts: {nodelist!r}", ["expected such as gpu[01-03,07],login"])


def _num_tasks(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "")


def _tasks_here(environment: Mapping[str, str]) -> str:
    """Tasks on this host, from a list such as ``4(x2),3``: hosts with 4, 4 and 3 tasks; empty if it is not said."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    found: list[str] = []
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return ""
        found += [match.group(1)] * int(match.group(2) or 1)
    host = _number(environment, "SLURM_NODEID")
    return found[host] if host < len(found) else ""


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}", ["expected a number"])
    return int(text)
