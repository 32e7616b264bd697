"""What each action of a program lasts, beside its messages: sums over layers, ranks and buckets of gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from planner.costs.communication.collectives import memory_factor
from planner.costs.layers.cost_table import runs_of
from planner.costs.stages.gradient_overlap import exposed_s
from planner.costs.stages.input_pipeline import spare_cores
from planner.ir.cluster import GRADIENT_SUMS
from planner.ir.graph import Layer
from planner.ir.plan import samples_in
from planner.ir.schedule import ADDS_GRADIENTS, RECEIVE, Action, Op
from tests.oracles.stage_memory import buckets_of
from tests.oracles.stages import Stages

_SECONDS = {
    Op.FORWARD: "forward_s",
    Op.BACKWARD: "backward_s",
    Op.BACKWARD_INPUT: "backward_input_s",
    Op.BACKWARD_WEIGHT: "backward_weight_s",
}


class ActionTimes:
    """Seconds of the actions of one program, and of what is done beside them."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._cost_model = stages.cost_model
        self._prices = stages.prices
        self._decision = stages.decision
        self._program = stages.program
        self._graph = stages.graph
        self._layers = stages.layers
        self._indices = stages.indices
        self._sizes = stages.sizes
        self._has_layouts = stages.has_layouts
        self._users = stages.users
        self._sum_s = self._cost_model.network.all_reduce_s
        self._adding = {(r, index) for r, row in enumerate(self._program.rows) for index in adding_to_gradients(row)}
        self.is_prepared = self._decision.prepares_next_step or self._cost_model.preparations.look_ahead
        self.is_shared = any(len(group) > 1 for group in self._program.ranks)

    def action_s(self, rank: int, action: Action, index: int) -> float:
        """Seconds of the action at a place in the row of ``rank``; of a send or receive beside its messages."""
        stage = action.stage
        group = self._program.ranks[action.stage]
        kind = self._cost_model.kind(rank)
        if action.op in RECEIVE:
            return self._cost_model.tables.overhead_s(kind)
        if action.op is Op.PREPARE:
            if self.is_prepared:
                return 0.0
            ranks = (r for group in self._program.ranks for r in group)
            others_s = max(map(self.found_s, ranks)) - self.found_s(rank) if self.begins(rank, action) else 0.0
            return self.prepare_s(rank, action) + others_s
        if action.op is Op.REDUCE_GRAD:
            return self._reduction_s(stage)
        if action.op is Op.UPDATE:
            return self._update_s(stage, rank)
        if action.op not in _SECONDS:
            return 0.0
        accumulates = (rank, index) in self._adding
        if self._has_layouts[stage]:
            size = self._sizes[action.microbatch or 0]
            return self._stages.of_size(stage, size).action_s(_SECONDS[action.op], accumulates)
        exchanged_s = self.exchanged_s(action)
        members = group if exchanged_s > 0 else (rank,)
        return exchanged_s + max(self._compute_s(m, action, accumulates) for m in members)

    def prepare_s(self, rank: int, action: Action) -> float:
        """Seconds of preparing on ``rank``, in whatever step it is done; in its first ``PREP`` all sites are found."""
        stage = action.stage
        group = self._program.ranks[action.stage]
        kind = self._cost_model.kind(rank)
        samples = samples_in(self._sizes[action.microbatch or 0])
        preparations = self._cost_model.preparations
        if not preparations.is_beside(kind):
            made_s = preparations.seconds(kind, self._indices[stage], samples, shared=self.is_shared)
            return made_s + (self.found_s(rank) if self.begins(rank, action) else 0.0)
        own = self._decision.layout_of(stage).samples(samples)[group.index(rank)] if len(group) > 1 else samples
        return preparations.seconds(kind, self._indices[stage], own)

    def begins(self, rank: int, action: Action) -> bool:
        """Whether it is the rank's first ``PREP``: sites were found before, on all ranks before any begins."""
        return action == next(a for a in self._program.rows[rank] if a.op is Op.PREPARE)

    def found_s(self, rank: int) -> float:
        """Seconds of finding the sites of a step's micro-batches on ``rank``."""
        found_s = self._cost_model.preparations.before_program_s
        kind = self._cost_model.kind(rank)
        return sum(found_s(kind, samples_in(size), shared=self.is_shared) for size in self._sizes)

    def next_step(self) -> list[tuple[float, bool, float]]:
        """By rank: seconds of preparing the next step in this one, whether a core beside does, and what that costs."""
        if not self.is_prepared:
            return []
        rows = self._program.rows
        own_s = [sum(self.prepare_s(r, a) for a in row if a.op is Op.PREPARE) for r, row in enumerate(rows)]
        cores = spare_cores(self._cost_model.profile.cluster, len(rows))
        by_rank = []
        for rank, core in enumerate(cores):
            on_core = [s for s, other in zip(own_s, cores, strict=True) if other == core]
            has_core = core is not None
            kind = self._cost_model.kind(rank)
            lost_s = 0.0
            for a in rows[rank]:
                if a.op is Op.PREPARE:
                    made_s = self.prepare_s(rank, a)
                    lost_s += self._cost_model.preparations.turns_s(kind, self._indices[a.stage], made_s, has_core)
            by_rank.append((sum(on_core) if has_core else own_s[rank], has_core, lost_s))
        return by_rank

    def exchanged_s(self, action: Action) -> float:
        """The part of a computation in which the ranks of its stage exchange something."""
        stage = action.stage
        size = self._sizes[action.microbatch or 0]
        if self._has_layouts[stage]:
            return self._stages.of_size(stage, size).exchanged_s(_SECONDS[action.op])
        samples = samples_in(size)
        price = self._prices.exchange_s
        trains = self._program.trains
        total_s = self._in_slices_s(stage, action.op)
        for layer in self._layers[stage] if action.op is not Op.BACKWARD_WEIGHT else ():
            backward = action.op is not Op.FORWARD
            total_s += price(layer, self._program.ranks[stage], samples, backward=backward, trains=trains)
            if backward and self._runs_twice(layer, stage):
                total_s += price(layer, self._program.ranks[stage], samples, backward=False)
        return total_s

    def summed(self, stage: int) -> tuple[float, float]:
        """Of the sum of a stage's gradients that is waited for: seconds, and bytes/s on each card of its hosts."""
        group = self._program.ranks[stage]
        size = self._stages.own_bytes(stage)
        if len(group) < 2 or size == 0 or self._has_layouts[stage] or self._stages.zero(stage) > 1:
            return 0.0, 0.0
        whole_s = self._sum_s(group, size)
        return self._reduction_s(stage), 2 * (len(group) - 1) / len(group) * size / whole_s if whole_s > 0 else 0.0

    def _compute_s(self, rank: int, action: Action, accumulates: bool) -> float:
        stage = action.stage
        kind = self._stages.kind(rank)
        shared = len(self._program.ranks[action.stage]) > 1
        costs = self._prices.columns(kind, self._stages.samples_on(rank, stage, action.microbatch or 0), shared)
        goes_back = action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
        total_s = 0.0
        for layer, at in zip(self._layers[stage], self._indices[stage], strict=True):
            total_s += float(costs[_SECONDS[action.op]][at])
            total_s += float(costs["forward_s"][at]) if goes_back and self._runs_twice(layer, stage) else 0.0
            total_s += self._prices.accumulate_s(layer, kind, shared) if accumulates else 0.0
        for name, stages in self._users.items() if accumulates else ():
            if stage in stages and len(stages) > 1:
                first, part = self._priced_with(name)
                elsewhere = first not in self._layers[stage]
                total_s += part * self._prices.accumulate_s(first, kind, shared) * elsewhere
        return total_s

    def _runs_twice(self, layer: Layer, stage: int) -> bool:
        return self._decision.stages[stage].recompute or layer.name in self._stages.again[stage]

    def _reduction_s(self, stage: int) -> float:
        """What is waited for sums of the stage's gradients when its slowest rank has ended its last backward."""
        group = self._program.ranks[stage]
        if self._has_layouts[stage]:
            return self._stages.of_size(stage, self._sizes[0]).reduction_s()
        if self._stages.zero(stage) > 1:  # summed in each backward
            return 0.0
        if self._stages.is_sharded(stage) or len(group) < 2:
            return self._sum_s(group, self._stages.own_bytes(stage)) / 2
        last = len(self._decision.micro_batches) - 1
        backward: list[list[float]] = []
        for rank in group:
            costs = self._prices.columns(self._stages.kind(rank), self._stages.samples_on(rank, stage, last), True)
            backward.append([float(costs["backward_s"][at]) for at in self._indices[stage]])
        slowest = max(backward, key=sum)
        size = self._decision.micro_batches[last]
        before_s = 0.0
        ends = {}  # of backward, still to come after the layer of that index
        for layer, at, own_s in zip(self._layers[stage], self._indices[stage], slowest, strict=True):
            ends[at] = before_s
            before_s += own_s + self._prices.exchange_s(layer, group, size, backward=True)
        if not self._cost_model.network.in_background(group):
            ends = dict.fromkeys(ends, 0.0)  # the ranks are busy with every sum themselves
        return exposed_s(
            self._cost_model.buckets(
                runs_of(self._indices[stage]), frozenset(n for n, users in self._users.items() if len(users) > 1)
            ),
            ends.__getitem__,
            lambda num_bytes: self._sum_s(group, num_bytes),
            lambda num_bytes: self._cost_model.network.moving_s(group, num_bytes),
            lambda num_bytes: (
                memory_factor(self._cost_model.profile.cluster, group)
                * self._cost_model.network.around_s(GRADIENT_SUMS, num_bytes)
            ),
        )

    def _update_s(self, stage: int, rank: int) -> float:
        group = self._program.ranks[stage]
        kind = self._stages.kind(rank)
        beside = memory_factor(self._cost_model.profile.cluster, group)  # all of them update at once
        if self._has_layouts[stage]:
            return beside * self._stages.of_size(stage, self._sizes[0]).update_s()
        own_s = sum(self._prices.update_s(layer, kind) for layer in self._layers[stage])
        ties_s = 0.0
        tied_s = 0.0
        sizes: dict[frozenset[int], int] = {}
        for name, stages in self._users.items():  # gradients of several stages, summed with the lowest on each rank
            if len(stages) < 2 or stage not in stages:
                continue
            first, part = self._priced_with(name)
            of_it_s = part * self._prices.update_s(first, kind)
            own_s -= of_it_s if first in self._layers[stage] else 0.0
            if stage == next(each for each in sorted(stages) if rank in self._program.ranks[each]):
                tied_s += of_it_s
                key = frozenset(stages)
                sizes[key] = sizes.get(key, 0) + self._graph.parameters[name].num_bytes
        for together, size in sizes.items():
            ties_s += self._sum_s(self._on(together), size)
        if self._stages.is_sharded(stage):  # a part of it, then the parts are gathered: half a sum of gradients
            gathered_s = self._sum_s(group, self._stages.own_bytes(stage)) / 2 if self._stages.zero(stage) < 3 else 0.0
            return ties_s + beside * (own_s / len(group) + tied_s) + gathered_s
        return ties_s + beside * (own_s + tied_s)

    def meetings(self) -> list[frozenset[int]]:
        """Ranks that come together before their first update, to sum gradients of what several stages use."""
        together = {frozenset(self._on(stages)) for stages in self._users.values() if len(stages) > 1}
        return [ranks for ranks in together if len(ranks) > 1] if self._program.trains else []

    def _on(self, stages: Collection[int]) -> tuple[int, ...]:
        """All ranks of some stages."""
        return tuple(sorted({rank for stage in stages for rank in self._program.ranks[stage]}))

    def _priced_with(self, name: str) -> tuple[Layer, float]:
        """The first layer that uses a parameter, and what part it is of those that this is the first to use."""
        users = [layer for layer in self._graph.layers if name in layer.parameters]
        earlier = self._graph.layers[: self._graph.layers.index(users[0])]
        before = {each for layer in earlier for each in layer.parameters}
        own = {each: self._graph.parameters[each].num_bytes for each in users[0].parameters if each not in before}
        return users[0], own[name] / max(1, sum(own.values()))

    def _in_slices_s(self, stage: int, op: Op) -> float:
        """Of a pass: halves of all-reduces, one for each bucket, that gather parameters or scatter gradients."""
        zero = self._stages.zero(stage)
        group = self._program.ranks[stage]
        if zero < 2 or op is Op.BACKWARD_WEIGHT:
            return 0.0
        tied = {name for name, users in self._users.items() if len(users) > 1}
        buckets = buckets_of(self._layers[stage], self._graph, tied)
        half_s = (
            sum(self._sum_s(group, sum(self._graph.parameters[n].num_bytes for n in names)) for names in buckets) / 2
        )
        if op is Op.FORWARD:
            return half_s if zero > 2 else 0.0
        return half_s * (1 + (zero > 2) * (1 + self._decision.stages[stage].recompute))


def adding_to_gradients(row: Sequence[Action]) -> Iterator[int]:
    """Places of the backwards that add to gradients of an earlier micro-batch."""
    made = set()
    for index, action in enumerate(row):
        if action.op is Op.UPDATE:
            made.discard(action.stage)
        elif action.op in ADDS_GRADIENTS:
            if action.stage in made:
                yield index
            made.add(action.stage)
