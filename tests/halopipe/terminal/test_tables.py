from __future__ import annotations

import pytest

from halopipe.terminal import tables
from planner.ir.timeline import Span, Timeline


def one_f_one_b() -> Timeline:
    """Two stages, two micro-batches, forward 3 ms, backward 6 ms, an update of 2 ms."""
    spans = (
        Span(0, "0F0", 0.000, 0.003),
        Span(0, "0SEND_F0>1", 0.003, 0.003),
        Span(0, "0F1", 0.003, 0.006),
        Span(0, "0RECV_B0<1", 0.006, 0.012),
        Span(0, "0B0", 0.012, 0.018),
        Span(0, "0B1", 0.021, 0.027),
        Span(0, "0UPDATE", 0.027, 0.029),
        Span(1, "1F0", 0.003, 0.006),
        Span(1, "1B0", 0.006, 0.012),
        Span(1, "1F1", 0.012, 0.015),
        Span(1, "1B1", 0.015, 0.021),
        Span(1, "1UPDATE", 0.021, 0.023),
    )
    return Timeline("predicted", 0.030, spans)


def test_a_step_is_drawn_to_scale() -> None:
    assert tables.gantt(one_f_one_b(), ["n0/cpu0", "n0/cpu1"], width=17 + 30) == (
        "rank 0  n0/cpu0  F0░F1░······B0▓▓▓▓···B1▓▓▓▓U#·\n"
        "rank 1  n0/cpu1  ···F0░B0▓▓▓▓F1░B1▓▓▓▓U#·······\n"
        "                 0                      30.0 ms\n"
        "                 F forward   B backward   U update   · idle or waiting"
    )


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("spans", "width", "row", "legend"),
    [
        (one_f_one_b().spans, 10, "░░··B0·B1U", ""),
        ((Span(0, "0F0", 0.0, 0.015), Span(0, "2F0", 0.015, 0.030)), 10, "0F0░░2F0░░", ""),
        (
            (Span(0, "0I0", 0.0, 0.012), Span(0, "0W0", 0.012, 0.024), Span(0, "0REDUCE_GRAD", 0.024, 0.030)),
            10,
            "I0▓▓W0▒▒R=",
            "W backward for weights   R gradient all-reduce",
        ),
        (
            (Span(0, "0PREP0", 0.0, 0.0075), Span(0, "0F0", 0.0075, 0.0225), Span(0, "0PREP1", 0.0075, 0.030)),
            20,
            "P0:::F0░░░░░░░░:::::",
            "P preparing on the host",
        ),
    ],
    ids=["no room for a label", "several stages", "a divided backward", "what is prepared"],
)
def test_each_action_has_its_mark_and_as_much_of_a_label_as_fits(
    spans: tuple[Span, ...], width: int, row: str, legend: str
) -> None:
    lines = tables.gantt(Timeline("predicted", 0.030, spans), width=8 + width).splitlines()
    assert lines[0] == f"rank 0  {row}"
    assert legend in lines[-1]


def test_columns_are_as_wide_as_their_cells_and_numbers_flush_right() -> None:
    assert tables.table(["plan", "step"], [["a", "9.10 ms"], ["longer", "12 s"]]) == (
        "  plan       step\n  a       9.10 ms\n  longer     12 s"
    )


def test_a_bar_shows_too_much() -> None:
    assert tables.bar(0.5, 4) == "[##..]"
    assert tables.bar(1.2, 4) == "[###!]"
    assert tables.bar(0.0, 4) == "[....]"


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
