"""Ten thousand random plans, and what the cost model says of each: its step, its fullest rank, and all ranks together.

Pipelines under every schedule on hosts that share cards, with ties; and stages whose layers have layouts of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.schedules import names as schedule_names
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.evaluate import Evaluator
from tests.frozen.files import FOLDER, ROUNDING
from tests.planner.shared_hosts import random_plan
from tests.planner.solvers.laid_out_plans import random_candidate, random_network

TABLE = FOLDER / "candidates.npz"
CHUNK = 100
IN_ALL = 10_000
LAID_OUT = "layouts"
ALONE = "alone"
OF_HOSTS_ALONE = ("1f1b", "1f1b-sno", "pipedream", "zb-h2")
"""Schedules that are also looked at where each rank has a host of its own, and messages share nothing."""

OF_A_NETWORK = 20
"""Plans with layouts that one random network gives."""

MARGIN = 0.08

Table = NDArray[np.float64]


def chunks() -> dict[str, tuple[str, int]]:
    """By name: a schedule (with :data:`ALONE` or without), or :data:`LAID_OUT`, and the first seed."""
    kinds = [*schedule_names(), *[LAID_OUT] * (len(schedule_names()) // 3)]
    counts = dict.fromkeys(kinds, 0)
    named = {}
    for number in range(IN_ALL // CHUNK):
        kind = kinds[number % len(kinds)]
        named[f"{kind}-{counts[kind]}"] = kind, CHUNK * counts[kind]
        counts[kind] += 1
    return {**named, **{f"{kind}-{ALONE}": (f"{kind} {ALONE}", 0) for kind in OF_HOSTS_ALONE}}


def priced(kind: str, first: int) -> Table:
    """A row a plan: seconds of its step, bytes of its fullest rank, bytes of all ranks."""
    return np.array([_row(profile, decision) for profile, decision in _plans(kind, first)])


def frozen() -> Mapping[str, Table]:
    """The table by chunk."""
    with np.load(TABLE) as file:
        return dict(file)


def freeze() -> list[str]:
    """Write it; gives the chunks that are others."""
    was = frozen() if TABLE.exists() else {}
    now = {name: priced(*chunk) for name, chunk in chunks().items()}
    changed = [name for name, rows in now.items() if name not in was or not same(rows, was[name]).all()]
    if changed:
        np.savez_compressed(TABLE, **now)  # type: ignore[arg-type]
    return changed


def same(now: Table, was: Table) -> NDArray[np.bool_]:
    """Of each plan, whether both say the same."""
    return np.isclose(now, was, rtol=ROUNDING, atol=1e-15).all(axis=1)


def _plans(kind: str, first: int) -> Iterator[tuple[Profile, Decision]]:
    if kind != LAID_OUT:
        for seed in range(first, first + CHUNK):
            schedule, _, alone = kind.partition(" ")
            yield random_plan(random.Random(f"{kind} {seed}"), schedule, alone=bool(alone), small=seed % 3 == 0)
        return
    for seed in range(first, first + CHUNK, OF_A_NETWORK):
        draw = random.Random(f"{kind} {seed}")
        problem = Problem(random_network(draw), 4, allow=("sample", "spatial", "channel"), confidence=0.0)
        evaluator = Evaluator(problem, CostModel(problem.profile))
        for _ in range(OF_A_NETWORK):
            yield problem.profile, decision_of(problem, random_candidate(draw, evaluator))


def _row(profile: Profile, decision: Decision) -> tuple[float, float, float]:
    prediction = forecast(Pricing.of(profile), decision, MARGIN, num_draws=0).prediction
    peaks = [float(rank.peak_bytes) for rank in prediction.ranks]
    return prediction.step_s, max(peaks), sum(peaks)
