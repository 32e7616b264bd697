"""A second, plain evaluation of a program: what each action lasts, when it runs, and what is held meanwhile.

Prices of layers and links are those of the cost model (``prices``); sums over layers, ranks and micro-batches are made
here, the order of events in ``events`` and memory in ``memory``, with none of the simulator's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.check.events import Spans, Step
from planner.check.memory import Account, Holding, buckets_of
from planner.check.prices import LaidOut, LayerPrices, Sliced
from planner.check.structure import has_layouts, samples_of
from planner.costs.communication.collectives import memory_factor
from planner.costs.communication.links import shares_memory
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import runs_of
from planner.costs.stages.gradient_overlap import exposed_s
from planner.costs.stages.input_pipeline import spare_cores
from planner.ir.cluster import GRADIENT_SUMS
from planner.ir.graph import Layer
from planner.ir.plan import Decision, Size, TokenSlice, samples_in
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, RECEIVE, SEND, Action, Op
from planner.layers import throughout_sites
from planner.layers.recomputed import layers_in_order

_SECONDS = {
    Op.FORWARD: "forward_s",
    Op.BACKWARD: "backward_s",
    Op.BACKWARD_INPUT: "backward_input_s",
    Op.BACKWARD_WEIGHT: "backward_weight_s",
}


@dataclass(frozen=True, slots=True)
class Times:
    """The four parts of a rank's step, as in :class:`planner.ir.plan.RankPrediction`."""

    compute_s: float
    communication_s: float
    bubble_s: float
    idle_s: float
    is_used: bool


@dataclass(frozen=True, slots=True)
class Reckoning:
    """The step, the most that each rank holds, and where its time goes.

    Attributes:
        on_chip_bytes: by rank, of parameters, gradients and optimiser state in a memory on chip.
        times: by rank.
        longest_sum_s: the longest that a rank is in a sum of gradients.
        most_messages_s: the most communication that a rank has beside it.
    """

    step_s: float
    peak_bytes: tuple[int, ...]
    on_chip_bytes: tuple[int, ...]
    times: tuple[Times, ...]
    longest_sum_s: float
    most_messages_s: float

    @property
    def bubble_fraction(self) -> float:
        """Of the time of the ranks that are used, what is bubble or idle."""
        used = [times for times in self.times if times.is_used]
        lost_s = sum(times.bubble_s + times.idle_s for times in used)
        return lost_s / (self.step_s * len(used)) if used and self.step_s > 0 else 0.0


def reckon(profile: Profile | PriceBook, decision: Decision, program: Program) -> Reckoning:
    """Evaluates a legal program.

    Args:
        profile: or its prices, looked up before.

    Raises:
        ValueError: it never ends.
        HalopipeError: the profile lacks a measurement.
    """
    book = profile if isinstance(profile, PriceBook) else PriceBook(profile)
    plain = _Plain(book, decision, program)
    places: dict[int, dict[Action, int]] = {}
    ranks = range(len(program.rows))
    times, found_bytes = 2 if plain.is_prepared else 1, book.preparations.found_bytes  # this step's, the next one's
    sites = times * sum(found_bytes(rows, shared=plain.shares_sites) for rows in decision.micro_batches)
    accounts = (Account(book.profile, decision, program, rank, plain.holding, places, sites) for rank in ranks)
    peaks = tuple(account.peak_bytes() for account in accounts)
    step = Step(book.network, program, plain.action_s, plain.summed, plain.next_step())
    step_s = step.seconds()
    spent = tuple(times_of(program, step.spans, step_s, plain.exchanged_s, step.left_s))
    sums = [sum_of_gradients_s(program.rows[rank], spans) for rank, spans in enumerate(step.spans)]
    messages_s = max((each.communication_s - last for each, (_, last) in zip(spent, sums, strict=True)), default=0.0)
    on_chip = tuple(plain.on_chip_bytes(rank) for rank in ranks)
    return Reckoning(step_s, peaks, on_chip, spent, max((longest for longest, _ in sums), default=0.0), messages_s)


@dataclass(frozen=True, slots=True)
class _Kept:
    """By layer, as in :class:`planner.check.memory.Holding`."""

    kept: Sequence[float] = ()
    same: Sequence[float] = ()


_NOTHING_KEPT = _Kept()


class _Plain:
    """What actions last, and what stages hold, of one program."""

    def __init__(self, book: PriceBook, decision: Decision, program: Program) -> None:
        self.book, self.prices, self.decision, self.program = book, LayerPrices(book), decision, program
        self.graph, self.sum_s = book.profile.graph, book.network.all_reduce_s
        of_stage = [set(decision.layers_of(stage)) for stage in range(len(decision.stages))]
        self.layers = [[layer for layer in self.graph.layers if layer.name in names] for names in of_stage]
        self.indices = [[self.prices.index[layer.name] for layer in layers] for layers in self.layers]
        sliced, self.sizes = bool(decision.token_slices), decision.sizes
        self.has_layouts = [sliced or has_layouts(decision, stage) for stage in range(len(decision.stages))]
        self.throughout = throughout_sites(self.graph)
        self.spans = [stage.recomputed if program.trains else () for stage in decision.stages]
        self.again = [frozenset(name for span in spans for name in span) for spans in self.spans]
        self.users: dict[str, set[int]] = {}  # by parameter, the stages that use it
        for stage, layers in enumerate(self.layers):
            for layer in layers:
                for name in layer.parameters:
                    self.users.setdefault(name, set()).add(stage)
        self.adding = {(rank, index) for rank, row in enumerate(program.rows) for index in adding_to_gradients(row)}
        self.is_prepared = decision.prepares_next_step or book.preparations.look_ahead
        self.shares_sites = any(len(group) > 1 for group in program.ranks)
        self._laid_out: dict[tuple[int, int], LaidOut] = {}
        self._slices: dict[tuple[int, TokenSlice], Sliced] = {}
        self._reductions: dict[int, float] = {}
        self._on_chip: dict[int, int] = {}
        self._holdings: dict[tuple[int, int, Size], Holding] = {}
        self._exchanged: dict[tuple[int, Op, int], float] = {}
        self._computed: dict[tuple[int, int, Op, int, bool], float] = {}

    def action_s(self, rank: int, action: Action, index: int) -> float:
        """Seconds of the action at a place in the row of ``rank``; of a send or receive beside its messages."""
        stage, group, kind = action.stage, self.program.ranks[action.stage], self.book.kind(rank)
        if action.op in RECEIVE:
            return self.book.tables.overhead_s(kind)
        if action.op is Op.PREPARE:
            if self.is_prepared:
                return 0.0
            ranks = (r for group in self.program.ranks for r in group)
            others_s = max(map(self.found_s, ranks)) - self.found_s(rank) if self.begins(rank, action) else 0.0
            return self.prepare_s(rank, action) + others_s
        if action.op is Op.REDUCE_GRAD:
            return self._reduction_s(stage)
        if action.op is Op.UPDATE:
            return self._update_s(stage, rank)
        if action.op not in _SECONDS:
            return 0.0
        accumulates = (rank, index) in self.adding
        if self.has_layouts[stage]:
            size = self.sizes[action.microbatch or 0]
            return self._of_size(stage, size).action_s(_SECONDS[action.op], accumulates)
        exchanged_s = self.exchanged_s(action)
        members = group if exchanged_s > 0 else (rank,)
        return exchanged_s + max(self._compute_s(m, action, accumulates) for m in members)

    def prepare_s(self, rank: int, action: Action) -> float:
        """Seconds of preparing on ``rank``, in whatever step it is done; in its first ``PREP`` all sites are found."""
        stage, group, kind = action.stage, self.program.ranks[action.stage], self.book.kind(rank)
        samples, preparations = samples_in(self.sizes[action.microbatch or 0]), self.book.preparations
        if not preparations.is_beside(kind):
            made_s = preparations.seconds(kind, self.indices[stage], samples, shared=self.shares_sites)
            return made_s + (self.found_s(rank) if self.begins(rank, action) else 0.0)
        own = self.decision.layout_of(stage).samples(samples)[group.index(rank)] if len(group) > 1 else samples
        return preparations.seconds(kind, self.indices[stage], own)

    def begins(self, rank: int, action: Action) -> bool:
        """Whether it is the rank's first ``PREP``: sites were found before, on all ranks before any begins."""
        return action == next(a for a in self.program.rows[rank] if a.op is Op.PREPARE)

    def found_s(self, rank: int) -> float:
        """Seconds of finding the sites of a step's micro-batches on ``rank``."""
        found_s, kind = self.book.preparations.found_s, self.book.kind(rank)
        return sum(found_s(kind, samples_in(size), shared=self.shares_sites) for size in self.sizes)

    def next_step(self) -> list[tuple[float, bool, float]]:
        """By rank: seconds of preparing the next step in this one, whether a core beside does, and what that costs."""
        if not self.is_prepared:
            return []
        rows = self.program.rows
        own_s = [sum(self.prepare_s(r, a) for a in row if a.op is Op.PREPARE) for r, row in enumerate(rows)]
        cores = spare_cores(self.book.profile.cluster, len(rows))
        found = []
        for rank, core in enumerate(cores):
            on_core = [s for s, other in zip(own_s, cores, strict=True) if other == core]
            has_core, kind, lost_s = core is not None, self.book.kind(rank), 0.0
            for a in rows[rank]:
                if a.op is Op.PREPARE:
                    made_s = self.prepare_s(rank, a)
                    lost_s += self.book.preparations.turns_s(kind, self.indices[a.stage], made_s, has_core)
            found.append((sum(on_core) if has_core else own_s[rank], has_core, lost_s))
        return found

    def on_chip_bytes(self, rank: int) -> int:
        """Parameters, gradients and optimiser state, if the device has a memory on chip that takes all of them."""
        if rank not in self._on_chip:
            stages = [stage for stage, group in enumerate(self.program.ranks) if rank in group]
            names = {name for stage in stages for layer in self.layers[stage] for name in layer.parameters}
            size = sum(self.graph.parameters[name].num_bytes for name in names)
            others = 0
            for stage in stages:
                own, members = self._stage_bytes(stage), len(self.program.ranks[stage])
                others += own - math.ceil(own / members) if self._is_sharded(stage) else 0
            state = round((size - others) * self.book.profile.optimizer.state_bytes_per_parameter_byte)
            wanted = 2 * size + state if self.program.trains else size
            fits = stages and not any(self.has_layouts[stage] for stage in stages)
            room = self.book.profile.cluster.devices[rank].on_chip_bytes
            self._on_chip[rank] = wanted if fits and wanted <= room else 0
        return self._on_chip[rank]

    def _kind(self, rank: int) -> str:
        return self.book.kind(rank) if self.on_chip_bytes(rank) else self.book.kind_off_chip(rank)

    def exchanged_s(self, action: Action) -> float:
        """The part of a computation in which the ranks of its stage exchange something."""
        stage, size = action.stage, self.sizes[action.microbatch or 0]
        if self.has_layouts[stage]:
            return self._of_size(stage, size).exchanged_s(_SECONDS[action.op])
        samples = samples_in(size)
        key = (stage, action.op, samples)
        if key not in self._exchanged:
            found = 0.0
            for layer in self.layers[stage] if action.op is not Op.BACKWARD_WEIGHT else ():
                backward = action.op is not Op.FORWARD
                found += self.prices.exchange_s(layer, self.program.ranks[stage], samples, backward=backward)
                if backward and self._runs_twice(layer, stage):
                    found += self.prices.exchange_s(layer, self.program.ranks[stage], samples, backward=False)
            self._exchanged[key] = found + self._in_slices_s(stage, action.op)
        return self._exchanged[key]

    def summed(self, stage: int) -> tuple[float, float]:
        """Of the sum of a stage's gradients that is waited for: seconds, and bytes/s on each card of its hosts."""
        group, size = self.program.ranks[stage], self._stage_bytes(stage)
        if len(group) < 2 or size == 0 or self.has_layouts[stage] or self._zero(stage) > 1:
            return 0.0, 0.0
        whole_s = self.sum_s(group, size)
        return self._reduction_s(stage), 2 * (len(group) - 1) / len(group) * size / whole_s if whole_s > 0 else 0.0

    def holding(self, rank: int, stage: int, microbatch: int) -> Holding:
        """The stage on ``rank``, for the account of its memory; stages of like micro-batches are one object."""
        key = (rank, stage, self.sizes[microbatch])
        if key not in self._holdings:
            self._holdings[key] = self._held(rank, stage, microbatch)
        return self._holdings[key]

    def _compute_s(self, rank: int, action: Action, accumulates: bool) -> float:
        key = (rank, action.stage, action.op, samples_in(self.sizes[action.microbatch or 0]), accumulates)
        if key not in self._computed:
            kind, shared = self._kind(rank), len(self.program.ranks[action.stage]) > 1
            costs = self.prices.columns(kind, self._samples(rank, action.stage, action.microbatch or 0), shared)
            goes_back = action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
            total = 0.0
            for layer, at in zip(self.layers[action.stage], self.indices[action.stage], strict=True):
                again = goes_back and self._runs_twice(layer, action.stage)
                total += float(costs[_SECONDS[action.op]][at]) + (float(costs["forward_s"][at]) if again else 0.0)
                if accumulates:
                    total += self.prices.accumulate_s(layer, kind, shared)
            self._computed[key] = total
        return self._computed[key]

    def _runs_twice(self, layer: Layer, stage: int) -> bool:
        return self.decision.stages[stage].recompute or layer.name in self.again[stage]

    def _reduction_s(self, stage: int) -> float:
        """What is waited for sums of the stage's gradients when its slowest rank has ended its last backward."""
        if stage not in self._reductions:
            self._reductions[stage] = self._find_reduction_s(stage)
        return self._reductions[stage]

    def _find_reduction_s(self, stage: int) -> float:
        group = self.program.ranks[stage]
        if self.has_layouts[stage]:
            return self._of_size(stage, self.sizes[0]).reduction_s()
        if self._zero(stage) > 1:  # summed in each backward
            return 0.0
        if self._is_sharded(stage) or len(group) < 2:
            return self.sum_s(group, self._stage_bytes(stage)) / 2
        last = len(self.decision.micro_batches) - 1
        backward: list[list[float]] = []
        for rank in group:
            costs = self.prices.columns(self._kind(rank), self._samples(rank, stage, last), True)
            backward.append([float(costs["backward_s"][at]) for at in self.indices[stage]])
        slowest, size = max(backward, key=sum), self.decision.micro_batches[last]
        before_s, ends = 0.0, {}  # of backward, still to come after the layer of that index
        for layer, at, own_s in zip(self.layers[stage], self.indices[stage], slowest, strict=True):
            ends[at] = before_s
            before_s += own_s + self.prices.exchange_s(layer, group, size, backward=True)
        if not self.book.network.in_background(group):
            ends = dict.fromkeys(ends, 0.0)  # the ranks are busy with every sum themselves
        return exposed_s(
            self.book.buckets(
                runs_of(self.indices[stage]), frozenset(n for n, users in self.users.items() if len(users) > 1)
            ),
            ends.__getitem__,
            lambda num_bytes: self.sum_s(group, num_bytes),
            lambda num_bytes: self.book.network.moving_s(group, num_bytes),
            lambda num_bytes: (
                memory_factor(self.book.profile.cluster, group) * self.book.network.around_s(GRADIENT_SUMS, num_bytes)
            ),
        )

    def _update_s(self, stage: int, rank: int) -> float:
        group, kind = self.program.ranks[stage], self._kind(rank)
        beside = memory_factor(self.book.profile.cluster, group)  # all of them update at once
        if self.has_layouts[stage]:
            return beside * self._of_size(stage, self.sizes[0]).update_s()
        update_s, ties_s = beside * sum(self.prices.update_s(layer, kind) for layer in self.layers[stage]), 0.0
        sizes: dict[frozenset[int], int] = {}
        for name, stages in self.users.items():  # gradients of several stages, summed with the lowest on each rank
            mine = [each for each in sorted(stages) if rank in self.program.ranks[each]]
            if len(stages) > 1 and mine and mine[0] == stage:
                key = frozenset(stages)
                sizes[key] = sizes.get(key, 0) + self.graph.parameters[name].num_bytes
        for together, size in sizes.items():
            ties_s += self.sum_s(tuple(sorted({r for each in together for r in self.program.ranks[each]})), size)
        if self._is_sharded(stage):  # a part of it, then the parts are gathered: half a sum of gradients
            gathered_s = self.sum_s(group, self._stage_bytes(stage)) / 2 if self._zero(stage) < 3 else 0.0
            return ties_s + update_s / len(group) + gathered_s
        return ties_s + update_s

    def _is_sharded(self, stage: int) -> bool:
        """Whether the stage's ranks divide the optimiser's state among them."""
        several = len(self.program.ranks[stage]) > 1
        return self.decision.stages[stage].sharded and several and not self.has_layouts[stage]

    def _zero(self, stage: int) -> int:
        """ZeRO's level of the stage."""
        return self.decision.stages[stage].zero if self._is_sharded(stage) and self.program.trains else 0

    def _in_slices_s(self, stage: int, op: Op) -> float:
        """Of a pass: halves of all-reduces, one for each bucket, that gather parameters or scatter gradients."""
        zero, group = self._zero(stage), self.program.ranks[stage]
        if zero < 2 or op is Op.BACKWARD_WEIGHT:
            return 0.0
        tied = {name for name, users in self.users.items() if len(users) > 1}
        buckets = buckets_of(self.layers[stage], self.graph, tied)
        half_s = sum(self.sum_s(group, sum(self.graph.parameters[n].num_bytes for n in names)) for names in buckets) / 2
        if op is Op.FORWARD:
            return half_s if zero > 2 else 0.0
        return half_s * (1 + (zero > 2) * (1 + self.decision.stages[stage].recompute))

    def _stage_bytes(self, stage: int) -> int:
        """Of the parameters that this stage alone uses."""
        alone = [name for name, stages in self.users.items() if stages == {stage}]
        return sum(self.graph.parameters[name].num_bytes for name in alone)

    def _of_size(self, stage: int, samples: Size) -> LaidOut | Sliced:
        """The stage, whose layers have layouts of their own, for micro-batches of ``samples``; or a token slice."""
        if isinstance(samples, TokenSlice):
            return self._of_slice(stage, samples)
        if (stage, samples) not in self._laid_out:
            placements = {layer.name: self.decision.layers[layer.name] for layer in self.layers[stage]}
            group = self.decision.stages[stage]
            self._laid_out[stage, samples] = LaidOut(
                self.prices,
                self.layers[stage],
                placements,
                self.program.ranks[stage],
                samples,
                group.recompute,
                self.again[stage],
                group.blocks,
                not self.program.trains,
            )
        return self._laid_out[stage, samples]

    def _of_slice(self, stage: int, size: TokenSlice) -> Sliced:
        if (stage, size) not in self._slices:
            kind, again = self.book.kind(self.program.ranks[stage][0]), self.decision.stages[stage].recompute
            table = self.book.slices.table(kind, size)
            self._slices[stage, size] = Sliced(self.prices, self.layers[stage], table, kind, size.samples, again)
        return self._slices[stage, size]

    def _samples(self, rank: int, stage: int, microbatch: int) -> float:
        throughout = self.throughout.issuperset(layer.name for layer in self.layers[stage])
        return samples_of(self.decision, stage, samples_in(self.sizes[microbatch]), throughout)[
            self.program.ranks[stage].index(rank)
        ]

    def _held(self, rank: int, stage: int, microbatch: int) -> Holding:
        kind, layers = self._kind(rank), self._as_they_run(stage)
        indices = [self.prices.index[layer.name] for layer in layers]
        recompute, size = self.decision.stages[stage].recompute, self.sizes[microbatch]
        rows = samples_in(size)
        if self.has_layouts[stage]:
            laid_out, member = self._of_size(stage, size), self.program.ranks[stage].index(rank)
            blocks = self.decision.stages[stage].blocks
            if blocks:
                kept, of_layers = [0.0] * len(layers), None
            else:
                kept, of_layers = laid_out.saved_bytes(member), None if recompute else laid_out.levels(member)
            if of_layers is not None:  # whose weight gradients are made with those of inputs
                of_layers = [[one[0], one[1], one[1], 0.0, 0.0, *one[5:]] for one in of_layers]
            made = laid_out.made_bytes(member) if of_layers is not None else []
            parts = [] if of_layers is None else laid_out.parts(member)
            stays = _NOTHING_KEPT
            if self.spans[stage] and isinstance(laid_out, LaidOut):
                order = [self.layers[stage].index(layer) for layer in layers]
                kept, made = [kept[at] for at in order], [made[at] for at in order] if made else []
                of_layers = None if of_layers is None else [of_layers[at] for at in order]
                parts = [parts[at] for at in order] if parts else []
                stays = self._kept(stage, layers, of_layers, [laid_out.part(layer, member) for layer in layers])
            is_shared = shares_memory(self.book.profile.cluster, self.program.ranks[stage])
            sizes = set[Size]() if is_shared else set(self.sizes)
            return Holding(
                layers=layers,
                saved=[laid_out.always_bytes()] if recompute else kept if of_layers or stays.kept else [sum(kept)],
                levels=of_layers,
                defers=() if of_layers is None else [False] * len(layers),
                gradients=self.prices.gradients(kind, [samples for samples, _ in parts]),
                parts=parts,
                workspace=laid_out.unrecorded_bytes(member) if blocks else laid_out.workspace_bytes(member),
                left=sum(kept),
                again=sum(kept) - laid_out.always_bytes() if recompute else 0.0,
                prepared=self.book.preparations.num_bytes(indices, rows, len(self.program.ranks[stage])),
                samples=rows,
                standing=sum(self._of_size(stage, each).standing_bytes(member) for each in sizes),
                made=made,
                parameter_bytes=round(laid_out.parameter_bytes(member)),
                recompute=False,
                has_layouts=True,
                spans=self._places(stage, layers),
                kept=stays.kept,
                same=stays.same,
            )
        samples, own = self._samples(rank, stage, microbatch), self._stage_bytes(stage)
        costs, levels = self.prices.columns(kind, samples, False), self.book.levels.at(kind, samples)
        deferring = self.book.tables.deferring(kind)
        of_layers = None if levels is None else [levels[:, at].tolist() for at in indices]
        stays = self._kept(stage, layers, of_layers, [float(samples)] * len(layers))
        return Holding(
            layers=layers,
            saved=[float(costs["saved_bytes"][at]) for at in indices],
            levels=of_layers,
            gradients=self.prices.gradients(kind, [samples]),
            inputs_left=[self.prices.inputs_left(kind, samples, at) for at in indices],
            gradients_left=[self.prices.gradients_left(kind, samples, at) for at in indices],
            defers=() if levels is None else [bool(deferring[at]) for at in indices],
            workspace=max(float(costs["workspace_bytes"][at]) for at in indices),
            left=round(self.book.tables.left_bytes(kind, samples, runs_of(indices))),
            prepared=self.book.preparations.num_bytes(indices, samples, len(self.program.ranks[stage])),
            samples=samples,
            parameter_bytes=self.graph.parameter_bytes(frozenset(layer.name for layer in layers)),
            elsewhere=own - math.ceil(own / len(self.program.ranks[stage])) if self._is_sharded(stage) else 0,
            tied=frozenset(name for name, users in self.users.items() if len(users) > 1),
            sums_behind=len(self.program.ranks[stage]) > 1 and not self._is_sharded(stage),
            zero=self._zero(stage),
            slices=len(self.program.ranks[stage]),
            on_chip=self.on_chip_bytes(rank) > 0,
            recompute=recompute,
            spans=self._places(stage, layers),
            kept=stays.kept,
            same=stays.same,
        )

    def _as_they_run(self, stage: int) -> list[Layer]:
        """The layers of a stage, each span that is computed again as one."""
        if not self.spans[stage]:
            return self.layers[stage]
        names = self.decision.layers_of(stage)
        return [layer for unit in layers_in_order(self.graph, names, self.spans[stage]) for layer in unit]

    def _places(self, stage: int, layers: Sequence[Layer]) -> list[list[int]]:
        """Where the layers of each span are among ``layers``."""
        place = {layer.name: at for at, layer in enumerate(layers)}
        return [sorted(place[name] for name in span) for span in self.spans[stage]]

    def _kept(
        self, stage: int, layers: Sequence[Layer], levels: list[list[float]] | None, parts: Sequence[float]
    ) -> _Kept:
        """What stays of what spans read, by layer: a price."""
        if not self.spans[stage]:
            return _NOTHING_KEPT
        spans = tuple(tuple(self.prices.index[name] for name in span) for span in self.spans[stage])
        order = np.array([self.prices.index[layer.name] for layer in layers], dtype=np.int64)
        found = self.book.levels.kept(order, spans, None if levels is None else np.array(levels).T, np.array(parts))
        return _Kept(found.kept.tolist(), found.same.tolist())


def times_of(
    program: Program,
    spans: Spans,
    step_s: float,
    exchanged_s: Callable[[Action], float],
    left_s: Sequence[float] = (),
) -> Iterator[Times]:
    """The parts of the step by rank.

    Args:
        exchanged_s: of a forward or backward, how long ranks exchange parts of tensors in it.
        left_s: by rank, of preparing the next step behind its row; empty: nothing.
    """
    began: dict[Action, list[float]] = {}
    for row, times in zip(program.rows, spans, strict=True):
        for action, (start_s, _) in zip(row, times, strict=True):
            if action.op in SEND or action.op is Op.REDUCE_GRAD:
                began.setdefault(action, []).append(start_s)
    behind_s = left_s or [0.0] * len(program.rows)
    for row, times, more_s in zip(program.rows, spans, behind_s, strict=True):
        compute_s = communication_s = bubble_s = end_s = 0.0
        for action, (start_s, stop_s) in zip(row, times, strict=True):
            bubble_s += max(0.0, start_s - end_s)
            end_s = stop_s
            if action.op in RECEIVE or action.op is Op.REDUCE_GRAD:
                ready_s = _ready_s(action, began, stop_s)
                waited_s = 0.0 if ready_s is None else min(max(ready_s, start_s), stop_s) - start_s
                bubble_s += waited_s
                communication_s += stop_s - start_s - waited_s
            elif action.op in SEND:
                communication_s += stop_s - start_s
            else:
                moved_s = min(exchanged_s(action), stop_s - start_s) if action.op in COMPUTE else 0.0
                compute_s += stop_s - start_s - moved_s
                communication_s += moved_s
        idle_s = max(0.0, step_s - end_s)
        behind = min(idle_s, more_s)
        yield Times(compute_s + behind, communication_s, bubble_s, idle_s - behind, bool(row))


def _ready_s(action: Action, began: dict[Action, list[float]], stop_s: float) -> float | None:
    """When what is waited for began: the last member of a sum, the last sender that began in time."""
    if action.op is Op.REDUCE_GRAD:
        return max(began[action])
    if action.peer is None:
        return None
    op = Op.SEND_FORWARD if action.op is Op.RECV_FORWARD else Op.SEND_BACKWARD
    sent = began.get(Action(action.peer, op, action.microbatch, action.stage), ())
    return max((at_s for at_s in sent if at_s <= stop_s), default=None)


def sum_of_gradients_s(row: Sequence[Action], spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How long a rank is in sums of gradients that are made once a step: the longest, and the last."""
    pairs = zip(row, spans, strict=True)
    sums = [b - a for action, (a, b) in pairs if action.op is Op.REDUCE_GRAD and action.microbatch is None]
    return max(sums, default=0.0), sums[-1] if sums else 0.0


def adding_to_gradients(row: Sequence[Action]) -> Iterator[int]:
    """Places of the backwards that add to gradients of an earlier micro-batch."""
    made = set()
    for index, action in enumerate(row):
        if action.op is Op.UPDATE:
            made.discard(action.stage)
        elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            if action.stage in made:
                yield index
            made.add(action.stage)
