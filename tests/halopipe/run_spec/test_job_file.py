from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from benchmarks.chains import chain_profile
from halopipe.launch import run
from halopipe.run_spec import job_file
from halopipe.run_spec.options import ASKED, RunOptions
from planner.ir.codec import dump
from planner.ir.errors import CorruptFileError
from planner.ir.plan import Plan
from planner.ir.timeline import Span, Timeline
from tests.halopipe.commands import call
from tests.planner.factories import chain_decision, plan_of

HEAD = "halopipe: job\nversion: 1\nplan: plan.json\n"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """What runs were asked for; the working directory has a folder ``jobs`` with a plan."""
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    profile = chain_profile(3)
    dump(plan_of(profile, chain_decision(profile, (2,))), "jobs/plan.json")
    found: list[RunOptions] = []

    def run_plan(plan: Plan, options: RunOptions, progress: object, replanner: object) -> run.RunResult:
        found.append(options)
        timeline = Timeline("measured", 0.011, (Span(0, "0F0", 0.0, 0.01),))
        return run.RunResult((2.3, 2.2), (0.012, 0.011), 1, timeline, (0.01, 0.0), (0.0, 0.0), (1, 1))

    monkeypatch.setattr(run, "run_plan", run_plan)
    return found


def test_what_is_merged_counts_unless_the_file_says_otherwise(asked: list[RunOptions]) -> None:
    merged = "<<: {steps: 3, clip-norm: 1e-3, plan: other.json}\ndevice: cpu\nseed: 7\n"
    Path("jobs/a.yaml").write_text(HEAD + merged)
    assert call("run", "jobs/a.yaml").exit_code == 0
    assert asked == [RunOptions(3, clip_norm=1e-3, device="cpu", seed=7)]


def test_flags_override_a_job_file_whose_paths_are_its_own(asked: list[RunOptions], tmp_path: Path) -> None:
    text = "steps: 7\nclip-norm: 1e-2\ndata: mine.py:photos\neval-data: pkg.data:test\nmemory-limit: 1GiB\n"
    text += "check-first-step: false\nmetrics: tb:logs\nprofile-steps: 3:5\noutput: out.json\ncheckpoint: ../saved\n"
    Path("jobs/a.yaml").write_text(HEAD + text)
    result = call("run", "jobs/a.yaml", "--clip-norm", "2", "--check-first-step", "--profile-steps", "4")
    assert result.exit_code == 0, result.stderr
    jobs = tmp_path / "jobs"
    assert asked == [
        RunOptions(
            7,
            data=f"{jobs}/mine.py:photos",
            eval_data="pkg.data:test",
            clip_norm=2.0,
            tensors_limit_bytes=2**30,
            metrics=f"tb:{jobs}/logs",
            profile_steps="4",
            profile_folder=str(tmp_path / "torch-traces"),
            checkpoint=f"{jobs}/../saved",
        )
    ]
    assert (jobs / "out.json").exists()
    assert call("run", "jobs/a.yaml").exit_code == 0
    assert (asked[1].profile_steps, asked[1].clip_norm, asked[1].check_first_step) == ("3:5", 0.01, False)


def test_what_the_command_line_said_comes_back_from_the_job_file_that_it_wrote(
    asked: list[RunOptions], tmp_path: Path
) -> None:
    options = "--steps 20 --data mine.py:f --no-check-first-step --metrics logs/m.csv --memory-limit 2GiB --update"
    options += " --no-learn --calibrate on --checkpoint saved --resume auto --restarts 2"
    command = ["run", "jobs/plan.json", *options.split()]
    wrote = call(*command, "--write-job", "other name.yaml")
    assert (wrote.exit_code, asked) == (0, []), wrote.stderr
    assert wrote.stderr.endswith("next: halopipe run 'other name.yaml'\n")
    document = yaml.safe_load(Path("other name.yaml").read_text("utf-8"))
    assert (document["plan"], document["metrics"], document["steps"]) == ("jobs/plan.json", "logs/m.csv", 20)
    jsonschema.validate(document, json.loads(call("schema", "job").stdout))
    assert call(*command).exit_code == call("run", "other name.yaml").exit_code == 0
    assert replace(asked[0], data=f"{tmp_path}/mine.py:f") == asked[1]
    assert call(*command, "--write-job", "x.txt").exit_code == 2


@pytest.mark.parametrize("option", ["--write-job", "-o", "--trace", "--metrics"])
def test_a_job_file_that_is_read_is_not_replaced(asked: list[RunOptions], option: str) -> None:
    Path("jobs/a.yaml").write_text(HEAD)
    Path("link.yaml").symlink_to("jobs/a.yaml")
    result = call("run", "jobs/a.yaml", option, "link.yaml")
    assert (result.exit_code, asked) == (2, [])
    assert "link.yaml is read, and would be replaced" in result.stderr
    assert Path("jobs/a.yaml").read_text() == HEAD


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["jobs/plan.json"], False),
        (["--resume", "jobs/plan.json"], True),
        (["jobs/plan.json", "--resume", "--steps", "4"], True),
        (["jobs/plan.json", "--resume"], True),
        (["--resume", "auto", "jobs/plan.json"], "auto"),
        (["jobs/plan.json", "--resume=auto"], "auto"),
        (["jobs/auto.yaml"], "auto"),
        (["jobs/flag.yaml"], True),
        (["jobs/flag.yaml", "--resume", "auto"], "auto"),
    ],
)
def test_resume_is_a_flag_that_one_word_may_follow(
    asked: list[RunOptions], words: list[str], meant: bool | str
) -> None:
    for name, said in (("auto", "auto"), ("flag", "true")):
        Path(f"jobs/{name}.yaml").write_text(f"{HEAD}resume: {said}\n")
    assert call("run", *words).exit_code == 0
    assert asked[0].resume == meant


def test_all_faults_are_named_at_once_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "halopipe: job\nversion: 1\nplam: p.json\nsteps: 0\nresume: maybe\nmemory-limit: 2 giga\nkeep: 1.5\ndata:\n"
    )
    with pytest.raises(CorruptFileError, match="7 faults") as caught:
        job_file.read(path)
    told = [line.removeprefix(f"{path}:") for line in caught.value.details]
    assert told[:2] == ["1: plan is missing", "3: unknown key plam; did you mean plan?"]
    assert [line.partition(",")[0] for line in told[2:]] == [
        "4: steps: input should be greater than or equal to 1",
        "5: resume: input should be a valid boolean or auto",
        "6: memory-limit: '2 giga' is not a size; write a number and a unit: 2GiB",
        "7: keep: input should be a valid integer",
        "8: data: input should be a valid string",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("halopipe: cluster\n", "it is a halopipe cluster file"),
        ("steps: 3\n", "it has no line 'halopipe: job'"),
        (f"{HEAD}steps: 3\nsteps: 4\n", "steps is given twice"),
        ("{", "is not YAML"),
    ],
)
def test_what_is_no_job_file_is_refused(asked: list[RunOptions], text: str, message: str) -> None:
    Path("x.yaml").write_text(text)
    result = call("run", "x.yaml")
    assert (result.exit_code, message in result.stderr, asked) == (3, True, []), result.stderr


def test_the_schema_has_every_option_and_nothing_else() -> None:
    keys = json.loads(job_file.schema())["properties"].keys()
    assert keys == {"halopipe", "version", "plan", *map(job_file.key_of, ASKED)}


def test_intervals_and_times_are_written_as_on_the_command_line(asked: list[RunOptions], tmp_path: Path) -> None:
    saved = "--checkpoint saved --checkpoint-every"
    for number, words in enumerate(("50", "10min --grace 45", "auto --mtbf 6h")):
        command = ["run", "jobs/plan.json", *f"{saved} {words}".split()]
        assert call(*command).exit_code == 0
        assert call(*command, "--write-job", f"{number}.yaml").exit_code == 0
        jsonschema.validate(
            yaml.safe_load(Path(f"{number}.yaml").read_text()), json.loads(call("schema", "job").stdout)
        )
        assert call("run", f"{number}.yaml").exit_code == 0
        assert asked[-1] == asked[-2]
    found = [(each.checkpoint_every, each.mtbf_s, each.grace_s) for each in asked[::2]]
    assert found == [(50, 0.0, 30.0), ("10min", 0.0, 45.0), ("auto", 21600.0, 30.0)]
    assert yaml.safe_load(Path("0.yaml").read_text())["checkpoint-every"] == 50
    bad = call("run", "jobs/plan.json", *f"{saved} often".split())
    assert (bad.exit_code, "'often' does not say how often" in bad.stderr) == (2, True)
    Path("bad.yaml").write_text(f"{HEAD}checkpoint-every: often\nmtbf: soon\n".replace("plan.json", "jobs/plan.json"))
    assert call("run", "bad.yaml").exit_code == 3
