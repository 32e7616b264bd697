"""A rank's work: where it computes, the capture that it shares with others of its host, and what it refuses first."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.chains import cluster
from cuda_ops.device import host
from cuda_ops.device.host import DeviceDescription
from halopipe.launch import spawn
from halopipe.launch.parallelize import ScriptRanks
from halopipe.launch.run import run_plan
from halopipe.launch.script_rank import Script
from halopipe.run_spec.job import JOB, REFERENCE, Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training import rank_device, shared_capture
from halopipe.training.rank import JobMember
from halopipe.training.rank_device import (
    DeviceAssignment,
    device_assignment_of,
    device_assignments_of,
    device_of,
    number_here,
    require_devices,
)
from halopipe.training.single_device import make_reference
from halopipe.training.work import work
from planner.costs.stages.input_pipeline import spare_cores
from planner.ir.errors import CorruptFileError, IllegalProgramError, MissingDeviceError, StaleFileError, UsageError
from planner.ir.plan import Decision, Plan, RankPrediction, Stage
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.monitor.activity import read_board
from runtime.monitor.failure import set_text
from runtime.rank import RankContext
from runtime.transport import Hub, InProcessTransport, Transport
from tests.halopipe.plans import RESNET, mined, plan_of


def do(plan: Plan, folder: Path, store: dist.Store | None = None, **options: object) -> RankResult:
    """The work of rank 0 where it is the only one to come."""
    job = Job(plan, RunOptions(**{"steps": 3, "warmup": 1, "check_first_step": False, **options}), folder)
    board = dist.HashStore()
    if job.is_compared:
        set_text(store or board, REFERENCE, make_reference(job).to_text())
    result = work(job, 0, store or board, board, lambda groups, program: InProcessTransport(Hub(1, groups), 0))
    assert read_board(board, [0])[0].num_done == job.options.steps
    return result


def test_one_rank_does_everything(tmp_path: Path) -> None:
    result = do(plan_of(RESNET, []), tmp_path, check_numerics=True, dtype="float64")
    assert (len(result.losses), len(result.step_seconds), sorted(result.spans)) == (3, 3, [0, 1, 2])
    module = load_model(RESNET).module
    assert result.peak_bytes > 3 * 8 * sum(each.numel() for each in module.parameters())  # with gradients and momentum
    assert {each.kind for each in result.compared} == {"gradient", "parameter", "buffer", "loss"}
    assert "bn1.num_batches_tracked" in {each.name for each in result.compared if each.kind == "buffer"}
    assert max(each.error for each in result.compared) == 0.0


def test_a_plan_for_another_model_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    plan = plan_of(RESNET, [])
    other = mined()
    wrong = replace(plan, inputs=replace(plan.inputs, model_fingerprint=other.inputs.model_fingerprint))
    with pytest.raises(StaleFileError) as caught:
        do(wrong, tmp_path)
    there, here, which = caught.value.details
    assert there.startswith(f"plan: {other.inputs.model_fingerprint}, of ")
    assert here.startswith(f"here: {plan.inputs.model_fingerprint}, of ")
    assert "their names are the same" in which
    assert (caught.value.code, caught.value.exit_code) == ("H304", 3)


def test_a_rank_that_fails_while_it_is_opened_leaves_the_others_and_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Transport] = []
    monkeypatch.setattr(InProcessTransport, "close", lambda end: closed.append(end))
    monkeypatch.setattr("halopipe.training.rank.Engine", lambda *given, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        do(plan_of(RESNET, []), tmp_path)
    assert len(closed) == 1
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_an_edited_plan_that_would_hang_or_lacks_a_layer_is_refused(tmp_path: Path) -> None:
    plan = mined()
    rows = (tuple(action for action in plan.decision.program[0] if action != "0SEND_F1>1"), plan.decision.program[1])
    with pytest.raises(IllegalProgramError) as caught:
        do(replace(plan, decision=replace(plan.decision, program=rows)), tmp_path)
    assert "rank 0: " in str(caught.value)
    assert caught.value.exit_code == 3
    layers = {name: place for name, place in plan.decision.layers.items() if name != "1.linear"}
    with pytest.raises(CorruptFileError, match=r"layer 1\.linear is in no stage"):
        do(replace(plan, decision=replace(plan.decision, layers=layers)), tmp_path)


def dropping(*, input_shape: tuple[int, ...] = (4, 3)) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_numerics_of_a_random_model_are_checked_with_the_numbers_that_it_draws(tmp_path: Path, dtype: str) -> None:
    plan = plan_of(ModelSource(f"{__name__}:dropping", {}, (4, 3)), [])
    compared = do(plan, tmp_path, check_numerics=True, dtype=dtype).compared
    assert {each.kind for each in compared} == {"gradient", "parameter", "loss"}
    assert all(each.error <= each.accepted for each in compared)
    assert max(each.accepted for each in compared) < 0.1  # in float32: its twin in float64 drops the same units


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
    for devices in (("n0/cpu0", "n0/gpu0"), ("n0/gpu0", "n0/gpu0"), ("n0/cpu0", "n0/cpu1")):  # none of their own
        assert not any(assignment.over_nccl for assignment in device_assignments_of(decision(devices)))


@pytest.mark.every_case
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
    store = object()
    groups = ((0, 1),)
    rank_device.opened(assignment, torch.device("cuda:0"), ("n0", "n1"), store, groups, lambda: "program", 30.0)
    assert asked == [("cuda:0", ("program", "its channels"), 1, 2, store, 30.0, groups, ("H", "D"))]
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("name", ["n0/fpga0", "n1/tpu3", "n2/snn0", "n2/d0"])
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


@pytest.mark.parametrize("device", ["gpu", "fpga"])
def test_a_plan_for_what_is_not_here_is_refused_by_every_way_to_start_it(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    here(monkeypatch, 0, "torch finds no NVIDIA GPU")
    monkeypatch.setattr("runtime.monitor.watch.host_store", lambda: pytest.fail("a process was about to be started"))
    plan = mined()
    stages = tuple(replace(stage, devices=(f"n0/{device}{rank}",)) for rank, stage in enumerate(plan.decision.stages))
    there = replace(plan, decision=replace(plan.decision, stages=stages))
    with pytest.raises(MissingDeviceError, match=f"rank 0 is to run on n0/{device}0"):
        run_plan(there, RunOptions(steps=1))
    with pytest.raises(MissingDeviceError, match=f"rank 0 is to run on n0/{device}0"):  # hp.parallelize, halopipe serve
        ScriptRanks(Script(there, None, {"device": ""}, has_state=False), None, 60.0)
    # hp.execute, torchrun, mpiexec: each for itself
    member = JobMember(there, RankContext(there.decision, lambda _: [], 1))
    with pytest.raises(MissingDeviceError, match=f"rank 1 is to run on n0/{device}1"), member.opened(None, None):
        pytest.fail("it was opened")


@pytest.mark.every_case
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


NETWORK = """
from pathlib import Path

import torch
from torch import nn

with Path({log!r}).open("a") as file:
    file.write("loaded, ")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.last({call}(self.first(x)) * {scale})


def make():
    return Scaled(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 3])), nn.CrossEntropyLoss()
"""


def written(folder: Path, scale: float, call: str = "torch.relu") -> ModelSource:
    """A network whose file notes how often it is run."""
    place = folder / "network.py"
    place.write_text(NETWORK.format(log=str(folder / "log"), scale=scale, call=call))
    return ModelSource(f"{place}:make")


def trained(plan: Plan, folder: Path) -> RunResult:
    (folder / "log").unlink(missing_ok=True)
    result = run_plan(plan, RunOptions(steps=2, warmup=0))
    assert result is not None
    assert result.numerics is not None
    assert result.numerics.num_steps == 1, "its first step was compared with one device"
    return result


@contextlib.contextmanager
def by_each(folder: Path, num_workers: int) -> Iterator[None]:
    """As where nothing can be shared."""
    yield None


def test_a_shared_capture_gives_the_first_step_that_captures_of_their_own_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(written(tmp_path, 1.5), [0.5])
    together = trained(plan, tmp_path)
    assert (tmp_path / "log").read_text() == "loaded, "
    monkeypatch.setattr(spawn, "captured_once", by_each)
    apart = trained(plan, tmp_path)
    assert (tmp_path / "log").read_text() == "loaded, " * 3
    assert together.losses == apart.losses


def test_a_changed_source_is_captured_anew(tmp_path: Path) -> None:
    plan = plan_of(written(tmp_path, 1.5), [0.5])
    before = trained(plan, tmp_path)
    written(tmp_path, 3.0)
    assert trained(plan, tmp_path).losses[0] != before.losses[0]
    written(tmp_path, 1.5, "torch.tanh")
    with pytest.raises(StaleFileError):
        trained(plan, tmp_path)


def test_a_model_that_was_captured_ahead_is_taken_once_by_its_source_and_seed(tmp_path: Path) -> None:
    plan = mined()
    job = Job(plan, RunOptions(1, dtype="float64"), tmp_path)
    job.write(tmp_path / JOB)
    forget = shared_capture.capture_ahead(str(tmp_path / JOB))
    source = plan.inputs.model
    seed = job.options.seed
    assert shared_capture.load(source, seed + 1)[1] is None
    assert shared_capture.load(replace(source, arguments={**source.arguments, "where": "0"}), seed)[1] is None
    model, captured = shared_capture.load(source, seed)
    assert captured is not None
    assert {id(each) for each in captured.graph_module.parameters()} == {id(p) for p in model.module.parameters()}
    other, none = shared_capture.load(source, seed)
    assert none is None
    assert other.module is not model.module
    assert {str(each.dtype) for each in shared_capture.load(job.source, seed)[0].module.parameters()} == {
        "torch.float64"
    }
    shared_capture.capture_ahead(str(tmp_path / JOB))
    forget()
    assert shared_capture.load(source, seed)[1] is None
