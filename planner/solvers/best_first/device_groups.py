"""Which groups of devices a stage may have, and what then remains: the states of the suffix DP.

Devices of one kind and memory size in the same groups (an island, a host, ...) are a pool (``candidate.pools``).  A
state says how many devices of each pool are unused; states that differ by an exchange of like islands, hosts or racks
are one (``canonical``), and each option carries the exchange that makes what remains canonical, so that a group's hosts
can be told from those of the next.

    2 hosts of 4      (4, 4) -- group (3, 0) --> (1, 4) ~ (4, 1)      the group is now called (0, 3)

A group takes devices of one pool, or of several pools of one kind (hosts), or, where there are few devices, of several
kinds.  On large clusters a group takes multiples of ``unit`` devices of a pool, and of several pools all but the last
whole; ``DeviceStates.restrictions`` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, permutations, product
from math import comb, factorial, prod

from planner.ir.lazy import once
from planner.solvers.candidates.candidate import DevicePool, like_groups

Counts = tuple[int, ...]
"""Devices by pool: of a group, or unused ones."""

MANY_OPTIONS = 12_000
"""(State, option) pairs at most, before groups become coarser."""

FEW_COMPOSITIONS = 100
"""Groups of several pools up to which they may be of any composition."""


FEW_ORDERS = 6
"""Orders of a group's hosts that are told apart, at most."""


@dataclass(frozen=True, slots=True)
class GroupOption:
    """A group that can be taken from a state.

    Attributes:
        group: what is taken, in the state's order of pools.
        left: what remains, canonical.
        order: pool number ``order[i]`` of the state is number ``i`` in ``left``.
        renamed: ``group`` in the order of ``left``.
    """

    group: Counts
    left: Counts
    order: Counts
    renamed: Counts


@dataclass
class DeviceStates:
    """The states and options of one search.

    Attributes:
        groups_allowed: whether a stage may have several devices.
        most_options: (state, option) pairs, about, before groups become coarser.
        unit: groups take multiples of this many devices of a pool (or all that remain).
        mixes_kinds: whether a group may have devices of several kinds.
    """

    pools: tuple[DevicePool, ...]
    groups_allowed: bool = True
    most_options: int = MANY_OPTIONS
    unit: int = field(init=False, default=1)
    mixes_kinds: bool = field(init=False)

    def __post_init__(self) -> None:
        counts = [len(pool.ranks) for pool in self.pools]
        self.mixes_kinds = prod(count + 1 for count in counts) <= FEW_COMPOSITIONS
        largest = max(counts)
        while self.unit < largest and self._estimate() > self.most_options:
            self.unit = min(largest, 2 * self.unit)

    @property
    def all_unused(self) -> Counts:
        """The state in which no device is used, canonical."""
        return self.canonical(tuple(len(pool.ranks) for pool in self.pools))[0]

    @property
    def restrictions(self) -> tuple[tuple[str, str], ...]:
        """What the search leaves out: (what, why)."""
        left_out = []
        if self.unit > 1:
            text = f"groups of other sizes than multiples of {self.unit} devices"
            left_out.append(
                (text, f"{sum(len(pool.ranks) for pool in self.pools)} devices are too many for all groups")
            )
        kinds = {pool.kind for pool in self.pools}
        if len(kinds) > 1 and not self.mixes_kinds:
            left_out.append(("stages on several kinds of devices", "too many devices for all compositions"))
        return tuple(left_out)

    def canonical(self, counts: Counts) -> tuple[Counts, Counts]:
        """The state with like groups in order of what they have left, and the order of pools that makes it so."""
        order = list(range(len(counts)))
        for alike in self._like_groups:  # innermost first: the islands of a host are in order before its host is
            now = [[order[number] for number in group] for group in alike]
            now.sort(key=lambda pools: [-counts[number] for number in pools])
            for places, numbers in zip(alike, now, strict=True):
                for place, number in zip(places, numbers, strict=True):
                    order[place] = number
        return tuple(counts[number] for number in order), tuple(order)

    @once
    def options(self, state: Counts) -> tuple[GroupOption, ...]:
        """Every group that can be taken from ``state``, a canonical one; of groups that are alike the first."""
        by_rest: dict[tuple[Counts, Counts], GroupOption] = {}
        for group in self.within(state):
            after = tuple(a - b for a, b in zip(state, group, strict=True))
            left, order = self.canonical(after)
            renamed = tuple(group[number] for number in order)
            by_rest.setdefault((left, renamed), GroupOption(group, left, order, renamed))
        return tuple(by_rest.values())

    def groups(self) -> Iterator[Counts]:
        """Every group there is, whatever hosts of a kind are called."""
        states = set()
        pending = [self.all_unused]
        for state in pending:
            for option in self.options(state):
                if option.left not in states:
                    states.add(option.left)
                    pending.append(option.left)
        counts = {option.group for state in pending for option in self.options(state)}
        counts |= {option.renamed for state in pending for option in self.options(state)}
        yield from sorted(counts)

    def within(self, state: Counts) -> Iterator[Counts]:
        """Every group of unused devices, those that are alike too."""
        for number, count in enumerate(state):
            yield from (at_pools((size,), (number,), len(state)) for size in self._sizes(count))
        if not self.groups_allowed:
            return
        for kind in dict.fromkeys(pool.kind for pool in self.pools):
            members = [n for n, pool in enumerate(self.pools) if pool.kind == kind and state[n]]
            yield from self._across(state, members)
        if self.mixes_kinds:
            members = [n for n, count in enumerate(state) if count]
            for composition in product(*(range(state[n] + 1) for n in members)):
                if len({self.pools[n].kind for n, count in zip(members, composition, strict=True) if count}) > 1:
                    yield at_pools(composition, members, len(state))

    def _across(self, state: Counts, members: list[int]) -> Iterator[Counts]:
        """Groups over several pools of one kind."""
        sizes = [(0, *self._sizes(state[n])) for n in members]
        if prod(len(size) for size in sizes) <= FEW_COMPOSITIONS:
            for composition in product(*sizes):
                if sum(count > 0 for count in composition) > 1:
                    yield at_pools(composition, members, len(state))
            return
        for first in range(1, len(members)):  # whole pools, then a part of the next
            whole = tuple(state[n] for n in members[:first])
            for part in self._sizes(state[members[first]]):
                yield at_pools((*whole, part), members[: first + 1], len(state))

    def _sizes(self, count: int) -> tuple[int, ...]:
        if not self.groups_allowed:
            return (1,) if count else ()
        sizes = tuple(range(self.unit, count + 1, self.unit))
        return sizes if not count or (sizes and sizes[-1] == count) else (*sizes, count)

    @cached_property
    def _like_groups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return like_groups(self.pools)

    def _estimate(self) -> float:
        """About how many (state, option) pairs there are."""
        steps = [-(-len(pool.ranks) // self.unit) for pool in self.pools]
        states = [count + 1 for count in steps]
        for alike in self._like_groups:  # as many multisets of the states of one
            of_one = prod(states[number] for number in alike[0])
            for number in chain.from_iterable(alike):
                states[number] = 1
            states[alike[0][0]] = comb(len(alike) + of_one - 1, len(alike))
        options = 1
        for shape, number in Counter(pool.shape for pool in self.pools).items():
            most = next(count for pool, count in zip(self.pools, steps, strict=True) if pool.shape == shape)
            across = min((most + 1) ** number, FEW_COMPOSITIONS + number * most) if number > 1 else 0
            options += min(number, most) * most + across
        return prod(states) * options / 2


def member_orders(pools: tuple[DevicePool, ...], counts: Counts) -> tuple[tuple[int, ...], ...]:
    """The orders in which a group's members may share a micro-batch: the pool of each member.

    Kinds follow one another, within a kind those with more memory first; of what is alike in both the pool with more
    members comes first, and pools with equally many in any order (which of them is which is not known before the whole
    pipeline is), or, if these orders are many, in one.  The first order is that by the pools' numbers.
    """
    kinds = list(dict.fromkeys(pool.kind for pool in pools))
    alike = [(kinds.index(pool.kind), -pool.room_bytes, -pool.bytes_beside) for pool in pools]
    blocks: list[list[int]] = []
    keys: list[tuple[tuple[int, int, int], int]] = []
    for number in sorted(range(len(counts)), key=lambda n: (alike[n], -counts[n], n)):
        key = (alike[number], counts[number])
        if counts[number] and keys and keys[-1] == key:
            blocks[-1].append(number)
        elif counts[number]:
            blocks.append([number])
            keys.append(key)
    variants = prod(factorial(len(block)) for block in blocks)
    each = [tuple(permutations(block)) if variants <= FEW_ORDERS else (tuple(block),) for block in blocks]
    orders = [tuple(chain.from_iterable(choice)) for choice in product(*each)]
    return tuple(tuple(chain.from_iterable((n,) * counts[n] for n in order)) for order in orders)


def first_ranks(
    pools: tuple[DevicePool, ...], members: Iterable[int], used: Counter[int] | None = None
) -> tuple[int, ...]:
    """Ranks for members of the given pools: the first ones of each that are not used, and now are."""
    used = Counter[int]() if used is None else used
    ranks = list[int]()
    for number in members:
        ranks.append(pools[number].ranks[used[number]])
        used[number] += 1
    return tuple(ranks)


def ranks_apart(pools: tuple[DevicePool, ...], stages: Iterable[Counts]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage: the first of each pool that no stage before has."""
    used = Counter[int]()
    return tuple(first_ranks(pools, member_orders(pools, counts)[0], used) for counts in stages)


def orders_known(pools: tuple[DevicePool, ...], counts: Counts) -> bool:
    """Whether :func:`member_orders` gives all orders."""
    alike = Counter((*pool.sort, count) for pool, count in zip(pools, counts, strict=True) if count)
    return prod(factorial(number) for number in alike.values()) <= FEW_ORDERS


def at_pools(counts: Iterable[int], numbers: Iterable[int], num_pools: int) -> Counts:
    """Devices by pool, ``counts`` of the pools ``numbers`` and none of others."""
    by_pool = [0] * num_pools
    for number, count in zip(numbers, counts, strict=True):
        by_pool[number] = count
    return tuple(by_pool)
