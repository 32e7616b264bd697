from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutation import HOME, mirroring


@pytest.mark.parametrize(
    ("module", "tests"),
    [
        ("planner/ir/box.py", "tests/planner/ir/test_box.py"),
        ("planner/ir/__init__.py", "tests/planner/ir"),
        ("planner/ir/of_no_test.py", "tests/planner/ir"),
        ("runtime/of_no_folder/a.py", "tests/runtime"),
    ],
)
def test_a_mutant_is_judged_by_the_tests_that_mirror_its_module(
    module: str, tests: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HOME)
    assert mirroring(Path(module)) == tests
