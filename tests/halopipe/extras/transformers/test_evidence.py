"""How far off ``ways`` was, by kind of run; and the page of its answer."""

from __future__ import annotations

import html
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from halopipe.extras.transformers import page
from halopipe.extras.transformers.evidence import MEGATRON, OWN_LAYERS, RunKind, kind_of, published, range_of, summed
from halopipe.extras.transformers.options import WaysOptions
from halopipe.extras.transformers.ways import LAUNCHES, ON_HOST, WaysReport, find, shares_s, space_of
from planner.extras.kernels.estimates import Estimate
from planner.extras.transformers.cluster import named_cluster
from planner.extras.transformers.layers import layers_for
from planner.extras.transformers.passes import Timed
from planner.extras.transformers.search import search
from planner.extras.transformers.shape import ParallelDegrees, named_transformer
from planner.ir.errors import UsageError
from tests.halopipe.commands import call, good, require_said

KIND = RunKind(MEGATRON, "A100-80GB", experts=False, several_hosts=True, short=False)
SIZES = "hidden=2048,ffn=8192,heads=16,layers=8,vocab=1024,seq=1024"
PRICED = WaysOptions(price_per_hour=2.0)


def answer(transformer: str = SIZES, options: WaysOptions = PRICED, gpus: int = 8, batch: int = 32) -> WaysReport:
    return find(transformer, "a100-dgx", gpus, batch, options)


def test_evidence_sums_errors_with_and_without_their_signs() -> None:
    found = summed(KIND, {"a": [0.1, -0.2], "b": [0.0]})
    assert (found.runs, found.sources) == (3, {"a": 2, "b": 1})
    assert found.mean_error == pytest.approx(-0.1 / 3)
    assert found.mean_size == pytest.approx(0.1)
    assert found.largest == 0.2
    assert 1 / 1.1 <= found.low < 1 < found.high <= 1 / 0.8


def test_a_range_is_of_the_runs_of_its_kind_and_of_few_of_them_the_kernels_too() -> None:
    step = Estimate(10.0, 9.0, 12.0, "fitted")
    assert range_of(step, None) == (9.0, 12.0)
    exact = [0.01, -0.01]
    assert range_of(step, summed(KIND, {"a": exact})) == (9.0, 12.0)
    low, high = range_of(step, summed(KIND, {"a": exact * 5}))
    assert 9.8 < low < 10 < high < 10.2
    late = summed(KIND, {"a": [-0.2] * 6})
    assert range_of(step, late) == (10.0, pytest.approx(12.5))


@pytest.mark.parametrize(
    ("name", "gpus", "text"),
    [
        ("gpt3-175b", 64, "Megatron-LM, A100-80GB, dense, several hosts"),
        ("mixtral-8x7b", 8, "Megatron-LM, A100-80GB, experts, one host"),
        ("gpt2-345m", 8, "Megatron-LM, A100-80GB, dense, one host, short kernels"),
    ],
)
def test_a_kind_is_the_framework_the_device_the_network_and_the_hosts(name: str, gpus: int, text: str) -> None:
    ways = ParallelDegrees(tensor=8, data=gpus // 8)
    assert str(kind_of(MEGATRON, named_transformer(name), named_cluster("a100-dgx"), ways)) == text


def test_times_of_ones_own_are_of_no_kind_that_was_published() -> None:
    shape = named_transformer("gpt3-175b")
    cluster = named_cluster("a100-dgx")
    ways = ParallelDegrees(tensor=8)
    own = replace(cluster, timed=Timed({(8, 1): layers_for(shape, cluster, ways)}))
    assert kind_of(MEGATRON, shape, own, ways).framework == OWN_LAYERS
    assert OWN_LAYERS not in {kind.framework for kind in published()}


def test_an_answer_says_what_published_runs_of_its_kind_say_of_it() -> None:
    evidence = published()[KIND]
    asked = ("ways", "gpt3-175b", "--on", "a100-dgx", "--gpus", "64", "--global-batch", "64")
    told = good(*asked)
    assert f"published runs, {evidence.kind}: {evidence.runs}, predicted" in told.output
    best = json.loads(good(*asked, "--json").stdout)["best"]
    assert best["published_runs"] == evidence.runs
    assert best["low_s"] == pytest.approx(best["step_s"] * min(1, evidence.low))
    assert best["high_s"] == pytest.approx(best["step_s"] * max(1, evidence.high))


def test_a_kind_without_a_published_run_is_said_to_have_none() -> None:
    told = good(
        "ways", "mixtral-8x7b", "--on", "a100-pairs", "--gpus", "16", "--global-batch", "64", "--for", "deepspeed"
    )
    kind = "published runs, DeepSpeed, A100-80GB, experts, several hosts"
    assert f"{kind}: none, the range is that of kernels and links alone" in told.output


def test_shares_are_the_whole_step_and_waits_for_launches_are_no_computing(folder: Path) -> None:
    prediction = answer().sweep.best.prediction
    shares = shares_s(prediction)
    assert sum(shares.values()) == pytest.approx(prediction.step.seconds)
    assert list(shares) == ["computing", "exposed communication", "bubble", "optimiser", LAUNCHES, ON_HOST]
    small = "hidden=64,ffn=128,heads=2,layers=2,vocab=100,seq=16"
    told = good("ways", small, "--on", "a100-dgx", "--gpus", "8", "--global-batch", "8", "--report", "ways.html")
    assert f"bound by {LAUNCHES}" in told.output
    assert LAUNCHES in Path("ways.html").read_text("utf-8")


def test_the_front_is_the_fastest_under_each_limit_of_memory() -> None:
    report = answer()
    space = space_of(PRICED)
    points = page.front(report, space)
    held = [point.prediction.memory.total for point in points]
    steps_s = [point.prediction.step.seconds for point in points]
    assert points[0].ways == report.sweep.best.ways
    assert len(points) > 2
    assert held == sorted(set(held), reverse=True)
    assert steps_s == sorted(steps_s)
    cluster = named_cluster("a100-dgx")
    for point, size in zip(points, held, strict=True):
        under = replace(cluster, memory_bytes=size * (1 + 1e-9) / 0.94 + 1.5 * 2**30)
        best_s = search(report.shape, under, 8, 32, space, rivals=0).best.prediction.step.seconds
        assert point.prediction.step.seconds <= best_s * 1.01


@pytest.mark.parametrize(
    "fixed",
    [
        {"tensor": 2, "pipeline": 2, "micro_batch": 1},
        {"tensor": 1, "pipeline": 4, "interleave": 2, "micro_batch": 1},
        {"tensor": 8, "pipeline": 1},
        {"tensor": 1, "pipeline": 1, "zero": 3, "micro_batch": 1},
    ],
)
def test_the_step_that_is_drawn_is_the_one_that_is_predicted(fixed: dict[str, int]) -> None:
    report = answer(options=WaysOptions(**fixed))
    step = page.drawn_step(report)
    best = report.sweep.best
    assert step.micro_batches == best.prediction.micro_batches
    assert step.timeline.step_s == pytest.approx(best.prediction.step.seconds)
    assert {span.rank for span in step.timeline.spans} == set(range(best.ways.pipeline))
    assert max(span.stop_s for span in step.timeline.spans) == pytest.approx(best.prediction.step.seconds)


def test_of_a_long_step_the_first_micro_batches_are_drawn() -> None:
    report = answer(options=WaysOptions(tensor=1, pipeline=8, micro_batch=1), batch=4096)
    step = page.drawn_step(report)
    assert 8 <= step.micro_batches < report.sweep.best.prediction.micro_batches
    assert len(step.timeline.spans) <= page.MOST_ACTIONS + 2 * 8


def test_a_page_shows_the_front_the_step_and_what_limits_it_and_fetches_nothing(folder: Path) -> None:
    asked = ("ways", SIZES, "--on", "a100-dgx", "--gpus", "8", "--global-batch", "32", "--price-per-hour", "2")
    good(*asked, "--report", "ways.html", "-o", "ways.json")
    good("report", "ways.json")
    assert Path("report.html").read_bytes() == Path("ways.html").read_bytes()
    text = html.unescape(Path("ways.html").read_text("utf-8"))
    best = answer().sweep.best
    for shown in (
        str(best.ways), "exposed communication", "bubble", "optimiser", "computing", "a billion tokens",
        "no way is better", "dollars for a billion tokens", "Published runs,",
    ):  # fmt: skip
        assert shown in text
    assert text.count("<svg") == 2
    assert "default-src 'none'" in text
    assert "<script" not in text
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", re.sub(r"xmlns(:\w+)?=\"[^\"]*\"", "", text))
    rows = re.findall(r'<tr><th scope="row">', text)
    assert len(rows) >= 3


def test_a_page_is_refused_where_it_cannot_be_one(folder: Path) -> None:
    asked = ["ways", SIZES, "--on", "a100-dgx", "--gpus", "8", "--global-batch", "32"]
    require_said(folder, [*asked, "--report", "ways.pdf"], 2, "a report is a page of HTML", "--report ways.html")
    require_said(folder, [*asked, "--fits", "--report", "ways.html"], 2, "--fits answers another question")
    assert call(*asked, "--report", "ways.html", "--tensor", "3").exit_code == 2
    assert not Path("ways.html").exists()
    good(*asked, "--fits", "-o", "fits.json")
    require_said(folder, ["report", "fits.json"], 2, "is an answer of --fits")
    good(*asked, "-o", "ways.json")
    other = json.loads(Path("ways.json").read_text("utf-8"))
    for changed, code, said in (
        ({"best": other["best"] | {"step_s": 1.0}}, 3, "holds another answer than the same question has now"),
        ({"asked": {}}, 3, "is no file of ways"),
    ):
        Path("ways.json").write_text(json.dumps(other | changed), "utf-8")
        require_said(folder, ["report", "ways.json"], code, said)
    assert not Path("report.html").exists()


def test_without_the_library_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    report = answer()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UsageError, match="a page needs jinja2") as caught:
        page.page(report, [report.sweep.best])
    assert caught.value.remedies[0] == "pip install 'halopipe[report]'"
