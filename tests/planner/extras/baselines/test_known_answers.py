"""Published planners' own answers, found again: every row of the reference table."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.known_answers.known_rows import Known, known

QUESTIONS = list(known())


def test_the_reference_has_as_many_rows_as_it_had() -> None:
    assert Counter(question.peer for question in QUESTIONS) == {"pipedream": 0, "tarnawski": 0, "piper": 0}


@pytest.mark.cases(24)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: f"{question.peer}: {question.name}")
def test_a_published_answer_is_found_again(question: Known) -> None:
    row = question.row()
    assert row.holds, row
