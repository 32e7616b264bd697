"""How many receive buffers a rank has: those of the window that the memory model counts, and what it works on."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import torch

import runtime.transport.gloo as peer_module
from planner.ir.box import whole
from planner.ir.program import Message, Part, Program
from planner.ir.schedule import Action, Edge, StageGraph
from runtime.pipeline.p2p import FORWARD, P2PMailbox
from runtime.pipeline.routing import MessageSlice
from runtime.transport.base import Deadline
from runtime.transport.gloo import Peer

from .test_peer import ends

NUM_MICROBATCHES = 9
SHAPE = (5, 2**18)  # 5 MiB: of 16 MiB no more than the least window
BOX = whole(SHAPE)


class End:
    """As a transport, one end of the wire between two ranks."""

    def __init__(self, rank: int, peer: Peer) -> None:
        self.rank, self._peer = rank, peer
        self.most_announced = 0

    def post_receive(self, key, source, specs):
        self._peer.post_receive(key, specs)
        self.most_announced = max(self.most_announced, self._peer.num_buffers()[0])

    def receive(self, key, source):
        return self._peer.receive(key, Deadline(1.0))

    def send(self, key, destination, tensors):
        self._peer.send(key, tensors)


def program() -> Program:
    part = Part("x", BOX, 5 * 2**20)
    rows = (
        [text for m in range(NUM_MICROBATCHES) for text in (f"0F{m}", f"0SEND_F{m}>1")],
        [text for m in range(NUM_MICROBATCHES) for text in (f"1RECV_F{m}<0", f"1F{m}")],
    )
    return Program(
        tuple(tuple(map(Action.parse, row)) for row in rows),
        StageGraph(2, NUM_MICROBATCHES, (Edge(0, 1, ("x",)),)),
        ((0,), (1,)),
        {(0, 1, m): (Message(0, 1, (part,), ()),) for m in range(NUM_MICROBATCHES)},
    )


def post(end: End, whole_program: Program, peer: int) -> P2PMailbox:
    wire = MessageSlice(peer, ("x",), (BOX,), ((slice(None), slice(None)),), ((SHAPE, torch.float32),))
    wires = dict.fromkeys(whole_program.messages, (wire,))
    routing = SimpleNamespace(forward_out=wires, forward_in=wires, backward_out={}, backward_in={})
    context = SimpleNamespace(transport=end, rank=end.rank, lookahead=0, device=None)
    return P2PMailbox(context, routing, whole_program)


def test_a_rank_has_the_buffers_of_its_window_and_of_the_message_it_works_on(monkeypatch):
    alive, most_alive = set(), []
    make = peer_module.alone_buffer

    def counted(*arguments):
        buffer = make(*arguments)
        name = object()
        alive.add(name)
        weakref.finalize(buffer.untyped_storage(), alive.discard, name)
        most_alive.append(len(alive))
        return buffer

    monkeypatch.setattr(peer_module, "alone_buffer", counted)
    whole_program = program()
    sender, receiver = (End(rank, peer) for rank, peer in enumerate(ends()))
    there, here = post(sender, whole_program, 1), post(receiver, whole_program, 0)
    there.begin(0)
    here.begin(0)
    for m in range(NUM_MICROBATCHES):
        there.hand_out(FORWARD, (0, 1, m), {"x": torch.full(SHAPE, float(m))})
        there.handler(Action.parse(f"0SEND_F{m}>1"))()
        here.handler(Action.parse(f"1RECV_F{m}<0"))()
        ((_, tensor),) = here.take(FORWARD, 1, m)["x"]
        assert tensor[0, 0].item() == m
        del tensor
    window = whole_program.receive_window(1)
    assert window == receiver.most_announced == 4
    assert max(most_alive) <= window + 1
    assert not alive


def test_a_step_forgets_what_came_in_the_last_one_and_was_not_taken():
    whole_program = program()
    sender, receiver = (End(rank, peer) for rank, peer in enumerate(ends()))
    there, here = post(sender, whole_program, 1), post(receiver, whole_program, 0)
    there.begin(0)
    here.begin(0)
    for m in range(2):
        there.hand_out(FORWARD, (0, 1, m), {"x": torch.full(SHAPE, float(m))})
    there.handler(Action.parse("0SEND_F0>1"))()
    here.handler(Action.parse("1RECV_F0<0"))()
    assert (there.num_left, here.num_left) == (1, 1)
    there.begin(1)
    here.begin(1)
    assert (there.num_left, here.num_left) == (0, 0)
