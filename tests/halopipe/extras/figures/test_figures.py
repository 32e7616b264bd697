"""Figures of steps, memory and accuracy; the layout of a network; what a notebook shows of values."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chains import chain_profile
from halopipe import api
from halopipe.extras.figures.graph_layout import BOX_HEIGHT, BOX_WIDTH, LANES_PER_COLUMN, NetworkDrawing, draw, edges_of
from halopipe.extras.figures.notebook import register
from halopipe.planning.problem import make_problem
from halopipe.planning.solve import predict_again, solve
from planner.ir.errors import UsageError
from planner.ir.timeline import Span, Timeline, TimelineFile
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


def test_a_chart_has_a_bar_an_action_and_no_messages(figures: ModuleType) -> None:
    figure = figures.gantt(TIMELINE, devices=["n0/cpu0", "n0/cpu1"])
    (axes,) = figure.axes
    assert len(axes.patches) == 4
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0\nn0/cpu0", "rank 1\nn0/cpu1"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward", "update"]


def test_predicted_and_measured_share_the_time_axis(figures: ModuleType) -> None:
    figure = figures.gantt(TIMELINE, Timeline("measured", 2.0, (Span(0, "0F0", 0.0, 2.0),)))
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim()
    assert second.get_title(loc="left") == "measured: 2.00 s"


def test_accuracy_has_a_point_a_plan(figures: ModuleType) -> None:
    (axes,) = figures.accuracy({"a": (0.1, 0.11), "b": (0.2, 0.19)}).axes
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert [float(line.get_xdata()[0]) for line in points] == pytest.approx([100, 200])
    assert [text.get_text() for text in axes.texts] == ["a", "b"]


def test_the_same_figure_gives_the_same_file(figures: ModuleType, tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        figures.save(figures.gantt(TIMELINE), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<svg" in (tmp_path / "a.svg").read_text("utf-8")


def test_what_is_prepared_is_a_thin_bar_below_the_ranks_own(figures: ModuleType) -> None:
    step = Timeline("predicted", 0.02, (Span(0, "0PREP0", 0.0, 0.01), Span(0, "0F0", 0.0, 0.02)))
    figure = figures.gantt(step)
    heights = sorted(bar.get_height() for bar in figure.axes[0].patches)
    assert heights == [0.14, 0.8]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "preparing on the host"]


def test_memory_has_a_bar_a_rank_and_plan_and_is_written_in_two_formats(figures: ModuleType, tmp_path: Path) -> None:
    figure = figures.memory({"a": PLAN, "b": PLAN})
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1.0] * 4  # MiB
    figures.save(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match=r"not '\.gif'"):
        figures.save(figure, tmp_path / "a.gif")


@st.composite
def networks(drawn: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    size = drawn(st.integers(1, 25))
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)).filter(lambda pair: pair[0] < pair[1])
    return size, drawn(st.lists(pairs, unique=True, max_size=40)) if size > 1 else []


@given(networks(), st.sampled_from([0.3, 1.0, 2.3, 100.0]))
def test_boxes_lie_apart_inside_the_picture_and_no_level_line_runs_through_one(
    network: tuple[int, list[tuple[int, int]]], aspect: float
) -> None:
    size, edges = network
    drawn = draw(size, edges, aspect)
    assert len(set(drawn.boxes)) == len(drawn.boxes) == size
    for number, (x, y) in enumerate(drawn.boxes):
        assert 0 <= x - BOX_WIDTH / 2 < x + BOX_WIDTH / 2 <= drawn.width
        assert 0 <= y - BOX_HEIGHT / 2 < y + BOX_HEIGHT / 2 <= drawn.height + 1e-9
        for other_x, other_y in drawn.boxes[:number]:
            assert abs(x - other_x) >= 1 - 1e-9 or abs(y - other_y) >= 1 - 1e-9
        for x0, y0, x1, y1 in drawn.lines:
            through = y0 == y1 == y and x0 < x < x1
            assert not through


@given(networks())
def test_every_edge_leads_from_its_maker_to_its_reader(network: tuple[int, list[tuple[int, int]]]) -> None:
    size, edges = network
    drawn = draw(size, edges, 100.0)  # in one row
    for src, dst in edges:
        reached = {(drawn.boxes[src][0] + BOX_WIDTH / 2, drawn.boxes[src][1])}
        for _ in drawn.lines:
            reached |= {(x1, y1) for x0, y0, x1, y1 in drawn.lines if (x0, y0) in reached}
        assert (drawn.boxes[dst][0] - BOX_WIDTH / 2, drawn.boxes[dst][1]) in reached


def test_a_residual_block_is_two_lanes_and_a_chain_is_one() -> None:
    block = draw(4, [(0, 1), (1, 2), (2, 3), (0, 3)], 100.0)
    assert [x for x, _ in block.boxes] == [0.5, 1.5, 2.5, 3.5]
    assert {y for _, y in draw(4, [(0, 1), (1, 2), (2, 3)], 100.0).boxes} == {0.5}
    assert block.height == 2.0


@pytest.mark.parametrize("aspect", [0.5, 1.0, 2.5])
def test_rows_are_as_long_as_the_shape_asks(aspect: float) -> None:
    drawn: NetworkDrawing = draw(300, [(n, n + 1) for n in range(299)], aspect)
    assert drawn.width * LANES_PER_COLUMN / drawn.height == pytest.approx(aspect, rel=0.25)


def test_what_is_no_layer_is_an_input() -> None:
    assert edges_of({"a": ["x"], "b": ["a", "a", "y"], "c": ["a", "b"]}) == [(0, 1), (0, 2), (1, 2)]


SLOW = chain_profile(4, latency_s=3e-4)


def html(value: object) -> str:
    from IPython.core.formatters import DisplayFormatter

    shell = SimpleNamespace(display_formatter=DisplayFormatter())
    register(shell)
    return str(shell.display_formatter.format(value)[0]["text/html"])


def test_a_plan_shows_itself_with_its_step_where_its_profile_is_remembered() -> None:
    alone = html(solve(make_problem(SLOW, global_batch=8)))
    assert "peak memory in MiB" in alone
    shown = html(api.plan(SLOW, global_batch=8))
    assert "predicted: " in shown
    assert "<td>nothing</td>" in shown  # the last stage sends


def test_a_timeline_shows_its_step_and_a_file_both() -> None:
    timeline = predict_again(api.plan(SLOW, global_batch=8), SLOW)[1]
    assert html(timeline).count("<svg") == 2  # memory over time as well
    both = html(TimelineFile(timeline, timeline, (0.5, 0.7, 0.6), (1.0, 1.0, 1.0)))
    assert "3 steps, median 600 ms" in both
