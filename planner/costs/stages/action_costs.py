"""What each action of a program lasts on each rank.

F, B, I and W are the sums of the stage's layers at the rank's own number of samples. By how much they are longer after
a wait for a message (``Profile.action_overhead_s``) is put on the receive. A stage that recomputes runs its forward
once more in B or I. Every backward but a rank's first also adds its gradients into those that are there. On a stage of
several ranks each normalisation over the batch exchanges statistics (``runtime.stage.batch_norm``: a row of 1 + 2
channels float64 numbers to each other rank forward, one of 2 channels backward), and layers may exchange more
(``CostModel.stage_exchanges``), so its ranks go at the pace of the slowest. What hosts prepare is in
``costs.stages.input_pipeline``. Where layers have layouts of their own all ranks go at one pace, layer by layer,
messages between layers included (``costs.stages.stage_cost``). Where ranks divide the optimiser's state, the sum of
gradients is a reduce-scatter and the update is of one part, then an all-gather: each half of an all-reduce (a ring is
made of the two; Patarasuk and Yuan 2009). Where they divide gradients (ZeRO-2) the first half is waited for in each
backward instead, bucket by bucket, and where they divide parameters (ZeRO-3) the second one too: in each forward, and
once more in each backward. Otherwise, on a stage cut along samples alone, sums overlap with the last
backward (``costs.stages.gradient_overlap``). Gradients of parameters that several stages use are summed over all their
ranks before the update, and priced with it. Where ranks of a host update at once, they share its memory
(``collectives.memory_factor``), as when they put gradients together; what passes take longer beside those of other
ranks depends on when these run (``StageCosts.slowed_s``, priced by the simulator). What runs of plans corrected
(``costs.calibration``) is in all of these; of compute, what differs between stages of one rank and shared ones is put
on here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.costs.communication.collectives import memory_factor
from planner.costs.cost_model import CostModel
from planner.costs.layers.confidence import weakest
from planner.costs.layers.cost_table import Array, SizeTable, before, layers_of, span
from planner.costs.memory.table import What, divided
from planner.costs.stages.gradient_overlap import exposed_s
from planner.costs.stages.placement import StagePlacement
from planner.costs.stages.stage_sums import PASSES, PassTimes
from planner.ir.cluster import GRADIENT_SUMS, Evidence
from planner.ir.extras import extras
from planner.ir.lazy import once
from planner.ir.plan import AxisPart, Size, samples_in
from planner.ir.planner_extra import PlannerExtra
from planner.ir.schedule import COMPUTE, RECEIVE, Action, Op


@dataclass(eq=False)
class StageCosts:
    """Prices of the actions of one plan.

    Attributes:
        micro_batches: samples of each of the program's, or which part of how many it is.
        trains: whether there are gradients and an optimiser's state beside the parameters.
        prepares_next_step: whether the plan has the step's inputs prepared during the one before; of graphs they always
            are (:attr:`is_prepared`).
    """

    cost_model: CostModel
    stages: tuple[StagePlacement, ...]
    micro_batches: tuple[Size, ...]
    trains: bool = True
    prepares_next_step: bool = False

    def action_s(self, rank: int, action: Action, accumulates: bool = False) -> float:
        """Seconds that ``action`` keeps ``rank`` busy, waiting for messages or members not included.

        Args:
            accumulates: whether gradients of an earlier micro-batch are there to add to.
        """
        stage = self.stages[action.stage]
        if action.op in RECEIVE:
            return self.cost_model.tables.overhead_s(self.cost_model.kind(rank))
        if action.microbatch is not None and action.op in COMPUTE:
            times = self.times(action.stage, self.micro_batches[action.microbatch])
            return times.action_s(action.op, stage.ranks.index(rank), accumulates)
        if action.op is Op.PREPARE and action.microbatch is not None:
            if self.is_prepared:
                return 0.0
            others_s = 0.0
            if self._is_first(rank, action):  # all begin when the slowest has made what is before
                others_s = max(
                    self._before_s(self.cost_model.kind(other)) for own in self.stages for other in own.ranks
                )
                others_s -= self._before_s(self.cost_model.kind(rank))
            return self.prepare_s(rank, action) + others_s
        whole = stage.once
        if whole is not None and action.op in (Op.REDUCE_GRAD, Op.UPDATE):
            beside = memory_factor(self.cost_model.cluster, stage.ranks)
            return whole.reduction_s if action.op is Op.REDUCE_GRAD else whole.update_s * beside
        if action.op is Op.REDUCE_GRAD:
            return self.waited_s(action.stage)
        if action.op is Op.UPDATE:
            return self._update_s(action.stage, rank)
        return 0.0

    def slowed_s(self, rank: int, action: Action, accumulates: bool = False) -> float:
        """By how many seconds ``action`` is longer where the other devices of the rank's host compute all the while.

        Of what several ranks lay out in their own ways: as the same layers are slowed as a whole.
        """
        if action.microbatch is None or action.op not in COMPUTE:
            return 0.0
        stage = self.stages[action.stage]
        size = self.micro_batches[action.microbatch]
        member = stage.ranks.index(rank)
        samples = stage.samples_of(member, samples_in(size))
        of = self.kind(rank), samples, len(stage.ranks) > 1, stage.recompute_mask
        slowed = self.cost_model.slowed(*of)
        if slowed is None:
            return 0.0
        place = PASSES.index(action.op)
        alone_s, more_s = (sums.passes_s(stage.runs)[place] for sums in (self.cost_model.sums(*of), slowed))
        times = self.times(action.stage, size)
        computing_s = times.action_s(action.op, member, accumulates) - times.exchange_s(action.op)
        return computing_s * more_s / alone_s if alone_s > 0 else 0.0

    def _update_s(self, number: int, rank: int) -> float:
        """Of a rank of a stage cut along samples: sums over stages, then what it updates, then what others did."""
        stage = self.stages[number]
        beside = memory_factor(self.cost_model.cluster, stage.ranks)
        sums = self.cost_model.tables.parameters(self.kind(rank)).update_s
        update_s = span(sums, stage.runs)
        tied_s = 0.0
        ties_s = 0.0
        for tie in stage.ties:
            update_s -= _part_of(sums, tie.inside)
            if rank not in tie.held_below:  # a rank updates its copy once, with the lowest of its stages that use it
                tied_s += _part_of(sums, (*tie.inside, *tie.outside))
                ties_s += self.cost_model.network.all_reduce_s(tie.ranks, tie.num_bytes)
        if not stage.sharded:
            return ties_s + beside * (update_s + tied_s)
        gather_s = self._reduce_s(number) / 2 if stage.zero < 3 else 0.0
        return ties_s + beside * (update_s / len(stage.ranks) + tied_s) + gather_s

    @property
    def tied_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that sum the gradients of what several stages use, once a step."""
        groups = (tie.ranks for stage in self.stages for tie in stage.ties if len(tie.ranks) > 1)
        return tuple(dict.fromkeys(groups)) if self.trains else ()

    @once
    def kind(self, rank: int) -> str:
        """The kind of device that the rank's layers cost what they do on: by the memory that its parameters lie in."""
        is_beside = self.bytes_beside(rank) > 0
        return self.cost_model.kind(rank) if is_beside else self.cost_model.main_kind(rank)

    @once
    def bytes_beside(self, rank: int) -> int:
        """Parameters, gradients and optimiser state of the rank, where they lie beside its main memory; else 0."""
        return sum(extra.bytes_beside(self, rank) for extra in extras(PlannerExtra))

    def state_bytes(self, rank: int) -> int:
        """What the rank holds of the optimiser's state."""
        if not self.trains:
            return 0
        mine = [stage for stage in self.stages if rank in stage.ranks]
        kept = sum(parameters_used(stage, rank) - left_to_others(stage, What.OPTIMISER_STATE) for stage in mine)
        return round(kept * self.cost_model.profile.optimizer.state_bytes_per_parameter_byte)

    def prepare_s(self, rank: int, action: Action) -> float:
        """Seconds in which the rank prepares what a stage reads of a micro-batch; of the first with what is before."""
        stage = self.stages[action.stage]
        samples = samples_in(self.micro_batches[action.microbatch or 0])
        preparations = self.cost_model.preparations
        layers = layers_of(stage.runs)
        kind = self.cost_model.kind(rank)
        if not preparations.is_beside(kind):
            before_s = self._before_s(kind) if self._is_first(rank, action) else 0.0
            return before_s + preparations.seconds(kind, layers, samples, shared=self._is_shared)
        return preparations.seconds(kind, layers, stage.samples_of(stage.ranks.index(rank), samples))

    @once
    def _before_s(self, kind: str) -> float:
        """Seconds in which a rank on such a device makes of all micro-batches what is made before the program."""
        of = self.cost_model.preparations.before_program_s
        shared = self._is_shared
        return sum(of(kind, samples_in(size), shared=shared) for size in self.micro_batches)

    def _is_first(self, rank: int, action: Action) -> bool:
        """Whether the rank has prepared nothing of the step before."""
        if action.microbatch != 0:
            return False
        mine = (stage for stage in self.stages[: action.stage] if rank in stage.ranks)
        return not any(self.cost_model.preparations.read(layers_of(stage.runs)) for stage in mine)

    @property
    def _is_shared(self) -> bool:
        return any(len(stage.ranks) > 1 for stage in self.stages)

    @property
    def is_prepared(self) -> bool:
        """Whether a step finds its inputs made, but for what the step before had no time for."""
        return self.prepares_next_step or self.cost_model.preparations.look_ahead

    def waited_s(self, number: int) -> float:
        """What the ranks of a stage that is cut along samples wait for the sum of its gradients.

        With ZeRO-2 nothing: each micro-batch's are summed in its backward.
        """
        zero = self.stages[number].zero
        return 0.0 if zero > 1 else self._reduce_s(number) / (2 if zero else 1)

    @once
    def _reduce_s(self, number: int) -> float:
        """Of a stage's gradients: what is left of their sums when its slowest rank ends its backward."""
        stage = self.stages[number]
        if not stage.overlaps_sums:
            return self.cost_model.network.all_reduce_s(stage.ranks, stage.own_bytes)
        last = samples_in(self.micro_batches[-1])
        backward_s = [
            self.cost_model.at(self.kind(rank), own, True).backward_s
            for rank, own in zip(stage.ranks, stage.samples[last], strict=True)
        ]
        slowest_s = max(backward_s, key=lambda sums: span(sums, stage.runs))
        exchanges_s = self.cost_model.exchanges_s(stage.ranks, last)[1]
        hides = self.cost_model.network.in_background(stage.ranks)
        beside = memory_factor(self.cost_model.cluster, stage.ranks)
        return exposed_s(
            self.cost_model.buckets(stage.runs, stage.tied),
            lambda layer: hides * sum(span(sums, before(stage.runs, layer)) for sums in (slowest_s, exchanges_s)),
            lambda num_bytes: self.cost_model.network.all_reduce_s(stage.ranks, num_bytes),
            lambda num_bytes: self.cost_model.network.moving_s(stage.ranks, num_bytes),
            lambda num_bytes: beside * self.cost_model.network.around_s(GRADIENT_SUMS, num_bytes),
        )

    def prepared_bytes(self, stage: int, member: int, microbatch: int) -> int:
        """What the stage's rank number ``member`` holds of prepared inputs (kernel maps) of a micro-batch."""
        placed = self.stages[stage]
        samples = placed.samples_of(member, samples_in(self.micro_batches[microbatch]))
        return self.cost_model.preparations.num_bytes(layers_of(placed.runs), samples, len(placed.ranks))

    def before_program_bytes(self) -> int:
        """What every rank holds of a step from before the program on; of the next one too, if it is prepared in it."""
        bytes_of = self.cost_model.preparations.before_program_bytes
        shared = self._is_shared
        return self.num_steps_held * sum(bytes_of(samples_in(size), shared=shared) for size in self.micro_batches)

    @property
    def num_steps_held(self) -> int:
        """Of how many steps a rank has the batch and what is prepared of it: this one, and maybe the next."""
        return 2 if self.is_prepared else 1

    @property
    def num_samples(self) -> int:
        """Of a step."""
        firsts = (size for size in self.micro_batches if not isinstance(size, AxisPart) or not size.start)
        return sum(map(samples_in, firsts))

    def parameter_bytes(self, rank: int) -> int:
        """What the rank holds of parameters, between passes."""
        return sum(
            parameters_used(stage, rank) - (left_to_others(stage, What.PARAMETERS) if self.trains else 0)
            for stage in self.stages
            if rank in stage.ranks
        )

    def table(self, stage: int, member: int, microbatch: int) -> SizeTable:
        """Costs of all layers on the stage's rank number ``member`` at its share of the micro-batch."""
        placed = self.stages[stage]
        samples = placed.samples_of(member, samples_in(self.micro_batches[microbatch]))
        return self.cost_model.tables.at(self.kind(placed.ranks[member]), samples)

    def evidence(self) -> Evidence:
        """The weakest evidence for the prices of layers in this plan."""
        own = [cost.evidence for stage in self.stages for cost in stage.laid_out.values()]
        uses = {
            (stage.runs, self.kind(rank), samples[member])
            for stage in self.stages
            for samples in stage.samples.values()
            for member, rank in enumerate(stage.ranks)
        }
        return weakest((*own, *(self.cost_model.tables.evidence(kind, samples, runs) for runs, kind, samples in uses)))

    def exchange_s(self, action: Action) -> float:
        """The part of a compute action in which its ranks exchange statistics, halos and other parts of tensors."""
        if action.microbatch is None or action.op not in COMPUTE:
            return 0.0
        return self.times(action.stage, self.micro_batches[action.microbatch]).exchange_s(action.op)

    @once
    def times(self, number: int, size: Size) -> PassTimes:
        """What the passes of a stage take for a micro-batch, or part, of this size.

        Of a stage that is cut along samples alone: differences of sums over layers, once for like members.
        """
        placed = self.stages[number]
        samples = samples_in(size)
        if placed.laid_out:
            return placed.laid_out[size]
        members = [(self.kind(rank), own) for rank, own in zip(placed.ranks, placed.samples[samples], strict=True)]
        is_shared = len(members) > 1
        runs = placed.runs
        sums = {member: self.cost_model.sums(*member, is_shared, placed.recompute_mask) for member in members}
        passes = {member: own.passes_s(runs) for member, own in sums.items()}
        adds = {
            member: span(own.accumulate_s, runs) + sum(_part_of(own.accumulate_s, tie.outside) for tie in placed.ties)
            for member, own in sums.items()
        }
        forward_s = backward_s = 0.0
        if is_shared:
            exchanges = self.cost_model.exchanges_s(placed.ranks, samples, placed.recompute_mask, self.trains)
            forward_s, backward_s = (span(way, runs) for way in exchanges)
            gather_s, scatter_s = self._in_slices_s(placed)
            forward_s += gather_s
            backward_s += (1 + placed.recompute) * gather_s + scatter_s
        return PassTimes(
            tuple(zip(*(passes[member] for member in members), strict=True)),
            tuple(adds[member] for member in members),
            forward_s,
            backward_s,
        )

    def _in_slices_s(self, placed: StagePlacement) -> tuple[float, float]:
        """What a pass waits for its parameters, and a backward for the sums of its gradients, bucket by bucket.

        Of a micro-batch, where ranks have them in slices (ZeRO-3, ZeRO-2); each is half of an all-reduce, and nothing
        is computed beside it.
        """
        if placed.zero < 2 or not self.trains:
            return 0.0, 0.0
        in_buckets = self.cost_model.buckets(placed.runs, placed.tied)
        half_s = sum(self.cost_model.network.all_reduce_s(placed.ranks, bucket.num_bytes) for bucket in in_buckets) / 2
        return half_s * (placed.zero > 2), half_s


def _part_of(sums: Array, parts: Iterable[tuple[int, float]]) -> float:
    """What parameters cost that are parts of those of layers; ``sums`` run over layers."""
    return sum(part * float(sums[layer + 1] - sums[layer]) for layer, part in parts)


def left_to_others(stage: StagePlacement, what: What) -> int:
    """Bytes of parameters of which other ranks of the stage hold what they divide: state, gradients, themselves."""
    parts = divided(what, stage.zero, len(stage.ranks))
    return stage.own_bytes - -(-stage.own_bytes // parts) if parts > 1 else 0


def parameters_used(stage: StagePlacement, rank: int) -> int:
    """Bytes of parameters of the stage that the rank uses, of those that its stages share once."""
    if stage.once is not None:
        return round(float(stage.once.parameter_bytes[stage.ranks.index(rank)]))
    return stage.parameter_bytes - sum(tie.num_bytes for tie in stage.ties if rank in tie.held_below)
