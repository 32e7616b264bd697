"""What no request may ask for: every row of the tables, through the calls that people make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning.problem import make_problem
from planner.ir.errors import UsageError
from planner.ir.extras import hooks
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.solvers import requests, solver

ASKED: Mapping[str, Mapping[str, Any]] = {
    "a gap of 1": {"gap": 1.0},
    "a confidence of 1": {"confidence": 1.0},
    "a time limit of -1 s": {"time_limit_s": -1.0},
    "a rate of -1 samples/s": {"rate_per_s": -1.0, "objective": "latency"},
    "a rate goes with latency or throughput": {"rate_per_s": 5.0, "objective": "memory"},
    "-1 stages": {"max_stages": -1},
    "-1 devices": {"num_ranks": -1},
    "-1 bytes of memory": {"memory_bytes": -1},
    "-1 rows of halo": {"halo_depth": -1},
    "even-split knows no rate of a stream": {"rate_per_s": 5.0, "objective": "latency", "solver": "even-split"},
    "span-ilp cannot minimise memory": {"objective": "memory", "solver": "span-ilp"},
    "--global-batch is 16777217": {"global_batch": 2**24 + 1},
    "--zero is 2, --shard never": {"zero": 2},
    "micro-batch 8 is larger than the global batch 4": {"micro_batch": [2, 8]},
    "a rate is that of a stream": {"rate_per_s": 5.0, "schedules": ["1f1b"]},
    "--zero 2 divides gradients": {"zero": 2, "shard": "always"},
    "--recompute selective: no attention": {"recompute": "selective"},
}
"""By the beginning of the title of what is said."""


def profile() -> Profile:
    """A chain of which a layer makes a term of the loss."""
    whole = chain_profile(3, 2)
    first, *others = whole.graph.layers
    return replace(whole, graph=replace(whole.graph, layers=(replace(first, kind="loss"), *others)))


@pytest.mark.every_case
@pytest.mark.parametrize("title", ASKED)
def test_it_is_refused_with_its_code_and_a_remedy_or_a_reason(title: str) -> None:
    asked = dict(ASKED[title])
    name = asked.pop("solver", "best-first")
    with pytest.raises(UsageError) as caught:
        solver(name)(make_problem(profile(), **{"global_batch": 4, **asked}), None)
    assert caught.value.title.startswith(title)
    assert (caught.value.code, caught.value.exit_code) == ("H200", 2)
    assert [*caught.value.details, *caught.value.remedies]


def test_no_row_of_the_tables_is_left_out() -> None:
    problem = Problem(profile(), 4)
    rows = (*requests.of_search(problem, "best-first"), *requests.of_numbers(problem), *requests.of_pairs(problem))
    added = [row for rows_of in hooks("planner", "refusals").values() for row in rows_of(problem)]
    assert len(rows) == len(ASKED) + len(added)
    assert not any(applies for applies, _ in rows)
