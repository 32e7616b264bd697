from __future__ import annotations

import pytest

from benchmarks.without import closure, extras, measure


@pytest.mark.cases(2)  # seconds each
@pytest.mark.parametrize("name", list(extras()))
def test_every_module_of_the_core_is_imported_without_an_extra(name: str) -> None:
    assert [row.value for row in measure(quick=True, extra=[name], tests=())] == [0]


def test_an_extra_goes_with_those_that_import_it() -> None:
    assert closure("token_slices") == ["token_slices"]
    assert {"kernels", "modelled", "transformers"} <= set(closure("kernels"))
    assert [path.as_posix() for path in extras()["token_slices"]] == [
        "planner/extras/token_slices",
        "runtime/extras/token_slices",
    ]
