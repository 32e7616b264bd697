from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.devices import testbed as beds
from benchmarks.devices.testbed import RATES, Testbed, TestbedError

pytestmark = pytest.mark.testbed
Build = Callable[..., Testbed]

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as peer:
        while peer.recv(1 << 16):
            pass
        peer.sendall(b"done")
"""
CALL = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), 10) as peer:
    start = time.perf_counter()
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(4)
    print(time.perf_counter() - start)
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def seconds(testbed: Testbed, num_bytes: int) -> float:
    address = testbed.hosts[1].address
    server = testbed.start(1, [sys.executable, "-S", "-c", SERVE, address], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == "ready\n"
        command = testbed.command(0, [sys.executable, "-S", "-c", CALL, address, str(num_bytes)])
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return float(text)


@pytest.mark.parametrize("rate", ["200mbit", "1gbit"])
def test_a_large_message_takes_what_the_rate_says(build: Build, rate: str) -> None:
    num_bytes = round(RATES[rate].payload_bytes_per_s / 4)
    assert seconds(build(2, rate), num_bytes) == pytest.approx(0.25, rel=0.15)


def test_a_link_is_as_slow_as_it_is_made_while_it_is_there(build: Build) -> None:
    testbed = build(2, "1gbit")
    slower = RATES["200mbit"]
    testbed.limit(1, slower)
    assert seconds(testbed, round(slower.payload_bytes_per_s / 4)) == pytest.approx(0.25, rel=0.15)


def test_a_host_reaches_the_others_and_nothing_else(build: Build) -> None:
    testbed = build(3)
    probe = "import socket, sys; socket.create_connection((sys.argv[1], 80), 2)"
    for address, word in ((testbed.hosts[2].address, "refused"), ("192.0.2.1", "unreachable")):
        command = testbed.command(0, [sys.executable, "-S", "-c", probe, address])
        assert word in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_nothing_is_left_and_what_runs_on_the_hosts_is_ended(build: Build) -> None:
    testbed = build(2)
    sleeper = testbed.start(0, ["sleep", "600"])
    detached = subprocess.Popen(testbed.command(1, ["setsid", "sleep", "600"]))  # not among those it started
    for host in testbed.hosts:
        assert host.name in namespaces()
    testbed.close()
    assert testbed.name not in namespaces()
    assert (sleeper.wait(10), detached.wait(10)) == (-9, -9)


def test_a_failure_while_building_leaves_nothing(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    build(1).close()  # skips where there is none
    run = beds._run

    def refuse(*command: str) -> str:
        if "tbf" in command:
            raise TestbedError("no")
        return run(*command)

    monkeypatch.setattr(beds, "_run", refuse)
    with pytest.raises(TestbedError):
        Testbed.build(2, RATES["1gbit"])
    assert f"halopipe-{os.getpid()}" not in namespaces()


def test_what_a_killed_process_left_is_removed_by_the_next(build: Build) -> None:
    build(1).close()
    script = "from benchmarks.devices.testbed import Testbed; import os; Testbed.build(1); os.kill(os.getpid(), 9)"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    assert process.wait(60) == -9
    assert f"halopipe-{process.pid}-n0" in namespaces()
    build(1)
    assert f"halopipe-{process.pid}-n0" not in namespaces()


def test_a_cut_cable_loses_packets_in_silence(build: Build) -> None:
    testbed = build(2)
    probe = "import socket, sys; socket.create_connection((sys.argv[1], 80), 0.5)"
    command = testbed.command(0, [sys.executable, "-S", "-c", probe, testbed.hosts[1].address])

    def said() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert "refused" in said()
    testbed.cut(1)
    assert "timed out" in said()
    testbed.mend(1)
    assert "refused" in said()


@pytest.mark.parametrize(
    ("user", "why"), [(1000, "network namespaces need root"), (0, "ip and tc not found (package iproute2)")]
)
def test_without_root_or_the_tools_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, user: int, why: str) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", "/nowhere")
    assert beds.unavailable() == why
