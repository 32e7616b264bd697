"""Trials are of every kind, the same for the same seed, and one that goes wrong is seen."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.devices.testbed import unavailable
from benchmarks.faults import hosts, limits, victim
from benchmarks.faults.__main__ import ANY_TIME, MOMENTS, OWN, PLANS, SAVING, SIGNALS, Trial, _wrong, drawn, made, tried
from benchmarks.faults.hosts import HostTrial
from benchmarks.faults.jobs import EVERY, STEPS, Job, Outcome, rows
from benchmarks.faults.limits import DiskTrial
from benchmarks.faults.victim import FORWARD, Pace
from halopipe.run_spec.result import RunResult, Score
from planner.ir.errors import CheckpointError, WorkerDiedError
from planner.ir.timeline import Restart, Timeline

TRIAL = Trial("1f1b/2", "SIGKILL", FORWARD, 0, 3)
RESULT = RunResult((1.0, 2.0), (0.1, 0.1), 0, Timeline("measured", 0.1, ()), (), (), (), scores=(Score(2, 0.5, 8),))
CUT = HostTrial("naive/4", hosts.CUT, hosts.SAME, 1, 0.3)


def test_trials_are_of_every_kind_and_follow_from_the_seed() -> None:
    trials = list(drawn(300, 0))
    assert trials == list(drawn(300, 0)) != list(drawn(300, 1))
    assert {each.deed for each in trials} == {*OWN, *SIGNALS}
    assert {each.plan for each in trials} == set(PLANS)
    assert {each.moment for each in trials} >= set(MOMENTS)
    assert any(each.damaged for each in trials)
    several = list(hosts.drawn(40, 0))
    assert several == list(hosts.drawn(40, 0)) != list(hosts.drawn(40, 1))
    assert {(each.deed, each.moment) for each in several} == {
        *((deed, moment) for deed in (hosts.LOST_HOST, hosts.LOST_STORE) for moment in (hosts.SAME, hosts.REPLANNED)),
        *((deed, hosts.SAME) for deed in (hosts.CUT, hosts.BACK, hosts.TORCHRUN)),
    }
    assert {each.host == 0 for each in several if each.deed == hosts.LOST_HOST} == {False}
    disks = list(limits.drawn(12, 0, tuple(PLANS), (ANY_TIME, SAVING)))
    assert {(each.moment, each.until) for each in disks} == {
        (moment, until) for moment in (ANY_TIME, SAVING) for until in (limits.FOR_A_WHILE, limits.TO_THE_END)
    }


def test_other_losses_other_evaluations_and_too_much_done_again_are_wrong() -> None:
    once = replace(RESULT, restarts=(Restart(4, (0,), "killed", "H501", 3, 1, 1.5),))
    assert _wrong(TRIAL, once, RESULT, 1) == ""
    assert "other losses" in _wrong(TRIAL, replace(RESULT, losses=(1.0, 2.5)), RESULT, 0)
    assert "other evaluations" in _wrong(TRIAL, replace(RESULT, scores=()), RESULT, 0)
    assert "were repeated" in _wrong(TRIAL, once, RESULT, 2 * EVERY + 1)
    outcomes = [Outcome(TRIAL, "", (1.5,), 1), Outcome(TRIAL, "the job ended", ()), Outcome(CUT, "", beyond_s=2.1)]
    found = {row.name: row for row in rows(outcomes)}
    assert (found["ended as they should"].value, found["ended as they should"].holds) == (2, False)
    assert found["recovery, median"].value == 1.5
    assert not found["fault cut link: ended beyond the deadline, latest"].holds


def ranks(folder: Path, **ends: tuple[int, str]) -> Job:
    """Of two that have ended, each with its exit code and what it said."""
    job = Job(folder, {0: 1, 1: 1})
    for rank, (code, said) in enumerate(ends.values()):
        (folder / f"output-{rank}.txt").write_text(said)
        job.ended[rank] = code, 10.0 + rank
    return job


def test_hosts_that_end_with_another_code_without_a_name_or_on_another_curve_are_seen(tmp_path: Path) -> None:
    good = {"a": (5, "error[H503] rank 0 waited for rank 1"), "b": (5, "error[H504] rank 1 lost rank 0")}
    assert hosts._ended(ranks(tmp_path, **good), [1], []) == ("", 11.0)
    assert "exit codes {0: 5, 1: 1}" in hosts._ended(ranks(tmp_path, **good | {"b": (1, "")}), [1], [])[0]
    assert "name none of [1]" in hosts._ended(ranks(tmp_path, **good | {"a": (5, "rank 0 waited")}), [1], [])[0]
    assert hosts._ended(ranks(tmp_path, **good | {"b": (-9, "")}), [1], [1]) == ("", 10.0)
    job = ranks(tmp_path, a=(0, ""), b=(0, ""))
    lines = [{"step": 1, "loss": 0.5}, {"step": 1, "eval_loss": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    curve = {(1, "loss"): 0.5, (1, "eval_loss"): 0.25}
    assert hosts._went_on(job, curve, bit_for_bit=True) == ""
    near = curve | {(1, "loss"): 0.5 + 1e-8}
    assert "step 1: loss 0.5" in hosts._went_on(job, near, bit_for_bit=True)
    assert hosts._went_on(job, near, bit_for_bit=False) == ""
    assert "in one curve alone" in hosts._went_on(job, curve | {(2, "loss"): 0.5}, bit_for_bit=True)
    assert "exit codes" in hosts._went_on(ranks(tmp_path, **good), curve, bit_for_bit=True)


def test_how_a_job_on_a_full_disk_ends_is_judged(tmp_path: Path) -> None:
    end, while_ = (DiskTrial("1f1b/2", ANY_TIME, until, 0.5) for until in (limits.TO_THE_END, limits.FOR_A_WHILE))
    full = CheckpointError("not saved", [f"rank 0 needs 9 bytes, 0 are free on the disk of {tmp_path}"])
    assert limits._wrong_end(end, tmp_path, full, []) == ""
    assert "nobody says which disk" in limits._wrong_end(end, tmp_path, CheckpointError("not saved"), [])
    assert "the job ended by" in limits._wrong_end(end, tmp_path, WorkerDiedError("killed"), [])
    assert "the job ended: not saved" in limits._wrong_end(while_, tmp_path, full, [])
    assert "steps () were saved" in limits._wrong_end(while_, tmp_path, None, [])


def test_layers_sleep_as_long_as_they_are_told() -> None:
    slow = Pace(0.1, rank=1, since=4, factor=1.3)
    layers = [victim.LAYERS_A_RANK, victim.LAYERS_A_RANK + 1]
    assert [slow.seconds(layer, step) for layer in (0, layers[0]) for step in (3, 4)] == [0.1, 0.1, 0.1, 0.13]
    noisy = Pace(0.1, noise=0.1)
    assert noisy.seconds(layers[0], 3) == noisy.seconds(layers[1], 3) != noisy.seconds(0, 3)
    assert statistics.stdev(noisy.seconds(0, step) for step in range(1000)) == pytest.approx(0.01, rel=0.1)


@pytest.mark.exhaustive("4 s: three jobs in processes; tests of launch/test_restart.py lose ranks as well")
def test_a_trial_ends_as_it_should() -> None:
    from benchmarks.faults.__main__ import _job

    plan = made()[TRIAL.plan]
    with limits.own_folder() as folder:
        expected = _job(plan, folder)
    found = tried(TRIAL, plan, expected, 1.0)
    assert (found.wrong, len(found.recoveries_s)) == ("", 1)
    assert "other losses" in tried(TRIAL, plan, replace(expected, losses=()), 1.0).wrong
    with limits.small_group() as group:
        for deed in (victim.REFUSED, victim.KILLED):
            if group is not None or deed != victim.KILLED:
                found = tried(replace(TRIAL, deed=deed), plan, expected, 1.0, group)
                assert (found.wrong, len(found.recoveries_s)) == ("", 1)
    assert group is None or not group.exists()


@pytest.mark.exhaustive("8 s: jobs in processes")
def test_a_job_whose_disk_is_full_keeps_what_it_has_and_goes_on_when_there_is_room() -> None:
    from benchmarks.faults.__main__ import _job, _options

    if why := limits.no_small_disk():
        pytest.skip(why)
    plan = made()["1f1b/2"]
    with limits.own_folder() as folder:
        expected = _job(plan, folder)
    for until in (limits.TO_THE_END, limits.FOR_A_WHILE):
        trial = DiskTrial("1f1b/2", ANY_TIME, until, 0.4)
        assert limits.tried(trial, plan, expected, _options(Path("unused")), False).wrong == ""
    other = replace(expected, losses=(0.0,) * STEPS)
    assert "other losses" in limits.tried(trial, plan, other, _options(Path("unused")), False).wrong


@pytest.mark.testbed
@pytest.mark.exhaustive("10 s: a deadline, and two starts of a job on hosts of the testbed")
@pytest.mark.parametrize("deed", [hosts.CUT, hosts.LOST_STORE])
def test_a_job_that_loses_a_link_or_a_host_ends_in_time_and_goes_on(deed: str) -> None:
    if why := unavailable():
        pytest.skip(why)
    trial = HostTrial("naive/4", deed, hosts.REPLANNED if deed == hosts.LOST_STORE else hosts.SAME, 0, 0.3)
    with hosts.Hosts() as several:
        found = several.tried(trial)
    assert found.wrong == ""
    assert found.beyond_s is not None
    assert found.beyond_s < 5.0, "2 s on a machine that does nothing else"
