"""Settings of the whole suite: one thread a process, no display, reproducible examples, and what is left out when.

``make test`` runs a few cases of every test function and leaves out what is marked ``exhaustive``; ``make test-all``
(or ``pytest --all-cases``) runs everything.  Cases are taken evenly from first to last, the same ones every time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import settings

from tests import sampling

# Set before torch or matplotlib are imported, and inherited by every worker that a test spawns.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

# No deadline, since no test asserts a time; the same examples every time, since a red suite should stay red.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

LONG = ("tests/test_notebooks.py", "tests/benchmarks/", "tests/halopipe/", "tests/testbed/", "tests/profiler/")
"""Where tests start processes: they come first, so that no core waits for another one at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help=f"every case of every test, not {sampling.MOST_CASES} of a function at most",
    )


def pytest_configure(config: pytest.Config) -> None:
    sampling.everything = config.getoption("--all-cases")


@pytest.hookimpl(trylast=True)  # behind -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-cases"):
        kept = set(few_cases([item for item in items if item.get_closest_marker("exhaustive") is None]))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch  # only where it is needed: collecting the planner's tests loads no torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU"))


def few_cases(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of each function the first case, the last one, and some evenly between them."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return [item for of_function in cases.values() for item in sampling.few(of_function, sampling.MOST_CASES)]
