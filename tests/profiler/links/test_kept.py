"""Links are measured once for each boot of a machine, while it is as it was; in doubt they are measured again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from planner.ir.cluster import ALL_REDUCE, SITES, WITHIN_HOST, Cluster, Collective, DeviceSpec, Link
from planner.ir.codec import load
from planner.ir.profile import MeasuringProcess, ModelSource, Profile
from profiler import session
from profiler.links import kept as kept_links
from profiler.links.kept import Quietness, keep, kept
from profiler.links.processes import LinkCosts, num_measurements
from profiler.measure.partial_results import FinishedMeasurements, ModelCosts, Rest
from profiler.measure.processes import MeasuredProcesses
from profiler.measure.progress import Overall, ProfileProgress
from tests.halopipe.commands import good

NETWORK = chain_profile(4)
CANARY_S = 2e-3
QUIET = Quietness(CANARY_S, False)
DEVICES = tuple(DeviceSpec(f"n0/cpu{rank}", "processor", "n0", 2**30) for rank in range(2))
LINKS = LinkCosts(
    {WITHIN_HOST: Link(1e-6, 1e9, ((1024, 1e-6), (4096, 2e-6)), transport="shared memory")},
    (Collective(ALL_REDUCE, 2, WITHIN_HOST, ((1024, 1e-5),)),),
)


class Machine:
    """A machine whose layers are measured in no time; it counts how often its links are.

    Attributes:
        canary_s, contended: what its next profile finds.
        measured: (quick, transport) of each measurement of the links.
    """

    def __init__(self) -> None:
        self.canary_s = CANARY_S
        self.contended = False
        self.measured: list[tuple[bool, str]] = []
        self.seen: list[ProfileProgress] = []

    def layers(self, *_: object) -> MeasuredProcesses:
        rest = Rest({}, self.canary_s, self.canary_s, 0.5 if self.contended else 0.0)
        process = MeasuringProcess(self.canary_s, self.canary_s, rest.run_delay, self.contended)
        return MeasuredProcesses(NETWORK.graph, (ModelCosts(FinishedMeasurements(), rest),), (process,))

    def links(self, num: int, quick: bool, progress: Any, transport: str, *, sites: bool) -> LinkCosts:
        self.measured.append((quick, transport))
        for _ in range(num_measurements(num)):
            progress("a link", 1e-6)
        return LINKS

    def profile(self, **asked: Any) -> Profile:
        return session.profile(ModelSource("a:b"), num_workers=2, progress=self.seen.append, **asked)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(session, "measure_in_processes", made.layers)
    monkeypatch.setattr(session, "measure_links", made.links)
    return made


def file() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "halopipe" / "machine.json"


def test_a_second_profile_has_the_links_of_the_first_and_says_when_they_were_measured(machine: Machine) -> None:
    first = machine.profile()
    second = machine.profile()
    assert machine.measured == [(False, "")]
    assert (second.cluster.links, second.cluster.collectives) == (first.cluster.links, first.cluster.collectives)
    assert first.provenance.links_measured_at == ""
    assert second.provenance.links_measured_at == first.provenance.measured_at


def test_they_are_measured_anew_where_that_is_asked_for_and_kept(machine: Machine) -> None:
    machine.profile()
    again = machine.profile(measure_machine=True)
    assert (len(machine.measured), again.provenance.links_measured_at) == (2, "")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("canary_s", "contended", "num_measured"),
    [
        (CANARY_S * 1.05, False, 1),
        (CANARY_S * 0.95, True, 1),
        (CANARY_S * 1.2, False, 2),
        (CANARY_S * 0.8, False, 2),
        (CANARY_S * 1.2, True, 2),
    ],
)
def test_they_are_believed_while_a_fixed_kernel_takes_as_long(
    machine: Machine, canary_s: float, contended: bool, num_measured: int
) -> None:
    machine.profile()
    machine.seen.clear()
    machine.canary_s = canary_s
    machine.contended = contended
    later = machine.profile()
    assert len(machine.measured) == num_measured
    assert bool(later.provenance.links_measured_at) == (num_measured == 1)
    assert len(machine.seen) == (num_measured - 1) * num_measurements(2)
    assert all(at.eta_s == 0.0 for at in machine.seen[-1:])


def test_what_a_busy_machine_said_is_believed_until_it_is_quiet(machine: Machine) -> None:
    machine.contended = True
    machine.profile()
    machine.profile()
    assert len(machine.measured) == 1
    machine.contended = False
    machine.profile()
    machine.profile()
    assert len(machine.measured) == 2


def test_all_repetitions_stand_for_few_and_few_not_for_all(machine: Machine) -> None:
    machine.profile(quick=True)
    machine.profile()
    machine.profile(quick=True)
    assert [quick for quick, _ in machine.measured] == [True, False]


@pytest.mark.every_case
@pytest.mark.parametrize("what", ["boot", "cores", "versions", "transport", "workers", "host"])
def test_another_machine_or_another_question_is_measured(
    machine: Machine, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.profile()
    (tmp_path / "boot").write_text("another\n")
    changed: dict[str, Callable[[], object]] = {
        "boot": lambda: monkeypatch.setattr(kept_links, "_BOOT", tmp_path / "boot"),
        "cores": lambda: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64))),
        "versions": lambda: monkeypatch.setattr(session, "versions", lambda: {"torch": "0"}),
        "host": lambda: monkeypatch.setattr("socket.gethostname", lambda: "another"),
    }
    changed.get(what, lambda: None)()
    asked = {"transport": {"transport": "gloo"}, "workers": {"num_workers": 3}}.get(what, {})
    session.profile(ModelSource("a:b"), **{"num_workers": 2, **asked})
    assert len(machine.measured) == 2
    machine.profile()
    assert len(machine.measured) == 2, "the first one's are still there"


def test_where_a_boot_has_no_name_nothing_is_kept(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_links, "_BOOT", Path("/nowhere"))
    machine.profile()
    machine.profile()
    assert (len(machine.measured), file().exists()) == (2, False)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: "[" * 100_000,
        lambda text: "\0" * 64,
        lambda text: text.replace('"machine"', '"profile"'),
        lambda text: text.replace('"canary_s":0.002', '"canary_s":0'),
        lambda text: text.replace('"canary_s":0.002', '"canary_s":NaN'),
        lambda text: text.replace("[1024,1e-06]", "[1024,-1.0]"),
        lambda text: text.replace("[1024,1e-06]", "[1024,NaN]"),
        lambda text: text.replace("[1024,1e-06]", "[1e99,1e-06]"),
        lambda text: text.replace('"bandwidth_bytes_per_s":1000000000.0', '"bandwidth_bytes_per_s":0'),
        lambda text: text.replace('"bandwidth_bytes_per_s":1000000000.0', '"bandwidth_bytes_per_s":"fast"'),
        lambda text: text.replace('{"within-host"', '{"elsewhere"'),
        lambda text: text.replace('"host"', '"hosts"'),
    ],
)
def test_a_file_that_makes_no_sense_is_measured_over(machine: Machine, change: Callable[[str], str]) -> None:
    first = machine.profile()
    text = file().read_text("utf-8")
    assert change(text) != text
    file().write_text(change(text), "utf-8")
    assert machine.profile().cluster.links == first.cluster.links
    machine.profile()
    assert len(machine.measured) == 2
    assert json.loads(file().read_text("utf-8"))["halopipe"] == "machine"


@pytest.mark.every_case
@pytest.mark.parametrize("what", ["a link", "a pipe", "a folder of everybody's", "a folder in its place"])
def test_what_another_user_may_have_put_there_is_not_read(machine: Machine, what: str, tmp_path: Path) -> None:
    machine.profile()
    kept_file = file()
    if what == "a folder of everybody's":
        kept_file.parent.chmod(0o777)
    else:
        kept_file.rename(tmp_path / "moved.json")
    if what == "a link":
        kept_file.symlink_to(tmp_path / "moved.json")
    if what == "a pipe":
        os.mkfifo(kept_file)
    if what == "a folder in its place":
        kept_file.mkdir()
    machine.profile()
    assert len(machine.measured) == 2


def test_only_what_is_wanted_of_them_is_in_a_profile() -> None:
    over_sites = replace(LINKS, collectives=(*LINKS.collectives, Collective(SITES, 1, WITHIN_HOST, ((1024, 1e-5),))))
    known = kept_links.KeptLinks("key", "host", "", QUIET, over_sites)
    assert known.stands_for(QUIET, sites=True)
    assert (known.wanted(sites=True), known.wanted(sites=False)) == (over_sites, LINKS)
    assert not replace(known, links=LINKS).stands_for(QUIET, sites=True)


def test_several_processes_may_keep_theirs_at_once(machine: Machine) -> None:
    seen = []

    def work(key: str) -> None:
        for _ in range(30):
            keep(key, key, QUIET, LINKS)
            seen.extend(found.measured_at == key for found in [kept(key, DEVICES)] if found is not None)

    workers = [threading.Thread(target=work, args=(f"key {number}",)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen
    assert all(seen)
    assert any(kept(f"key {number}", DEVICES) for number in range(4))
    assert [path.name for path in file().parent.iterdir()] == [file().name]


def test_progress_counts_links_only_where_they_are_measured() -> None:
    seen: list[ProfileProgress] = []
    overall = Overall(1, seen.append, 0, 1.0, now=lambda: 0.0)
    overall.links_doubted(2)
    overall.link("a link", 1e-6)
    overall.link("another", 1e-6)
    assert [at.eta_s for at in seen] == [1.0, 0.0]


def test_the_command_measures_the_machine_once_and_where_it_is_told_to(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["profile", "a:b", "--device", "cpu", "--workers", "2"]
    good(*words)
    said = good(*words).stdout
    measured_at = load("profile.json", Profile).provenance.links_measured_at
    assert len(machine.measured) == 1
    assert f"links as they were measured at {measured_at}; --measure-machine measures them anew" in said
    assert "links as they were" not in good(*words, "--measure-machine").stdout
    assert len(machine.measured) == 2


def test_a_cluster_alone_can_be_checked() -> None:
    from planner.ir.validation import faults

    assert faults(Cluster(DEVICES, LINKS.links, LINKS.collectives)) == ()
    assert faults(Cluster((), {}))
