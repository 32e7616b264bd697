"""``halopipe plan --proof`` and ``halopipe check --proof``: proofs, as a user makes and verifies them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.ir.codec import dump
from tests.halopipe.commands import call


@pytest.fixture
def certified(folder: Path) -> Path:
    """The folder with a plan and its proof."""
    made = call("plan", "profile.json", "--global-batch", "8", "--confidence", "0", "--proof", "proof.json")
    assert made.exit_code == 0, made.stderr
    assert "no plan that the proof covers takes less than" in made.stderr
    assert "wrote proof.json; next: halopipe check plan.json --proof proof.json" in made.stderr
    return folder


def edit(path: str, **changes: object) -> None:
    document = json.loads(Path(path).read_text("utf-8"))
    Path(path).write_text(json.dumps({**document, **changes}), "utf-8")


def test_a_proof_is_made_and_verified(certified: Path) -> None:
    checked = call("check", "plan.json", "--proof", "proof.json")
    assert checked.exit_code == 0, checked.stderr
    good, holds, *space = checked.stdout.splitlines()
    assert good == "plan.json is good"
    assert holds.startswith("its proof holds: no plan of its space takes less than ")
    assert holds.endswith("(gap 0.0 %)")
    assert space == [
        "  micro-batches of 1, 2, 3, 4, 5, 6, 7, 8; schedules 1f1b, 1f1b-so, 1f1b-windowed, gpipe",
        "  8 places to cut (all); stages on any of 2 x kind-1 on n0, divided by samples",
        "  computed again for the backward: nothing",
    ]
    document = json.loads(call("check", "plan.json", "--proof", "proof.json", "--json").stdout)
    assert document["faults"] == []
    assert document["bound_s"] == json.loads(Path("proof.json").read_text("utf-8"))["bound_s"]


def test_a_claim_that_was_raised_is_no_proof(certified: Path) -> None:
    proof = json.loads(Path("proof.json").read_text("utf-8"))
    edit("proof.json", bound_s=proof["step_s"] * 1.5)
    refused = call("check", "plan.json", "--proof", "proof.json")
    assert refused.exit_code == 6
    assert "error[H602] proof.json is no proof of plan.json" in refused.stderr
    assert f"bound_s: {proof['step_s'] * 1.5} s is more than the {proof['step_s']} s" in refused.stderr
    assert "make it again: halopipe plan" in refused.stderr
    assert refused.stdout == ""


def test_the_proof_of_another_plan_is_refused(certified: Path) -> None:
    assert call("plan", "profile.json", "--global-batch", "4", "-o", "other.json").exit_code == 0
    refused = call("check", "other.json", "--proof", "proof.json")
    assert refused.exit_code == 6
    assert "plan_fingerprint: sha256:" in refused.stderr


def test_the_proof_of_another_profile_is_refused(certified: Path) -> None:
    dump(chain_profile(6, forward_s=1e-2, latency_s=1e-4, parameter_bytes=2**20), "other.json")
    refused = call("check", "plan.json", "--proof", "proof.json", "--profile", "other.json")
    assert refused.exit_code == 6
    assert "inputs.profile_fingerprint" in refused.stderr


@pytest.mark.parametrize(
    ("text", "fault"),
    [("{", "proof.json"), ("{}", "proof.json"), ('{"halopipe": "plan", "version": 1}', "proof.json")],
)
def test_a_damaged_proof_is_no_file(certified: Path, text: str, fault: str) -> None:
    Path("proof.json").write_text(text, "utf-8")
    refused = call("check", "plan.json", "--proof", "proof.json")
    assert refused.exit_code == 3
    assert "error[H302]" in refused.stderr
    assert fault in refused.stderr


def test_a_proof_is_verified_with_the_profile_alone(certified: Path) -> None:
    Path("plan.json").rename("alone/plan.json")
    refused = call("check", "alone/plan.json", "--proof", "proof.json")
    assert refused.exit_code == 2
    assert "try: --profile PROFILE" in refused.stderr
    assert call("check", "alone/plan.json", "--proof", "proof.json", "--profile", "profile.json").exit_code == 0


def test_a_plan_that_is_not_the_best_is_certified_with_its_gap(folder: Path) -> None:
    options = ("--global-batch", "8", "--solver", "one-device", "--proof", "proof.json")
    assert call("plan", "profile.json", *options).exit_code == 0
    checked = call("check", "plan.json", "--proof", "proof.json")
    assert checked.exit_code == 0, checked.stderr
    gap = float(checked.stdout.split("(gap ")[1].split(" %")[0])
    assert 50 < gap < 110


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        (("--shard", "auto"), "it has a divided optimiser state", "leave out --shard"),
        (("--schedule", "interleaved"), "it has the schedule interleaved", "--schedule 1f1b"),
        (("--fix", "l0=stage:0"), "it has side constraints", "leave out --fix and --forbid"),
        (("--pareto", "3"), "--proof with --pareto", "leave out --pareto"),
    ],
)
def test_what_no_proof_covers_is_refused_before_the_search(
    options: tuple[str, ...], what: str, remedy: str, folder: Path
) -> None:
    refused = call("plan", "profile.json", "--global-batch", "8", "--proof", "proof.json", *options)
    assert refused.exit_code == 2
    assert what in refused.stderr
    assert remedy in refused.stderr
    assert not Path("proof.json").exists()
    assert not Path("plan.json").exists()
