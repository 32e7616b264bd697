"""What a person gets wrong, verb by verb: its exit code, what is said on standard error, and no file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.halopipe.commands import RENAMED, call, require_said

RESNET = "profile profiler.models.resnet:resnet18"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "exit_code", "texts"),
    [
        ("plan nowhere.json", 3, ["error[H301] cannot read nowhere.json"]),
        ("plan broken.json", 3, ["error[H302] broken.json is not JSON"]),
        ("plan by_hand.json", 3, ["it is a halopipe plan file"]),
        ("plan profile.json --schedule 1b1f", 2, ["1f1b (did you mean that?)"]),
        ("plan profile.json --solver best-frst", 2, ["best-first (did you mean that?)"]),
        ("plan profile.json --memory 2giga", 2, ["error[H200] '2giga' is not a size"]),
        ("plan profile.json --memory 1MiB", 4, ["error[H401]"]),
        ("plan profile.json --ranks 9", 2, ["error[H205] 9 ranks are asked for"]),
        ("plan profile.json --global-batch -1", 2, ["global-batch"]),
        ("plan profile.json -o no/folder/plan.json", 3, ["error[H301] cannot write no/folder/plan.json"]),
        ("plan profile.json --objective speed", 2, ["error[H206] no objective 'speed'"]),
        ("plan profile.json --allow samples", 2, ["sample (did you mean that?)"]),
        ("plan profile.json --recompute maybe", 2, ["error[H206] no way to recompute 'maybe'"]),
        ("plan profile.json --fix l0", 2, ["error[H200] 'l0' is not a rule"]),
        ("plan profile.json --forbid enc.*=replicas:2", 2, ["matches no layer"]),
        ("plan profile.json --quick", 2, ["error[H200] --quick is of no use without --measure-missing"]),
        (
            "plan profile.json --halo-depth 2",
            2,
            ["--halo-depth is of no use without --allow sample,spatial"],
        ),
        ("plan profile.json --confidence 1", 2, ["less than or equal to 0.999"]),
        ("plan", 2, ["PROFILE"]),
        ("plam profile.json", 2, ["plam"]),
        ("explain nowhere.json", 3, ["error[H301] cannot read nowhere.json"]),
        ("explain by_hand.json other.json", 3, ["error[H304] the plan was made for another profile"]),
        ("explain by_hand.json profile.json --profile p.json", 2, ["two profiles are given"]),
        ("explain by_hand.json --layer l9", 2, ["error[H206] no layer 'l9'"]),
        ("explain by_hand.json --why-not magic", 2, ["nothing is known of 'magic'"]),
        ("explain by_hand.json --what-if n9/x.memory=1GiB", 2, ["error[H206] no device 'n9/x'"]),
        ("explain by_hand.json --what-if devices=3 --prices", 2, ["are asked at once"]),
        ("explain alone/by_hand.json --prices", 2, ["--prices searches again, which needs the profile"]),
        ("compare alone/by_hand.json --baselines", 2, ["--baselines are solved from the profile"]),
        ("compare by_hand.json by_hand.json", 2, ["by_hand.json is given twice"]),
        ("check edited.json --profile profile.json", 6, ["error[H602] edited.json has"]),
        ("schema plans", 2, ["plan (did you mean that?)"]),
        ("run nowhere.json", 3, ["error[H301] cannot read nowhere.json"]),
        ("run by_hand.json --hosts x", 2, ["torchrun --nproc-per-node"]),
        ("run --resume broken.json", 3, ["broken.json is not JSON"]),
        ("profile a:b --hosts x", 2, ["on HOST1: torchrun --nnodes 2 --node-rank 1"]),
        ("profile nowhere:factory -o x.json", 2, ["error[H201]"]),
        ("profile profiler.models.resnet:resnet51 -o x.json", 2, ["error[H201]"]),
        (f"{RESNET} --input 8x3", 2, ["is not a list of positive integers"]),
        (f"{RESNET} --optimizer SDG", 2, ["SGD (did you mean that?)"]),
        ("explain renamed.json", 6, RENAMED),
        ("explain renamed.json --layer l1", 6, RENAMED),
        ("explain renamed.json --what-if devices=2", 6, RENAMED),
        ("compare renamed.json", 6, RENAMED),
        ("check renamed.json", 6, RENAMED),
        ("run renamed.json", 6, RENAMED),
    ],
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, words: str, exit_code: int, texts: list[str]
) -> None:
    require_said(folder, words.split(), exit_code, *texts)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("plan p.json --rank 2", ["No such option: --rank", "--ranks"]),
        ("run p.json --stpes 3", ["No such option: --stpes", "--steps"]),
        ("plan p.json --ranks -1", ["'--ranks'", "greater than or equal to 0"]),
        ("plan p.json --ranks two", ["'--ranks'", "valid integer"]),
        ("plan p.json --gap 1%", ["'--gap'", "valid number"]),
        ("plan p.json --gap nan", ["'--gap'", "greater than or equal to 0"]),
        ("plan p.json --micro-batch 1,2", ["'--micro-batch'", "valid integer"]),
        ("plan p.json --ranks 1 --ranks 2", ["--ranks is given more than once", "keep one of them: --ranks 2"]),
        ("plan p.json -o a.json --output b.json", ["--output is given more than once", "--output b.json"]),
        ("plan p.json q.json", ["unexpected extra argument(s) (q.json)", "Usage: halopipe plan [OPTIONS] {PROFILE}"]),
        ("compare", ["Missing argument 'PLAN...'", "Usage: halopipe compare [OPTIONS]"]),
        ("export p.json", ["Missing option '--to'"]),
        ("exlpain p.json", ["No such command 'exlpain'", "'explain'"]),
        ("run p.json --resume autom", ["--resume knows no 'autom'", "try: --resume auto (did you mean that?)"]),
        ("run --replan fre p.json", ["--replan knows no 'fre'", "try: --replan free (did you mean that?)"]),
    ],
)
def test_what_is_mistyped_is_named_with_what_was_meant(words: str, lines: list[str]) -> None:
    result = call(*words.split())
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("error[H200] ")
    assert [line for line in lines if line not in result.stderr] == [], result.stderr
    assert "\n  try: halopipe" in result.stderr or "did you mean" in result.stderr or "keep one" in result.stderr


def test_an_option_with_many_values_and_a_flag_may_come_again(folder: Path) -> None:
    again = ["--micro-batch", "1", "--micro-batch", "2", "--json", "--json"]
    result = call("plan", "profile.json", "--global-batch", "4", *again)
    assert result.exit_code == 0, result.stderr


def test_nothing_at_all_shows_the_help() -> None:
    result = call()
    assert result.exit_code == 2
    assert "profile" in result.output
    assert "error" not in result.output


def test_one_measurement_is_of_one_host(folder: Path) -> None:
    shutil.copy("profile.json", "copy.json")
    assert "profile.json is given twice" in call("merge", "profile.json", "./profile.json").stderr
    assert "are the same profile" in call("merge", "profile.json", "copy.json").stderr
    assert not Path("merged.json").exists()


def test_one_point_of_a_front_is_one_plan_and_a_device_takes_all(folder: Path) -> None:
    assert call("plan", "profile.json", "--global-batch", "4", "--pareto", "1", "-o", "one.json").exit_code == 0
    assert sorted(path.name for path in folder.glob("one*")) == ["one.json"]
    (folder / "null").symlink_to("/dev/null")
    assert call("plan", "profile.json", "--global-batch", "4", "--pareto", "2", "-o", "null").exit_code == 0
    assert sorted(path.name for path in folder.glob("null*")) == ["null"]
    shutil.copy("profile.json", "q.2.json")
    refused = call("plan", "q.2.json", "--global-batch", "4", "--pareto", "2", "-o", "q.json")
    assert "q.2.json is read, and would be replaced" in refused.stderr
