"""Ranks of a plan as threads, each with its stages on a card that is not there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from planner.ir.plan import Decision
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.engine import Engine
from runtime.optim.ties import groups_of
from runtime.rank import RankContext
from runtime.transport import InProcessTransport, MessageKey
from runtime.transport.frame import FrameLayout
from runtime.transport.inprocess import QueuedMessage
from tests.devices.card import DEVICE, Card, Crossings, card
from tests.runtime.ranks import on_ranks

T = TypeVar("T")
_DEADLINE_S = 60.0


@dataclass(slots=True)
class _Parcel(QueuedMessage):
    tensors: tuple[Tensor, ...] = ()


class CardTransport(InProcessTransport):
    """Messages go from card to card, as over NCCL."""

    def _packed(self, key: MessageKey, tensors: Sequence[Tensor]) -> QueuedMessage:
        return _Parcel(key, torch.empty(0), tensors=tuple(each.detach().clone() for each in tensors))

    def _unpacked(
        self, message: QueuedMessage, key: MessageKey, source: int, layout: FrameLayout
    ) -> tuple[Tensor, ...]:
        assert isinstance(message, _Parcel)
        assert message.key == key
        assert tuple((tuple(each.shape), each.dtype) for each in message.tensors) == layout.specs, key
        return message.tensors


def on_card(
    decision: Decision,
    network: tuple[LoadedModel, CapturedModule],
    work: Callable[[Engine, Card, InProcessTransport], T],
    crossings: Crossings,
    *,
    optimizer: Callable[..., torch.optim.Optimizer],
    transport: type[InProcessTransport] = CardTransport,
    **options: Any,
) -> list[T]:
    """What ``work`` gives on each rank; ranks take turns, one waits where another goes on."""
    with card() as made:
        cards = [made(crossings) for _ in range(decision.num_ranks)]
        copies = [hosted(each, network) for each in cards]

        def run(end: InProcessTransport) -> T:
            own = cards[end.rank]
            model, captured = copies[end.rank]
            # Backward in this thread, in its turn.
            with end._hub.changed, torch.autograd.set_multithreading_enabled(False), own:
                told = {"model": captured, "module": model.module, "transport": end, **options}
                engine = Engine(RankContext(decision, optimizer, device=DEVICE, deadline_s=_DEADLINE_S, **told))
                return work(engine, own, end)

        groups = groups_of(decision, network[1].graph)
        return on_ranks(decision.num_ranks, run, groups, rendezvous=True, transport=transport)


def hosted(made: Card, network: tuple[LoadedModel, CapturedModule]) -> tuple[LoadedModel, CapturedModule]:
    """A copy of a network whose parameters, buffers and constants can be moved to the card."""
    model, captured = network
    held = [*captured.graph_module.parameters(), *captured.graph_module.buffers()]
    held += [each for owner in model.owners.values() for each in (*owner.parameters(), *owner.buffers())]
    memo: dict[int, object] = {id(each): made.of_host(each) for each in {id(each): each for each in held}.values()}
    return copy.deepcopy(network, {**memo, id(captured.graph): captured.graph})
