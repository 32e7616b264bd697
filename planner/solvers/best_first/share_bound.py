"""What pipelines take at least, whatever shares of the samples members of their stages have.

Where devices are unlike, the shares of a stage are left open until a pipeline is whole
(:mod:`planner.solvers.best_first.share_search`).  Follow one sample of b through a pipeline of any shares, on the
member that has it at every stage: with the times of that member the recurrences of
:mod:`planner.solvers.best_first.solver` hold, and so they hold for the mean over samples, as the mean of the largest of
some terms is no less than the largest of their means.  Here the suffix DP has that mean, least over all shares, for
each of its terms (``GroupTimes.mean``), of full micro-batches.  Between g and h members there are at most g + h - 1
messages, so that of the mean sample has b / (g + h - 1) samples at least.  Beside, no stage takes less than the least
largest time of a member (``GroupTimes.levels``).
"""

from __future__ import annotations

from contextlib import suppress
from itertools import chain

import numpy as np

from planner.costs.candidate import Recomputes, recompute_mask
from planner.costs.communication.tables import transfer_s
from planner.costs.layers.cost_table import Array
from planner.costs.stages.shared_bound import SharedBound
from planner.ir.errors import MissingMeasurementError
from planner.ir.lazy import once
from planner.solvers.best_first.device_groups import Counts, DeviceStates, member_orders
from planner.solvers.best_first.graph_cuts import Handed, Numbers
from planner.solvers.best_first.message_bound import HandoverBound, HandoverBounds
from planner.solvers.best_first.priced_groups import GroupPrices, PricedGroup, RunMode, Version


def has_open_shares(prices: GroupPrices, devices: DeviceStates) -> bool:
    """Whether some group of devices may share samples in several ways."""
    if prices.throughout.any():  # members may also have parts of all samples: these have no shares in the mean
        return False
    return any(prices.is_open(option.group) for option in devices.options(devices.all_unused))


class AnyShares(GroupPrices):
    """The groups of one way to cut the batch, each with whatever shares are best for it."""

    upper_s: float = float("inf")

    @classmethod
    def of(cls, prices: GroupPrices, upper_s: float) -> AnyShares:
        """The same groups.

        Args:
            upper_s: pipelines that take so long are of no interest.
        """
        batches = prices.micro_batches
        received = prices.received
        every = cls(prices.problem, prices.cost_model, prices.pools, prices.cuts, batches, prices.freedom, received)
        every.upper_s = upper_s
        return every

    @property
    def num_counted(self) -> int:
        """Those that are full."""
        return self.micro_batches.count(self.micro_batches[0])

    @once
    def versions(self, counts: Counts) -> tuple[PricedGroup, ...]:
        """Where all members are the same, that alone is the mean."""
        if not self.is_open(counts):
            closed = super().versions(counts)
            members = (zip(group.ranks, group.samples[self.micro_batches[0]], strict=True) for group in closed[:1])
            if len({(self.cost_model.kind(rank), samples) for rank, samples in chain.from_iterable(members)}) < 2:
                return closed
        groups = []
        if len(self.first_ranks(counts)) <= min(self.micro_batches):
            for recompute in self.freedom.recompute:
                with suppress(MissingMeasurementError):
                    groups.append(self._any(counts, recompute))
        return tuple(groups)

    def most_samples(self, group: PricedGroup, cuts: tuple[int, int], kept: int) -> Numbers:
        """The most samples of each member of a stage between two cuts that keeps ``kept`` micro-batches."""
        first, last = map(np.array, cuts)
        zero = self.problem.zero_over(group.size)
        mask = recompute_mask(group.recompute, self._cores)
        parts = group.size if zero else 1
        most = np.zeros(group.size, dtype=np.int64)
        pools = [self.pools[number] for number in group.orders[0]]
        for place, pool in enumerate(pools):
            if place and pool.sort == pools[place - 1].sort:
                most[place] = most[place - 1]
                continue
            for samples in range(self.micro_batches[0], 0, -1):
                member = pool.kind, pool.room_bytes
                with suppress(MissingMeasurementError):
                    memory = self._bounds.memory_of(member, samples, mask, parts, zero)
                    if memory is None or memory.window(first, last, self.num_counted) >= kept:
                        most[place] = samples
                        break
        return most

    def _any(self, counts: Counts, recompute: Recomputes) -> PricedGroup:
        ranks = self.first_ranks(counts)
        times = self.times(ranks, recompute, self.num_counted)
        all_times = self.times(ranks, recompute)
        zero = self.problem.zero_over(len(ranks))
        pools = [self.pools[number] for number in member_orders(self.pools, counts)[0]]
        members = [(pool.kind, pool.room_bytes, (1.0, 1.0)) for pool in pools]
        single = self._bounds.of(ranks, members, recompute_mask(recompute, self._cores), zero)
        bound = SharedBound(single, times, all_times, self.num_counted, self.cuts.inside, self.upper_s)
        return self._group(counts, Version(RunMode(recompute), (0,) * len(ranks)), {}, single, bound)


class MeanHandovers(HandoverBounds):
    """Messages between groups with any shares: those of the mean sample."""

    def between(self, source: PricedGroup, destination: PricedGroup) -> HandoverBound:
        """Messages from ``source`` to ``destination``, and gradients back."""
        if source.size == destination.size == 1:
            return super().between(source, destination)
        overhead_s = min(source.prices.overhead_s, destination.prices.overhead_s)
        return self._mean(*self._pieces(source, destination), overhead_s)

    def handed(self, source: PricedGroup, destination: PricedGroup, handed: Handed) -> tuple[float, float]:
        """As there; of the mean sample."""
        if source.size == destination.size == 1:
            return super().handed(source, destination, handed)
        return self._mean_s(*self._pieces(source, destination), handed.forward_bytes, handed.backward_bytes)

    @once
    def _mean_s(self, num_pieces: int, name: str, forward_bytes: float, backward_bytes: float) -> tuple[float, float]:
        samples = self.prices.micro_batches[0] / num_pieces
        both_bytes = np.array([forward_bytes, backward_bytes])
        there, back = self._least_mean_s(name, samples, both_bytes).tolist()
        return there, back

    def _pieces(self, source: PricedGroup, destination: PricedGroup) -> tuple[int, str]:
        """The most messages of a micro-batch, and a name for their links."""
        ends = sorted((source.size, destination.size))
        whole = source.samples and destination.samples and ends[1] % ends[0] == 0
        pools = [tuple(dict.fromkeys(group.orders[0])) for group in (source, destination)]
        name = self._any_of(sorted(set(chain.from_iterable(self._tiers[np.ix_(*pools)].tolist()))))
        return ends[1] if whole else sum(ends) - 1, name

    @once
    def _mean(self, num_pieces: int, name: str, overhead_s: float) -> HandoverBound:
        crossings = self.prices.cuts.crossings
        samples = self.prices.micro_batches[0] / num_pieces
        times = self.prices.num_counted
        forward_s = self._least_mean_s(name, samples, crossings.forward_bytes)
        backward_s = self._least_mean_s(name, samples, crossings.backward_bytes)
        both_s = np.zeros_like(forward_s) if self._links[name].duplex else forward_s + backward_s
        return HandoverBound(
            forward_s=forward_s + overhead_s,
            least_forward_s=forward_s + overhead_s,
            least_backward_s=backward_s + overhead_s,
            backward_s=backward_s + overhead_s,
            load_forward_s=times * forward_s,
            load_backward_s=times * backward_s,
            load_both_s=times * both_s,
        )

    def _least_mean_s(self, name: str, samples: float, per_sample: Array) -> Array:
        """The mean, over samples, of a message that has ``samples`` in the mean, and one at least."""
        link = self._links[name]
        sizes = range(1, self.prices.micro_batches[0] + 1)
        each = np.minimum.reduce([transfer_s(link, per_sample * size) / size for size in sizes])
        least_s: Array = np.maximum(transfer_s(link, per_sample), samples * each)
        return least_s
