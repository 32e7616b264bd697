"""This host: its cores, memory, GPUs and seeds; where ranks are placed."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from cuda_ops import core_of, device_description, prepare_process
from cuda_ops.device import gpus
from cuda_ops.device.gpus import GpuDescription, gpu_clocks, gpu_descriptions, num_gpus, parse_clocks, why_no_gpu
from cuda_ops.device.host import cpu_s_of_all
from cuda_ops.device.placing import move, on_device, tensors_of
from cuda_ops.device.seeding import seeded
from tests.without_memory import META, on_meta

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def in_new_process(program: str) -> str:
    command = [sys.executable, "-c", program]
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env={**os.environ, "PYTHONPATH": path}
    ).stdout


@linux_only
def test_ranks_take_the_cores_of_this_process_in_turn() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert [core_of(rank) for rank in range(2 * len(cores))] == cores * 2


@linux_only
def test_a_prepared_process_has_one_core_and_one_thread() -> None:
    core = core_of(1)
    program = (
        "import os; from cuda_ops import prepare_process\n"
        f"for _ in range(2): prepare_process({core})\n"
        "import torch; print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())"
    )
    assert in_new_process(program).strip() == f"[{core}] 1"


@linux_only
def test_freed_memory_stays_with_a_prepared_process() -> None:
    program = (
        "from cuda_ops import prepare_process; prepare_process(None)\n"
        "import torch, resource\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): torch.zeros(1 << 24)\n"  # glibc 2.36 leaves splinters in the first rounds
        "before = faults()\n"
        "for _ in range(5): torch.zeros(1 << 24)\n"  # 64 MiB = 16384 pages
        "print(faults() - before)"
    )
    assert int(in_new_process(program)) < 16384


def test_without_a_core_the_affinity_stays() -> None:
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    prepare_process(None)
    assert before is None or os.sched_getaffinity(0) == before


def test_memory_is_shared_by_the_workers() -> None:
    alone = device_description(1)
    shared = device_description(4)
    assert shared.processor == alone.processor != ""
    assert shared.num_cores == alone.num_cores >= 1
    assert shared.memory_bytes == pytest.approx(alone.memory_bytes / 4, rel=0.2)


@linux_only
def test_a_child_dies_with_its_parent() -> None:
    child = "import sys, time; from cuda_ops import die_with_parent; die_with_parent(int(sys.argv[1])); time.sleep(60)"
    parent = (
        "import os, subprocess, sys\n"
        f"process = subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
        "import time; time.sleep(1)\n"
        "print(process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    result = subprocess.run(
        [sys.executable, "-c", parent],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == -signal.SIGKILL
    assert _is_gone(int(result.stdout), deadline_s=10)


def _is_gone(process: int, deadline_s: float) -> bool:
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        try:
            with open(f"/proc/{process}/stat", encoding="ascii") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_process_that_ends_while_it_is_looked_at_has_used_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python looks whether the folder of its threads is there, and only then into it."""

    def ended(self: Path, _: str) -> Iterator[Path]:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "glob", ended)
    assert cpu_s_of_all(os.getpid()) > 0


UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9, uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((149 - index) * 10**9, 150 * 10**9))


def test_a_host_without_gpus_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert why_no_gpu() == "this build of torch has no CUDA"
    assert (num_gpus(), gpu_descriptions()) == (0, ())
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_no_gpu() == "torch finds no NVIDIA GPU"


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_has_as_much_memory_as_a_process_that_uses_it_finds_free() -> None:
    assert why_no_gpu() == ""
    assert gpu_descriptions() == (
        GpuDescription("NVIDIA H200", 149 * 10**9, 150 * 10**9),
        GpuDescription("NVIDIA H200", 148 * 10**9, 150 * 10**9),
    )


@pytest.mark.parametrize(
    ("answer", "clocks"),
    [
        ("1980, 3201\n", {"sm": 1.98e9, "memory": 3.201e9}),
        ("[N/A], 3201\n", {"memory": 3.201e9}),
        ("1980, [Not Supported]", {"sm": 1.98e9}),
        ("No devices were found\n", {}),
        ("", {}),
    ],
)
def test_clocks_are_in_hertz_and_what_is_not_known_is_left_out(answer: str, clocks: dict[str, float]) -> None:
    assert parse_clocks(answer) == clocks


@pytest.mark.usefixtures("two_gpus")
def test_clocks_are_asked_by_uuid_as_torch_may_number_gpus_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "1755, 2619"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_clocks(1) == {"sm": 1.755e9, "memory": 2.619e9}
    assert f"--id=GPU-{UUID}" in (tmp_path / "asked").read_text().split()
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_clocks(1) == {}
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    assert gpu_clocks(1) == {}


@pytest.mark.cuda
def test_a_gpu_of_this_host_is_described() -> None:
    found = gpu_descriptions()[0]
    assert 0 < found.memory_bytes < found.total_bytes
    assert found.name == torch.cuda.get_device_name(0)
    assert all(1e8 < hertz < 1e10 for hertz in gpu_clocks(0).values())


class Positions(nn.Module):
    """Makes tensors from nothing, and has a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.constant = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool, device=x.device).triu(1)
        places = torch.arange(4, device=x.device) + self.constant
        y = (x * self.weight + self.shift + places).unsqueeze(1).expand(-1, 4, -1)
        return y.masked_fill(mask, 0.0).to(x.device, torch.float64).sum()


def captured() -> fx.GraphModule:
    graph: fx.GraphModule = torch.export.export(Positions(), (torch.ones(2, 4),)).module()
    for node in list(graph.graph.nodes):
        if node.op == "call_module" or "assert" in str(node.target):  # as the profiler's capture drops them
            graph.graph.erase_node(node)
    return graph


def test_a_graph_runs_where_it_was_placed_and_not_where_it_was_captured() -> None:
    there = on_meta(captured())
    (loss,) = run(there)
    assert loss.device == META
    loss.backward()
    assert all(parameter.grad.device == META for parameter in there.parameters())


def test_operators_that_were_not_placed_mix_devices() -> None:
    graph = captured()
    there = on_meta(graph)
    for before, after in zip(graph.graph.nodes, there.graph.nodes, strict=True):
        after.kwargs = {**after.kwargs, **{n: v for n, v in before.kwargs.items() if isinstance(v, torch.device)}}
    with pytest.raises(RuntimeError, match="device"):
        run(there)


def test_parameters_stay_the_same_objects_and_nodes_keep_their_names() -> None:
    graph = captured()
    there = on_device(graph, META)
    assert there.get_parameter("weight") is graph.get_parameter("weight")
    assert there.get_buffer("shift") is graph.get_buffer("shift")
    assert [node.name for node in there.graph.nodes] == [node.name for node in graph.graph.nodes]


def test_what_is_there_already_is_not_moved() -> None:
    tensor = torch.ones(3)
    address = tensor.data_ptr()
    move([tensor], torch.device("cpu"))
    assert tensor.data_ptr() == address


@pytest.mark.cuda
def test_tensors_are_moved_in_place_with_all_who_have_them() -> None:
    graph = captured()
    device = torch.device("cuda:0")
    weight = graph.get_parameter("weight")
    there = on_device(graph, device)
    move(tensors_of(there), device)
    assert graph.get_parameter("weight") is weight
    assert isinstance(weight, nn.Parameter)
    assert {tensor.device for tensor in tensors_of(graph)} == {device}
    (loss,) = run(there, device)
    loss.backward()
    assert weight.grad.device == device


def test_the_graph_that_was_captured_is_left_as_it_was() -> None:
    graph = captured()
    before = str(graph.graph)
    on_device(graph, META)
    assert str(graph.graph) == before


def run(graph: fx.GraphModule, device: torch.device = META) -> tuple[Tensor, ...]:
    return fx.Interpreter(graph).run(torch.ones(2, 4, device=device))


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002


def test_numbers_follow_from_the_seed_and_leave_no_trace() -> None:
    with seeded(3):
        before = draw()
        with seeded(2**62 + 1):
            inner = draw()
        after = draw()
    with seeded(3):
        assert (draw(), draw()) == (before, after)
    with seeded(2**62 + 1):
        assert draw() == inner
    with seeded(4):
        assert all(a != b for a, b in zip(draw(), before, strict=True))


def test_an_error_leaves_no_trace_either() -> None:
    with seeded(3):
        expected = draw(), draw()
    with seeded(3):
        first = draw()
        with pytest.raises(ValueError, match="user"), seeded(5):
            raise ValueError(f"user code that drew {draw()}")
        assert (first, draw()) == expected


def test_threads_take_turns() -> None:
    found: list[tuple[float, float, float]] = []

    def one() -> None:
        for _ in range(50):
            with seeded(7):
                found.append(draw())

    threads = [threading.Thread(target=one) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 1
