"""Makes a proof: best first over beginnings of pipelines, at the verifier's own account of what they take.

The search that made the plan is not asked: its bounds are other ones.  Work is counted, not timed, so that equal
profiles and plans give equal bytes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

import numpy as np

from planner.ir.codec import plan_fingerprint
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.proof import Potential, Proof, ProofPrices
from planner.proof.prices import SpacePrices
from planner.proof.scope import refusals
from planner.proof.space import Array, PlanSpace
from planner.proof.verify import PotentialKey, ProofAccount, ProofPrefix

MOST_OPENED = 1_000
MOST_SIMULATED = 2_000
"""So much is looked at; the claim is then what the rest takes at least."""

_ROUNDING = 1 - 1e-9
_DOWN = 1 - 1e-11


def require_provable(problem: Problem) -> None:
    """Raises :class:`UsageError` where no proof covers the request."""
    refused = list(refusals(problem))
    if refused:
        remedies = dict.fromkeys(remedy for _, remedy in refused)
        raise UsageError("no proof covers this request", [f"it has {what}" for what, _ in refused], remedies)


def prove(plan: Plan, profile: Profile) -> Proof:
    """The proof of a plan, with the largest claim that the verifier's account supports.

    Args:
        profile: what the plan was made from.

    Raises:
        UsageError: no proof covers what was asked for.
    """
    problem = Problem.of(plan.inputs.as_seen(profile), plan.decision.global_batch, plan.inputs.request)
    require_provable(problem)
    prices = SpacePrices(PlanSpace(problem))
    prices.of_layers.update({key: prices.derived(*key) for key in prices.space.sized()})
    step_s = min(plan.prediction.step_s, plan.search.tie.step_s if plan.search.tie is not None else np.inf)
    account = _account(prices, step_s * _ROUNDING)
    claim_s = _claim_s(account)
    if claim_s < account.claim_s:
        account = _account(prices, claim_s)
    return Proof(
        plan_fingerprint(plan),
        plan.inputs.profile_fingerprint,
        plan.prediction.step_s,
        account.claim_s,
        prices.space.stated(),
        tuple(ProofPrices(*key, *_rows(rows)) for key, rows in prices.of_layers.items()),
        tuple(_potential(key, rows) for key, rows in account.potentials.items()),
        tuple(_opened(account)),
    )


def _account(prices: SpacePrices, claim_s: float) -> ProofAccount:
    """With the largest potentials."""
    account = ProofAccount(prices, claim_s)
    for size in prices.space.sizes:
        for key in account.keys(size):
            most = account.allowed(key) * _DOWN
            if np.isfinite(most).any():
                account.potentials[key] = most
    return account


def _claim_s(account: ProofAccount) -> float:
    """The least that any pipeline takes, as far as there is room to look."""
    order = count()
    claim_s = account.claim_s
    num_opened = 0
    num_simulated = 0
    waiting: list[tuple[float, int, int, ProofPrefix]] = [
        (0.0, next(order), size, ProofPrefix()) for size in account.space.sizes
    ]
    while waiting and waiting[0][0] < claim_s and num_opened < MOST_OPENED and num_simulated < MOST_SIMULATED:
        _, _, size, prefix = heappop(waiting)
        if prefix.cuts[-1] == account.space.last:
            claim_s = min(claim_s, account.step_s(prefix, size)[0] * _ROUNDING)
            num_simulated += 1
            continue
        num_opened += 1
        for bound_s, child in account.children(prefix, size):
            if bound_s < claim_s:
                heappush(waiting, (bound_s, next(order), size, child))
    return min(claim_s, waiting[0][0]) if waiting else claim_s


def _opened(account: ProofAccount) -> list[str]:
    """What the verifier looks for."""
    opened = list[str]()
    waiting = [(size, ProofPrefix()) for size in account.space.sizes]
    while waiting:
        size, prefix = waiting.pop()
        for _, child in account.children(prefix, size):
            if child.cuts[-1] != account.space.last:
                opened.append(child.text(size))
                waiting.append((size, child))
    return sorted(opened)


def _potential(key: PotentialKey, rows: Array) -> Potential:
    size, pairs, recompute = key
    cuts = np.flatnonzero(np.isfinite(rows[3]))
    unused = tuple(a for a, _ in pairs)
    devices = tuple(b for _, b in pairs)
    return Potential(size, unused, devices, recompute, tuple(cuts.tolist()), *_rows(rows[:, cuts]))


def _rows(rows: Array) -> list[tuple[float, ...]]:
    return [tuple(row.tolist()) for row in rows]
