"""How the parameters of one stage are updated: over which ranks gradients are summed, and what steps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from runtime.transport import Transport
from runtime.updates.optimizer import MakeOptimizer, StageOptimizer
from runtime.updates.reduction import GradientBuckets
from runtime.updates.sharding import ShardedParameters
from runtime.updates.ties import Tie


@dataclass(frozen=True, slots=True)
class Updates:
    """What makes gradients into new parameters.

    Attributes:
        tied: names of the parameters that other stages use too; their gradients are summed over all these stages when
            the step is finished (:mod:`runtime.updates.finishing`), not with the others.
        reduction: makes one gradient of those of the stage's ranks; None on a stage of one rank.
        optimizer: None where there is nothing to train.
        speaks_for: names of the parameters that this rank saves whole, on behalf of all that have a copy.
    """

    tied: frozenset[str]
    reduction: GradientBuckets | ShardedParameters | None
    optimizer: StageOptimizer | None
    speaks_for: frozenset[str]


def updates_of(
    stage: int,
    parameters: Mapping[str, nn.Parameter],
    ranks: tuple[int, ...],
    ties: Iterable[Tie],
    transport: Transport,
    make: MakeOptimizer,
    *,
    sharded: bool,
    deadline_s: float,
) -> Updates:
    """The updates of ``stage``, which runs on ``ranks`` (by growing number).

    Args:
        parameters: that are trained, by name.
        ties: of the whole plan.
        make: called once, with the parameters that this stage's optimiser updates, if there are any.
        sharded: divide the optimiser's state over the ranks.

    Raises:
        UsageError: the optimiser cannot be used.
    """
    rank = transport.rank
    tie_of = {name: tie for tie in ties for name in tie.names if name in parameters}
    own = {name: parameter for name, parameter in parameters.items() if name not in tie_of}
    exchange = {"ranks": ranks, "deadline_s": deadline_s}
    reduction: GradientBuckets | ShardedParameters | None = None
    shards = None
    if sharded and len(ranks) > 1:
        scatter, gather = (partial(each, **exchange) for each in (transport.reduce_scatter, transport.all_gather))
        reduction = shards = ShardedParameters(own, ranks.index(rank), len(ranks), scatter, gather)
    elif len(ranks) > 1:
        reduction = GradientBuckets(own.values(), partial(transport.start_sum, **exchange))
    trained = {
        name: parameter for name, parameter in parameters.items() if name in own or tie_of[name].owner(rank) == stage
    }
    saved = {name for name in trained if rank == (tie_of[name].ranks[0] if name in tie_of else ranks[0])}
    return Updates(
        frozenset(tie_of), reduction, StageOptimizer(trained, make, shards) if trained else None, frozenset(saved)
    )
