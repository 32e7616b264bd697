"""Tables of documents are made from the results, and those that are committed are."""

from __future__ import annotations

import pytest

from benchmarks.report import DOCUMENTS, MOST_ROWS, RESULTS, Row, as_text, at_most, figure, run, written

ROWS = (
    Row("VGG, chosen: predicted", 363.07, "ms"),
    at_most("VGG, chosen: error", 33.4, "%", 5),
    Row("GNMT, chosen: predicted", 1421.6, "ms"),
    Row("mean error", 7.94, "%"),
)


def shown(asked: str) -> list[str]:
    """The lines of a table over ROWS."""
    document = f"before\n<!-- results: {asked} -->\nan old table\n<!-- end of results -->\nafter\n"
    lines = written(document, lambda name: ROWS if name == "steps" else ()).splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    return [line for line in lines if line.startswith("|")]


def test_names_are_cut_into_rows_and_columns_and_a_missed_goal_is_bold() -> None:
    assert shown("steps; rows=chosen") == [
        "|  | predicted, ms | error, % |",
        "| --- | ---: | ---: |",
        "| VGG, chosen | 363 | **33.4** (<= 5) |",
        "| GNMT, chosen | 1,422 |  |",
    ]


@pytest.mark.parametrize(
    ("asked", "last"),
    [
        ("steps; columns=^$", "| mean error | 7.94 |"),
        ("steps; rows=GNMT; by=", "| GNMT, chosen: predicted | 1,422 |"),
        ("steps; rows=GNMT; by=,", "| GNMT | 1,422 |"),
    ],
)
def test_what_is_shown_and_where_names_are_cut_can_be_chosen(asked: str, last: str) -> None:
    assert shown(asked)[-1] == last


@pytest.mark.parametrize(
    ("asked", "fault"), [("steps; row=x", "no option row"), ("steps; rows=^x", "no row of steps is like that")]
)
def test_a_table_that_cannot_be_is_refused(asked: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        shown(asked)


def test_a_table_of_many_rows_is_folded_behind_its_size_and_its_missed_goals() -> None:
    rows = [at_most(f"case {number}: error", number, "%", 5) for number in range(MOST_ROWS + 1)]
    document = "<!-- results: steps -->\n<!-- end of results -->\n"
    many = written(document, lambda name: rows)
    assert '<details markdown="1"><summary>7 rows, 1 of the figures misses the goal</summary>\n\n|' in many
    assert many.count("</details>") == 1
    assert "<details" not in written(document, lambda name: rows[:MOST_ROWS])


def test_figures_have_three_digits_or_all_before_the_point() -> None:
    values = (0.0, 3.0, 0.8014, -0.8823, 2e-6, 7.94, 33.41, 363.07, 1421.6, 62.0)
    words = "0 3 0.80 -0.88 2.0e-06 7.94 33.4 363 1,422 62"
    assert [figure(value) for value in values] == words.split()


def test_the_tables_of_all_documents_are_those_of_the_results() -> None:
    paths = [DOCUMENTS / "README.md", *(DOCUMENTS / "docs").rglob("*.md")]
    old = [path.name for path in paths if written(text := path.read_text("utf-8")) != text]
    assert old == [], "python -m benchmarks.report writes them again"


def test_every_result_is_shown() -> None:
    page = (DOCUMENTS / "docs" / "benchmarks.md").read_text("utf-8")
    names = {path.stem for path in RESULTS.glob("*.json")}
    assert {name for name in names if f"`python -m benchmarks.{name}`" not in page} == set()
    assert {name for name in names if f"<!-- results: {name}" not in page} == {"networks"}  # it has a page of its own


def test_a_benchmark_is_given_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(quick: bool, only: str, sizes: list[int]) -> list[Row]:
        return [Row(f"{only}, {quick}", sum(sizes), "B")]

    own = {"--only": {"default": ""}, "--sizes": {"type": int, "nargs": "+", "default": [1]}}
    assert run("Sizes", measure, ["--quick", "--json", "--only", "a", "--sizes", "2", "3"], own) == 0
    assert capsys.readouterr().out == as_text([Row("a, True", 5, "B")])
    assert run("Sizes", measure, [], own) == 0
    assert capsys.readouterr().out.startswith("Sizes\nfigure")
