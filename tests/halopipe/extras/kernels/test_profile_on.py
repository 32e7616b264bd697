"""``halopipe profile --on`` and ``halopipe fit``: from a network's name to a plan for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import halopipe as hp
from halopipe.cli.app import app
from planner.ir.codec import load
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile

SLICE = Path(__file__).parents[3] / "data" / "kernels" / "a40.csv"
MODEL = ("profiler.models.gpt:gpt", "--input", "8,32", "--arg", "width=64", "--arg", "layers=1", "--arg", "heads=2")


def halopipe(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_network_is_planned_for_gpus_that_are_not_here_and_refused_where_it_runs() -> None:
    made = halopipe("profile", *MODEL, "--dtype", "bfloat16", "--on", "h100-dgx", "--workers", "4", "--sizes", "2,8")
    assert made.exit_code == 0, made.stderr
    assert "n0/gpu3: H100-SXM" in made.stdout
    assert "of a step on H100-SXM: fitted, held-back error 3.6 %" in made.stdout
    profile = load("profile.json", Profile)
    assert {m.evidence for m in profile.measurements["H100-SXM"]} == {"kernels", "datasheet"}
    planned = halopipe("plan", "profile.json", "--global-batch", "32", "-o", "plan.json")
    assert planned.exit_code == 0, planned.stderr
    prediction = load("plan.json", Plan).prediction
    assert prediction.p10_s < prediction.step_s < prediction.p90_s
    assert halopipe("check", "plan.json").exit_code == 0
    assert halopipe("explain", "plan.json").exit_code == 0
    run = halopipe("run", "plan.json", "--steps", "1")
    assert run.exit_code == 2
    assert "error[H207] rank 0 is to run on n0/gpu0" in run.stderr


def test_what_tables_say_is_said_to_be_of_kernels(folder: Path) -> None:
    (folder / "net.py").write_text(
        "from torch import nn, randn\n\n\ndef net():\n"
        "    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), randn(64, 512)\n"
    )
    made = halopipe(
        "profile", "net.py:net", "--dtype", "bfloat16", "--on", "a100-dgx", "--workers", "2", "--sizes", "64"
    )
    assert made.exit_code == 0, made.stderr
    planned = halopipe("plan", "profile.json", "-o", "plan.json")
    assert planned.exit_code == 0, planned.stderr
    assert "costs: kernels" in planned.stdout
    assert halopipe("check", "plan.json", "--profile", "profile.json").exit_code == 0
    assert "no device ran this network" in halopipe("explain", "plan.json").stdout


def test_a_module_object_is_priced_by_the_same_words() -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))
    example = torch.randn(16, 3, 4, 4), torch.randint(10, (16,))
    given = {"loss_fn": torch.nn.functional.cross_entropy, "on": "a100-dgx", "cluster": 2, "dtype": "bfloat16"}
    found = hp.profile(network, example, sizes=(16,), **given)
    assert len(found.cluster.devices) == 2
    assert {m.evidence for m in found.measurements["A100-80GB"] if m.forward_s} == {"kernels"}
    with pytest.raises(UsageError, match="quick: of no use with 'on'"):
        hp.profile(network, example, quick=True, **given)


def test_a_cluster_file_says_which_devices_and_how_fast(folder: Path) -> None:
    device = "{name: my-gpu, memory: 24GiB, memory-bandwidth: 900GB/s, peak: {float32: 30TFLOP/s}}"
    text = f"halopipe: cluster\nversion: 1\nhosts:\n  - {{name: n, count: 2, devices: [{device}]}}\n"
    (folder / "c.yaml").write_text(f"{text}links:\n  across-hosts: Ethernet-10G\n")
    made = halopipe("profile", *MODEL, "--on", "c.yaml", "--sizes", "8")
    assert made.exit_code == 0, made.stderr
    profile = load("profile.json", Profile)
    assert {m.evidence for m in profile.measurements["my-gpu"] if m.forward_s} == {"datasheet"}
    other = halopipe("profile", *MODEL, "--on", "c.yaml", "--dtype", "float16")
    assert other.exit_code == 3
    assert "error[H306] nothing says how fast my-gpu computes in float16" in other.stderr


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (("--on", "h200-dgx"), "no system 'h200-dgx' is known", 2),
        (("--on", "h100-dgx", "--quick"), "--quick: of no use with 'on'", 2),
        (("--on", "h100-dgx", "--workers", "12"), "12 devices are no whole number of hosts of h100-dgx", 2),
        (("--on", "nowhere.yaml"), "nowhere.yaml", 3),
        (("--tables", "own.csv"), "--tables is for --on", 2),
    ],
)
def test_what_does_not_fit_together_is_said_before_anything_is_captured(
    options: tuple[str, ...], said: str, code: int
) -> None:
    result = halopipe("profile", *MODEL, *options)
    assert result.exit_code == code
    assert said in result.stderr
    assert not Path("profile.json").exists()


def test_a_table_is_fitted_and_its_errors_drawn(folder: Path) -> None:
    result = halopipe("fit", str(SLICE), "-o", "fit.svg")
    assert result.exit_code == 0, result.stderr
    assert "A40" in result.stdout
    assert "curve and neighbours" in result.stdout
    assert (folder / "fit.svg").read_text().startswith("<?xml")
    found = json.loads(halopipe("fit", str(SLICE), "--json").stdout)
    (product,) = (fit for fit in found if fit["kind"] == "gemm")
    assert 0 < product["held_back"]["median"] < 0.1
    assert halopipe("fit", "nowhere.csv").exit_code == 3
