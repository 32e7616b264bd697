from __future__ import annotations

import re
import tomllib

import pytest

from cuda_ops.device import torch_versions
from halopipe.reports import doctor
from tests.lower_bounds import PROJECT, lower_bounds

CONSTRAINTS = PROJECT.parent / "constraints.txt"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_every_bound_is_a_constraint_and_none_is_above_what_is_tested() -> None:
    bounds = lower_bounds(PROJECT.read_text("utf-8"))
    pinned = [line.split("==") for line in CONSTRAINTS.read_text("utf-8").splitlines() if "==" in line]
    newest = {re.sub("[-_.]+", "-", name).lower(): version.split()[0] for name, version in pinned}
    assert {"torch", "numpy", "pytest", "triton", "scikit-learn"} <= set(bounds)
    for name, bound in bounds.items():
        assert numbers(bound) <= numbers(newest[re.sub("[-_.]+", "-", name).lower()]), name


@pytest.mark.parametrize("requirements", ['["numpy"]', '["numpy<3"]', '["numpy>=2.0", "numpy>=2.1"]'])
def test_a_requirement_without_one_lower_bound_is_named(requirements: str) -> None:
    with pytest.raises(ValueError, match=r"'numpy.*' in pyproject.toml: a package has one lower bound"):
        lower_bounds(f'[project]\nname="a"\ndependencies={requirements}\noptional-dependencies={{t=["a[t]"]}}')


def test_the_tested_ranges_are_those_of_the_project() -> None:
    project = tomllib.loads(PROJECT.read_text("utf-8"))["project"]
    bound = lower_bounds(PROJECT.read_text("utf-8"))["torch"]
    newest = re.search(r"(?m)^torch==(\S+)$", CONSTRAINTS.read_text("utf-8"))
    assert newest is not None
    assert (numbers(bound)[:2], numbers(newest[1])[:2]) == (torch_versions.OLDEST, torch_versions.NEWEST)
    assert project["requires-python"] == ">={}.{}".format(*doctor.OLDEST_PYTHON)
    stated = {one.rpartition(" ")[2] for one in project["classifiers"] if "Python :: 3." in one}
    minors = range(doctor.OLDEST_PYTHON[1], doctor.NEWEST_PYTHON[1] + 1)
    assert stated == {f"3.{minor}" for minor in minors}
