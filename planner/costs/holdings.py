"""What the actions of a program do to the memory of the ranks (:mod:`planner.costs.memory` says what counts)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.costs.compiled import RECEIVE_STEP, SEND_STEP, CompiledProgram
from planner.costs.courses import Activation, activation_of
from planner.costs.stage import StageCosts, StagePlacement
from planner.costs.tables import layers_of
from planner.ir.program import Part, Program
from planner.ir.schedule import Op

BUCKET_BYTES = 8 * 2**20
"""Most bytes of gradients that the runtime copies together to sum them."""
ALONE_BYTES = 256 * 1024
"""From here a tensor is sent and received on its own, from where it lies (:mod:`runtime.transport.peer`)."""
SPARE_BYTES = 2**20
"""Room behind a receive buffer: at most so much, of a tensor on its own an eighth of it."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the actions of a program do to memory, in bytes.

    Attributes:
        activations: by activation slot.
        gradients: of parameters, by rank and stage.
        messages: payload by message.
        buffers: by message, what it takes where it is received.
        sent: by message, what it keeps alive where it was sent, and what of that is in a frame.
        acknowledged: by message, those that its receiver then knows to have come.
        update, reduction: what an update, and a sum of gradients, need besides, by rank and stage.
        prepared: what the host makes of a micro-batch, by rank, stage and micro-batch.
    """

    activations: tuple[Activation, ...]
    gradients: dict[tuple[int, int], int]
    messages: tuple[int, ...]
    buffers: tuple[int, ...]
    sent: tuple[tuple[int, int], ...]
    acknowledged: dict[int, tuple[int, ...]]
    update: dict[tuple[int, int], int]
    reduction: dict[tuple[int, int], int]
    prepared: dict[tuple[int, int, int], int]


def activations(
    costs: StageCosts, compiled: CompiledProgram, transfer_bytes: Sequence[int], small: Sequence[int] = ()
) -> Holdings:
    """What :func:`walk` needs to know of all ranks.

    Args:
        transfer_bytes: by transfer slot.
        small: of these the bytes of tensors that are copied into frames (:func:`small_bytes`); empty: of a transfer
            that is small itself, all.
    """
    small = small or [size if size < ALONE_BYTES else 0 for size in transfer_bytes]
    alone, seeds = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
    for slot, transfer in enumerate(compiled.transfers):
        src, _, microbatch = transfer.route
        size = costs.micro_batches[microbatch]
        if transfer.forward:
            alone[transfer.src, src, size] += transfer_bytes[slot] - small[slot]
        else:
            seeds[transfer.dst, src, size] += buffer_bytes(transfer_bytes[slot], small[slot])
    found = []
    unsaved: dict[tuple[int, int, int], float] = {}
    for each in compiled.activations:
        key = (each.rank, each.stage, costs.micro_batches[each.microbatch])
        member = costs.stages[each.stage].ranks.index(each.rank)
        found.append(activation_of(costs, each.stage, member, each.microbatch, alone[key], seeds[key]))
        unsaved[key] = found[-1].unsaved / alone[key] if alone[key] else 0.0
    sent = []
    for slot, _ in compiled.messages:
        transfer = compiled.transfers[slot]
        src, _, microbatch = transfer.route
        share = unsaved.get((transfer.src, src, costs.micro_batches[microbatch]), 1.0) if transfer.forward else 1.0
        sent.append((round(share * (transfer_bytes[slot] - small[slot])), small[slot]))
    gradients, update, reduction = {}, {}, {}
    needs = _update_needs(costs)
    for number, stage in enumerate(costs.stages):
        for rank in stage.ranks:
            own = stage.parameter_bytes
            if stage.once is not None:
                own = round(float(stage.once.parameter_bytes[stage.ranks.index(rank)]))
            gradients[rank, number] = own if compiled.trains[rank] else 0
            update[rank, number] = round(needs * _largest_parameter(costs, stage))
            reduction[rank, number] = min(BUCKET_BYTES, own) if len(stage.ranks) > 1 else 0
    return Holdings(
        tuple(found),
        gradients,
        tuple(transfer_bytes[slot] for slot, _ in compiled.messages),
        tuple(buffer_bytes(transfer_bytes[slot], small[slot]) for slot, _ in compiled.messages),
        tuple(sent),
        _acknowledged(compiled),
        update,
        reduction,
        _prepared(costs, compiled),
    )


def small_bytes(program: Program, compiled: CompiledProgram) -> list[int]:
    """By transfer slot, the bytes of its tensors that are too small to be sent on their own."""
    return [framed_bytes(slot.parts(program)) for slot in compiled.transfers]


def framed_bytes(parts: Iterable[Part]) -> int:
    """Bytes of the tensors that a message copies into its frame: those too small to be sent on their own."""
    return sum(part.num_bytes for part in parts if part.num_bytes < ALONE_BYTES)


def _prepared(costs: StageCosts, compiled: CompiledProgram) -> dict[tuple[int, int, int], int]:
    return {
        (rank, action.stage, action.microbatch or 0): costs.prepared_bytes(
            action.stage, costs.stages[action.stage].ranks.index(rank), action.microbatch or 0
        )
        for rank, row in enumerate(compiled.grid)
        for action in row
        if action.op is Op.PREPARE
    }


def buffer_bytes(payload: int, small: int) -> int:
    """What a message takes where it is received: behind a tensor on its own an eighth to spare, behind a frame all."""
    alone = payload - small
    return payload + min(alone // 8, SPARE_BYTES) + min(small, SPARE_BYTES)


def _acknowledged(compiled: CompiledProgram) -> dict[int, tuple[int, ...]]:
    """By message, those of which it tells its receiver that they came.

    A message tells which ones had come when it was sent (:mod:`runtime.transport.peer`).
    """
    received_at: dict[int, int] = {}
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by (sender, receiver): (position, message), ascending
    for row in compiled.rows:
        for position, (code, _, messages) in enumerate(row):
            if code == RECEIVE_STEP:
                received_at.update(dict.fromkeys(messages, position))
            elif code == SEND_STEP:
                for message in messages:
                    ends = compiled.channels[compiled.messages[message][1]]
                    sent.setdefault(ends, []).append((position, message))
    found: dict[int, tuple[int, ...]] = {}
    for (src, dst), leaving in sent.items():
        answers = sent.get((dst, src), [])
        for _, message in leaving:
            first = bisect_right(answers, (received_at[message], len(compiled.messages)))
            if first < len(answers):
                answer = answers[first][1]
                found[answer] = (*found.get(answer, ()), message)
    return found


def _largest_parameter(costs: StageCosts, stage: StagePlacement) -> int:
    graph = costs.book.profile.graph
    names = (name for index in layers_of(stage.runs) for name in graph.layers[index].parameters)
    return max((graph.parameters[name].num_bytes for name in names), default=0)


def _update_needs(costs: StageCosts) -> float:
    """What an update needs besides, in sizes of a parameter: copies that the optimiser makes on its way."""
    optimizer = costs.book.profile.optimizer
    if optimizer.state_bytes_per_parameter_byte >= 2:
        return 2.0
    return 1.0 if optimizer.arguments.get("weight_decay", 0.0) else 0.0
