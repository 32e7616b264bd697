"""Spans and hand-overs that no solution below an upper bound can have are left out before a variable exists.

Two labels per (cut, group), each a shortest path without regard to how many devices there are:

    before    the least that a pipeline takes from its start to the first F of a stage that begins there, and back
    behind    the least that a pipeline takes which begins there

once along the round trip (F and B, both messages), once along forwards alone.  A span stays if what is before it, the
span itself and what is behind it stay below the bound; behind a stage from which the next need not read, nothing is
before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from planner.costs.columns import Flags
from planner.costs.tables import Array
from planner.solvers.ilp.spans import Handovers, Instance, Spans

_SLACK = 1e-9
_ROUNDS = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """One of the two chains: what spans add to it, what they are as its end, and where it breaks."""

    pass_s: Array
    end_s: Array
    message_s: Array
    wire_s: Array
    linked: Flags


def prune(instance: Instance, upper_s: float) -> tuple[Instance, float]:
    """What a solution of at most ``upper_s`` can have, and a lower bound on all of them (infinite: there is none)."""
    bound_s, limit_s = 0.0, upper_s * (1 + _SLACK)
    for _ in range(_ROUNDS):
        spans, handovers = instance.spans, instance.handovers
        keep, keep_handovers = np.ones(len(spans), dtype=bool), np.ones(len(handovers), dtype=bool)
        for chain in _chains(spans, handovers):
            before, behind = _before(instance, chain), _behind(instance, chain)
            bound_s = max(bound_s, float(behind.begins[0].min(initial=np.inf)))
            with np.errstate(invalid="ignore"):  # no way there, with no way on
                least = _least(instance, chain, before, behind)
                keep &= (least <= limit_s) & np.isfinite(least)
                least = _least_over(instance, chain, before, behind)
                keep_handovers &= (least <= limit_s) & np.isfinite(least)
        instance = replace(instance, spans=spans.where(keep), handovers=handovers.where(keep_handovers))
        if keep.all() and keep_handovers.all():
            break
    return instance, bound_s if len(instance.spans) else float("inf")


def _chains(spans: Spans, handovers: Handovers) -> tuple[_Chain, _Chain]:
    wire_s, none_s = np.maximum(handovers.wire_s, handovers.shared_s), np.zeros(len(handovers))
    return (
        _Chain(spans.round_s, spans.turn_s, handovers.round_s, wire_s, spans.linked_back),
        _Chain(spans.there_s, spans.work_s + spans.last_s, handovers.there_s, none_s, spans.linked),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """By (cut, group): the least before a stage that begins there; and of one that ended there, -inf if unlinked."""

    begun: Array
    ended: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Behind:
    """By (cut, group): the least of what begins there; and behind a stage that ends there, linked to it or not."""

    begins: Array
    linked: Array
    unlinked: Array


def _before(instance: Instance, chain: _Chain) -> _Before:
    spans, handovers = instance.spans, instance.handovers
    shape = (len(instance.cuts), len(instance.groups))
    begun, ended = np.full(shape, np.inf), np.full(shape, np.inf)
    begun[0] = 0.0
    for cut in range(1, instance.end):
        here = np.flatnonzero(spans.last == cut)
        value = begun[spans.first[here], spans.group[here]] + chain.pass_s[here]
        value = np.where(chain.linked[here] | np.isinf(value), value, -np.inf)
        np.minimum.at(ended[cut], spans.group[here], value)
        over = np.flatnonzero(handovers.cut == cut)
        arrived = np.maximum(ended[cut, handovers.source[over]] + chain.message_s[over], 0.0)
        np.minimum.at(begun[cut], handovers.destination[over], arrived)
    return _Before(begun, ended)


def _behind(instance: Instance, chain: _Chain) -> _Behind:
    spans, handovers = instance.spans, instance.handovers
    shape = (len(instance.cuts), len(instance.groups))
    begins, linked, unlinked = (np.full(shape, np.inf) for _ in range(3))
    for cut in range(instance.end - 1, -1, -1):
        here = np.flatnonzero(spans.first == cut)
        at = spans.last[here], spans.group[here]
        follows = np.where(chain.linked[here], chain.pass_s[here] + linked[at], unlinked[at])
        follows = np.where(spans.last[here] == instance.end, 0.0, follows)
        np.minimum.at(begins[cut], spans.group[here], np.maximum(chain.end_s[here], follows))
        over = np.flatnonzero(handovers.cut == cut)
        after = begins[cut, handovers.destination[over]]
        waited = np.maximum(after, chain.wire_s[over])
        np.minimum.at(linked[cut], handovers.source[over], chain.message_s[over] + waited)
        np.minimum.at(unlinked[cut], handovers.source[over], after)
    return _Behind(begins, linked, unlinked)


def _least(instance: Instance, chain: _Chain, before: _Before, behind: _Behind) -> Array:
    """By span: the least of a pipeline that has it."""
    spans = instance.spans
    at = spans.last, spans.group
    begun = before.begun[spans.first, spans.group]
    follows = np.where(chain.linked, begun + chain.pass_s + behind.linked[at], behind.unlinked[at])
    return np.maximum(begun + chain.end_s, np.where(spans.last == instance.end, 0.0, follows))


def _least_over(instance: Instance, chain: _Chain, before: _Before, behind: _Behind) -> Array:
    """By hand-over: the least of a pipeline that has it; where a stage may end unlinked, its message is no bound."""
    handovers = instance.handovers
    ended = before.ended[handovers.cut, handovers.source]
    follows = behind.begins[handovers.cut, handovers.destination]
    return np.where(np.isneginf(ended), follows, ended + chain.message_s + np.maximum(follows, chain.wire_s))
