from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from halopipe.launch.hosts import Host, Hosts, named, place, ranks_by_host, read_hosts
from planner.ir.errors import CorruptFileError, MissingFileError, RankCountError, UsageError
from planner.ir.plan import Decision, Stage

WORDS = ("env", "PYTHONPATH=/a b", "python", "-m", "halopipe.launch.agent")


def decision(*devices: Sequence[str]) -> Decision:
    """One stage for each group of devices; ranks in order."""
    stages, rank = [], 0
    for group in devices:
        stages.append(Stage(tuple(range(rank, rank + len(group))), tuple(group)))
        rank += len(group)
    return Decision("1f1b", (1,), tuple(stages), {}, ((),) * rank)


def written(folder: Path, text: str) -> Path:
    path = folder / "hosts.txt"
    path.write_text(text)
    return path


def test_a_host_file_is_read_as_open_mpi_reads_it(tmp_path: Path) -> None:
    text = (
        "# the rack\nnode07 slots=2 max_slots=4\n\nalice@10.0.0.9   # spare\n[fe80::1%eth0] slots=1\nnode07 slots=1\n"
    )
    assert read_hosts(written(tmp_path, text)) == (Host("node07", 3), Host("alice@10.0.0.9"), Host("[fe80::1%eth0]", 1))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("node slots=0", "not understood"),
        ("node slots=two", "not understood"),
        ("node slot=2", "not understood"),
        ("node 2", "not understood"),
        ("-oProxyCommand=reboot", "is no name of a host"),
        ("a;reboot slots=1", "is no name of a host"),
        ("$(reboot)", "is no name of a host"),
    ],
)
def test_a_line_that_is_no_host_is_named(tmp_path: Path, line: str, what: str) -> None:
    with pytest.raises(CorruptFileError, match=what) as caught:
        read_hosts(written(tmp_path, f"good\n{line}\n"))
    assert "hosts.txt:2" in caught.value.title


def test_a_file_without_hosts_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match="names no host"):
        read_hosts(written(tmp_path, "# none\n"))
    with pytest.raises(MissingFileError, match="cannot read the host file"):
        read_hosts(tmp_path / "nowhere.txt")


def test_the_plans_hosts_are_matched_in_the_order_of_their_ranks() -> None:
    made = decision(["n1/gpu0", "n0/gpu1"], ["n1/gpu1"])
    assert ranks_by_host(made) == {"n1": (0, 2), "n0": (1,)}
    assert place(made, (Host("a", 2), Host("b"), Host("c"))) == {"a": (0, 2), "b": (1,)}


def test_too_few_hosts_or_slots_are_refused_with_both_numbers() -> None:
    made = decision(["n0/cpu0", "n0/cpu1"], ["n1/cpu0"])
    with pytest.raises(RankCountError, match="the plan is for 2 hosts, the host file names 1"):
        place(made, (Host("a", 8),))
    with pytest.raises(RankCountError, match="2 ranks on n0, its host a has slots=1") as caught:
        place(made, (Host("a", 1), Host("b", 1)))
    assert "a slots=2" in caught.value.remedies[0]


def test_ssh_gets_one_quoted_line_and_other_launchers_get_words() -> None:
    ssh = Hosts((), "").command("node07", WORDS)
    assert ssh[0] == "ssh"
    assert ssh[-2:] == ["node07", "env 'PYTHONPATH=/a b' python -m halopipe.launch.agent"]
    assert Hosts((), "ip netns exec {host}").command("n1", WORDS) == ["ip", "netns", "exec", "n1", *WORDS]
    wrapped = Hosts((), "ssh {host} 'module load torch; {command}'").command("n1", ("python", "-V"))
    assert wrapped == ["ssh", "n1", "module load torch; python -V"]


def test_this_host_needs_no_launcher_unless_one_is_named() -> None:
    for here in ("localhost", "127.0.0.1", socket.gethostname()):
        assert Hosts((), "").command(here, WORDS) == list(WORDS)
        assert Hosts((), "env HOST={host}").command(here, WORDS)[:2] == ["env", f"HOST={here}"]


@pytest.mark.parametrize("launcher", ["ssh", "ssh 'host}", "ssh host"])
def test_a_launcher_without_a_place_for_the_host_is_refused(launcher: str) -> None:
    with pytest.raises(UsageError, match="launcher"):
        Hosts((), launcher).command("n1", WORDS)


def test_options_of_hosts_need_a_host_file(tmp_path: Path) -> None:
    assert named(None) is None
    with pytest.raises(UsageError, match="--launcher is for hosts of a file"):
        named(None, launcher="ssh {host}")
    with pytest.raises(UsageError, match="--interface is for hosts of a file"):
        named(None, interface="eth0")
    path = written(tmp_path, "a\n")
    assert named(path, "ssh {host}", "eth0") == Hosts((Host("a"),), "ssh {host}", "eth0")
