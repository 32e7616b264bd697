"""Settings of the whole suite: one thread a process, no display, reproducible examples, and what is left out when.

``make test`` runs some cases of every test function, which :mod:`tests.sampling` chooses by the commit, and leaves out
what is marked ``exhaustive``; ``make test-all`` (or ``pytest --all-cases``) runs everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import sampling

# Set before torch or matplotlib are imported, and inherited by every worker that a test spawns.  The last two would be
# set later on: processes of another environment have a server of their own, which loads torch again.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.pop("COLUMNS", None)  # of xdist, in which tables would be narrow

# No deadline, since no test asserts a time; the same examples every time, since a red suite should stay red.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="every case of every test, not those that a budget of seconds buys",
    )
    parser.addoption("--seed", help="what chooses the cases, as a run before this one printed it; else git's HEAD")
    parser.addoption("--write-costs", action="store_true", help=f"write what cases take to tests/{sampling.COSTS.name}")


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: while a test waits for processes or a deadline, another one computes."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_LIMITS] = {}
    sampling.everything = config.getoption("--all-cases")
    config.option.seed = config.option.seed or sampling.commit(config.rootpath)  # xdist hands options to its workers
    if config.getoption("--write-costs"):
        config.pluginmanager.register(Costs())


def pytest_report_header(config: pytest.Config) -> str:
    if sampling.everything:
        return "cases: all"
    return f"cases: {sampling.budget_s():.2f} s of a function; these again: --seed {config.option.seed}"


_LIMITS = pytest.StashKey[dict[str, tuple[int, int]]]()
"""How many cases of each table run at least and at most, whatever they take."""


class Costs:
    """Counts the processor time of every case, wherever xdist runs it, and writes it down at the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.limits: dict[str, tuple[int, int]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._started_s = _processor_s()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            item.user_properties.append(("processor_s", _processor_s() - self._started_s))
            function = item.nodeid.partition("[")[0]
            item.user_properties.append(("limits", item.config.stash[_LIMITS].get(function, (1, 1))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            function = report.nodeid.partition("[")[0]
            properties: dict[str, Any] = dict(report.user_properties)
            self.seconds[function].append(float(properties["processor_s"]))
            self.limits[function] = properties["limits"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            sampling.write_costs(
                {
                    function: sampling.measured_cost(cases_s, *self.limits[function])
                    for function, cases_s in self.seconds.items()
                }
            )


def _processor_s() -> float:
    """Of this process and those that it started, also of those that still run: a server forks ranks for many tests."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) + sum(_running_s())


def _running_s() -> Iterator[float]:
    """Seconds of each process below this one, and of those that it has waited for."""
    found: dict[int, tuple[int, float]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text("utf-8").rpartition(")")[2].split()  # behind a name that may hold anything
            found[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below = {os.getpid()}
    while more := {number for number, (parent, _) in found.items() if parent in below} - below:
        below |= more
    return (found[number][1] for number in below - {os.getpid()})


_HUGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Collects garbage once, behind it: meanwhile a million objects are made that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _settle()
        _collapse()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tests run side by side, one a core; torch's threads would wait for one another."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    found = yield
    if nextitem is None or nextitem.path != item.path:
        _settle()
    return found


def _settle() -> None:
    """What there is now stays (modules, tests, caches): whoever collects garbage later need not look at it again.

    A pass over it took more than a second, and forked ranks copied its pages.
    """
    gc.collect()
    gc.freeze()


def _collapse() -> None:
    """This process's memory in huge pages, where Linux has the call: a fork copies a page table of 700 MB else."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text("ascii").splitlines():
        span, permissions, *_, inode = line.split()[:5]
        start, stop = (int(end, 16) for end in span.split("-"))
        if permissions == "rw-p" and inode == "0" and stop - start >= _HUGE:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_COLLAPSE)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[object]:
    """Draws the cases before items are made of them: making those of all tables, most of which do not run, took longer.

    Where a call names cases (``-k``, ``-m``, ``file::test[case]``) they are drawn from what it names, see below.
    """
    found = yield
    options = metafunc.config.option
    names_cases = options.keyword or options.markexpr or any("[" in name for name in options.file_or_dir)
    function = metafunc.definition
    calls = metafunc._calls  # no public hook lies between parameters and items
    quick = [call for call in calls if all(mark.name != "exhaustive" for mark in call.marks)]
    if quick:
        metafunc.config.stash[_LIMITS][function.nodeid] = _limits(function, quick)
    if not (options.all_cases or names_cases):
        number = _number_of(function, quick)
        drawn = sampling.drawn(quick, number, options.seed, lambda call: f"{function.nodeid}[{call.id}]")
        calls[:] = drawn or calls[:1]  # a function of exhaustive cases alone is left out with its first one
    return found


@pytest.hookimpl(trylast=True)  # behind -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all-cases"):
        quick = [item for item in items if item.get_closest_marker("exhaustive") is None]
        kept = set(few_cases(quick, config.getoption("--seed")))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    seconds = sampling.file_costs()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch  # only where it is needed: collecting the planner's tests loads no torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU"))


def few_cases(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Of each function as many cases as its marks and its budget say, chosen by ``seed``."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return [
        item
        for of_function in cases.values()
        for item in sampling.drawn(of_function, _number_of(of_function[0], of_function), seed, lambda item: item.nodeid)
    ]


def _number_of(function: pytest.Item, cases: Sequence[object]) -> int:
    """How many of ``cases`` run."""
    fewest, most = _limits(function, cases)
    return sampling.num_cases(function.nodeid.partition("[")[0], fewest, most)


def _limits(function: pytest.Item, cases: Sequence[object]) -> tuple[int, int]:
    """How many of ``cases`` run at least and at most, as the marks of ``function`` (or of its first case) say."""
    if function.get_closest_marker("every_case"):
        return len(cases), len(cases)
    mark = function.get_closest_marker("cases")
    most = min(len(cases), int(mark.args[0]) if mark else sampling.NUM_CASES)
    fewest = mark.kwargs.get("at_least", 1) if mark else 1
    return min(most, fewest), most
