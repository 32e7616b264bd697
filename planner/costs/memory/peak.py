"""How much memory a plan takes on each rank, action by action.

    parameters + optimiser state (or a part of it) + buffers, each once   all the time; of forward passes alone no
                                                                          state; all versions of parameters in use
    the batch, whole; the sites of all its clouds                         all the time: every rank is given it
    prepared inputs (kernel maps)                                         from their making to the end of the step;
                                                                          where the next step is prepared in this one,
                                                                          those and the batch of both, all the time
    receive buffers, with room to spare; in shared memory none            from their announcement to their receive
    what was received, in its buffer; parts that several ranks            inputs: from then to the end of B, of split
    sent till the end of the action that puts them together               backwards to that of I, or of W if weight
                                                                          gradients are made of them; gradients: to the
                                                                          end of B or I, or to that of their layer in W
    saved activations, less what surely lies where it was received        from F to B (or W), per micro-batch
    gradients of parameters                                               from the first B (or W) on, in which they come
                                                                          layer by layer
    (of a device with two memories parameters, state and gradients lie in the one on chip, if they fit there, and are
    left out here: ``RankMemory.on_chip_bytes``)
    gradients sent, and sent outputs that nobody saves                    until a message tells they came; in shared
                                                                          memory the receiver alone holds them
    frames, into which small tensors are copied to be sent                all the time, of each kind as many as are
                                                                          under way at once
    receives that stand ready for exchanges inside a stage, and           all the time; in shared memory none
    what was sent in them, those of small sums of gradients too
    the stage's highest level (planner.costs.memory.courses)                     while F, B, I or W runs
    a bucket of gradients, put together                                   in the last B (or W), when the last layer has
                                                                          run that adds to it, if sums run behind; else
                                                                          while they are summed
    with ZeRO-1 a bucket of gradients put together, the pieces of         while each bucket is summed; then
    it that come from other ranks, and the slice that is cut out          slices of gradients alone
    with ZeRO-2 slices of gradients alone; beside them the gradients      in the backward of the layers that make them
    of a bucket in the making, and what putting it together takes
    with ZeRO-3 slices of parameters alone; beside them whole buckets     in the forward and backward of their layers
    what the update of the largest parameter, or slice, needs             while the optimiser runs

A backward in two halves keeps, from I to W, what the weight gradients that come later are computed from, and lets the
rest go.  A stage that recomputes keeps received inputs alone, and has its activations back while B runs, or from I to
W; spans of layers that are computed again keep what they read, and have theirs back one span at a time.  What a rank
holds depends on the order of its row alone, not on times.  Ignored: what a process takes before it has a model
(interpreter, libraries), what libraries take without torch's allocator (oneDNN and MKL little), what passes between
stages of one rank, and fragmentation.  Where layers have layouts of their own a rank holds its parts of their
parameters, what its group sent it and what it reads and saves whole, each layer has its part's share of the whole one's
levels, and I makes the gradients of weights as well; only where such a stage recomputes does every action need the
workspace of the hungriest layer beyond all that is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.costs.communication.links import shares_memory
from planner.costs.layers.cost_table import layers_of
from planner.costs.memory.activations import buckets_behind
from planner.costs.memory.holdings import Held, holdings, prepared_bytes, walk
from planner.costs.memory.messages import Carried, sums_standing
from planner.costs.simulator.program import CompiledProgram
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.placement import StagePlacement


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes that a rank holds; ``gradients`` and most ``receive_buffers`` are those of a moment, the rest stays."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    receive_buffers: int
    batch: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        held = self.parameters + self.gradients + self.optimizer + self.buffers
        return held + self.receive_buffers + self.batch


_NOTHING = Resident(0, 0, 0, 0, 0)
"""Of a rank that is not used."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds in its device's memory when it holds most, by part.

    Attributes:
        on_chip_bytes: of parameters, gradients and optimiser state that lie in a memory on chip, and are in no part.
    """

    resident: Resident
    activations: int
    workspace: int
    on_chip_bytes: int = 0

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
            "batch": self.resident.batch,
            "receive buffers": self.resident.receive_buffers,
            "activations": self.activations,
            "workspace": self.workspace,
        }


def rank_memories(
    costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int], carried: Sequence[Carried] = ()
) -> tuple[RankMemory, ...]:
    """What each rank holds when it holds most; arguments as of :func:`planner.costs.memory.holdings.holdings`."""
    found_of = holdings(costs, compiled, transfer_bytes, carried)
    found = []
    for rank, always in enumerate(resident(costs, compiled, transfer_bytes)):
        if not compiled.rows[rank]:
            found.append(RankMemory(always, 0, 0, costs.on_chip_bytes(rank)))
            continue
        steps = walk(compiled, rank, found_of)
        most = max(steps, key=lambda step: step.during + step.workspace, default=Held(0, 0, 0, 0, 0, 0))
        buffers = always.receive_buffers + most.receive_buffers
        at_peak = replace(always, gradients=most.gradients, receive_buffers=buffers)
        found.append(RankMemory(at_peak, most.activations, most.workspace, costs.on_chip_bytes(rank)))
    return tuple(found)


def resident(costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int]) -> tuple[Resident, ...]:
    """What each rank holds throughout, hence no gradients, and of receive buffers those that stand ready.

    Args:
        transfer_bytes: by transfer slot.
    """
    versions = compiled.versions
    batch = costs.num_steps_held * _batch_bytes(costs) + costs.found_bytes()
    ahead = prepared_bytes(costs, compiled) if costs.is_prepared else {}
    found = []
    buffers_of: dict[tuple[int, ...], int] = {}  # by the stages of a rank
    for rank, row in enumerate(compiled.rows):
        if not row:
            found.append(_NOTHING)
            continue
        stages = [stage for stage in costs.stages if rank in stage.ranks]
        parameters = costs.parameter_bytes(rank)
        state = costs.state_bytes(rank) if compiled.trains[rank] else 0
        if costs.on_chip_bytes(rank):
            parameters = state = 0
        older = sum(
            (versions[number] - 1) * stage.parameter_bytes
            for number, stage in enumerate(costs.stages)
            if rank in stage.ranks and versions[number] > 1
        )
        own = tuple(map(id, stages))
        if own not in buffers_of:
            graph = costs.book.profile.graph
            buffers_of[own] = graph.buffer_bytes(index for stage in stages for index in layers_of(stage.runs))
        buffers = buffers_of[own]
        standing = round(sum(_standing_bytes(costs, stage, rank) for stage in stages))
        made = costs.num_steps_held * sum(size for (at, _, _), size in ahead.items() if at == rank)
        found.append(Resident(parameters + older, 0, state, buffers, standing, batch + made if row else 0))
    return tuple(found)


def _batch_bytes(costs: StageCosts) -> int:
    """Of the inputs and targets of a step that are not prepared."""
    graph = costs.book.profile.graph
    prepared = costs.book.preparations.inputs
    whole = costs.num_samples / graph.samples
    return round(
        sum(
            spec.num_bytes * (whole if spec.has_samples else 1)
            for name, spec in graph.inputs.items()
            if name not in prepared
        )
    )


def _standing_bytes(costs: StageCosts, stage: StagePlacement, rank: int) -> float:
    """Of the receives that stand ready for exchanges inside the stage; none in shared memory.

    Those of parts of tensors are of every size of micro-batch.
    """
    if shares_memory(costs.book.profile.cluster, stage.ranks):
        return 0.0
    member = stage.ranks.index(rank)
    found = sum(float(cost.standing_bytes[member]) for cost in stage.laid_out.values())
    return found + sums_standing(_summed_bytes(costs, stage, member))


def _summed_bytes(costs: StageCosts, stage: StagePlacement, member: int) -> list[int]:
    """What comes from other ranks of the stage in sums of gradients that are exchanges, not rings."""
    several = len(stage.ranks)
    if not costs.trains:
        return []
    if not stage.zero:
        found = buckets_behind(costs, stage, member)
        return [bucket.num_bytes for bucket in found if (bucket.num_ranks or several) == 2]
    # each rank's piece of a bucket comes from each other one; one after another, so that like ones use one buffer
    pieces = {-(-bucket.num_bytes // several) for bucket in costs.book.buckets(stage.runs, stage.tied)}
    return [piece for piece in sorted(pieces) for _ in range(several - 1)]
