"""Costs of kernels: ``halopipe fit``, ``profile --on`` GPUs that are not here, and recomputation of attention alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import halopipe as hp
from planner.ir.codec import dump, load
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.layers.recomputed import attention_cores
from tests.halopipe.commands import call, code_and_output, good, require_said
from tests.oracles.plans import check

SLICE = Path(__file__).parents[3] / "data" / "kernels" / "a40.csv"
MODEL = ("profiler.models.gpt:gpt", "--input", "8,32", "--arg", "width=64", "--arg", "layers=1", "--arg", "heads=2")


def test_a_network_is_planned_for_gpus_that_are_not_here_and_refused_where_it_runs(folder: Path) -> None:
    made = good("profile", *MODEL, "--dtype", "bfloat16", "--on", "h100-dgx", "--workers", "4", "--sizes", "2,8")
    assert "n0/gpu3: H100-SXM" in made.stdout
    assert "of a step on H100-SXM: fitted, held-back error 4.4 %" in made.stdout
    profile = load("profile.json", Profile)
    assert {m.evidence for m in profile.measurements["H100-SXM"]} == {"kernels", "datasheet"}
    good("plan", "profile.json", "--global-batch", "32", "-o", "plan.json")
    prediction = load("plan.json", Plan).prediction
    assert prediction.p10_s < prediction.step_s < prediction.p90_s
    assert call("check", "plan.json").exit_code == 0
    assert call("explain", "plan.json").exit_code == 0
    run = call("run", "plan.json", "--steps", "1")
    assert run.exit_code == 2
    assert "error[H207] rank 0 is to run on n0/gpu0" in run.stderr


def test_what_tables_say_is_said_to_be_of_kernels(folder: Path) -> None:
    (folder / "net.py").write_text(
        "from torch import nn, randn\n\n\ndef net():\n"
        "    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), randn(64, 512)\n"
    )
    good("profile", "net.py:net", "--dtype", "bfloat16", "--on", "a100-dgx", "--workers", "2", "--sizes", "64")
    planned = good("plan", "profile.json", "-o", "plan.json")
    assert "costs: kernels" in planned.stdout
    assert call("check", "plan.json", "--profile", "profile.json").exit_code == 0
    assert "no device ran this network" in call("explain", "plan.json").stdout


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
    good("profile", *MODEL, "--on", "c.yaml", "--sizes", "8")
    profile = load("profile.json", Profile)
    assert {m.evidence for m in profile.measurements["my-gpu"] if m.forward_s} == {"datasheet"}
    other = call("profile", *MODEL, "--on", "c.yaml", "--dtype", "float16")
    assert other.exit_code == 3
    assert "error[H306] nothing says how fast my-gpu computes in float16" in other.stderr


def test_a_table_is_fitted_and_its_errors_drawn(folder: Path) -> None:
    result = good("fit", str(SLICE), "-o", "fit.svg")
    assert "A40" in result.stdout
    assert "curve and neighbours" in result.stdout
    assert (folder / "fit.svg").read_text().startswith("<?xml")
    found = json.loads(call("fit", str(SLICE), "--json").stdout)
    (product,) = (fit for fit in found if fit["kind"] == "gemm")
    assert 0 < product["held_back"]["median"] < 0.1
    assert call("fit", "nowhere.csv").exit_code == 3


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "1e300"])
def test_a_kernel_takes_a_finite_time(folder: Path, value: str) -> None:
    Path("t.csv").write_text(f"device,dtype,op,median_ms,m,n,k\nX,float16,gemm,{value},8,8,8\n", "utf-8")
    result = call("fit", "t.csv")
    assert (result.exit_code, f"line 2: ValueError: median_ms is {value}" in result.stderr) == (3, True), result.stderr


GPT = ("vocabulary=48", "width=16", "layers=2", "heads=4", "context=32", "dropout=0.1", "fused=false")

SELECTIVE = ("--recompute", "selective", "--micro-batch", "1", "--max-stages", "1")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of two ranks, of attention that is written in operators."""
    made = tmp_path_factory.mktemp("selective")
    words = [word for each in GPT for word in ("--arg", each)]
    given = ["--input", "2,32", *words, "--on", "a100-dgx", "--workers", "2", "--sizes", "1,2"]
    found = code_and_output("profile", "profiler.models.gpt:gpt", *given, "-o", str(made / "profile.json"))
    assert not found[0], found
    return made


def test_every_attention_is_computed_again_and_what_that_wins_is_code_and_output(planned: Path) -> None:
    path = str(planned / "profile.json")
    plan = str(planned / "plan.json")
    code, text = code_and_output("plan", path, *SELECTIVE, "-o", plan)
    assert code == 0, text
    assert "2 spans of layers computed again in the backward: the fullest rank holds" in text
    found = load(plan, Plan)
    profile = load(path, Profile)
    spans = [span for stage in found.decision.stages for span in stage.recomputed]
    assert sorted(spans) == sorted(attention_cores(profile.graph))
    assert not any(stage.recompute for stage in found.decision.stages)
    assert not check(found, profile)
    assert "12 layers" in code_and_output("explain", plan, "--profile", path)[1]
    core = attention_cores(profile.graph)[0]
    assert f"{len(core)} layers, {core[0]} to {core[-1]}" in code_and_output("explain", plan, "--layer", core[1])[1]


def test_other_spans_than_were_asked_for_are_a_fault_and_priced_by_the_checker(planned: Path) -> None:
    path = str(planned / "profile.json")
    code, text = code_and_output("plan", path, *SELECTIVE, "-o", str(planned / "other.json"))
    assert code == 0, text
    plan = load(planned / "other.json", Plan)
    profile = load(path, Profile)
    bare = tuple(replace(stage, recomputed=()) for stage in plan.decision.stages)
    faults = check(replace(plan, decision=replace(plan.decision, stages=bare)), profile)
    assert any("asked for recompute selective" in fault for fault in faults), faults
    assert any("is predicted to hold" in fault for fault in faults), faults
    assert any("the predicted step is" in fault for fault in faults), faults
    never = replace(plan, inputs=replace(plan.inputs, request=replace(plan.inputs.request, recompute="never")))
    assert any("asked for recompute never" in fault for fault in check(never, profile))


def test_what_cannot_be_is_refused_by_name(planned: Path, tmp_path: Path) -> None:
    path = str(planned / "profile.json")
    code, text = code_and_output("plan", path, "--recompute", "core")
    assert code == 2
    assert "selective" in text
    profile = load(path, Profile)
    plain = tuple(replace(each, kind="pointwise") if each.kind == "softmax" else each for each in profile.graph.layers)
    dump(replace(profile, graph=replace(profile.graph, layers=plain)), tmp_path / "none.json")
    code, text = code_and_output("plan", str(tmp_path / "none.json"), "--recompute", "selective")
    assert code == 2
    assert "no attention is found" in text


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("options", "text", "exit_code"),
    [
        ("--on h200-dgx", "no system 'h200-dgx' is known", 2),
        ("--on h100-dgx --quick", "--quick: of no use with 'on'", 2),
        ("--on h100-dgx --workers 12", "12 devices are no whole number of hosts of h100-dgx", 2),
        ("--on nowhere.yaml", "nowhere.yaml", 3),
        ("--tables own.csv", "--tables is for --on", 2),
    ],
)
def test_what_does_not_fit_together_is_said_before_anything_is_captured(
    folder: Path, options: str, text: str, exit_code: int
) -> None:
    require_said(folder, ["profile", *MODEL, *options.split()], exit_code, text)
