"""What the search starts from: the known strategies, and the empty pipeline of every micro-batch size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from planner.ir.errors import MissingMeasurementError
from planner.ir.plan import Rejected
from planner.solvers.candidates.choose import Choice
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.space import (
    Pool,
    micro_batch_sizes,
    micro_batches,
    mixing_layers,
    pools,
    schedule_names,
)
from planner.solvers.search.blocks import cuts_worth_trying
from planner.solvers.search.bounds import Bounds
from planner.solvers.search.crossing import crossings
from planner.solvers.search.groups import Group, Stretches, group, least_link
from planner.solvers.search.incumbents import Replicas, mixed_replicas, strategies
from planner.solvers.search.windows import most_in_flight, splits_backwards


@dataclass(slots=True, eq=False)
class Start:
    """What the search starts from, and what was left out.

    Attributes:
        choices: the everyday strategies, by name.
        rejected: what the search need not look at.
        num_cuts: places to cut that are looked at.
    """

    evaluator: Evaluator
    choices: dict[str, Choice] = field(init=False, default_factory=dict)
    rejected: list[Rejected] = field(init=False, default_factory=list)
    num_cuts: int = field(init=False, default=0)

    def items(self) -> Iterator[Choice | Bounds | Replicas]:
        """Strategies first, as their steps prune what follows."""
        problem, book = self.evaluator.problem, self.evaluator.book
        for name, choice in strategies(self.evaluator):
            self.choices[name] = choice
            yield choice
        sizes, found_pools = micro_batch_sizes(problem, book), pools(problem)
        stretches = self._stretches()
        for size in sizes:
            ways = bounds_of(self.evaluator, stretches, found_pools, micro_batches(problem, size))
            if not ways:
                self.rejected.append(Rejected(f"micro-batches of {size}", "not measured, or fewer samples than ranks"))
            yield from ways
        yield from mixed_replicas(problem, book, found_pools, sizes)

    def _stretches(self) -> Stretches:
        cuts, merged = cuts_worth_trying(self.evaluator.book)
        self.num_cuts = len(cuts) - 2
        if merged:
            why = f"next to layers that cost nothing; {self.num_cuts} places remain"
            self.rejected.append(Rejected(f"{merged} places to cut", why))
        return stretches_of(self.evaluator, cuts)


def stretches_of(evaluator: Evaluator, cuts: tuple[int, ...]) -> Stretches:
    """What all groups share, for stages between ``cuts``."""
    graph = evaluator.problem.profile.graph
    mixing = mixing_layers(graph)
    running = np.concatenate(([0.0], np.cumsum([layer.name in mixing for layer in graph.layers])))
    splits = any(splits_backwards(name) for name in schedule_names(evaluator.problem))
    crossing = crossings(graph, cuts)
    return Stretches(cuts, crossing.without_way_back() if splits else crossing, running, splits)


def bounds_of(
    evaluator: Evaluator, stretches: Stretches, found_pools: tuple[Pool, ...], batches: tuple[int, ...]
) -> list[Bounds]:
    """The bounds of one way to cut the batch under each schedule; none if no group of devices can be priced for it."""
    problem, book = evaluator.problem, evaluator.book
    groups: dict[tuple[int, int], Group] = {}
    for number, pool in enumerate(found_pools):
        for size in range(1, len(pool.ranks) + 1):
            try:
                found = group(problem, book, stretches, (number, pool), size, batches)
            except MissingMeasurementError:
                continue
            if found is not None:
                groups[number, size] = found
    if not groups:
        return []
    links = {name: least_link(link) for name, link in problem.profile.cluster.links.items()}
    depths = range(1, len(problem.ranks) + 1)
    return [
        Bounds(
            problem,
            found_pools,
            stretches,
            batches,
            name,
            groups,
            tuple(most_in_flight(name, depth, len(batches)) for depth in depths),
            links,
        )
        for name in schedule_names(problem)
    ]
