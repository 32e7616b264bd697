"""Settings of the whole suite: one thread a process, no display, reproducible examples, and what is left out when.

``make test`` runs as many cases of every test function as :mod:`tests.sampling` allows and leaves out what is marked
``exhaustive``; ``make test-all`` (or ``pytest --all-cases``) runs everything.  Cases are taken evenly from first to
last, the same ones every time.
"""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import settings

from tests import sampling

# Set before torch or matplotlib are imported, and inherited by every worker that a test spawns.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("COLUMNS", None)  # of xdist, in which tables would be narrow

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
    parser.addoption("--write-costs", action="store_true", help=f"write what cases take to tests/{sampling.COSTS.name}")


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: while a test waits for processes or a deadline, another one computes."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    sampling.everything = config.getoption("--all-cases")
    if config.getoption("--write-costs"):
        config.pluginmanager.register(Costs())


class Costs:
    """Counts the processor time of every case, wherever xdist runs it, and writes it down at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._started_s = _processor_s()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            item.user_properties.append(("processor_s", _processor_s() - self._started_s))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.seconds[report.nodeid.partition("[")[0]].append(
                float(str(dict(report.user_properties)["processor_s"]))
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            sampling.write_costs(self.seconds)


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


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
    """Of each function the first case, the last one, and some evenly between them, as many as can be paid."""
    costs = sampling.written_costs()
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return [
        item
        for function, of_function in cases.items()
        for item in sampling.few(of_function, sampling.affordable(costs.get(function, 0.0)))
    ]
