from __future__ import annotations

import json

import pytest

from benchmarks.report import Row
from benchmarks.robustness import __main__ as robustness
from tests.zoo.entries import DATA, PIPELINE, Entry
from tests.zoo.judging import ADMITTED, CRASHED, EQUAL, REFUSED, WRONG, Verdict


def entry(refused: dict[str, str] | None = None) -> Entry:
    return Entry("module:network", "none", tuple, refused=refused or {})


def verdicts(*outcomes: str, text: str = "the buffer mean is written") -> list[Verdict]:
    return [Verdict(plan, outcome, text) for plan, outcome in zip((PIPELINE, DATA), outcomes, strict=False)]


@pytest.mark.parametrize(
    ("refused", "outcomes", "expected"),
    [
        ({}, (EQUAL, EQUAL), robustness.EQUAL),
        ({PIPELINE: "buffer mean"}, (REFUSED, EQUAL), robustness.REFUSED),
        ({PIPELINE: "buffer mean"}, (EQUAL, EQUAL), robustness.EQUAL),
        ({PIPELINE: "hook"}, (REFUSED, EQUAL), robustness.NEEDLESS),
        ({}, (EQUAL, REFUSED), robustness.NEEDLESS),
        ({DATA: "buffer mean"}, (EQUAL, ADMITTED), robustness.NEEDLESS),
        ({PIPELINE: "buffer mean"}, (REFUSED, WRONG), robustness.WRONG),
        ({}, (CRASHED, WRONG), robustness.WRONG),
        ({}, (EQUAL, CRASHED), robustness.UNTYPED),
    ],
)
def test_a_network_is_of_the_class_of_its_worst_verdict(
    refused: dict[str, str], outcomes: tuple[str, ...], expected: str
) -> None:
    assert robustness.class_of(entry(refused), verdicts(*outcomes)) == expected


@pytest.mark.exhaustive("all parts of the benchmark, each a little")
def test_the_quick_run_prints_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robustness, "EVERY_FIFTH", 40)
    monkeypatch.setattr(robustness, "QUICK_SHARE", 200)
    assert robustness.main(["--quick", "--json"]) == 0
    rows = [Row(**row) for row in json.loads(capsys.readouterr().out)]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for word in ("networks", "plans", "profiles", "hostile", "checker"):
        assert any(word in name for name in names), word
    figures = {row.name: row.value for row in rows}
    judged = [value for name, value in figures.items() if name.startswith("networks") and name != "networks tried"]
    assert sum(judged) == figures["networks tried"] >= 3
    assert [row.name for row in rows if row.goal and not row.holds] == []
