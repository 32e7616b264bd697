"""Where ranks compute, as told by the names of the plan's devices; no GPU is needed to tell."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from benchmarks.chains import cluster
from cuda_ops.device import host
from cuda_ops.device.host import DeviceDescription
from halopipe.launch.parallelize import ScriptRanks
from halopipe.launch.run import run_plan
from halopipe.launch.script_rank import Script
from halopipe.run_spec.options import RunOptions
from halopipe.training import rank_device
from halopipe.training.rank import Rank
from halopipe.training.rank_device import (
    DeviceAssignment,
    device_assignment_of,
    device_assignments_of,
    device_of,
    number_here,
    require_devices,
)
from planner.costs.stages.input_pipeline import spare_cores
from planner.ir.errors import MissingDeviceError, UsageError
from planner.ir.plan import Decision, RankPrediction, Stage
from runtime.rank import RankContext
from tests.halopipe.plans import mined


def decision(*devices: tuple[str, ...]) -> Decision:
    ranks = iter(range(sum(map(len, devices))))
    stages = tuple(Stage(tuple(next(ranks) for _ in names), names) for names in devices)
    return Decision("1f1b", (1,), stages, {}, tuple(() for names in devices for _ in names))


def here(monkeypatch: pytest.MonkeyPatch, count: int, why: str = "") -> None:
    monkeypatch.setattr(rank_device, "num_gpus", lambda: count)
    monkeypatch.setattr(rank_device, "why_no_gpu", lambda: why)


def test_each_rank_has_the_gpu_of_its_device_and_its_share_of_the_cores() -> None:
    found = device_assignments_of(decision(("n0/gpu1", "n1/gpu0"), ("n0/gpu3",)))
    assert [assignment.gpu for assignment in found] == [1, 0, 3]
    assert [assignment.beside for assignment in found] == [(0, 2), (0, 1), (1, 2)]
    assert all(assignment.over_nccl for assignment in found)


@pytest.mark.parametrize(
    ("cores", "ahead", "expected"),
    [
        ([4, 5, 6], True, (6, False)),  # one to spare, for both
        ([4, 5, 6], False, (6, False)),
        ([4, 5], True, (None, True)),  # the rank's own, while it waits
        ([4, 5], False, (None, False)),
        ([4], True, (None, False)),  # ranks share it: their threads take turns as they are
    ],
)
def test_a_thread_beside_a_rank_has_a_spare_core_or_gives_way_as_the_plan_means_it(
    cores: list[int], ahead: bool, expected: tuple[int | None, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_cores", lambda: cores)
    plan = replace(decision(("n0/cpu0",), ("n0/cpu1",)), prepares_next_step=ahead)
    assert [rank_device.beside(assignment, assignment.rank, plan) for assignment in device_assignments_of(plan)] == [
        expected
    ] * 2
    gpus = replace(decision(("n0/gpu0", "n0/gpu1")), prepares_next_step=ahead)
    assert rank_device.beside(device_assignment_of(gpus, 0), 0, gpus) == (None, False)


def test_ranks_of_a_host_take_its_spare_cores_by_turns_as_the_planner_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_cores", lambda: list(range(5)))
    found = [host.spare_core(rank, 3) for rank in range(3)]
    assert tuple(found) == spare_cores(cluster((1.0,) * 5), 3) == (3, 4, 3)


@pytest.mark.parametrize(
    "devices", [("n0/cpu0", "n0/gpu0"), ("n0/gpu0", "n0/gpu0"), ("n0/cpu0", "n0/cpu1")], ids=["mixed", "one", "cores"]
)
def test_ranks_without_a_gpu_of_their_own_exchange_over_gloo(devices: tuple[str, ...]) -> None:
    assert not any(assignment.over_nccl for assignment in device_assignments_of(decision(devices)))


def test_a_run_on_the_processor_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, 0, "torch finds no NVIDIA GPU")
    found = device_assignments_of(decision(("n0/gpu0", "n0/gpu1")), "cpu")
    require_devices(found)
    assert [(assignment.gpu, assignment.over_nccl) for assignment in found] == [(None, False)] * 2
    assert device_of(found[0]) is None
    with pytest.raises(UsageError, match="device 'tpu' is not known"):
        device_assignments_of(decision(("n0/gpu0",)), "tpu")


def test_a_gpu_that_is_not_there_is_named_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    here(monkeypatch, 1)
    found = device_assignments_of(decision(("n0/gpu0", "n0/gpu1")))
    require_devices(found[:1])
    with pytest.raises(MissingDeviceError, match=r"rank 1 is to run on n0/gpu1, this host has 1 GPUs") as caught:
        require_devices(found)
    assert "CUDA_VISIBLE_DEVICES is '0'" in caught.value.details
    here(monkeypatch, 0, "this build of torch has no CUDA")
    with pytest.raises(MissingDeviceError, match="rank 0 is to run on n0/gpu0") as caught:
        device_of(found[0])
    assert caught.value.details == ("this build of torch has no CUDA",)
    assert "--device cpu" in caught.value.remedies[0]


def test_a_process_that_was_given_one_gpu_calls_it_the_first() -> None:
    assignment = DeviceAssignment(3, "n0/gpu3", 3)
    assert number_here(assignment, 1, {"LOCAL_RANK": "3"}) == 0
    assert number_here(assignment, 1, {}) == 3  # nobody gave it one: the plan's third is missing
    assert number_here(assignment, 4, {"LOCAL_RANK": "3"}) == 3


def test_a_process_with_a_gpu_keeps_several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[object] = []
    monkeypatch.setattr(rank_device, "prepare_process", prepared.append)
    monkeypatch.setattr("cuda_ops.device.host._cores", lambda: list(range(10, 18)))
    for assignment in (
        *device_assignments_of(decision(("n0/gpu0", "n0/gpu1"))),
        device_assignment_of(decision(("n0/cpu0",)), 0),
    ):
        rank_device.prepare(assignment, 5)
    assert prepared == [(10, 11, 12, 13), (14, 15, 16, 17), 15]


def test_ranks_with_gpus_of_their_own_open_nccl_with_the_channels_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("runtime.transport.channels_of", lambda program: (program, "its channels"))
    monkeypatch.setattr("runtime.transport.open_nccl", lambda *given: asked.append(given))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assignment = device_assignment_of(decision(("n0/gpu0", "n1/gpu0")), 1)
    store, groups = object(), ((0, 1),)
    rank_device.opened(assignment, torch.device("cuda:0"), ("n0", "n1"), store, groups, lambda: "program", 30.0)
    assert asked == [("cuda:0", ("program", "its channels"), 1, 2, store, 30.0, groups, ("H", "D"))]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


def test_a_plan_for_gpus_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, 0, "torch finds no NVIDIA GPU")
    monkeypatch.setattr("runtime.monitor.watch.host_store", lambda: pytest.fail("a process was about to be started"))
    plan = mined()
    stages = tuple(replace(stage, devices=(f"n0/gpu{rank}",)) for rank, stage in enumerate(plan.decision.stages))
    there = replace(plan, decision=replace(plan.decision, stages=stages))
    with pytest.raises(MissingDeviceError, match="rank 0 is to run on n0/gpu0"):
        run_plan(there, RunOptions(steps=1))


BOARDS = ("n0/fpga0", "n1/tpu3", "n2/snn0", "n2/d0")


@pytest.mark.parametrize("name", BOARDS)
def test_a_device_that_nothing_drives_is_refused_with_its_kind_what_is_here_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    here(monkeypatch, 0, "torch finds no NVIDIA GPU")
    known = DeviceDescription("AMD EPYC 7763 64-Core Processor", 2, 2**30)
    monkeypatch.setattr(rank_device, "device_description", lambda: known)
    found = device_assignments_of(decision(("n0/cpu0",), (name,)))
    ranks = (predicted(0, "a core"), predicted(1, "VCU118"))
    require_devices(found[:1], ranks)
    with pytest.raises(MissingDeviceError, match=f"rank 1 is to run on {name}, a device of kind VCU118") as caught:
        require_devices(found, ranks)
    assert caught.value.details == (
        f"the plan is for 1 of those: {name}",
        "this host has 2 cores of AMD EPYC 7763 64-Core Processor and no GPUs",
    )
    words = " ".join(caught.value.remedies)
    assert all(word in words for word in ("halopipe profile", "--what-if", "halopipe export", "--device cpu"))
    with pytest.raises(MissingDeviceError):
        device_of(found[1], ranks)
    on_cores = device_assignments_of(decision(("n0/cpu0",), (name,)), "cpu")
    require_devices(on_cores, ranks)
    assert device_of(on_cores[1], ranks) is None


@pytest.mark.parametrize("names", [("n0/cpu0", "n0/cpu12"), ("", ""), ("n0/cpu", "n1/cpu")])
def test_cores_are_there_and_so_is_a_device_without_a_name(names: tuple[str, ...]) -> None:
    require_devices(device_assignments_of(decision(names)))


def test_a_plan_for_boards_is_refused_by_every_way_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.monitor.watch.host_store", lambda: pytest.fail("a process was about to be started"))
    plan = mined()
    stages = tuple(replace(stage, devices=(f"n0/fpga{rank}",)) for rank, stage in enumerate(plan.decision.stages))
    there = replace(plan, decision=replace(plan.decision, stages=stages))
    with pytest.raises(MissingDeviceError, match="rank 0 is to run on n0/fpga0"):
        run_plan(there, RunOptions(steps=1))
    with pytest.raises(MissingDeviceError, match="rank 0 is to run on n0/fpga0"):  # hp.parallelize, halopipe serve
        ScriptRanks(Script(there, None, {"device": ""}, has_state=False), None, 60.0)
    rank = Rank(there, RankContext(there.decision, lambda _: [], 1))  # hp.execute, torchrun, mpiexec: each for itself
    with pytest.raises(MissingDeviceError, match="rank 1 is to run on n0/fpga1"), rank.opened(None, None):
        pytest.fail("it was opened")


@pytest.mark.parametrize(
    ("processor", "planned", "kind"),
    [
        ("AMD EPYC 7763 64-Core Processor", "EPYC-7763-core", "EPYC-7763-core"),
        ("AMD EPYC 7763 64-Core Processor", "EPYC-7763-core (memory at 20GB/s)", "AMD EPYC 7763 64-Core Processor"),
        ("AMD EPYC 9654 96-Core Processor", "EPYC-7763-core", "AMD EPYC 9654 96-Core Processor"),
        ("Intel Xeon", "Intel Xeon", "Intel Xeon"),
        ("Intel Xeon", "Alveo-U280", "Intel Xeon"),
        ("Intel Xeon", "", "Intel Xeon"),
    ],
)
def test_a_rank_runs_on_the_kind_that_was_planned_or_on_what_the_host_calls_it(
    monkeypatch: pytest.MonkeyPatch, processor: str, planned: str, kind: str
) -> None:
    monkeypatch.setattr(rank_device, "device_description", lambda: DeviceDescription(processor, 2, 2**30))
    assert rank_device.kind_of(None, planned) == kind


def predicted(rank: int, kind: str) -> RankPrediction:
    return RankPrediction(rank, 0.0, 0.0, 0.0, 0, 0, kind=kind)
