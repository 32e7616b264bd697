"""Reports as a reader meets them, in Debian's chromium without a screen; skipped where it is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from planner.ir.timeline import MemorySample, Span, Timeline, TimelineFile
from tests.planner.factories import chain_decision, plan_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

RANKS = 64
MICRO_BATCHES = 167
MOST = 12_800
"""Elements of the page, and objects of its charts, which make a page slow: some for a layer, a rank or an operation
(4,100 elements before a chart is drawn), but not one for every tenth of the 128,000 actions, which are in columns."""

COUNT = """() => {
  const count = (root) => [...root.querySelectorAll("*")].reduce(
    (sum, one) => sum + 1 + (one.shadowRoot ? count(one.shadowRoot) : 0), 0);
  return count(document);
}"""


def timeline(source: str, scale: float, program: tuple[tuple[str, ...], ...]) -> Timeline:
    """Every action in its turn, as long as its kind: what a simulator says would take a minute to make."""
    spans = []
    memory = []
    for rank, row in enumerate(program):
        at_s = rank * 2e-3 * scale
        for action in row:
            stop_s = at_s + scale * (1e-5 if "_" in action else 1e-3 if "F" in action else 2e-3)
            spans.append(Span(rank, action, at_s, stop_s))
            at_s = stop_s
            memory.append(MemorySample(rank, at_s, (len(spans) * 7919 + rank * 1000) % 2**24))
    return Timeline(source, max(span.stop_s for span in spans), tuple(spans), tuple(memory))


@pytest.fixture(scope="module")
def large(report: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 ranks with a thousand actions each, predicted and measured."""
    profile = chain_profile(2 * RANKS, RANKS)
    cuts = tuple(range(2, 2 * RANKS, 2))
    plan = plan_of(profile, chain_decision(profile, cuts=cuts, micro_batches=(1,) * MICRO_BATCHES))
    predicted, measured = (timeline(s, x, plan.decision.program) for s, x in (("predicted", 1.0), ("measured", 1.03)))
    assert len(predicted.spans) > 990 * (RANKS - 2)
    path = tmp_path_factory.mktemp("report") / "report.html"
    sources = report.ReportSources(
        "plan.json", plan, None, TimelineFile(predicted, measured, (measured.step_s,), (0.1,))
    )
    path.write_text(report.page(sources), "utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """The page in a window of its own; what it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(120_000)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.add_init_script("window.requestIdleCallback = () => 0")  # charts come when one comes near them
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")

    def charts(self) -> set[str]:
        """Those that are drawn."""
        drawn = "all => all.filter((chart) => chart.childElementCount).map((chart) => chart.id)"
        return set(self.page.eval_on_selector_all("[id$=-chart]", drawn))

    def elements(self) -> int:
        """How many the page has, within charts too."""
        return int(self.page.evaluate(COUNT))

    def models(self) -> int:
        """Objects that the charts are made of."""
        return int(self.page.evaluate("Bokeh.documents.reduce((sum, each) => sum + each.all_models.size, 0)"))


@pytest.mark.timeout(300)  # a browser beside all other tests
def test_a_large_report_draws_what_is_looked_at_asks_for_nothing_and_can_be_explored(browser: Any, large: Path) -> None:
    """Takes 6 s: a report of 128,000 actions is written, and a browser draws it."""
    visit = Visit(browser, large, 1280, "light")
    page = visit.page
    assert visit.charts() == set(), "they are drawn when a reader comes near"
    assert visit.elements() < MOST
    for chart in ("step-chart", "memory-chart"):
        page.locator(f"#{chart}").scroll_into_view_if_needed()
    page.wait_for_selector("html[data-drawn=yes]", state="attached")
    assert {"step-chart", "memory-chart"} <= visit.charts()
    assert visit.elements() < MOST
    assert visit.models() < MOST

    page.fill("#search", "l99")
    assert page.inner_text("#matches").startswith("1 of ")
    assert page.locator("#graph .layer.match").count() == 1
    whole = page.get_attribute("#graph", "viewBox")
    page.press("#search", "Enter")
    assert page.get_attribute("#graph", "viewBox") != whole
    assert page.inner_text("#layer").startswith("l99")
    page.fill("#search", "no such layer")
    assert page.inner_text("#matches").startswith("0 of ")
    page.click("#zoom-all")
    assert page.get_attribute("#graph", "viewBox") == whole
    page.focus("#graph")
    page.keyboard.press("+")
    assert page.get_attribute("#graph", "viewBox") != whole
    page.keyboard.press("0")
    page.keyboard.press("ArrowDown")
    assert not page.inner_text("#layer").startswith("l99")

    page.locator("#graph .layer").first.hover()
    assert "stage 0" in page.inner_text("#tip")
    chart = page.locator("#step-chart")
    chart.scroll_into_view_if_needed()
    for _ in range(6):
        page.click("[data-zoom='0.5']")
    box = chart.bounding_box()
    for place in range(40):  # some action is under one of these
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40 + 3 * place)
        if page.is_visible("#tip") and "sent" in page.inner_text("#tip"):
            break
    assert "activation from stage" in page.inner_text("#tip") or "gradient from stage" in page.inner_text("#tip")

    memory = page.locator("#memory-chart")
    memory.scroll_into_view_if_needed()
    box = memory.bounding_box()
    for place in range(100):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5 + 3 * place)
        if page.is_visible("#tip") and "MiB at" in page.inner_text("#tip"):
            break
    assert "MiB at" in page.inner_text("#tip")

    assert visit.requests == [large.as_uri()]
    assert visit.complaints == []
    visit.context.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_on_a_telephone_by_day_and_by_night(browser: Any, large: Path, scheme: str) -> None:
    visit = Visit(browser, large, 400, scheme)
    page = visit.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    shown = page.evaluate(
        "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number))"
    )
    text, back = (sum(channels[:3]) / 3 for channels in shown)
    assert (text < 80 < 200 < back) if scheme == "light" else (back < 60 < 200 < text)
    assert page.locator("h1").count() == 1
    assert page.locator("h2").count() >= 5
    unnamed = "svg, [role=img], button, input"
    names = page.eval_on_selector_all(
        unnamed, "all => all.map((e) => e.ariaLabel || e.textContent || e.labels?.[0]?.textContent)"
    )
    assert all(name and name.strip() for name in names)
    visit.context.close()
