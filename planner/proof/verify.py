"""Verifies a proof: that no plan of its space has a step below its claim, and that it is of the plan in hand.

Prices      each at most what ``prices`` derives from the profile
Potentials  each at most what every stage that may come first allows with the potentials after it (dual feasibility of
            the suffix DP): f_s, b_s the shortest F and B, w_s a member's F and B, u_s sums and update, c a message,
            C all of a step on one channel, W_s the most micro-batches in flight, M their number
                trip_s  = f_s + c + trip + c + b_s
                end_s   = max(w_s, f_s + max(c + end + c, C + trip + c, c + trip + C) + b_s, ceil(M / W_s) trip_s)
                total_s = max(end_s + u_s, f_s + c + total)         free_s = max(total_s, free)
Opened      from no stage on, every next stage: its bound reaches the claim, or it is opened in turn
Complete    each pipeline that is reached so, under each schedule and in each window: ``step``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, product
from math import inf
from typing import NamedTuple

import numpy as np

from planner.ir.codec import fingerprint, plain, plan_fingerprint
from planner.ir.lazy import once, once_by
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.proof import Proof
from planner.proof.prices import QUANTITIES, LeastCost, SpacePrices
from planner.proof.scope import refusals
from planner.proof.space import Array, Counts, CutNumbers, Flags, PlanSpace, ProofGroup
from planner.proof.step import least_step_s

MOST_FAULTS = 20
LABELS = ("trip_s", "end_s", "total_s", "free_s")
PotentialKey = tuple[int, tuple[tuple[int, int], ...], str]
"""Of a potential: samples of a micro-batch, by pool unused devices and those of the first stage, what it recomputes."""


class ProofPrefix(NamedTuple):
    """The first stages of a pipeline: their cuts, when each has ended its first F, what follows its last gradient."""

    groups: tuple[ProofGroup, ...] = ()
    cuts: tuple[int, ...] = (0,)
    done_s: tuple[float, ...] = ()
    after_s: tuple[float, ...] = ()
    bound_s: float = 0.0

    def text(self, size: int) -> str:
        """As a proof has it: of each stage the cut where it ends, devices by pool, shares, recomputation."""
        stages = zip(self.groups, self.cuts[1:], strict=True)
        each = (f"{k} {'+'.join(map(str, g.devices))} {'+'.join(map(str, g.shares))} {g.recompute}" for g, k in stages)
        return f"{size}: {' | '.join(each)}"


class ProofAccount:
    """A space with potentials: what pipelines take at least.  ``claim_s``: what is not below it is of no interest."""

    def __init__(self, prices: SpacePrices, claim_s: float) -> None:
        self.prices = prices
        self.space = prices.space
        self.claim_s = claim_s
        self.potentials = dict[PotentialKey, Array]()

    def key(self, size: int, unused: Counts, devices: Counts, recompute: str) -> PotentialKey:
        """Pools that are alike may change places."""
        pairs = list(zip(unused, devices, strict=True))
        for like in self.space.like:
            for n, pair in zip(like, sorted((pairs[n] for n in like), reverse=True), strict=True):
                pairs[n] = pair
        return size, tuple(pairs), recompute

    def keys(self, size: int) -> Iterator[PotentialKey]:
        """Of all potentials, those of fewer unused devices first."""
        states = sorted(product(*(range(len(pool) + 1) for pool in self.space.pools)), key=sum)
        every = (
            self.key(size, s, devices, r) for s in states for devices in self.options(s) for r in self.space.recompute
        )
        yield from dict.fromkeys(every)

    def options(self, unused: Counts) -> list[Counts]:
        """Devices that a stage may take."""
        return [devices for devices in product(*(range(n + 1) for n in unused)) if sum(devices)]

    def allowed(self, key: PotentialKey) -> Array:
        """``[4, cuts]``: the most that a potential may be, given those after it; infinity where it is the claim."""
        size, pairs, recompute = key
        last = np.arange(self.space.last + 1)
        devices = tuple(n for _, n in pairs)
        left = tuple(a - b for a, b in pairs)
        each = [self.stage(group, size) for group in self.space.groups(devices, recompute, size)]
        if not each:
            return np.full((4, len(last)), inf)
        *lows, most = zip(*each, strict=True)
        rest = self.rest(size, left, devices)
        stage = LeastCost._make([*map(np.minimum.reduce, lows), np.maximum.reduce(most)])
        return np.asarray(self.labels(stage, size, rest, last, self.space.inside).min(axis=2))

    @once
    def stage(self, group: ProofGroup, size: int) -> LeastCost:
        """Stages of the group, by first and last cut."""
        return self.prices.stage(group, size)

    def labels(self, stage: LeastCost, size: int, rest: Array, last: CutNumbers, inside: Flags) -> Array:
        """``[4, ...]`` of stages that end at ``last``, with ``rest`` after them; infinite from the claim on."""
        count = len(self.space.micro_batches(size))
        is_end = last == self.space.last
        linked, returns = (self.space.meeting[2:, last] > 0) & ~is_end
        trip, end, total, free = np.where(is_end, 0.0, rest[:, last])
        trip = stage.head + np.where(returns, trip, 0.0) + stage.back
        late = np.where(returns, stage.head + end + stage.back, 0.0)
        end = np.maximum.reduce([stage.work, late, np.ceil(count / np.maximum(stage.window, 1)) * trip])
        later = np.where(linked, stage.head + total, 0.0)
        total = np.maximum(np.maximum(end, stage.all_work) + stage.tail, later)
        labels = np.array([trip, end, total, np.maximum(total, free)])
        return np.where(inside & (stage.window >= 1) & (labels[3] < self.claim_s), labels, inf)

    @once_by(lambda self, size, left, devices: self.key(size, left, devices, ""))
    def rest(self, size: int, left: Counts, devices: Counts) -> Array:
        """``[4, cuts]``: the least that follows an F of a stage on ``devices`` that ends there; infinite: the claim."""
        space = self.space
        least = np.full((4, space.last + 1), inf)
        mine = space.groups(devices, "nothing", size)
        for reader in self.options(left) if mine else ():
            keys = (self.key(size, left, reader, recompute) for recompute in space.recompute)
            potentials = [self.potentials[each] for each in keys if each in self.potentials]
            if potentials:
                groups = [mine, space.groups(reader, "nothing", size)]
                shares = [each[0].shares if len(each) == 1 else () for each in groups]
                there, back = self.prices.messages((devices, reader), shares, size, space.meeting[:2])
                for trip, end, total, free in potentials:
                    late = trip + np.maximum(there.step_s + back.piece_s, there.all_s + back.step_s)
                    end = np.maximum(there.all_s + end + back.piece_s, late)
                    least = np.minimum(least, [there.piece_s + trip + back.piece_s, end, there.all_s + total, free])
        return least

    def children(self, prefix: ProofPrefix, size: int) -> Iterator[tuple[float, ProofPrefix]]:
        """Every stage that may come next and may end below the claim, with the bound of its best continuation."""
        first = prefix.cuts[-1]
        last = np.flatnonzero(self.space.inside[first])
        if 0 < self.space.problem.max_stages <= len(prefix.groups) + 1:
            last = last[last == self.space.last]
        handed = [self.space.crossing(np.array([a]), b, first, last)[:, 0] for a, b in pairwise(prefix.cuts)]
        for group in self._next_groups(prefix, size):
            stage = LeastCost(*(row[first, last] for row in self.stage(group, size)))
            start_s, upstream_s = self._upstream(prefix, group, size, handed)
            rest = self.rest(size, self._unused((*prefix.groups, group)), group.devices)
            _, end, total, free = self.labels(stage, size, rest, last, np.array(True))
            tail = np.maximum(stage.tail, upstream_s)
            bound_s = np.maximum.reduce([free, start_s + np.maximum(end + tail, total)])
            own_s = start_s + np.maximum(stage.work + tail, stage.all_work + stage.tail)
            done_s = start_s + stage.head
            after_s = stage.back + tail
            for k in np.flatnonzero(np.maximum(bound_s, prefix.bound_s) < self.claim_s):
                child = ProofPrefix(
                    (*prefix.groups, group),
                    (*prefix.cuts, int(last[k])),
                    (*prefix.done_s, float(done_s[k])),
                    (*prefix.after_s, float(after_s[k])),
                    max(float(own_s[k]), prefix.bound_s),
                )
                yield max(float(bound_s[k]), prefix.bound_s), child

    def _unused(self, groups: Sequence[ProofGroup]) -> Counts:
        """Devices that ``groups`` leave."""
        return tuple(len(pool) - sum(group.devices[n] for group in groups) for n, pool in enumerate(self.space.pools))

    def _next_groups(self, prefix: ProofPrefix, size: int) -> Iterator[ProofGroup]:
        """By their potentials; of pools alike that gave alike so far, none gives more than one before it."""
        gave = list(zip(*(group.devices for group in prefix.groups), strict=True)) or [()] * len(self.space.pools)
        twins = [pair for like in self.space.like for pair in pairwise(like) if gave[pair[0]] == gave[pair[1]]]
        unused = self._unused(prefix.groups)
        first = prefix.cuts[-1]
        for devices, recompute in product(self.options(unused), self.space.recompute):
            best = self.potentials.get(self.key(size, unused, devices, recompute))
            if any(devices[a] < devices[b] for a, b in twins) or best is None or best[3, first] >= self.claim_s:
                continue
            yield from self.space.groups(devices, recompute, size)

    def _upstream(
        self, prefix: ProofPrefix, group: ProofGroup, size: int, handed: Sequence[Array]
    ) -> tuple[Array, Array]:
        """By last cut: when the group can begin its first F, and what stages before it need after its last B.

        Args:
            handed: by stage of the prefix, ``[4, last]`` as of :meth:`PlanSpace.crossing`.
        """
        start_s = np.zeros(1)
        upstream_s = np.zeros(1)
        for source, facts, done_s, after_s in zip(prefix.groups, handed, prefix.done_s, prefix.after_s, strict=True):
            ends = (source.devices, group.devices)
            there, back = self.prices.messages(ends, (source.shares, group.shares), size, facts[:2])
            start_s = np.maximum(start_s, np.where(facts[2] > 0, done_s + there.all_s, 0.0))
            upstream_s = np.maximum(upstream_s, np.where(facts[3] > 0, back.piece_s + after_s, 0.0))
        return start_s, upstream_s

    def step_s(self, prefix: ProofPrefix, size: int) -> tuple[float, str]:
        """The least step of a complete pipeline, and the schedule that takes it; infinity where none fits."""
        pairs = zip(prefix.groups, pairwise(prefix.cuts), strict=True)
        most = [int(self.stage(group, size).window[ends]) for group, ends in pairs]
        seconds, schedule = least_step_s(self.prices, size, prefix.groups, prefix.cuts, most)
        return max(seconds, prefix.bound_s), schedule


def verify(proof: Proof, plan: Plan, profile: Profile) -> tuple[str, ...]:
    """What is wrong with a proof of ``plan``, as "path in the file: what"; nothing if it holds.

    Args:
        profile: what the plan was made from.
    """
    profile = plan.inputs.as_seen(profile)
    problem = Problem.of(profile, plan.decision.global_batch, plan.inputs.request)
    heads = (
        ("plan_fingerprint", proof.plan_fingerprint, plan_fingerprint(plan)),
        ("profile_fingerprint", proof.profile_fingerprint, fingerprint(profile.bare)),
        ("step_s", proof.step_s, plan.prediction.step_s),
    )
    faults = [f"{name}: {stated}, of what is in hand {value}" for name, stated, value in heads if stated != value]
    if proof.bound_s > proof.step_s:
        faults.append(f"bound_s: {proof.bound_s} s is more than the {proof.step_s} s that the plan itself takes")
    faults += [f"the plan's request has {what}, which no proof covers" for what, _ in refusals(problem)]
    return tuple(faults or islice(_faults(proof, SpacePrices(PlanSpace(problem))), MOST_FAULTS))


def _faults(proof: Proof, prices: SpacePrices) -> Iterator[str]:
    faults = [*_space_faults(proof, prices.space), *_price_faults(proof, prices)]
    yield from faults
    account = ProofAccount(prices, proof.bound_s)
    numbers = dict[PotentialKey, int]()
    last = prices.space.last
    for number, row in enumerate(proof.potentials):
        values = [getattr(row, name) for name in LABELS]
        fits = len(row.unused) == len(row.devices) == len(prices.space.pools) and set(row.cuts) <= set(range(last))
        if not fits or {len(row.cuts)} != set(map(len, values)):
            yield f"potentials[{number}]: its lists differ in length, or name cuts that there are not"
            return
        key = account.key(row.micro_batch, row.unused, row.devices, row.recompute)
        numbers[key] = number
        account.potentials[key] = np.full((4, last + 1), inf)
        account.potentials[key][:, list(row.cuts)] = values
    for size in prices.space.sizes if not faults else ():
        for key in account.keys(size):
            most = account.allowed(key)
            stated = account.potentials.get(key, np.full_like(most, inf))
            for label, cut in np.argwhere(stated > most):
                where = f"potentials[{numbers[key]}].{LABELS[label]}" if key in numbers else f"potentials, {key}"
                value = f"{stated[label, cut]} s" if np.isfinite(stated[label, cut]) else "left out"
                yield f"{where}: of cut {cut} {value}, the stages that may come first allow {most[label, cut]} s"
        yield from _opened_faults(proof, account, size)


def _space_faults(proof: Proof, space: PlanSpace) -> Iterator[str]:
    derived = plain(space.stated())
    for name, value in plain(proof.space).items():
        if value != derived[name]:
            yield f"space.{name}: {value}, by the profile and what was asked it is {derived[name]}"


def _price_faults(proof: Proof, prices: SpacePrices) -> Iterator[str]:
    space = prices.space
    for number, row in enumerate(proof.prices):
        stated = [getattr(row, name) for name in QUANTITIES]
        if row.kind not in space.kinds or {len(each) for each in stated} != {space.count}:
            yield f"prices[{number}]: {space.count} layers on {', '.join(dict.fromkeys(space.kinds))} are needed"
            continue
        most = prices.derived(row.kind, row.samples)
        for n, layer in np.argwhere(np.array(stated) > most * (1 + 1e-12)):
            where = f"{space.graph.layers[layer].name} on {row.kind} at {row.samples} samples"
            values = f"{stated[n][layer]} for {where}, the profile says {most[n, layer]}"
            yield f"prices[{number}].{QUANTITIES[n]}[{layer}]: {values}"
        prices.of_layers[row.kind, row.samples] = np.array(stated)
    for kind, samples in space.sized():
        if (kind, samples) not in prices.of_layers:
            yield f"prices: those of {kind} at {samples} samples are left out"


def _opened_faults(proof: Proof, account: ProofAccount, size: int) -> Iterator[str]:
    opened = set(proof.opened)
    pending = [ProofPrefix()]
    while pending:
        for bound_s, child in account.children(pending.pop(), size):
            text = child.text(size)
            if child.cuts[-1] == account.space.last:
                step_s, schedule = account.step_s(child, size)
                if step_s < proof.bound_s:
                    yield f"bound_s: {text} takes {step_s} s under {schedule}, the claim is {proof.bound_s} s"
            elif text in opened:
                pending.append(child)
            else:
                yield f"opened: {text} is left out: it takes {bound_s} s at least, the claim is {proof.bound_s} s"
