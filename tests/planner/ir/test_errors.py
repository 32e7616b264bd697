from __future__ import annotations

import pickle
import re
from collections.abc import Iterator

import pytest

from planner.ir import errors as module
from planner.ir.errors import HalopipeError, InfeasibleError

EXIT_CODES = {"H1": 1, "H2": 2, "H3": 3, "H4": 4, "H5": 5, "H6": 6, "H7": 7}


def classes(root: type[HalopipeError] = HalopipeError) -> Iterator[type[HalopipeError]]:
    for cls in root.__subclasses__():
        yield cls
        yield from classes(cls)


ALL = (HalopipeError, *(cls for cls in classes() if cls.__module__ == module.__name__))


def test_every_code_belongs_to_one_class() -> None:
    codes = [cls.code for cls in ALL]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"H\d{3}", code) for code in codes)


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_the_first_digit_of_a_code_is_the_exit_code(cls: type[HalopipeError]) -> None:
    assert cls.exit_code == EXIT_CODES[cls.code[:2]]
    assert cls.__doc__


@pytest.mark.parametrize("cls", ALL[1:], ids=lambda cls: cls.__name__)
def test_the_tree_at_the_top_of_the_file_draws_every_class(cls: type[HalopipeError]) -> None:
    assert re.search(rf"{cls.__name__} +{cls.code}\b", module.__doc__ or "")


def test_the_tree_draws_nothing_else() -> None:
    drawn = re.findall(r"(\w+Error) +(H\d{3})", module.__doc__ or "")
    assert sorted(drawn) == sorted((cls.__name__, cls.code) for cls in ALL[1:])


def test_an_error_reads_title_details_remedies() -> None:
    error = InfeasibleError("no plan fits", ["n1/gpu0: needs 17.9 GiB\nusable 14.7 GiB"], ["--micro-batch 1"])
    assert str(error) == (
        "error[H401] no plan fits\n  n1/gpu0: needs 17.9 GiB\n  usable 14.7 GiB\n  try: --micro-batch 1"
    )


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_error_crosses_a_process_boundary_whole(cls: type[HalopipeError]) -> None:
    error = cls("title", ["detail"], ["remedy"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (copy.title, copy.details, copy.remedies) == ("title", ("detail",), ("remedy",))


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_no_error_leaves_a_user_without_a_remedy(cls: type[HalopipeError]) -> None:
    assert f"\n  try: {cls.usual[0]}" in cls("title").render()
    assert cls is HalopipeError or "usual" in vars(cls)
    assert cls("title", [], ["this"]).render().endswith("title\n  try: this")
