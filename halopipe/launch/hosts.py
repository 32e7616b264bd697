"""The hosts of a run: a host file in Open MPI's form, matched to the hosts of the plan's devices.

    # plan's first host, then its second
    node07 slots=2
    alice@node09 slots=4

A plan made for devices ``n0/cpu0 n0/cpu1 n1/cpu0`` runs ranks 0 and 1 on ``node07`` and rank 2 on ``node09``.
"""

from __future__ import annotations

import os
import shlex
import socket
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.ir.errors import CorruptFileError, MissingFileError, RankCountError, UsageError
from planner.ir.files import read_text
from planner.ir.plan import Decision

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=5 {host}"
"""The launcher by default: it never asks for a password, and notices a lost connection within 15 s."""

_MOST_BYTES = 2**20
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_SHELLS = frozenset({"ssh", "rsh"})
"""Launchers that hand their words to a shell on the other side, hence need them quoted."""

_HOST, _COMMAND = "{host}", "{command}"
_LETTERS = frozenset(string.ascii_letters + string.digits + "._-@:[]%")


@dataclass(frozen=True, slots=True)
class Host:
    """One line of the file.

    Attributes:
        slots: the most ranks it may get; None: as many as the plan puts there.
    """

    name: str
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class Hosts:
    """Where the ranks of a plan run.

    Attributes:
        launcher: what starts a command on a host: a line with ``{host}``, and ``{command}`` where it is not to be
            appended; ``ssh`` if empty.
        interface: name or address of the interface that the store of the job listens on, and (by name) that the ranks
            talk over; if empty, those that lead from host to host.
    """

    hosts: tuple[Host, ...]
    launcher: str = ""
    interface: str = ""

    def command(self, host: str, words: tuple[str, ...]) -> list[str]:
        """``words`` as a command that runs on ``host``; as they are where that is this host and no launcher is named.

        Raises:
            UsageError: the launcher cannot be understood.
        """
        if not self.launcher and is_here(host):
            return list(words)
        template = _words(self.launcher or SSH)
        line = shlex.join(words)
        filled = [word.replace(_HOST, host).replace(_COMMAND, line) for word in template]
        if any(_COMMAND in word for word in template):
            return filled
        return [*filled, line] if Path(filled[0]).name in _SHELLS else [*filled, *words]


def named(path: Path | None, launcher: str = "", interface: str = "") -> Hosts | None:
    """The hosts of a command line; None if it names none.

    Raises:
        UsageError: it says how to reach hosts, but not which.
    """
    if path is None:
        if launcher or interface:
            option = "--launcher" if launcher else "--interface"
            raise UsageError(f"{option} is for hosts of a file", ["there is no --hosts"], ["add --hosts hosts.txt"])
        return None
    return Hosts(read_hosts(path), launcher, interface)


def read_hosts(path: Path) -> tuple[Host, ...]:
    """The hosts of a file, in order; a host named twice has the slots of both lines.

    Raises:
        MissingFileError: it cannot be read.
        CorruptFileError: it names the line that is not ``host [slots=N]``.
    """
    try:
        lines = read_text(path, _MOST_BYTES).splitlines()
    except MissingFileError as error:
        raise MissingFileError(f"cannot read the host file {path}", error.details) from None
    found: dict[str, int | None] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if words:
            host = _parse(words, f"{path}:{number}: {line.strip()!r}")
            before = found.get(host.name, 0)
            found[host.name] = None if host.slots is None or before is None else before + host.slots
    if not found:
        raise CorruptFileError(f"the host file {path} names no host", remedies=["write one host a line"])
    return tuple(Host(name, slots) for name, slots in found.items())


def place(decision: Decision, hosts: tuple[Host, ...]) -> dict[str, tuple[int, ...]]:
    """The ranks of each host that has any: the hosts of the plan's devices are matched to ``hosts`` in order.

    Raises:
        RankCountError: there are fewer hosts than the plan has, or one has too few slots.
    """
    ranks_of = ranks_by_host(decision)
    if len(ranks_of) > len(hosts):
        raise RankCountError(
            f"the plan is for {len(ranks_of)} hosts, the host file names {len(hosts)}",
            [f"the plan's: {', '.join(ranks_of)}", f"the file's: {', '.join(host.name for host in hosts)}"],
            ["add hosts to the file, or plan for those that there are"],
        )
    placed = {}
    for (meant, ranks), host in zip(ranks_of.items(), hosts, strict=False):
        if host.slots is not None and len(ranks) > host.slots:
            raise RankCountError(
                f"the plan has {len(ranks)} ranks on {meant}, its host {host.name} has slots={host.slots}",
                [f"ranks {', '.join(map(str, ranks))}"],
                [f"write '{host.name} slots={len(ranks)}', or plan for devices on more hosts"],
            )
        placed[host.name] = ranks
    return placed


def ranks_by_host(decision: Decision) -> dict[str, tuple[int, ...]]:
    """The plan's hosts in the order of their first ranks, each with its ranks; a rank without a device joins the last.

    The host of device ``n0/cpu1`` is ``n0``.
    """
    device_of: dict[int, str] = {}
    for stage in decision.stages:
        for rank, device in zip(stage.ranks, stage.devices, strict=False):
            device_of.setdefault(rank, device)
    found: dict[str, list[int]] = {}
    host = ""
    for rank in range(decision.num_ranks):
        host = device_of[rank].rpartition("/")[0] if rank in device_of else host
        found.setdefault(host, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def is_here(host: str) -> bool:
    """Whether the name stands for this host."""
    return host in _LOCAL or host in (socket.gethostname(), os.uname().nodename)


def _parse(words: list[str], where: str) -> Host:
    name, *options = words
    if not set(name) <= _LETTERS or name.startswith("-"):  # it becomes a word of a command
        raise CorruptFileError(f"{where}: {name!r} is no name of a host")
    settings: Mapping[str, str] = dict(option.split("=", 1) for option in options if "=" in option)
    unknown = [option for option in options if option.split("=", 1)[0] not in ("slots", "max_slots", "max-slots")]
    slots = settings.get("slots", "")
    if (
        unknown
        or len(settings) < len(options)
        or (slots and not (slots.isdecimal() and len(slots) < 10 and int(slots) > 0))
    ):
        raise CorruptFileError(f"{where}: not understood", ["expected: host [slots=N], with N of at least 1"])
    return Host(name, int(slots) if slots else None)


def _words(launcher: str) -> list[str]:
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise UsageError(f"cannot read the launcher {launcher!r}", [str(error)]) from error
    if not words or not any(_HOST in word for word in words):
        raise UsageError(
            f"the launcher {launcher!r} does not say where the host's name goes",
            ["{host} is not in it"],
            [f"such as '{SSH}'"],
        )
    return words
