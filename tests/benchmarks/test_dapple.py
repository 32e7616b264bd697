from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import dapple
from benchmarks.planner import main
from planner.extras.baselines.hpgo import HpgoMachines, HpgoPipeline, search
from planner.extras.baselines.pipedream.format import read

VGG = Path(__file__).parents[1] / "data" / "profiles" / "pipedream" / "vgg16.graph.txt"
COLUMNS = ("instance", "devices", "memory_limit", "objective", "value", "solver", "seconds", "provenance")


def stages_text(found: HpgoPipeline, per_host: int) -> str:
    """As its source prints them."""
    free = [list(range(per_host * host, per_host * (host + 1))) for host in range(len(found.devices[0]))]
    starts = (0, *(end + 1 for end in found.ends))
    listed = [
        (
            start,
            end + 1,
            sum(counts),
            [host.pop(0) for host, count in zip(free, counts, strict=True) for _ in range(count)],
        )
        for start, end, counts in zip(starts, found.ends, found.devices, strict=False)
    ]
    return f"rp {found.copies} STAGES {listed}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """VGG-16 on two servers of two GPUs, and on four of one, as DAPPLE's planner would have it."""
    (tmp_path / "vgg16-pbs-128.txt").write_text(VGG.read_text(encoding="utf-8"), encoding="utf-8")
    with (tmp_path / "plans.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for text, servers, each in (("4xV100 as 2 servers of 2 (NVLink)", 2, 2), ("4 single-GPU servers", 4, 1)):
            speed_up, found = search(read(VGG), HpgoMachines(servers, each, 25e9, 1e9, 3e9), 1024, 128)
            plan = stages_text(found, each)
            row = ("DAPPLE/vgg16-pbs-128", text, "-", "speedup, GBS=1024", f"{speed_up:.4f}", dapple.SOLVER, "", plan)
            writer.writerow(row)
        writer.writerow(("DAPPLE/vgg16-pbs-128", text, "-", "speedup, GBS=1024", "1", "pure data parallel", "", ""))
    return tmp_path


def test_a_folder_of_plans_is_a_case_a_row_and_all_hold(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--only", "DAPPLE's", "--data", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("speed-up by DAPPLE's own estimate") == 2
    assert shown.count("ours / its plan") == 2
    assert "NO" not in shown.split()


def test_a_plan_that_is_said_to_be_better_than_what_is_found_again_is_a_miss(folder: Path) -> None:
    case = replace(next(dapple.cases(folder)), speed_up=10.0)
    estimate = next(dapple.rows(case))
    assert estimate.name == f"{case.name}: speed-up by DAPPLE's own estimate (published: 10.0000)"
    assert not estimate.holds


def test_a_plan_that_leaves_a_gpu_without_a_sample_is_not_run(folder: Path) -> None:
    case = next(dapple.cases(folder))
    assert replace(case, samples=2, copies=1, stages=((0, (0, 1, 2)), (20, (3,)))).step_s() == float("inf")
    assert case.step_s() < float("inf")
