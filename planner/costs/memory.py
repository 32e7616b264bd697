"""How much memory a plan takes on each rank.

    parameters + gradients + optimiser state (or a part of it) + buffers         all the time; of forward passes alone
                                                                                 neither gradients nor state; as many
                                                                                 versions of parameters as are in use
    receive buffers                                                              all the time: receives are posted ahead
    prepared inputs (kernel maps) of one micro-batch                             all the time: they are made ahead
    saved activations + received and prepared inputs + sent outputs              from F to B (or W), per micro-batch
    workspace of the hungriest layer                                             while F, B, I or W runs

A backward in two halves keeps, from I to W, inputs and gradients of outputs of the layers whose weight gradients come
later, where that is more than what was saved.  A stage that recomputes keeps received inputs and sent outputs alone,
and has its activations back while B runs, or from I to W.
What a rank holds depends on the order of its row alone, not on times.  Ignored: what a process takes before it has a
model (interpreter, libraries), the batch itself, gradients that wait to be sent, buckets of the gradient reduction, and
fragmentation.  A tensor at a boundary may be counted twice, once as received or sent, once as saved by a layer.
Where layers have layouts of their own a rank holds its parts of their parameters, and what its group sent it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.costs.compiled import CompiledProgram
from planner.costs.stage import StageCosts, StagePlacement
from planner.costs.tables import span
from planner.ir.program import receive_window


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that a rank holds throughout a step; ``receive_buffers`` with what is prepared ahead."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    receive_buffers: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.receive_buffers


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds when it holds most, by part."""

    resident: Resident
    activations: int
    workspace: int

    @property
    def peak_bytes(self) -> int:
        """The sum of the parts."""
        return self.resident.total + self.activations + self.workspace

    def parts(self) -> dict[str, int]:
        """Bytes by part, in words."""
        return {
            "parameters": self.resident.parameters,
            "gradients": self.resident.gradients,
            "optimiser state": self.resident.optimizer,
            "buffers": self.resident.buffers,
            "receive buffers": self.resident.receive_buffers,
            "activations": self.activations,
            "workspace": self.workspace,
        }


def resident(costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int]) -> tuple[Resident, ...]:
    """What each rank holds throughout.

    Args:
        transfer_bytes: by transfer slot.
    """
    received: list[list[int]] = [[] for _ in compiled.rows]
    for slot, _ in compiled.messages:
        received[compiled.transfers[slot].dst].append(transfer_bytes[slot])
    versions = compiled.versions
    found = []
    for rank in range(len(compiled.rows)):
        stages = [stage for stage in costs.stages if rank in stage.ranks]
        parameters = costs.parameter_bytes(rank)
        gradients = parameters if compiled.trains[rank] else 0
        divided = sum(_left_to_others(stage) for stage in stages) if compiled.trains[rank] else 0
        state = round((gradients - divided) * costs.book.profile.optimizer.state_bytes_per_parameter_byte)
        older = sum(
            (versions[number] - 1) * stage.parameter_bytes
            for number, stage in enumerate(costs.stages)
            if rank in stage.ranks and versions[number] > 1
        )
        buffers = round(sum(span(costs.book.tables.graph.buffer_bytes, stage.runs) for stage in stages))
        posted = sum(sorted(received[rank])[-receive_window(received[rank]) :])
        ahead = sum(_prepared_ahead(costs, number, rank) for number, s in enumerate(costs.stages) if rank in s.ranks)
        found.append(Resident(parameters + older, gradients, state, buffers, posted + ahead))
    return tuple(found)


def _prepared_ahead(costs: StageCosts, stage: int, rank: int) -> int:
    """Bytes of the prepared inputs of the largest micro-batch."""
    sizes = costs.micro_batches
    member = costs.stages[stage].ranks.index(rank)
    return costs.prepared_bytes(stage, member, sizes.index(max(sizes)))


def _left_to_others(stage: StagePlacement) -> int:
    """Bytes of parameters whose optimiser's state other ranks of the stage hold."""
    return stage.own_bytes - -(-stage.own_bytes // len(stage.ranks)) if stage.sharded else 0


@dataclass(frozen=True, slots=True)
class Activation:
    """What a stage holds for a micro-batch on a rank, in bytes.

    Attributes:
        kept: between forward and backward.
        again: computed again for the backward.
        workspace: of the hungriest layer, while an action runs.
        left: what a backward for the input leaves beyond the others until that for the weights.
    """

    kept: int
    again: int
    workspace: int
    left: int = 0


def activations(costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int]) -> tuple[Activation, ...]:
    """What is held, by activation slot."""
    kept: dict[tuple[int, int, int], int] = {}
    for slot, transfer in enumerate(compiled.transfers):
        if transfer.forward:
            src, dst, microbatch = transfer.route
            size = costs.micro_batches[microbatch]
            for key in ((transfer.src, src, size), (transfer.dst, dst, size)):
                kept[key] = kept.get(key, 0) + transfer_bytes[slot]
    found = []
    for activation in compiled.activations:
        stage = costs.stages[activation.stage]
        member = stage.ranks.index(activation.rank)
        saved, again, workspace, left = costs.held_bytes(activation.stage, member, activation.microbatch)
        size = costs.micro_batches[activation.microbatch]
        handed = kept.get((activation.rank, activation.stage, size), 0)
        found.append(Activation(saved + handed, again, workspace, left))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Held:
    """Activations that a rank holds around the step at ``position`` of its row, in bytes."""

    position: int
    during: int
    after: int
    workspace: int


def walk(compiled: CompiledProgram, rank: int, found: Sequence[Activation]) -> Iterator[Held]:
    """What the rank holds, compute step after compute step."""
    held = 0
    computed_again = Counter[int]()  # by slot: activations that an I brought back and no W has freed
    for position, slot, sign in compiled.holds[rank]:
        activation = found[slot]
        if sign > 0:
            held += activation.kept
            yield Held(position, held, held, activation.workspace)
        elif sign == 0:
            held += activation.again + activation.left
            computed_again[slot] += 1
            yield Held(position, held, held, activation.workspace)
        else:
            if computed_again[slot]:
                computed_again[slot] -= 1
                left = activation.left
            else:
                held += activation.again
                left = 0
            after = held - activation.again - activation.kept - left
            yield Held(position, held, after, activation.workspace)
            held = after


def rank_memories(
    costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int]
) -> tuple[RankMemory, ...]:
    """What each rank holds when it holds most."""
    kept = activations(costs, compiled, transfer_bytes)
    found = []
    for rank, always in enumerate(resident(costs, compiled, transfer_bytes)):
        most = max(walk(compiled, rank, kept), key=lambda step: step.during + step.workspace, default=Held(0, 0, 0, 0))
        found.append(RankMemory(always, most.during, most.workspace))
    return tuple(found)
