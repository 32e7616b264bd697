from __future__ import annotations

import pytest

from halopipe.terminal import tables
from planner.ir.timeline import Span, Timeline


def span(rank: int, action: str, start_s: float, stop_s: float) -> Span:
    return Span(rank, action, start_s, stop_s)


def one_f_one_b() -> Timeline:
    """Two stages, two micro-batches, forward 3 ms, backward 6 ms, an update of 2 ms."""
    spans = (
        span(0, "0F0", 0.000, 0.003),
        span(0, "0SEND_F0>1", 0.003, 0.003),
        span(0, "0F1", 0.003, 0.006),
        span(0, "0RECV_B0<1", 0.006, 0.012),
        span(0, "0B0", 0.012, 0.018),
        span(0, "0B1", 0.021, 0.027),
        span(0, "0UPDATE", 0.027, 0.029),
        span(1, "1F0", 0.003, 0.006),
        span(1, "1B0", 0.006, 0.012),
        span(1, "1F1", 0.012, 0.015),
        span(1, "1B1", 0.015, 0.021),
        span(1, "1UPDATE", 0.021, 0.023),
    )
    return Timeline("predicted", 0.030, spans)


def test_a_step_is_drawn_to_scale() -> None:
    assert tables.gantt(one_f_one_b(), ["n0/cpu0", "n0/cpu1"], width=17 + 30) == (
        "rank 0  n0/cpu0  F0░F1░······B0▓▓▓▓···B1▓▓▓▓U#·\n"
        "rank 1  n0/cpu1  ···F0░B0▓▓▓▓F1░B1▓▓▓▓U#·······\n"
        "                 0                      30.0 ms\n"
        "                 F forward   B backward   U update   · idle or waiting"
    )


def test_an_action_too_short_for_its_label_is_only_filled() -> None:
    first = tables.gantt(one_f_one_b(), width=8 + 10).splitlines()[0]
    assert first == "rank 0  ░░··B0·B1U"


def test_the_stage_is_named_where_a_rank_runs_several() -> None:
    spans = (span(0, "0F0", 0.0, 0.5), span(0, "2F0", 0.5, 1.0))
    assert tables.gantt(Timeline("predicted", 1.0, spans), width=18).splitlines()[0] == "rank 0  0F0░░2F0░░"


def test_split_backwards_and_reductions_have_their_own_marks() -> None:
    spans = (span(0, "0I0", 0.0, 0.4), span(0, "0W0", 0.4, 0.8), span(0, "0REDUCE_GRAD", 0.8, 1.0))
    lines = tables.gantt(Timeline("predicted", 1.0, spans), width=18).splitlines()
    assert lines[0] == "rank 0  I0▓▓W0▒▒R="
    assert "W backward for weights   R gradient all-reduce" in lines[-1]


def test_columns_are_as_wide_as_their_cells_and_numbers_flush_right() -> None:
    assert tables.table(["plan", "step"], [["a", "9.10 ms"], ["longer", "12 s"]]) == (
        "  plan       step\n  a       9.10 ms\n  longer     12 s"
    )


def test_a_bar_shows_too_much() -> None:
    assert tables.bar(0.5, 4) == "[##..]"
    assert tables.bar(1.2, 4) == "[###!]"
    assert tables.bar(0.0, 4) == "[....]"


def test_what_is_prepared_is_drawn_where_the_rank_does_not_compute() -> None:
    spans = (Span(0, "0PREP0", 0.0, 0.010), Span(0, "0F0", 0.010, 0.030), Span(0, "0PREP1", 0.010, 0.040))
    drawn = tables.gantt(Timeline("predicted", 0.040, spans), width=28)
    assert drawn.splitlines()[0] == "rank 0  P0:::F0░░░░░░░░:::::"
    assert "P preparing on the host" in drawn


def test_a_table_wider_than_the_screen_stands_as_blocks_and_is_whole() -> None:
    rows = [["plan.json", "412 ms", "[red]1f1b"], ["a-name-of-twenty-and-more-letters.json", "12 s", ""]]
    assert tables.table(["plan", "step", "schedule"], rows, width=30) == (
        "  plan plan.json\n    step      412 ms\n    schedule  [red]1f1b\n"
        "  plan\n  a-name-of-twenty-and-more-le\n  tters.json\n    step  12 s"
    )
    assert tables.table(["plan", "step", "schedule"], rows, width=80).splitlines()[1].endswith("412 ms  [red]1f1b")


def test_a_picture_is_no_wider_than_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (40, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, tables.gantt(one_f_one_b()).splitlines()[:-1])) == columns


def test_in_a_notebook_a_table_is_text_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [["plan", "step"], [["a", "1 ms"]]]
    elsewhere = tables.table(*asked)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert tables.table(*asked) == elsewhere != ""
