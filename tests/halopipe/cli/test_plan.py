"""``halopipe plan``, its proofs, and what the other verbs say of its plans."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import solve
from halopipe.terminal import console
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from tests.halopipe.commands import HOME, PROFILE, call, good, require_said


def test_a_plan_is_made_explained_checked_and_compared(folder: Path) -> None:
    made = good("plan", "profile.json", "--global-batch", "8")
    assert "a step" in made.stdout
    first, wrote = made.stderr.splitlines()
    assert re.fullmatch(r"searching: first plan .* ms, gap .* %, \d stages? on \d devices? \(.*s\)", first)
    assert wrote.startswith("wrote plan.json")
    explained = good("explain", "plan.json", "--profile", "profile.json")
    assert "Step (predicted)" in explained.stdout
    assert explained.stdout == call("explain", "plan.json", "profile.json").stdout
    checked = call("check", "plan.json", "--profile", "profile.json")
    assert (checked.exit_code, checked.stdout) == (0, "plan.json is good\n")
    compared = good("compare", "plan.json", "by_hand.json", "--baselines", "--profile", "profile.json")
    assert {"plan.json", "by_hand.json", "one-device", "data-parallel", "even-split"} <= set(compared.stdout.split())
    assert "data-parallel " in compared.stdout.partition("  planned in: ")[2]
    rival = call("plan", "profile.json", "--global-batch", "8", "--solver", "even-split", "-o", "rival.json")
    assert "even-split took " in rival.stderr
    assert "of 60.0 s that it may take" in rival.stderr


def test_a_plan_that_leaves_the_larger_device_idle_is_good_whatever_other_plans_hold_there(folder: Path) -> None:
    profile = HOME / "tests/data/checker/idle.json"
    good("plan", str(profile), "--global-batch", "3", "--schedule", "naive", "--confidence", "0", "-o", "idle.json")
    plan = load("idle.json", Plan)
    limits = [rank.memory_limit_bytes for rank in plan.prediction.ranks]
    assert max(other.peak_bytes or 0 for other in plan.alternatives) > max(limits)
    good("check", "idle.json", "--profile", str(profile))
    good("check", "idle.json")


def test_a_tie_is_called_one_by_plan_explain_compare_and_why_not(folder: Path) -> None:
    dump(chain_profile(18, speeds=(1.0, 0.1), parameter_bytes=2**22), "profile.json")
    made = call("plan", "profile.json", "--global-batch", "16")
    assert (made.exit_code, made.stdout.splitlines()[0].split(",")[0]) == (0, "1 stage on 1 device")
    said = "a tie     2 stages on 2 ranks, 1f1b-so, 16 micro-batches, is the fastest at the mean, 816 ms"
    assert said in made.stdout
    assert "this one uses 1 rank rather than 2, and gives up 5.9 % at the mean" in made.stdout
    explained = call("explain", "plan.json").stdout
    assert said in explained
    assert "the fastest at the mean is at the bound" in explained
    assert call("check", "plan.json", "--profile", "profile.json").stdout == "plan.json is good\n"
    fastest = call("plan", "profile.json", "--global-batch", "16", "--confidence", "0", "-o", "fastest.json")
    assert "2 stages on 2 devices" in fastest.stdout
    assert "a tie" not in fastest.stdout
    compared = call("compare", "plan.json", "fastest.json")
    assert "+5.9 %, a tie" in compared.stdout
    assert "a tie: fastest.json is the fastest at the mean, and not surely faster than plan.json (7" in compared.stdout
    assert "of these plan.json is taken: the fastest at the mean of those on the fewest ranks" in compared.stdout
    assert "plan.json uses 1 rank rather than 2, and gives up 5.9 % at the mean: 2 stages on 2 ranks" in compared.stdout
    told = json.loads(call("compare", "plan.json", "fastest.json", "--json").stdout)
    assert (list(told["ties"]), told["taken"]) == (["plan.json"], "plan.json")
    assert "faster, a tie" in call("explain", "plan.json", "--why-not", "stages=2").stdout


def test_the_same_profile_gives_the_same_bytes(folder: Path) -> None:
    texts = [call("plan", "profile.json", "--json").stdout for _ in range(2)]
    assert texts[0] == texts[1] == (folder / "plan.json").read_text("utf-8")


def test_what_is_asked_of_a_plan_is_heeded(folder: Path) -> None:
    good("plan", "profile.json", "--schedule", "gpipe", "--micro-batch", "4", "--memory", "512MB", "-o", "x.json")
    plan = load("x.json", Plan)
    assert (plan.decision.schedule, plan.decision.micro_batches) == ("gpipe", (4, 4))
    assert {rank.memory_limit_bytes for rank in plan.prediction.ranks} <= {512_000_000, 511_999_999}
    good("plan", "profile.json", "--solver", "one-device", "-o", "one.json")
    assert len(load("one.json", Plan).decision.stages) == 1


def test_a_front_is_a_plan_file_a_point(folder: Path) -> None:
    result = good("plan", "profile.json", "--pareto", "3", "-o", "front.json")
    written = [line.split()[1] for line in result.stderr.splitlines() if line.startswith("wrote ")]
    assert written[0] == "front.json"
    steps = [load(path, Plan).prediction.step_s for path in written]
    assert steps == sorted(steps)
    assert result.stdout.startswith("Step against memory of the fullest rank")


def test_ctrl_c_in_a_search_writes_the_best_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = load("by_hand.json", Plan)
    stopped = replace(best, search=replace(best.search, status="stopped"))
    monkeypatch.setattr(solve, "solve", lambda *_: stopped)
    result = call("plan", "profile.json", "-o", "stopped.json")
    assert result.exit_code == console.INTERRUPTED
    assert load("stopped.json", Plan) == stopped


def test_the_profile_beside_a_plan_is_found_if_the_plan_was_made_from_it(folder: Path) -> None:
    assert "Step (predicted)" in call("explain", "by_hand.json").stdout
    dump(chain_profile(6), "profile.json")
    assert "Step (predicted)" not in call("explain", "by_hand.json").stdout
    (folder / "profile.json").write_text("{")
    assert call("explain", "by_hand.json").exit_code == 0


def test_what_a_hint_says_can_be_pasted_also_with_spaces_in_paths(folder: Path) -> None:
    made = good("plan", "profile.json", "--solver", "one-device", "-o", "my plan.json")
    assert made.stderr.endswith(
        "next: halopipe explain 'my plan.json' --profile profile.json, or halopipe run 'my plan.json'\n"
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a plan of the profile lies, with its proof."""
    place = tmp_path_factory.mktemp("certified")
    dump(PROFILE, place / "profile.json")
    asked = ["--global-batch", "8", "--confidence", "0", "-o", str(place / "plan.json")]
    said = good("plan", str(place / "profile.json"), *asked, "--proof", str(place / "proof.json")).stderr
    assert "no plan that the proof covers takes less than" in said
    assert f"wrote {place}/proof.json; next: halopipe check {place}/plan.json --proof {place}/proof.json" in said
    return place


@pytest.fixture
def certified(folder: Path, made: Path) -> Path:
    """The folder with the plan and its proof."""
    for name in ("plan.json", "proof.json"):
        shutil.copy(made / name, folder)
    return folder


def test_a_proof_is_made_and_verified(certified: Path) -> None:
    checked = good("check", "plan.json", "--proof", "proof.json")
    first, holds, *space = checked.stdout.splitlines()
    assert first == "plan.json is good"
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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("claim", "words", "exit_code", "said"),
    [
        (1.5, "plan.json", 6, ["error[H602] proof.json is no proof of plan.json", "make it again: halopipe plan"]),
        (0, "faster.json", 6, ["plan_fingerprint: sha256:"]),
        (0, "plan.json --profile other.json", 6, ["inputs.profile_fingerprint"]),
        (0, "alone/plan.json", 2, ["try: --profile PROFILE"]),
        ("{", "plan.json", 3, ["error[H302]", "proof.json"]),
        ("{}", "plan.json", 3, ["error[H302]", "proof.json"]),
        ('{"halopipe": "plan", "version": 1}', "plan.json", 3, ["error[H302]", "proof.json"]),
    ],
)  # fmt: skip
def test_what_proves_nothing_is_refused(
    certified: Path, claim: float | str, words: str, exit_code: int, said: list[str]
) -> None:
    """A bound that was raised, another plan or profile, no profile, and files that are no proofs."""
    proof = json.loads(Path("proof.json").read_text("utf-8"))
    if isinstance(claim, str):
        Path("proof.json").write_text(claim, "utf-8")
    elif claim:
        Path("proof.json").write_text(json.dumps({**proof, "bound_s": claim * proof["step_s"]}), "utf-8")
        said = [*said, f"{claim * proof['step_s']} s is more than the {proof['step_s']} s"]
    shutil.copy("plan.json", "alone/plan.json")
    if words == "faster.json":
        good("plan", "profile.json", "--global-batch", "8", "--solver", "even-split", "-o", words)
    require_said(certified, ["check", *words.split(), "--proof", "proof.json"], exit_code, *said)


def test_a_proof_is_verified_with_the_profile_alone(certified: Path) -> None:
    Path("plan.json").rename("alone/plan.json")
    good("check", "alone/plan.json", "--proof", "proof.json", "--profile", "profile.json")


@pytest.mark.parametrize("output", ["-o", "--proof"])
def test_a_plan_is_written_with_its_proof_or_not_at_all(folder: Path, output: str) -> None:
    files = {"-o": "plan.json", "--proof": "proof.json", output: "/dev/full"}
    words = [word for pair in files.items() for word in pair]
    require_said(folder, ["plan", "profile.json", "--global-batch", "8", *words], 3, "cannot write /dev/full")


def test_a_plan_that_is_not_the_best_is_certified_with_its_gap(folder: Path) -> None:
    options = ("--global-batch", "8", "--solver", "one-device", "--proof", "proof.json")
    assert call("plan", "profile.json", *options).exit_code == 0
    checked = good("check", "plan.json", "--proof", "proof.json")
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
    words = ["plan", "profile.json", "--global-batch", "8", "--proof", "proof.json", *options]
    require_said(folder, words, 2, what, remedy)
