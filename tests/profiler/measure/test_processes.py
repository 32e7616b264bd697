"""Processes that measure: what comes back, a busy machine, an interrupt, what is left and who goes on with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.chains import chain_graph
from cuda_ops import core_of
from planner.ir.codec import fingerprint
from planner.ir.errors import (
    DeadlineError,
    InfeasibleError,
    MissingFileError,
    StaleFileError,
    WorkerDiedError,
    WorkerError,
)
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, PartShape, PreparationCost, SiteHalo
from profiler.measure.child_process import Child, Report
from profiler.measure.job import MeasuringJob
from profiler.measure.partial_results import (
    CapturedGraph,
    Contents,
    FinishedMeasurements,
    ModelCosts,
    PartCosts,
    ProcessResults,
    Rest,
    SizeCosts,
    Unfinished,
)
from profiler.measure.processes import MeasuredProcesses, measure_in_processes
from profiler.measure.progress import Overall, ProfileProgress
from profiler.session import profile
from tests.profiler.measure.test_sizes import never_falls

HERE = "tests.profiler.measure.test_processes"


def add(report: Report, a: int, b: int) -> tuple[int, list[int]]:
    report("adding")
    return a + b, sorted(os.sched_getaffinity(0))


def refuse(report: Report) -> None:
    raise InfeasibleError("no plan fits", ["too large"], ["a smaller one"])


def fail(report: Report) -> None:
    raise KeyError("lost")


def die(report: Report, number: int) -> None:
    sys.stdout.write("last words")
    sys.stdout.flush()
    os.kill(os.getpid(), number)


def sleep(report: Report) -> None:
    report(os.getpid())
    time.sleep(600)


def run(name: str, *arguments: Any) -> Any:
    with Child(f"{HERE}:{name}", *arguments, core=core_of(0)) as child:
        return child.result(deadline_s=60)


def test_a_result_comes_back_from_the_pinned_process() -> None:
    reports = []
    with Child(f"{HERE}:add", 2, 3, core=core_of(0)) as child:
        result = child.finish(60, reports.append)
    assert reports == ["adding"]
    assert result == (5, [core_of(0)])


def test_errors_keep_their_type_and_others_say_where_they_arose() -> None:
    with pytest.raises(InfeasibleError) as caught:
        run("refuse")
    assert (caught.value.details, caught.value.remedies) == (("too large",), ("a smaller one",))
    with pytest.raises(WorkerError, match=r"raised KeyError: 'lost'[\s\S]*test_processes.py") as other:
        run("fail")
    assert type(other.value) is WorkerError


def test_a_death_is_told_with_its_signal_and_last_words() -> None:
    with pytest.raises(WorkerDiedError, match=r"signal SIGKILL[\s\S]*last words[\s\S]*memory"):
        run("die", signal.SIGKILL)


def test_silence_ends_at_the_deadline_and_the_process_is_gone() -> None:
    with Child(f"{HERE}:sleep", core=None) as child:
        stream = child.reports(deadline_s=60)
        process = next(stream)
        stream.close()
        with pytest.raises(DeadlineError, match="said nothing for 0 s"):
            next(child.reports(deadline_s=0.1))
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_interrupt_kills_the_process() -> None:
    process = 0

    def interrupted() -> None:
        nonlocal process
        with Child(f"{HERE}:sleep", core=None) as child:
            process = next(child.reports(deadline_s=60))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


WHOLE = Measurement("conv", 4, 0.5, 1.0, 0.5, 0.25, 64, 8, 3, 0.01, "Mkldnn", raw_s=(1.5, 1.25, 2.0))
PART = Measurement("conv", 2, 0.5, 1.0, 0.5, 0.25, 64, 8, 3, part=(8, 4))
SIZE = SizeCosts(4, (WHOLE,), 2.5)
FAILED = SizeCosts(1, failure="1 samples: ValueError: one value")
PARTS = PartCosts((PartShape(("conv", "twin"), 2, (8, 4)),), (PART,))
REST = Rest(
    {"conv": ParameterCost(1.0, 2.0)},
    0.01,
    0.02,
    0.001,
    (PreparationCost("map_0", ("x",), ("collate",), 1.0, 4),),
    (SiteHalo("conv", 2, 4, 17),),
)


class Opened:
    """A file, opened anew each time, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".profile.json.unfinished"
        self.said: list[str] = []

    def open(self, job: str = "job", resume: bool = True) -> Unfinished:
        self.said.clear()
        return Unfinished(self.path, job, resume, self.said.append)


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    found = Opened(tmp_path)
    first = found.open(resume=False)
    first.captured("sha256:graph")
    for piece in (SIZE, FAILED, PARTS, REST):
        first.add("0", piece)
    first.add("0 again", SIZE)
    return found


def test_the_same_job_gets_back_every_piece(opened: Opened) -> None:
    again = opened.open()
    assert again.contents == Contents(
        "job",
        "sha256:graph",
        {
            "0": ProcessResults(FinishedMeasurements((SIZE, FAILED), (PARTS,)), REST),
            "0 again": ProcessResults(FinishedMeasurements((SIZE,))),
        },
    )
    assert again.of("1") == ProcessResults()
    assert not opened.said
    again.add("1", SIZE)
    assert set(opened.open().contents.processes) == {"0", "0 again", "1"}
    assert [path.name for path in opened.path.parent.iterdir()] == [opened.path.name]


@pytest.mark.parametrize(
    ("job", "resume", "text", "said"),
    [
        ("other", True, "", "was another job"),
        ("job", False, "", "--resume goes on with it"),
        ("job", True, "{", "cannot be read"),
        ("job", True, '{"halopipe": "profile"}', "cannot be read"),
        ("job", True, '{"halopipe": "unfinished profile", "contents": {"jobs": 1}}', "cannot be read"),
        ("job", True, '{"halopipe": "unfinished profile", "contents": {"job": 1}}', "cannot be read"),
    ],
)
def test_what_is_of_no_use_stays_until_something_is_measured_and_goes_with_a_word(
    opened: Opened, job: str, resume: bool, text: str, said: str
) -> None:
    if text:
        opened.path.write_text(text)
    before = opened.path.read_text()
    found = opened.open(job, resume)
    assert found.contents == Contents(job)
    found.captured("sha256:graph")  # as far as a command with a mistake in it comes
    assert opened.path.read_text() == before
    assert len(opened.said) == 1
    assert said in opened.said[0]
    found.add("0", SIZE)
    assert opened.open(job).contents == Contents(
        job, "sha256:graph", {"0": ProcessResults(FinishedMeasurements((SIZE,)))}
    )


def test_with_nothing_to_go_on_with_it_says_so_and_begins(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    assert opened.open().contents == Contents("job")
    assert "nothing to go on with" in opened.said[0]
    opened.open(resume=False)
    assert not opened.said


def test_without_a_file_pieces_are_kept_in_memory_alone(tmp_path: Path) -> None:
    found = Unfinished(None, "job", False, lambda _: None)
    found.add("0", SIZE)
    assert found.of("0").done.sizes == (SIZE,)
    found.drop()
    assert found.of("0") == ProcessResults()


def test_a_folder_that_is_not_there_is_told_at_the_first_piece(tmp_path: Path) -> None:
    found = Unfinished(tmp_path / "no" / "file", "job", False, lambda _: None)
    with pytest.raises(MissingFileError, match="cannot write"):
        found.captured("graph")


HOME = Path(__file__).resolve().parents[3]
QUIET = Rest({}, 1.0, 1.0, 0.001)
BUSY = Rest({}, 1.0, 1.0, 0.05)
BUSIER = Rest({}, 1.0, 1.5, 0.001)
SOURCE = ModelSource("tests.profiler.measure.test_processes:perceptron", {}, (8, 16))
JOB = MeasuringJob(SOURCE, Optimizer(), (), quick=False, num_processes=3)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class Machine:
    """Stands for the processes: how busy the machine is in each, what each was asked, when the user interrupts."""

    def __init__(self, rests: list[Rest]) -> None:
        self.rests = rests
        self.jobs: list[MeasuringJob] = []
        self.measured: list[int] = []
        self.interrupt_at = self.changes_at = -1
        self.run_delays: dict[int, float] = {}
        self.canaries_s: dict[int, tuple[float, ...]] = {}
        self.graph = chain_graph(2)

    def child(self, function: str, job: MeasuringJob, core: int | None) -> Machine:
        """In place of ``Child``."""
        if len(self.jobs) == self.changes_at:
            self.graph = chain_graph(3)
        self.jobs.append(job)
        self._function = function
        return self

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to end."""

    finish = Child.finish

    def reports(self, deadline_s: float) -> Iterator[Any]:
        job = self.jobs[-1]
        if job.graph and job.graph != fingerprint(self.graph):
            raise StaleFileError("the model changed", ["before, now"])
        yield CapturedGraph(self.graph)
        if self._function.endswith("capture_model"):
            return None
        sizes = list(job.done.sizes)
        for samples in job.chosen.sizes if job.chosen else (1, 2, 4):
            if samples in {size.samples for size in sizes}:
                continue
            if len(self.measured) == self.interrupt_at:
                raise KeyboardInterrupt
            self.measured.append(samples)
            yield ProfileProgress("l0", 1.0, 0.0, 1.0, 2.0, 1.0, samples)
            seconds = 1.0 + 0.1 * len(self.jobs)
            sizes.append(SizeCosts(samples, (Measurement("l0", samples, seconds, seconds, 0, 0, 0, 0, 1),), seconds))
            delay = self.run_delays.get(samples, 1.0)
            around_s = self.canaries_s.get(samples, ())
            sizes[-1] = replace(sizes[-1], run_delay=delay, canaries_s=around_s)
            yield sizes[-1]
        return ModelCosts(
            FinishedMeasurements(tuple(sizes)), self.rests.pop(0), ("1 to 2 samples, 1 layers",) * (not job.chosen)
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine([])
    monkeypatch.setattr("profiler.measure.processes.Child", found.child)
    return found


class Session:
    """One profile after another, with the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self.seen: list[ProfileProgress] = []

    def measure(self, job: MeasuringJob = JOB, resume: bool = False) -> MeasuredProcesses:
        self.said.clear()
        self.seen.clear()
        kept = Unfinished(self.path, "job", resume, self.said.append)
        return measure_in_processes(job, kept, Overall(job.num_processes, self.seen.append), self.said.append)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path / "unfinished")


def test_the_first_process_chooses_and_the_others_repeat(machine: Machine, session: Session) -> None:
    machine.rests = [QUIET] * 3
    found = session.measure()
    assert [job.chosen.sizes if job.chosen else None for job in machine.jobs] == [None, (1, 2, 4), (1, 2, 4)]
    assert (len(found.costs), len(found.processes), found.graph) == (3, 3, machine.graph)
    assert [process.step_s["4"] for process in found.processes] == [2.2, 2.4, 2.6]
    assert [at.done for at in session.seen] == sorted(at.done for at in session.seen)
    assert never_falls(session.seen)
    assert [at.eta_s > 0 for at in session.seen] == [True] * 9
    assert len(session.said) == 1
    assert "changes from 1 to 2 samples" in session.said[0]


@pytest.mark.parametrize(("again", "counts"), [(QUIET, QUIET), (BUSIER, BUSY)])
def test_a_contended_process_runs_once_more_and_the_quieter_counts(
    machine: Machine, session: Session, again: Rest, counts: Rest
) -> None:
    machine.rests = [QUIET, BUSY, again, QUIET]
    found = session.measure()
    assert len(machine.jobs) == 4
    assert [costs.rest for costs in found.costs] == [QUIET, counts, QUIET]
    assert [process.repeated for process in found.processes] == [False, True, False]
    assert [process.contended for process in found.processes] == [False, counts is BUSY, False]
    said = "\n".join(session.said)
    assert "process 2 of 3 met a busy machine (5.0% of its time it waited" in said
    assert f"its {'second' if counts is again else 'first'} run was quieter" in said
    assert all(at.done <= at.total for at in session.seen)


@pytest.mark.parametrize("interrupted", [False, True])
def test_only_what_was_disturbed_is_measured_once_more(machine: Machine, session: Session, interrupted: bool) -> None:
    machine.rests = [BUSY, QUIET, QUIET, QUIET]
    machine.run_delays = {1: 0.0, 2: 0.09, 4: 0.01}
    if interrupted:
        machine.interrupt_at = 4
        with pytest.raises(KeyboardInterrupt):
            session.measure()
        machine.interrupt_at = -1
    found = session.measure(resume=interrupted)
    assert machine.measured == [1, 2, 4, 2, *[1, 2, 4] * 2]
    assert [sorted(size.samples for size in costs.done.sizes) for costs in found.costs] == [[1, 2, 4]] * 3
    assert [process.repeated for process in found.processes] == [True, False, False]
    assert [process.step_s["1"] < process.step_s["2"] for process in found.processes] == [True, False, False]
    if not interrupted:
        assert any("1 of 3 sizes and rounds of parts are measured once more" in text for text in session.said)


def test_where_the_processor_changed_its_pace_all_is_measured_once_more(machine: Machine, session: Session) -> None:
    machine.rests = [replace(QUIET, canary_after_s=1.2 * QUIET.canary_before_s), QUIET, QUIET, QUIET]
    machine.run_delays = {1: 0.0, 2: 0.0, 4: 0.0}
    session.measure()
    assert machine.measured == [1, 2, 4] * 4


def test_where_it_is_known_when_the_pace_changed_only_what_came_then_is(machine: Machine, session: Session) -> None:
    machine.rests = [replace(QUIET, canary_after_s=1.2), QUIET, QUIET, QUIET]
    machine.run_delays = {1: 0.0, 2: 0.0, 4: 0.0}
    machine.canaries_s = {1: (1.0, 1.0), 2: (1.0, 1.02), 4: (1.02, 1.2)}
    session.measure()
    assert machine.measured == [1, 2, 4, 4, *[1, 2, 4] * 2]


def test_a_quick_profile_repeats_nothing(machine: Machine, session: Session) -> None:
    machine.rests = [BUSY]
    found = session.measure(replace(JOB, quick=True, num_processes=1))
    assert [process.contended for process in found.processes] == [True]
    assert machine.measured == [1, 2, 4]


@pytest.mark.parametrize("interrupt_at", range(9))
def test_an_interrupted_profile_goes_on_where_it_was(machine: Machine, session: Session, interrupt_at: int) -> None:
    machine.rests = [QUIET] * 3
    machine.interrupt_at = interrupt_at
    with pytest.raises(KeyboardInterrupt):
        session.measure()
    machine.interrupt_at = -1
    found = session.measure(resume=True)
    assert machine.measured == [1, 2, 4] * 3
    assert [[size.samples for size in costs.done.sizes] for costs in found.costs] == [[1, 2, 4]] * 3
    assert found.graph == machine.graph


def test_an_interrupted_repetition_goes_on_too(machine: Machine, session: Session) -> None:
    machine.rests = [BUSY, QUIET, QUIET, QUIET]
    machine.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        session.measure()
    machine.interrupt_at = -1
    found = session.measure(resume=True)
    assert machine.measured == [1, 2, 4] * 4
    assert [process.repeated for process in found.processes] == [True, False, False]


def test_where_all_is_measured_the_graph_alone_is_captured_again(machine: Machine, session: Session) -> None:
    machine.rests = [QUIET] * 3
    first = session.measure()
    again = session.measure(resume=True)
    assert (again.graph, again.processes) == (first.graph, first.processes)
    assert [costs.done for costs in again.costs] == [costs.done for costs in first.costs]
    assert len(machine.jobs) == 4
    assert len(machine.measured) == 9


def test_a_changed_model_starts_again_and_says_so(machine: Machine, session: Session) -> None:
    machine.rests = [QUIET] * 4
    machine.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        session.measure()
    machine.interrupt_at = -1
    machine.graph = chain_graph(3)
    assert session.measure(resume=True).graph == machine.graph
    assert machine.measured[4:] == [1, 2, 4] * 3
    assert "another graph" in session.said[0]


def test_a_model_that_changes_between_two_processes_is_refused(machine: Machine, session: Session) -> None:
    machine.rests = [QUIET] * 3
    machine.changes_at = 1
    with pytest.raises(StaleFileError, match="the model changed"):
        session.measure()


def test_a_killed_profile_is_completed_without_repeating_a_size(tmp_path: Path) -> None:
    """Takes 6 s: a new interpreter, which is what is killed, and a server of processes of its own, load torch."""
    kept = tmp_path / "unfinished"
    program = (
        "from pathlib import Path; from profiler.session import profile; "
        "from tests.profiler.measure.test_processes import SOURCE; "
        f"profile(SOURCE, num_workers=1, num_processes=2, quick=True, unfinished=Path({str(kept)!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL) as process:
        end_s = time.monotonic() + 200
        while '"samples"' not in (kept.read_text() if kept.exists() else "") and time.monotonic() < end_s:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finished = {size.samples for size in _kept(kept).of("0").done.sizes}
    assert finished
    seen: list[ProfileProgress] = []
    found = profile(
        SOURCE, num_workers=1, num_processes=2, quick=True, unfinished=kept, resume=True, progress=seen.append
    )
    starts = [number for number, at in enumerate(seen) if at.layer == "capture"]
    assert len(starts) == 2
    assert not finished & {at.samples for at in seen[starts[0] : starts[1]] if at.samples}
    (measured,) = found.measurements.values()
    assert finished < {one.samples for one in measured} <= {at.samples for at in seen[starts[1] :]}
    assert all(len(one.raw_s) == one.num_runs == 8 for one in measured)
    assert len(found.provenance.processes) == 2
    assert set(found.provenance.process_spread) == {str(one.samples) for one in measured}


def _kept(path: Path) -> Unfinished:
    return Unfinished(path, json.loads(path.read_text())["contents"]["job"], True, lambda _: None)
