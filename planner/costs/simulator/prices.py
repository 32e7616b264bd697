"""What the numbers of a compiled program cost: the simulator's input beside the program itself.

What several sends of one action bring to one rank may travel as one message
(:meth:`planner.ir.program.Program.joined`): what follows the first then costs by how much it makes the message
dearer, one latency less than a message of its own.

Where messages stream (:attr:`planner.ir.schedule.Action.streams`) between devices that can, a forward or backward lasts
at least as long as what it sends, and as what it receives, and the message costs nothing beside it (``streamed``).

What messages share is in ``traffic``, which says what is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from planner.costs.communication.links import NetworkPrices, joined_price
from planner.costs.simulator.next_step import NextStep, next_steps
from planner.costs.simulator.program import CompiledProgram
from planner.costs.simulator.traffic import Neighbours, NetworkTraffic, is_shared, neighbours_of, traffic_of
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.input_pipeline import has_host_beside
from planner.ir.plan import Size
from planner.ir.schedule import IN_PAIRS, Op


@dataclass(frozen=True, slots=True)
class SlotPrices:
    """Prices of one program.

    Attributes:
        action_s: by action slot; of a send without what each of its messages costs.
        transfer_s: by transfer slot, from the call that sends to the arrival.
        wires: by channel (:func:`resources`).
        sending_s: by transfer slot, how long that call keeps its rank; empty: not at all.
        beside: by rank, whether its host prepares while it computes; empty: nowhere.
        traffic: what messages share; None if nothing of it can make a difference, nor any neighbour.
        neighbours: what ranks that compute on one host take from one another; None: nothing.
        next_step: by rank, what it prepares of the next step; empty: nothing.
    """

    action_s: Sequence[float]
    transfer_s: Sequence[float]
    wires: Sequence[int]
    sending_s: Sequence[float] = ()
    beside: Sequence[bool] = ()
    traffic: NetworkTraffic | None = None
    next_step: Sequence[NextStep] = ()
    neighbours: Neighbours | None = None


def prices_of(
    compiled: CompiledProgram, costs: StageCosts, transfer_bytes: Sequence[int], wires: Sequence[int]
) -> SlotPrices:
    """All prices of a program.

    Args:
        transfer_bytes: by transfer slot.
        wires: by channel (:func:`resources`).
    """
    network = costs.cost_model.network
    devices = costs.cost_model.cluster.devices
    action_s = [costs.action_s(slot.rank, slot.action, slot.accumulates) for slot in compiled.actions]
    transfer_s = _by_slot(compiled, transfer_bytes, network.transfer_s)
    sending_s = _by_slot(compiled, transfer_bytes, network.sending_s)
    if not any(sending_s):
        sending_s = []
    if compiled.streams:
        action_s, transfer_s, sending_s = streamed(compiled, costs, action_s, transfer_s, sending_s)
    neighbours = neighbours_of(compiled, costs, action_s)
    traffic = traffic_of(compiled, costs, transfer_bytes, transfer_s)
    return SlotPrices(
        action_s,
        transfer_s,
        wires,
        sending_s,
        tuple(map(has_host_beside, devices[: len(compiled.rows)])) if compiled.num_prepared else (),
        traffic if neighbours is not None or is_shared(compiled, traffic) else None,
        next_steps(compiled, costs),
        neighbours,
    )


def _by_slot(
    compiled: CompiledProgram, transfer_bytes: Sequence[int], price: Callable[[int, int, int], float]
) -> list[float]:
    """``price(src, dst, bytes)`` by transfer slot."""
    return [
        joined_price(partial(price, slot.src, slot.dst), num_bytes, slot.bytes_ahead(num_bytes, transfer_bytes))
        for slot, num_bytes in zip(compiled.transfers, transfer_bytes, strict=True)
    ]


def streamed(
    compiled: CompiledProgram,
    costs: StageCosts,
    action_s: Sequence[float],
    transfer_s: Sequence[float],
    sending_s: Sequence[float],
) -> tuple[list[float], list[float], list[float]]:
    """Actions, transfers and calls that send, by slot, where messages stream between devices that can.

    A forward or backward lasts as long as the longest of the channels that it sends or receives on; in pairs, where a
    forward and a backward run at once on parts of the device in proportion to their work, as long as its part of that:
    F at least SR F / (F + B), so that both together last at least SR (BaPipe, Zhao et al., arXiv 2012.12544, its
    schedules 1F1B-AS and FBP-AS).  Ignored: that what streams shares a network card.
    """
    can = [device.streams for device in costs.cost_model.cluster.devices]
    flows = [can[slot.src] and can[slot.dst] for slot in compiled.transfers]
    streaming_s = [seconds * streams for seconds, streams in zip(transfer_s, flows, strict=True)]
    channels = _longest_channels(compiled, costs, streaming_s)
    lasting_s = []
    for one, seconds in zip(compiled.actions, action_s, strict=True):
        action = one.action
        op = Op.BACKWARD if action.op is Op.BACKWARD_INPUT else action.op
        size = costs.micro_batches[action.microbatch] if action.microbatch is not None else 0
        least_s = channels.get((one.rank, action.stage, op, size), 0.0)
        if least_s and compiled.streams == IN_PAIRS:
            halves = [costs.action_s(one.rank, replace(action, op=each)) for each in (Op.FORWARD, Op.BACKWARD)]
            least_s *= halves[op is Op.BACKWARD] / sum(halves) if sum(halves) > 0 else 0.5
        lasting_s.append(max(seconds, least_s))
    rest = 1.0 - np.array(flows, dtype=np.float64)
    return lasting_s, (rest * transfer_s).tolist(), (rest * sending_s).tolist() if sending_s else []


def _longest_channels(
    compiled: CompiledProgram, costs: StageCosts, streaming_s: Sequence[float]
) -> dict[tuple[int, int, Op, Size], float]:
    """By rank, stage, pass and size of micro-batch: seconds of the longest channel that it sends or receives on.

    Args:
        streaming_s: by transfer slot.
    """
    channels: dict[tuple[int, int, Op, Size], dict[tuple[int, int], float]] = {}
    for slot, seconds in zip(compiled.transfers, streaming_s, strict=True):
        first, last, microbatch = slot.route
        op, maker, reader = (Op.FORWARD, first, last) if slot.forward else (Op.BACKWARD, last, first)
        for rank, stage in ((slot.src, maker), (slot.dst, reader)):
            own = channels.setdefault((rank, stage, op, costs.micro_batches[microbatch]), {})
            own[slot.src, slot.dst] = own.get((slot.src, slot.dst), 0.0) + seconds
    return {key: max(own.values()) for key, own in channels.items()}


def resources(compiled: CompiledProgram, network: NetworkPrices) -> list[int]:
    """The wire that each channel uses: its own, or one for both directions where the link is not duplex."""
    number = {pair: index for index, pair in enumerate(compiled.channels)}
    return [
        index if network.duplex(src, dst) else min(index, number.get((dst, src), index))
        for index, (src, dst) in enumerate(compiled.channels)
    ]
