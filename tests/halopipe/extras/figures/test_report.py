from __future__ import annotations

import base64
import hashlib
import html
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import solve
from planner.ir.codec import dump
from planner.ir.errors import StaleFileError, UsageError
from planner.ir.plan import Alternative, Plan, Search
from planner.ir.timeline import Span, Timeline, TimelineFile
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(6, latency_s=1e-4, skips=[(0, 3)])
HOSTILE = '</script><script>alert("x")</script>'


def planned(cuts: tuple[int, ...] = (3,), micro_batches: tuple[int, ...] = (2, 2)) -> Plan:
    plan = plan_of(PROFILE, chain_decision(PROFILE, cuts=cuts, micro_batches=micro_batches))
    search = Search(
        "search", "best-first", "proven", 0.9e-2, 0.1, 5, 9, {"work": 0.8e-2, "chain": 0.9e-2}, ("stage 0",)
    )
    return replace(plan, search=search, alternatives=(Alternative(HOSTILE, 0.02, 2**20, "slower"),))


PLAN = planned()
MEASURED = replace(solve.predict_again(PLAN, PROFILE)[1], source="measured")
RUN = TimelineFile(solve.predict_again(PLAN, PROFILE)[1], MEASURED, (0.01, 0.012, 0.011), (1.0, 0.9, 0.8))


def data_of(page: str) -> dict[str, object]:
    found = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def page(report: ModuleType) -> str:
    return report.page(
        report.ReportSources("plan.json", PLAN, PROFILE, RUN, {"rival.json": planned((2,), (1, 1, 1, 1))})
    )


def test_files_are_told_apart_by_what_they_hold(report: ModuleType, tmp_path: Path) -> None:
    for name, value in (("a", RUN), ("b", PLAN), ("c", planned((2,))), ("d", PROFILE)):
        dump(value, tmp_path / name)
    paths = [str(tmp_path / name) for name in "abcd"]
    ran = replace(PLAN, measured=RUN.measured_beside(PLAN.prediction))
    assert report.read(paths) == report.ReportSources("b", ran, PROFILE, RUN, {"c": planned((2,))})
    assert report.read([PLAN, RUN, PROFILE]) == report.ReportSources("best-first", ran, PROFILE, RUN)
    assert report.read([PLAN]).profile is None


def test_what_does_not_belong_together_is_refused(report: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no plan is given"):
        report.read([PROFILE])
    with pytest.raises(UsageError, match="2 profiles are given"):
        report.read([PLAN, PROFILE, PROFILE])
    with pytest.raises(StaleFileError, match="made for another profile"):
        report.read([PLAN, chain_profile(6, latency_s=2e-4)])
    foreign = replace(RUN, measured=Timeline("measured", 1.0, (Span(0, "5F0", 0.0, 1.0),)))
    with pytest.raises(UsageError, match="is of another plan") as caught:
        report.read([PLAN, foreign])
    assert "rank 0 did 5F0" in caught.value.details[0]


def test_the_page_lets_its_two_scripts_run_and_nothing_be_fetched(page: str) -> None:
    (policy,) = map(html.unescape, re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert len(digests) == 2
    allowed = re.search(r"script-src (.*?);", policy)
    assert allowed is not None
    assert allowed[1].split() == [f"'sha256-{digest}'" for digest in digests]
    assert "default-src 'none'" in policy
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=", page)


def test_text_from_files_is_no_markup(page: str) -> None:
    assert HOSTILE not in page
    assert HOSTILE in json.dumps(data_of(page)["points"]).replace('\\"', '"')
    assert "&lt;/script&gt;&lt;script&gt;alert" in page


def test_what_is_known_is_on_the_page(page: str) -> None:
    for text in ("What binds", "stage 0", "the largest of: ", "rival.json, against plan.json", "measured at this size"):
        assert text in page
    for section in ("why", "network", "step", "memory", "candidates", "rivals", "evidence"):
        assert f'<section id="{section}"' in page
    found = data_of(page)
    charts = re.findall(r'<script type="application/json" id="data-(\S+)">(.*?)</script>', page, re.DOTALL)
    assert [element for element, text in charts if json.loads(text)["roots"]] == [
        "step-chart",
        "memory-chart",
        "plans-chart",
    ]
    network = found["network"]
    assert isinstance(network, dict)
    assert [layer[0] for layer in network["layers"]] == list(PLAN.decision.layers)
    assert [0, 3] in network["edges"]
    assert all(f'<th scope="row">{rank}</th>' in page for rank in range(PLAN.decision.num_ranks))
    assert "halopipe run plan.json" not in page


def test_a_plan_alone_says_what_is_not_shown(report: ModuleType) -> None:
    bare = report.page(report.ReportSources("plan.json", PLAN))
    assert "When actions run is not known" in bare
    assert "halopipe report plan.json PROFILE" in bare
    assert "it is no Pareto front of all plans" in bare
    assert 'id="step-chart"' not in bare


def test_the_front_is_what_no_other_beats() -> None:
    from halopipe.extras.figures.charts import ChartPoint, front_of  # late: it loads bokeh

    draws = random.Random(3)
    points = [ChartPoint(str(n), "rival", draws.randrange(9) + 1.0, draws.randrange(9)) for n in range(40)]
    found = [(points[n].step_s, points[n].peak_bytes) for n in front_of(points)]
    all_points = {(p.step_s, p.peak_bytes) for p in points}
    best = {(s, b) for s, b in all_points if not any(o != (s, b) and o[0] <= s and o[1] <= b for o in all_points)}
    assert found == sorted(best)


def test_without_the_library_the_error_names_the_command(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "halopipe.extras.figures.charts")
    monkeypatch.delattr("halopipe.extras.figures.charts")
    monkeypatch.setitem(sys.modules, "bokeh.document", None)
    with pytest.raises(UsageError, match="a report needs bokeh and jinja2") as caught:
        report.page(report.ReportSources("plan.json", PLAN))
    assert caught.value.remedies[0] == "pip install 'halopipe[report]'"


def test_figures_are_drawn_of_what_there_is(report: ModuleType) -> None:
    assert len(report.figure_of(report.ReportSources("p", PLAN, PROFILE, RUN), "step").axes) == 2
    (axes,) = report.figure_of(report.ReportSources("p", PLAN, None, RUN), "memory").axes
    assert axes.get_title(loc="left") == "predicted and measured (dashed)"
    boxes = report.figure_of(report.ReportSources("p", PLAN), "graph").axes[0].patches
    assert len(boxes) == len(PLAN.decision.layers)
