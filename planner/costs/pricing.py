"""What the numbers of a compiled program cost: the simulator's input beside the program itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.costs.compiled import CompiledProgram
from planner.costs.network import Network
from planner.costs.preparing import has_host_beside
from planner.costs.stage import StageCosts
from planner.costs.traffic import Traffic, traffic_of
from planner.ir.program import Program


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of one program.

    Attributes:
        action_s: by action slot; of a send without what each of its messages costs.
        transfer_s: by transfer slot, from the call that sends to the arrival.
        sending_s: by transfer slot, how long that call keeps its rank; empty: not at all.
        wires: by channel (:func:`resources`).
        beside: by rank, whether its host prepares while it computes; empty: nowhere.
        traffic: what messages share; None if nothing of it can make a difference.
    """

    action_s: Sequence[float]
    transfer_s: Sequence[float]
    sending_s: Sequence[float]
    wires: Sequence[int]
    beside: Sequence[bool]
    traffic: Traffic | None


def prices_of(
    compiled: CompiledProgram, costs: StageCosts, sizes: Sequence[int], wires: Sequence[int] | None = None
) -> Prices:
    """All prices of a program.

    Args:
        sizes: bytes by transfer slot.
        wires: if they are known.
    """
    network = costs.book.network
    transfer_s = transfer_prices(compiled, sizes, network)
    return Prices(
        action_prices(compiled, costs),
        transfer_s,
        sending_prices(compiled, sizes, network),
        resources(compiled, network) if wires is None else wires,
        hosts_beside(compiled, costs),
        traffic_of(compiled, costs, sizes, transfer_s),
    )


def action_prices(compiled: CompiledProgram, costs: StageCosts) -> list[float]:
    """Seconds by action slot."""
    return [costs.action_s(slot.rank, slot.action, slot.accumulates) for slot in compiled.actions]


def transfer_bytes(program: Program, compiled: CompiledProgram) -> list[int]:
    """Bytes by transfer slot."""
    return [sum(part.num_bytes for part in slot.parts(program)) for slot in compiled.transfers]


def transfer_prices(compiled: CompiledProgram, sizes: Sequence[int], network: Network) -> list[float]:
    """Seconds by transfer slot."""
    return [network.transfer_s(slot.src, slot.dst, size) for slot, size in zip(compiled.transfers, sizes, strict=True)]


def sending_prices(compiled: CompiledProgram, sizes: Sequence[int], network: Network) -> list[float]:
    """Seconds of the call that sends, by transfer slot; empty if none of them takes any."""
    slots = zip(compiled.transfers, sizes, strict=True)
    found = [network.sending_s(slot.src, slot.dst, size) for slot, size in slots]
    return found if any(found) else []


def resources(compiled: CompiledProgram, network: Network) -> list[int]:
    """The wire that each channel uses: its own, or one for both directions where the link is not duplex."""
    number = {pair: index for index, pair in enumerate(compiled.channels)}
    return [
        index if network.duplex(src, dst) else min(index, number.get((dst, src), index))
        for index, (src, dst) in enumerate(compiled.channels)
    ]


def hosts_beside(compiled: CompiledProgram, costs: StageCosts) -> tuple[bool, ...]:
    """By rank, whether its host prepares while it computes."""
    devices = costs.book.profile.cluster.devices
    return tuple(has_host_beside(devices[rank]) for rank in range(len(compiled.rows))) if compiled.num_prepared else ()
