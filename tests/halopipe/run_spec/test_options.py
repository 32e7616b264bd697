"""Options of a run and of lists of options: as text, in files, on the command line; and what a run is measured by."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.chains import chain_profile
from halopipe.cli.app import app
from halopipe.reports.predicted_vs_measured import apart_text
from halopipe.run_spec.job import Job, RankResult
from halopipe.run_spec.options import FIELDS, RunOptions, flag_of, option_of
from halopipe.run_spec.result import RunResult, Score
from halopipe.run_spec.schema import WRITTEN, asked_in, default_text, flag, from_text
from planner.ir.codec import plan_fingerprint
from planner.ir.errors import UsageError
from planner.ir.options import DURATION, INTEGERS, INTERVAL, NAMES, SIZE, SUM, option
from planner.ir.plan import Prediction, RankPrediction
from planner.ir.timeline import Span, Timeline
from runtime.numerics.difference import Difference
from tests.planner.factories import chain_decision, plan_of


def result(*seconds: float, warmup: int = 2) -> RunResult:
    return RunResult((1.0,) * len(seconds), seconds, warmup, Timeline("measured", 1.0, ()), (0.1,), (0.2,), (5,))


def test_warm_up_steps_count_in_no_median() -> None:
    measured = result(9.0, 8.0, 1.0, 2.0, 3.0).measured(Prediction(1.0, 1.0, 0.0, (), "measured"))
    assert (measured.step_s, measured.num_steps, measured.error) == (2.0, 3, 1.0)
    assert measured.spread == pytest.approx(1.0)
    assert (measured.stage_forward_s, measured.stage_backward_s, measured.peak_bytes) == ((0.1,), (0.2,), (5,))


def test_a_run_of_warm_up_only_is_measured_all_the_same() -> None:
    measured = result(9.0).measured(Prediction(0.0, 1.0, 0.0, (), "measured"))
    assert (measured.step_s, measured.num_steps, measured.spread, measured.error) == (9.0, 1, 0.0, 0.0)


def test_the_timeline_file_holds_all_steps() -> None:
    predicted = Timeline("predicted", 1.0, ())
    profile = chain_profile(2)
    plan = plan_of(profile, chain_decision(profile))
    file = result(3.0, 9.0, 1.0).timeline_file(plan, predicted)
    assert (file.predicted, file.step_seconds, file.losses) == (predicted, (3.0, 9.0, 1.0), (1.0, 1.0, 1.0))
    assert (file.plan, file.warmup, file.step_s) == (plan_fingerprint(plan), 2, 1.0)


def test_a_job_comes_through_its_file_whole(tmp_path: Path) -> None:
    profile = chain_profile(3)
    plan = plan_of(profile, chain_decision(profile, (2,)))
    job = Job(plan, RunOptions(steps=7, dtype="float64", deadline_s=1.5), tmp_path)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.source.dtype == "float64"
    assert Job(plan, RunOptions(), tmp_path).source == plan.inputs.model


@pytest.mark.parametrize(
    ("dtype", "used"),
    [("", ("float32", "bfloat16")), ("float32", ("float32", "bfloat16")), ("float64", ("float64", ""))],
)
def test_autocast_goes_with_parameters_in_float32_alone(tmp_path: Path, dtype: str, used: tuple[str, str]) -> None:
    profile = chain_profile(3)
    made = plan_of(profile, chain_decision(profile, (2,)))
    model = replace(made.inputs.model, autocast="bfloat16")
    plan = replace(made, inputs=replace(made.inputs, model=model))
    source = Job(plan, RunOptions(dtype=dtype), tmp_path).source
    assert (source.dtype, source.autocast) == used


def test_a_rank_result_comes_through_text_whole() -> None:
    compared = (Difference("w", "gradient", 0, 1.0, 1.5, 0.5, 0.01),)
    spans = {1: (Span(1, "1F0", 0.0, 0.5),)}
    scores = (Score(5, 1.5, 8, 0.25), Score(6, 1.0, 8))
    found = RankResult(1, (0.5, 0.25), (1.0, 2.0), spans, 77, compared, first_step=4, scores=scores, trained=False)
    assert RankResult.from_json(found.to_json()) == found


def test_the_words_of_a_run_need_no_torch() -> None:
    code = "import halopipe.launch.run, halopipe.run_spec.job, sys; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_every_option_is_one_of_the_command_line_with_its_help_default_and_limit() -> None:
    known = {option.name: option for option in typer.main.get_command(app).commands["run"].params}
    for name, field in FIELDS.items():
        option = option_of(name)
        if not option.help:
            assert name not in known
            continue
        shown = known[name]
        assert (shown.help, flag_of(name) in shown.opts) == (option.help, True)
        if not option.kind:
            assert shown.default == field.default
        if option.least is not None and not option.kind:
            assert shown.min == option.least


@pytest.mark.parametrize(
    ("stands_on", "evidence", "used", "other"),
    [
        ("shared memory", "measured", "shared memory", ""),
        ("shared memory", "measured", "gloo", "shared memory"),
        ("", "measured", "gloo", ""),  # a profile of before
        ("", "measured", "shared memory", "gloo"),
        ("", "measured", "nccl", ""),
        ("nccl", "measured", "shared memory", "nccl"),
        ("", "datasheet", "shared memory", ""),
        ("shared memory", "measured", "", ""),  # of one rank
    ],
)
def test_a_run_over_another_transport_says_nothing_of_the_prediction(
    stands_on: str, evidence: str, used: str, other: str
) -> None:
    said = replace(Prediction(0.5, 1.0, 0.0, (), "measured"), transport=stands_on, evidence=evidence)
    assert said.other_transport(used) == other
    measured = replace(result(9.0, 8.0, 1.0), transport=used).measured(said)
    assert (measured.error, measured.transport) == (None if other else 1.0, used)


@pytest.mark.parametrize(
    ("planned", "used", "apart"),
    [
        (("a", "a"), ("a", "a"), ("", "")),
        (("a", "b"), ("a", "a"), ("b", "a")),
        (("", ""), ("a", "a"), ("", "")),  # a plan file of before
        (("a", "a"), ("", ""), ("", "")),
        (("a", "b"), (), ("", "")),
    ],
)
def test_a_run_on_another_kind_of_device_says_nothing_of_the_prediction(
    planned: tuple[str, ...], used: tuple[str, ...], apart: tuple[str, str]
) -> None:
    ranks = tuple(RankPrediction(rank, 0.0, 0.0, 0.0, 0, 0, kind=kind) for rank, kind in enumerate(planned))
    said = replace(Prediction(0.5, 1.0, 0.0, (), "measured"), ranks=ranks)
    assert said.other_devices(used) == apart
    measured = replace(result(9.0, 8.0, 1.0), kinds=used).measured(said)
    assert (measured.error, measured.kinds) == (None if any(apart) else 1.0, used)
    text = apart_text(said, "", used)
    assert text == "" or text.startswith("predicted for b, run on a: this says nothing of how good the prediction is")
    assert bool(text) == any(apart)


@dataclass(frozen=True)
class Options:
    size: int = option(0, "Of memory.", kind=SIZE, flag="--memory")
    wait_s: float = option(30.0, "How long.", kind=DURATION)
    every: int | str = option(0, "How often.", kind=INTERVAL)
    dims: tuple[str, ...] = option(("sample",), "Of layers.", kind=NAMES)
    sizes: tuple[int, ...] = option((), "Of micro-batches.", kind=INTEGERS)
    slices: tuple[int, ...] = option((), "Of sequences.", kind=SUM)
    inner: int = option(-1)


OWN = {field.name: field for field in dataclasses.fields(Options)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("size", "2KiB", 2048),
        ("wait_s", "2min", 120.0),
        ("every", "50", 50),
        ("every", "10min", "10min"),
        ("dims", "sample, spatial", ("sample", "spatial")),
        ("sizes", "1,2,4", (1, 2, 4)),
        ("slices", "3+2", (3, 2)),
        ("size", "", 0),
        ("slices", "", ()),
    ],
)
def test_text_becomes_the_value_of_its_field(name: str, text: str, value: Any) -> None:
    assert from_text(OWN[name], text) == value


@pytest.mark.parametrize("name", asked_in(Options))
def test_a_default_is_shown_as_text_that_gives_it_again(name: str) -> None:
    assert from_text(OWN[name], default_text(OWN[name])) == OWN[name].default


@pytest.mark.parametrize(("name", "text"), [("size", "2 giga"), ("every", "often"), ("sizes", "1,x"), ("slices", "3+")])
def test_text_of_another_kind_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        from_text(OWN[name], text)


def test_fields_without_help_are_no_options_and_every_kind_that_is_written_is_tried_here() -> None:
    assert "inner" not in asked_in(Options)
    assert {field.metadata["option"].kind for field in asked_in(Options).values()} == WRITTEN.keys()
    assert [flag(OWN[name]) for name in ("size", "wait_s")] == ["--memory", "--wait-s"]
