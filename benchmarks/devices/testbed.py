"""Several hosts on one machine: network namespaces joined by a bridge, each link at the rate it is told.

    n0 [eth0]----[port0] switch [port1]----[eth0] n1         tbf on eth0 (egress) and on port (ingress)

Every host is a namespace with one interface ``eth0``; the bridge lives in a namespace of its own, so that the machine's
own network never sees any of it, and removing the namespaces removes everything.  Needs root, ``ip`` and ``tc``.

    with Testbed.build(2, RATES["1gbit"]) as testbed:
        testbed.start(0, ["python", "-m", "http.server"])

A large message takes its bytes / (rate x ``PAYLOAD_SHARE``); the rest of the rate are headers of Ethernet, IP and TCP.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PAYLOAD_SHARE = 1448 / 1514
"""What TCP carries of each frame that tbf counts: 1500 bytes less 52 of headers, of 1514 with Ethernet's own."""

INTERFACE = "eth0"
_PREFIX = "halopipe"
_CLONE_NEWNET = 0x40000000
"""<sched.h>"""
_QUEUE_S = 0.05
"""The longest that a packet waits for its turn; beyond it is dropped."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a host's link carries in each direction.

    Attributes:
        burst_bytes: what may pass at once after silence: too little starves fast links, too much hides the rate.
    """

    bits_per_s: float
    burst_bytes: int

    @property
    def payload_bytes_per_s(self) -> float:
        """What large messages see of it."""
        return self.bits_per_s / 8 * PAYLOAD_SHARE


RATES: Mapping[str, Rate] = {
    "200mbit": Rate(200e6, 32_000),
    "1gbit": Rate(1e9, 64_000),
    "4gbit": Rate(4e9, 128_000),
}


class TestbedError(Exception):
    """The machine refused something; the text is the command and what it said."""

    __test__ = False  # for pytest


@dataclass(frozen=True, slots=True)
class Host:
    """One host: ``name`` is its namespace."""

    name: str
    address: str


@dataclass(slots=True)
class Testbed:
    """Hosts that are there; use as a context, which removes them and ends what still runs on them.

    Attributes:
        hosts: in order; host ``i`` has address ``10.77.0.(i + 1)``.
    """

    __test__ = False  # for pytest

    name: str
    hosts: tuple[Host, ...]
    rate: Rate | None
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @classmethod
    def build(cls, num_hosts: int, rate: Rate | None = None, name: str = "") -> Testbed:
        """Make the hosts and shape their links; nothing is left if that fails.

        Args:
            rate: of every link; None leaves them as fast as the machine is.
            name: in the names of the namespaces; one of this process if not given.

        Raises:
            TestbedError: it cannot be done here.
        """
        sweep()
        label = f"{_PREFIX}-{name or os.getpid()}"
        testbed = cls(label, tuple(Host(f"{label}-n{i}", f"10.77.0.{i + 1}") for i in range(num_hosts)), rate)
        remove(label)
        try:
            testbed._add_switch()
            for number in range(num_hosts):
                testbed._add_host(number)
                if rate is not None:
                    testbed._shape(number, rate)
        except BaseException:
            testbed.close()
            raise
        return testbed

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that was started on the hosts, then remove them."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        remove(self.name)

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """``arguments`` as a command that runs on a host."""
        return ["ip", "netns", "exec", self.hosts[host].name, *arguments]

    def start(self, host: int, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host, in a session of its own; ``options`` are those of ``subprocess.Popen``."""
        process = subprocess.Popen(self.command(host, arguments), start_new_session=True, **options)
        self._started.append(process)
        return process

    def enter(self, host: int) -> None:
        """Move the calling process to a host; it must have one thread only, since others would stay where they are.

        Raises:
            TestbedError: the machine refuses.
        """
        with open(f"/var/run/netns/{self.hosts[host].name}", encoding="ascii") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise TestbedError(f"setns: {os.strerror(ctypes.get_errno())}")

    def cut(self, host: int) -> None:
        """Cut the cable of a host: what is sent is lost, and nobody is told."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Join the cable again."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")

    def processes(self, host: int) -> list[int]:
        """What runs on a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.hosts[host].name).split()]

    def limit(self, host: int, rate: Rate) -> None:
        """From now on the link of a host, which has had a rate, carries that."""
        for namespace, device in self._ends(host):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *_token_bucket(rate))

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _add_switch(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")

    def _add_host(self, number: int) -> None:
        host = self.hosts[number]
        port = f"port{number}"
        _run("ip", "netns", "add", host.name)
        _run("ip", "-n", host.name, "link", "set", "lo", "up")
        end = ("peer", "name", INTERFACE, "netns", host.name)
        _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", *end)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        _run("ip", "-n", host.name, "link", "set", INTERFACE, "up")

    def _shape(self, number: int, rate: Rate) -> None:
        for namespace, device in self._ends(number):
            # The kernel hands on up to 64 KiB as one packet, and tbf cuts up those larger than its burst: too slowly to
            # carry both directions at once (0.6-0.9 of 1 Gbit/s; 0.99 with packets of half a burst).
            packet = str(min(65_536, rate.burst_bytes // 2))
            _run("ip", "-n", namespace, "link", "set", device, "gso_max_size", packet, "gro_max_size", packet)
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *_token_bucket(rate))

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Of its cable: namespace and interface."""
        return (self.hosts[host].name, INTERFACE), (self._switch, f"port{host}")


def _token_bucket(rate: Rate) -> tuple[str, ...]:
    queue = ("limit", str(round(rate.bits_per_s / 8 * _QUEUE_S) + rate.burst_bytes))
    return ("tbf", "rate", f"{rate.bits_per_s:.0f}bit", "burst", str(rate.burst_bytes), *queue)


def unavailable() -> str:
    """Why no testbed can be built here, found by building a small one; empty if it can."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (package iproute2)"
    try:
        with Testbed.build(1, RATES["1gbit"], f"{os.getpid()}-probe"):
            return ""
    except TestbedError as error:
        return str(error)


def remove(name: str) -> None:
    """Remove the namespaces whose names begin with ``name``, and end what runs in them."""
    for namespace in _namespaces():
        if namespace == name or namespace.startswith(f"{name}-"):
            for pid in _run("ip", "netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(TestbedError):  # somebody else removed it meanwhile
                _run("ip", "netns", "delete", namespace)


def sweep() -> None:
    """Remove what processes left behind that were killed before they could."""
    for namespace in _namespaces():
        owner = namespace.removeprefix(f"{_PREFIX}-").partition("-")[0]
        if namespace.startswith(f"{_PREFIX}-") and owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            remove(namespace)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise TestbedError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise TestbedError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
