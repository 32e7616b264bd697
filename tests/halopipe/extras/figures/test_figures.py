from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from halopipe.extras.figures import figures
from planner.ir.errors import UsageError
from planner.ir.timeline import Span, Timeline
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(3)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)))
TIMELINE = Timeline(
    "predicted",
    1.0,
    (
        Span(0, "0F0", 0.0, 0.3),
        Span(0, "0SEND_F0>1", 0.3, 0.31),
        Span(1, "1F0", 0.3, 0.5),
        Span(1, "1B0", 0.5, 0.9),
        Span(1, "1UPDATE", 0.9, 1.0),
    ),
)


def test_a_chart_has_a_bar_an_action_and_no_messages() -> None:
    figure = figures.gantt(TIMELINE, devices=["n0/cpu0", "n0/cpu1"])
    (axes,) = figure.axes
    assert len(axes.patches) == 4
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0\nn0/cpu0", "rank 1\nn0/cpu1"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward", "update"]


def test_predicted_and_measured_share_the_time_axis() -> None:
    figure = figures.gantt(TIMELINE, Timeline("measured", 2.0, (Span(0, "0F0", 0.0, 2.0),)))
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert second.get_title(loc="left") == "measured: 2.00 s"


def test_memory_has_a_bar_a_rank_and_plan() -> None:
    (axes,) = figures.memory({"a": PLAN, "b": PLAN}).axes
    assert len(axes.patches) == 4
    assert [bar.get_height() for bar in axes.patches] == [1.0] * 4  # MiB


def test_accuracy_has_a_point_a_plan() -> None:
    (axes,) = figures.accuracy({"a": (0.1, 0.11), "b": (0.2, 0.19)}).axes
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(line.get_xdata()[0]) for line in points] == pytest.approx([100, 200])
    assert [text.get_text() for text in axes.texts] == ["a", "b"]


def test_the_same_figure_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        figures.save(figures.gantt(TIMELINE), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<svg" in (tmp_path / "a.svg").read_text("utf-8")


def test_other_formats_than_svg_and_png_are_refused(tmp_path: Path) -> None:
    figures.save(figures.memory({"a": PLAN}), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"not '\.gif'"):
        figures.save(figures.memory({"a": PLAN}), tmp_path / "a.gif")


def test_what_is_prepared_is_a_thin_bar_below_the_ranks_own() -> None:
    step = Timeline("predicted", 0.02, (Span(0, "0PREP0", 0.0, 0.01), Span(0, "0F0", 0.0, 0.02)))
    figure = figures.gantt(step)
    heights = sorted(bar.get_height() for bar in figure.axes[0].patches)
    assert heights == [0.14, 0.8]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "preparing on the host"]
