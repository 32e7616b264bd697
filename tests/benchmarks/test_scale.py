from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.scale import BY_HAND_S, Case, Result, cases, main, planned, scale_profile, worse
from planner.ir.codec import fingerprint

CASE = Case(50, 64, 1, 5.0)
RESULT = Result(CASE, step_s=0.47, bound_s=0.42, status="time limit", seconds=5.4, peak_bytes=10**9)


def misses(result: Result) -> set[str]:
    return {row.name.rpartition(": ")[2] for row in result.rows() if not row.holds}


def test_each_goal_is_missed_by_what_misses_it() -> None:
    assert misses(RESULT) == set()
    assert misses(replace(RESULT, seconds=5.6)) == {"time"}
    assert misses(replace(RESULT, peak_bytes=3 * 2**30)) == {"memory of the process"}
    assert misses(replace(RESULT, bound_s=0.40)) == {"gap"}
    assert misses(replace(RESULT, step_s=1.01 * BY_HAND_S, bound_s=0.45)) == {"beside a plan by hand"}


def test_more_devices_are_held_against_the_best_on_fewer() -> None:
    few, some, many = (replace(RESULT, case=replace(CASE, devices=count)) for count in (8, 16, 64))
    steps = (replace(few, step_s=0.3), replace(some, step_s=0.5), replace(many, step_s=0.33))
    (row,) = worse([steps[2], steps[0], steps[1], replace(RESULT, case=Case(50, 8, 2, 5.0))])
    assert (row.name, row.holds) == ("50 layers, 5 s: worse with more devices, by", False)
    assert row.value == pytest.approx(100 * (0.5 / 0.3 - 1))
    (row,) = worse([replace(few, step_s=0.5), replace(many, step_s=0.5)])
    assert row.holds


def test_networks_are_as_much_work_however_many_layers_and_the_same_each_time() -> None:
    few, many = scale_profile(50, 16, 2), scale_profile(1000, 16, 2)
    assert fingerprint(few) == fingerprint(scale_profile(50, 16, 2))
    kinds = [device.kind for device in few.cluster.devices]
    assert kinds == [kinds[0]] * 8 + [kinds[-1]] * 8
    assert kinds[0] != kinds[-1]
    work_s = [sum(m.forward_s for m in profile.measurements[kinds[0]] if m.samples == 1) for profile in (few, many)]
    assert work_s[1] == pytest.approx(work_s[0], rel=0.2)


def test_every_number_of_devices_is_planned_for_every_network_and_limit() -> None:
    every = list(cases(quick=False))
    assert len(every) == len(set(map(str, every))) == 3 * 5 * 2 * 3 + 6
    assert set(cases(quick=True)) <= set(every)


def test_a_case_is_planned_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    small = Case(4, 8, 1, 20.0)
    result = planned(small)
    assert result.status == "proven"
    assert result.bound_s == pytest.approx(result.step_s)
    assert main(["--quick", "--json", "--only", "no such case"]) == 0
    assert json.loads(capsys.readouterr().out) == []
