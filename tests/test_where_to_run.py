"""What docs/where_to_run.md shows of other engines: Kubernetes' manifest, the command of MPI, Ray Train's example."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.ir.codec import dump
from planner.ir.profile import ModelSource
from tests.forks import require_mpich
from tests.halopipe.plans import mined, plan_of

HOME = Path(__file__).resolve().parent.parent
PAGE = (HOME / "docs" / "where_to_run.md").read_text("utf-8")
MANIFEST = HOME / "docs/examples/pytorchjob.yaml"
RAY = HOME / "docs/examples/ray_train.py"


def pods(job: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Each pod of a PyTorchJob, with the environment that the operator gives its container.

    After ``setPodEnv`` of kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go; without an elastic policy.
    """
    replicas = job["spec"]["pytorchReplicaSpecs"]
    count = sum(each["replicas"] for each in replicas.values())
    per_node = int(job["spec"]["nprocPerNode"])
    found = []
    for role, each in replicas.items():
        for index in range(each["replicas"]):
            rank = index + (role == "Worker")
            environment = {
                "MASTER_ADDR": f"{job['metadata']['name']}-master-0",
                "MASTER_PORT": "23456",
                "WORLD_SIZE": str(count * per_node),
                "RANK": str(rank),
                "PET_NPROC_PER_NODE": str(per_node),
                "PET_NODE_RANK": str(rank),
                "PET_NNODES": str(count),
            }
            found.append((each["template"]["spec"], environment))
    return found


def test_each_pod_of_the_manifest_starts_torchrun_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    job = yaml.safe_load(MANIFEST.read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    (shown,) = re.findall(r'^torchrun --master-addr "\$MASTER_ADDR".*', PAGE, re.MULTILINE)
    seen = []
    for spec, environment in pods(job):
        (container,) = spec["containers"]
        assert container["name"] == "pytorch"
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        words = [
            os.path.expandvars(re.sub(r"\$\((\w+)\)", r"$\1", word))
            for word in container["command"] + container["args"]
        ]
        assert words == [os.path.expandvars(word) for word in shlex.split(shown)]
        asked = parse_args(words[1:])
        seen.append((asked.nnodes, asked.nproc_per_node, asked.node_rank, asked.master_addr, asked.master_port))
        assert (asked.module, asked.training_script) == (True, "halopipe")
        assert {volume["name"] for volume in spec["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert [tuple(map(str, each)) for each in seen] == [
        ("2", "2", str(node), "halopipe-master-0", "23456") for node in range(2)
    ]


def test_the_manifest_gives_run_options_that_there_are() -> None:
    import typer.main

    from halopipe.cli.app import app

    job = yaml.safe_load(MANIFEST.read_text("utf-8"))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    module, name, verb, *arguments = container["args"]
    assert (module, name, verb) == ("-m", "halopipe", "run")
    run = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    values = run.make_context(verb, list(arguments)).params
    assert (values["steps"], values["checkpoint_every"]) == (1000, "100")
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"] == [container]


def by_mpi(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What becomes of the command that the page shows, with more options."""
    (shown,) = re.findall(r"^\$ (mpiexec .* run .*)", PAGE, re.MULTILINE)
    mpiexec, *words = shlex.split(shown)
    command = [require_mpich(), *words, *options]
    at = command.index("halopipe")
    command[at : at + 1] = [sys.executable, "-m", "halopipe"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    assert mpiexec == "mpiexec"
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=150
    )


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("mpich*")}


@pytest.mark.exhaustive("two ranks load torch; tests/halopipe/launch/test_torchrun.py forks them")
@pytest.mark.timeout(160)
def test_ranks_that_mpiexec_starts_train_as_one_device(tmp_path: Path) -> None:
    dump(mined(), tmp_path / "plan.json")
    done = by_mpi(tmp_path, "--check-numerics", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads(done.stdout)["losses"]) == 3  # of rank 0 alone
    assert (tmp_path / "timeline.json").exists()


@pytest.mark.exhaustive("runs of two ranks; tests/runtime/transport/test_mpi.py says what peers see, in half a second")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("deed", "code"), [("raise", 5), ("kill", 9)])
def test_a_rank_that_fails_under_mpiexec_ends_the_job_and_leaves_nothing(tmp_path: Path, deed: str, code: int) -> None:
    before = segments()
    dump(mined(2, deed), tmp_path / "plan.json")
    done = by_mpi(tmp_path, "--data", "tests.halopipe.bombs:poison")
    assert done.returncode == code, done.stderr[-3000:]
    assert done.stderr.count("rank 1 (n0/cpu1, stage 1) stopped at step 2, micro-batch 1, forward") == (
        2 if deed == "raise" else 0
    )
    assert segments() <= before


@pytest.mark.exhaustive("Ray starts a cluster of processes of its own: half a minute")
@pytest.mark.timeout(900)
def test_a_plan_is_trained_by_two_workers_of_ray_as_on_one_device(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="ray is not installed: pip install 'halopipe[ray]'")
    import torch

    dump(plan_of(ModelSource(f"{RAY}:perceptron"), [0.5], (8, 8)), tmp_path / "plan.json")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place:  # its sockets need short paths
        environment = {
            **os.environ,
            "PYTHONPATH": str(HOME),
            "HOME": str(tmp_path),
            "RAY_TMPDIR": place,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # of a machine that has much else to do
        }
        command = [sys.executable, str(RAY), "plan.json"]
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=840
        )
    assert result.returncode == 0, result.stdout + result.stderr
    (losses,) = re.findall(r"^losses (.+)$", result.stdout, re.MULTILINE)
    spec = importlib.util.spec_from_file_location("ray_train", RAY)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    network, (inputs, targets), loss_fn = example.perceptron()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    expected = []
    for _ in range(example.STEPS):
        optimizer.zero_grad()
        loss = loss_fn(network(inputs), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert [float(word) for word in losses.split()] == pytest.approx(expected, rel=1e-5)
