"""How many bytes what ranks hold has (:mod:`planner.costs.memory.lifetimes`), of a program at its prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from planner.costs.communication.links import shares_memory
from planner.costs.layers.cost_table import Run, layers_of
from planner.costs.memory.activations import RankPart, activation_of, kept_gradients, overlapped_buckets
from planner.costs.memory.messages import CoalescedMessage, Received, answers, buffer_bytes, joined, sums_standing
from planner.costs.memory.table import SizeKey, What
from planner.costs.simulator.program import CompiledProgram
from planner.costs.stages.action_costs import StageCosts, left_to_others
from planner.costs.stages.placement import StagePlacement
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.lazy import once
from planner.ir.program import ALONE_BYTES
from planner.ir.schedule import Op


class Sizes:
    """Of what the actions of a program bring, make, keep and need.

    Attributes:
        payloads: by transfer slot.
        framed: by transfer slot, what of it goes in a frame; ``frames``: the first slot whose frame it may use again.
        varies: whether no two messages have as many bytes, since they are of sites.
        joined: by message that others travel with, those.
    """

    def __init__(
        self,
        costs: StageCosts,
        compiled: CompiledProgram,
        transfer_bytes: Sequence[int],
        carried: Sequence[CoalescedMessage],
    ) -> None:
        self.costs = costs
        self.compiled = compiled
        self.payloads = transfer_bytes
        self.joined = joined(compiled, transfer_bytes)
        cluster = costs.cost_model.cluster
        carried = carried or [CoalescedMessage(size if size < ALONE_BYTES else 0) for size in transfer_bytes]
        is_block = [cluster.link(slot.src, slot.dst).transport == SHARED_MEMORY for slot in compiled.transfers]
        self.framed = [0 if block else how.framed for how, block in zip(carried, is_block, strict=True)]
        firsts: dict[tuple[int, ...], int] = {}
        alike = zip(compiled.transfers, transfer_bytes, self.framed, strict=True)
        self.frames = [firsts.setdefault((slot.src, slot.dst, *of), place) for place, (slot, *of) in enumerate(alike)]
        self.varies = bool(costs.cost_model.preparations.inputs)
        self.buckets = {
            (rank, number): overlapped_buckets(costs, stage, member)
            for number, stage in enumerate(costs.stages)
            for member, rank in enumerate(stage.ranks)
            if compiled.rows[rank]
        }
        self._activations, unsaved = self._by_activation_slot(carried, is_block)
        self._transfer_sizes = self._by_transfer_slot(carried, is_block, unsaved)
        self._batch_bytes = costs.num_steps_held * _batch_bytes(costs) + costs.before_program_bytes()

    @cached_property
    def answers(self) -> dict[int, int]:
        """By message, the one that tells its sender that it came."""
        return answers(self.compiled)

    def of_rank(self, rank: int) -> dict[SizeKey, int]:
        """What is always there of a rank, and the sizes of its stages."""
        by_stage: dict[SizeKey, int] = {
            (name, rank, number): num_bytes
            for number, stage in enumerate(self.costs.stages)
            if rank in stage.ranks
            for name, num_bytes in self._stage_sizes(rank, number).items()
        }
        return {**{(name, rank): num_bytes for name, num_bytes in self._always_sizes(rank).items()}, **by_stage}

    def _by_activation_slot(
        self, carried: Sequence[CoalescedMessage], is_block: Sequence[bool]
    ) -> tuple[list[dict[str, int]], dict[RankPart, float]]:
        """By activation slot; and by rank, stage and size, the share of what is sent that nothing else keeps."""
        received, alone = self._messages(carried, is_block)
        sizes = self.costs.micro_batches
        parts = [(slot.rank, slot.stage, sizes[slot.microbatch]) for slot in self.compiled.activations]
        by_part = dict[RankPart, tuple[dict[str, int], int]]()
        for part in dict.fromkeys(parts):
            inputs, gradients = (
                Received.of({maker: [*own.values()] for maker, own in received.get((forward, part), {}).items()})
                for forward in (True, False)
            )
            by_part[part] = activation_of(self.costs, part, alone[part], gradients, inputs, self.buckets[part[:2]])
        unsaved = {part: own / alone[part] if alone[part] else 0.0 for part, (_, own) in by_part.items()}
        return [by_part[part][0] for part in parts], unsaved

    def _messages(
        self, carried: Sequence[CoalescedMessage], is_block: Sequence[bool]
    ) -> tuple[dict[tuple[bool, RankPart], dict[int, dict[int, tuple[int, int, bool]]]], Counter[RankPart]]:
        """What parts are sent, as of :meth:`Received.of` by way, stage and rank of the sender; what they send alone."""
        alone = Counter[RankPart]()
        received: dict[tuple[bool, RankPart], dict[int, dict[int, tuple[int, int, bool]]]] = {}
        slots = zip(self.compiled.transfers, self.payloads, carried, is_block, strict=True)
        for transfer, num_bytes, how, block in slots:
            src, dst, microbatch = transfer.route
            size = self.costs.micro_batches[microbatch]
            reader, maker = (dst, src) if transfer.forward else (src, dst)
            senders = received.setdefault((transfer.forward, (transfer.dst, reader, size)), {}).setdefault(maker, {})
            senders[transfer.src] = num_bytes, how.framed, block
            if transfer.forward and not block:
                alone[transfer.src, src, size] += num_bytes - sum(how)
        return received, alone

    def _by_transfer_slot(
        self, carried: Sequence[CoalescedMessage], is_block: Sequence[bool], unsaved: Mapping[RankPart, float]
    ) -> dict[str, list[int]]:
        """Of messages: where they are received, there from the announcement on, and where they were sent, unframed."""
        buffer = list[int]()
        posted = list[int]()
        kept = list[int]()
        slots = zip(self.compiled.transfers, self.payloads, carried, is_block, strict=True)
        for transfer, payload, how, block in slots:
            buffer.append(buffer_bytes(payload, how.framed, block))
            sent = payload - how.framed
            if transfer.forward:
                src, _, microbatch = transfer.route
                share = unsaved.get((transfer.src, src, self.costs.micro_batches[microbatch]), 1.0)
                sent = how.copied + round(share * (sent - how.copied))
            posted.append(0 if block else buffer[-1])
            kept.append(0 if block else sent)
        return {"buffer": buffer, "posted": posted, "kept": kept}

    def of_slot(self, size: SizeKey) -> int:
        """Of a micro-batch on a stage's rank, or of a message."""
        name = size[0]
        number = size[1]
        if name in self._transfer_sizes:
            return self._transfer_sizes[name][number]
        if name == "prepared":
            costs = self.costs
            slot = self.compiled.activations[number]
            member = costs.stages[slot.stage].ranks.index(slot.rank)
            return 0 if costs.is_prepared else costs.prepared_bytes(slot.stage, member, slot.microbatch)
        return self._activations[number][name]

    def _stage_sizes(self, rank: int, number: int) -> dict[str, int]:
        """Gradients that a rank keeps of a stage, and those that others update by; what a sum and an update need."""
        costs = self.costs
        stage = self.costs.stages[number]
        own = kept_gradients(stage) if costs.trains else stage.parameter_bytes
        if stage.once is not None:
            own = round(float(stage.once.parameter_bytes[stage.ranks.index(rank)]))
        if not self.compiled.trains[rank] or costs.bytes_beside(rank):
            own = 0
        # where gradients are whole and the state is not, others' go when they are summed
        elsewhere = left_to_others(stage, What.OPTIMISER_STATE) - left_to_others(stage, What.GRADIENTS) if own else 0
        sum_bytes = self._sum_bytes(rank, number)
        update_bytes = self._update_bytes(number)
        return {
            "gradients": own - elsewhere,
            "gradients of others": elsewhere,
            "sum": sum_bytes,
            "update": update_bytes,
        }

    def _always_sizes(self, rank: int) -> dict[str, int]:
        costs = self.costs
        compiled = self.compiled
        mine = [(number, stage) for number, stage in enumerate(costs.stages) if rank in stage.ranks]
        parameters = state = 0
        if not costs.bytes_beside(rank):
            parameters = costs.parameter_bytes(rank)
            state = costs.state_bytes(rank) if compiled.trains[rank] else 0
        batch = self._batch_bytes
        if costs.is_prepared:
            batch += costs.num_steps_held * sum(
                costs.prepared_bytes(action.stage, costs.stages[action.stage].ranks.index(rank), action.microbatch or 0)
                for action in compiled.grid[rank]
                if action.op is Op.PREPARE
            )
        return {
            "PARAMETERS": parameters + sum(max(0, compiled.versions[n] - 1) * s.parameter_bytes for n, s in mine),
            "OPTIMISER_STATE": state,
            "BUFFERS": self._buffer_bytes(tuple(stage.runs for _, stage in mine)),
            "BATCH": batch,
            "RECEIVE_BUFFERS": round(sum(_standing_bytes(costs, stage, rank) for _, stage in mine)),
        }

    @once
    def _buffer_bytes(self, stages: tuple[tuple[Run, ...], ...]) -> int:
        graph = self.costs.cost_model.graph
        return graph.buffer_bytes(index for runs in stages for index in layers_of(runs))

    def _sum_bytes(self, rank: int, number: int) -> int:
        """What a sum of gradients needs besides when nothing of it has begun in the backward.

        With ZeRO-1 the most of all buckets, one after another: each is put together, pieces come from the other ranks
        (in shared memory they are read where they lie), those of several ranks before this one are added apart, and its
        slice is cut out; then the rest of the bucket goes.
        """
        costs = self.costs
        stage = self.costs.stages[number]
        buckets = self.buckets[rank, number]
        several = len(stage.ranks)
        member = stage.ranks.index(rank)
        if several < 2 or stage.zero > 1:
            return 0
        if not stage.zero:
            return buckets[0].copied_bytes if len(buckets) == 1 else 0
        most = gone = 0
        others = 0 if shares_memory(costs.cost_model.cluster, stage.ranks) else several - 1
        for bucket in costs.cost_model.buckets(stage.runs, stage.tied):
            piece = -(-bucket.num_bytes // several)
            most = max(most, max(bucket.copied_bytes, max(1, others + (member > 1)) * piece) - gone)
            gone += 0 if costs.bytes_beside(rank) else bucket.num_bytes - piece
        return most

    @once
    def _update_bytes(self, number: int) -> int:
        """Copies that the optimiser makes on its way of a parameter, or of a rank's slice of one: of the largest."""
        cost_model = self.costs.cost_model
        stage = self.costs.stages[number]
        optimizer = cost_model.profile.optimizer
        graph = cost_model.graph
        copies = 2 if optimizer.state_bytes_per_parameter_byte >= 2 else bool(optimizer.arguments.get("weight_decay"))
        names = {name for index in layers_of(stage.runs) for name in graph.layers[index].parameters}
        sizes = [graph.parameters[name].num_bytes for name in (names & stage.tied if stage.zero else names)]
        for bucket in cost_model.buckets(stage.runs, stage.tied) if stage.zero else ():
            sizes += (min(size, -(-bucket.num_bytes // len(stage.ranks))) for _, size in bucket.by_layer)
        return copies * max(sizes, default=0)


def _batch_bytes(costs: StageCosts) -> int:
    """Of the inputs and targets of a step that are not prepared."""
    graph = costs.cost_model.graph
    prepared = costs.cost_model.preparations.inputs
    whole = costs.num_samples / graph.samples
    specs = (spec for name, spec in graph.inputs.items() if name not in prepared)
    return round(sum(spec.num_bytes * (whole if spec.has_samples else 1) for spec in specs))


def _standing_bytes(costs: StageCosts, stage: StagePlacement, rank: int) -> float:
    """Of the receives that stand ready for exchanges inside the stage; none in shared memory.

    Those of parts of tensors are of every size of micro-batch; of gradients they are what comes from other ranks in
    sums that are exchanges, not rings.
    """
    if shares_memory(costs.cost_model.cluster, stage.ranks):
        return 0.0
    member = stage.ranks.index(rank)
    several = len(stage.ranks)
    summed = list[int]()
    if costs.trains and stage.zero:
        # each rank's piece of a bucket comes from each other one; one after another, so that like ones use one buffer
        pieces = {-(-bucket.num_bytes // several) for bucket in costs.cost_model.buckets(stage.runs, stage.tied)}
        summed = [piece for piece in sorted(pieces) for _ in range(several - 1)]
    elif costs.trains:
        buckets = overlapped_buckets(costs, stage, member)
        summed = [bucket.num_bytes for bucket in buckets if (bucket.num_ranks or several) == 2]
    return sum(float(cost.standing_bytes[member]) for cost in stage.laid_out.values()) + sums_standing(summed)
