"""Messages of gloo: frames, waits, and when buffers are let go, of which a rank has as many as planned."""

from __future__ import annotations

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

import runtime.transport.gloo as peer_module
from planner.ir.box import whole
from planner.ir.errors import DeadlineError, TransportError
from planner.ir.program import ALONE_BYTES, Message, Part, Program
from planner.ir.schedule import Action, Edge, StageGraph
from runtime.pipeline.p2p import P2PMailbox
from runtime.pipeline.routing import FORWARD, MessageSlice
from runtime.transport import MessageKey
from runtime.transport.base import Deadline
from runtime.transport.frame import Frame, layout_of, tag, unpack
from runtime.transport.gloo import Peer
from runtime.transport.hosts import MixedTransport
from runtime.transport.works import StreamWorks, Works

LARGE = torch.ones(ALONE_BYTES // 4)
SMALL = torch.ones(3)


class Wire:
    """A process group of two without a network: by tag, first sent first received."""

    def __init__(self) -> None:
        self.waiting: dict[int, list[torch.Tensor]] = {}

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Wire:
        self.waiting.setdefault(tag, []).append(tensors[0])
        return self

    def wait(self, limit: object) -> None:
        """Everything has come."""


class Side:
    """One end's process group: what it sends goes into the other's buffers."""

    def __init__(self) -> None:
        self.here = Wire()
        self.there = Wire()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Wire:
        return self.here.recv(tensors, source, tag)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Wire:
        message = tensors[0].contiguous().view(torch.uint8).flatten()
        self.there.waiting[tag].pop(0)[: message.numel()] = message
        return self.there


def ends() -> tuple[Peer, Peer]:
    left = Side()
    right = Side()
    left.there = right.here
    right.there = left.here
    return Peer(left, Works(0), 1), Peer(right, Works(1), 0)


def deliver(source: Peer, target: Peer, key: MessageKey, tensor: torch.Tensor) -> torch.Tensor:
    target.post_receive(key, [(tuple(tensor.shape), tensor.dtype)])
    source.send(key, [tensor])
    return target.receive(key, Deadline(1.0))[0]


def forward(microbatch: int) -> MessageKey:
    return MessageKey(0, "F", 0, 1, microbatch)


def backward(microbatch: int) -> MessageKey:
    return MessageKey(0, "B", 1, 0, microbatch)


@pytest.mark.parametrize("tensor", [SMALL, LARGE])
def test_a_message_that_comes_back_lets_go_of_all_that_its_sender_had_received(tensor):
    left, right = ends()
    for microbatch in range(3):
        assert torch.equal(deliver(left, right, forward(microbatch), tensor), tensor)
    assert (left.num_buffers(), right.num_buffers()) == ((0, 3), (0, 0))
    deliver(right, left, backward(0), tensor)
    assert (left.num_buffers(), right.num_buffers()) == ((0, 0), (0, 1))
    deliver(left, right, forward(3), tensor)
    assert (left.num_buffers(), right.num_buffers()) == ((0, 1), (0, 0))


def test_a_message_that_was_not_received_keeps_its_buffer_and_those_behind_it():
    left, right = ends()
    for microbatch in range(4):
        right.post_receive(forward(microbatch), [((3,), torch.float32)])
        left.send(forward(microbatch), [SMALL * microbatch])
    for microbatch in (0, 2, 3):
        right.receive(forward(microbatch), Deadline(1.0))
    deliver(right, left, backward(0), SMALL)
    assert left.num_buffers() == (0, 3)
    assert torch.equal(right.receive(forward(1), Deadline(1.0))[0], SMALL)
    deliver(right, left, backward(1), SMALL)
    assert left.num_buffers() == (0, 0)


def test_counting_goes_round_at_32_bits():
    left, right = ends()
    left._num_sent = right._num_taken = 2**32 - 2
    for microbatch in range(4):
        deliver(left, right, forward(microbatch), SMALL)
    assert right._num_taken == 2
    deliver(right, left, backward(0), SMALL)
    assert left.num_buffers() == (0, 0)


def test_steady_traffic_needs_as_many_frames_as_are_in_flight(monkeypatch):
    made = []

    class Counted(Frame):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    left, right = ends()
    monkeypatch.setattr(peer_module, "Frame", Counted)
    for microbatch in range(2):
        deliver(left, right, forward(microbatch), SMALL)
    for microbatch in range(2, 20):
        deliver(right, left, backward(microbatch - 2), SMALL)
        deliver(left, right, forward(microbatch), SMALL)
    received = 20 + 18
    assert len(made) - received == 2 + 1  # two forward messages in flight, one backward


def test_a_large_tensor_is_not_copied_and_must_not_change_on_its_way():
    left, right = ends()
    value = LARGE.clone()
    deliver(left, right, forward(0), value)
    assert left._sends[0].alone[0].data_ptr() == value.data_ptr()
    value.add_(1)
    with pytest.raises(TransportError, match="step 0 F 0->1 mb 0 to rank 1 was changed while it was being sent"):
        left.flush(Deadline(1.0))


def test_the_receivers_memory_is_let_go_with_the_tensors():
    left, right = ends()
    came = deliver(left, right, forward(0), LARGE)
    assert right.num_buffers() == (0, 0)
    assert came.untyped_storage().nbytes() <= LARGE.nbytes * 9 // 8


NUM_MICROBATCHES = 9
SHAPE = (5, 2**18)  # 5 MiB: of 16 MiB no more than the least window
BOX = whole(SHAPE)


class End:
    """As a transport, one end of the line between two ranks."""

    def __init__(self, rank: int, peer: Peer) -> None:
        self.rank = rank
        self._peer = peer
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


def post(end: End, steps: Program, peer: int) -> P2PMailbox:
    indices = ((slice(None), slice(None)),)
    wires = {
        route: (MessageSlice(FORWARD, route, peer, ("x",), (BOX,), indices, ((SHAPE, torch.float32),)),)
        for route in steps.messages
    }
    routing = SimpleNamespace(forward_out=wires, forward_in=wires, backward_out={}, backward_in={})
    context = SimpleNamespace(transport=end, rank=end.rank, lookahead=0, device=None)
    return P2PMailbox(context, routing, steps)


def test_a_rank_has_the_buffers_of_its_window_and_of_the_message_it_works_on(monkeypatch):
    alive = set()
    most_alive = []
    make = peer_module.alone_buffer

    def counted(*arguments):
        buffer = make(*arguments)
        name = object()
        alive.add(name)
        weakref.finalize(buffer.untyped_storage(), alive.discard, name)
        most_alive.append(len(alive))
        return buffer

    monkeypatch.setattr(peer_module, "alone_buffer", counted)
    steps = program()
    sender, receiver = (End(rank, peer) for rank, peer in enumerate(ends()))
    there = post(sender, steps, 1)
    here = post(receiver, steps, 0)
    there.begin(0)
    here.begin(0)
    for m in range(NUM_MICROBATCHES):
        there.hand_out(FORWARD, (0, 1, m), {"x": torch.full(SHAPE, float(m))})
        there.handler(Action.parse(f"0SEND_F{m}>1"))()
        here.handler(Action.parse(f"1RECV_F{m}<0"))()
        ((_, tensor),) = here.take(FORWARD, 1, m)["x"]
        assert tensor[0, 0].item() == m
        del tensor
    window = steps.receive_window(1)
    assert window == receiver.most_announced == 4
    assert max(most_alive) <= window + 1
    assert not alive


def test_a_step_forgets_what_came_in_the_last_one_and_was_not_taken():
    steps = program()
    sender, receiver = (End(rank, peer) for rank, peer in enumerate(ends()))
    there = post(sender, steps, 1)
    here = post(receiver, steps, 0)
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


KEY = MessageKey(4, "F", 0, 1, 3)
SPECS = [((2, 3), torch.float32), ((), torch.int64)]


def message() -> torch.Tensor:
    frame = Frame(layout_of(SPECS))
    frame.write(KEY, [torch.arange(6.0).reshape(2, 3), torch.tensor(7)])
    return frame.message


def test_a_flip_of_any_bit_of_the_header_is_noticed():
    for position, bit in itertools.product(range(64), range(8)):
        corrupted = message()
        corrupted[position] ^= 1 << bit
        with pytest.raises(TransportError, match=f"{KEY}: rank 5 sent another message"):
            unpack(corrupted, KEY, 5, layout_of(SPECS))


def test_tags_of_different_keys_differ_and_fit_31_bits():
    ranges = ((0, 3), "AFBZ", (0, 1, 127), (0, 1, 127), (0, 1, 1023))
    tags = [tag(MessageKey(*fields)) for fields in itertools.product(*ranges)]
    assert len(set(tags)) == len(tags)
    assert min(tags) >= 1 << 26
    assert max(tags) < 27 << 26 < 2**31


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        (MessageKey(0, "f", 0, 0, 0), "the kind is 'f', expected one letter from A to Z"),
        (MessageKey(0, "FB", 0, 0, 0), "the kind is 'FB'"),
        (MessageKey(0, "F", 128, 0, 0), "src_stage is 128, expected 0 to 127"),
        (MessageKey(0, "F", 0, -1, 0), "dst_stage is -1, expected 0 to 127"),
        (MessageKey(0, "F", 0, 0, 1024), "microbatch is 1024, expected 0 to 1023"),
    ],
)
def test_a_key_that_fits_no_tag_is_refused(key, complaint):
    with pytest.raises(TransportError, match=complaint):
        tag(key)


class Work:
    """Done after it was asked ``polls`` times; then its wait raises ``error``."""

    def __init__(self, polls: int, error: str = "") -> None:
        self.polls = polls
        self.error = error
        self.num_waits = 0

    def is_completed(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.error and self.polls < 0:
            raise RuntimeError(self.error)


def test_a_wait_of_a_stream_asks_nothing_and_settling_asks_until_all_is_done():
    works = StreamWorks(0)
    some = [Work(0), Work(3), Work(1)]
    for number, work in enumerate(some):
        works.wait(work, ("receive", number), ("rank", 1), Deadline(5.0))
    assert [(work.polls, work.num_waits) for work in some] == [(0, 1), (3, 1), (1, 1)]
    works.settle(Deadline(5.0))
    assert [work.polls for work in some] == [-1, -1, -1]
    works.settle(Deadline(0.0))  # nothing is left


def test_what_is_not_done_in_time_is_named_with_its_peer():
    works = StreamWorks(0)
    for number, work in enumerate((Work(0), Work(10**9), Work(10**9))):
        works.wait(work, ("receive", number), ("rank", 7), Deadline(0.05))
    with pytest.raises(DeadlineError, match=r"receive 1: rank 0 waited \d+\.\d+ s for rank 7, deadline 0\.05 s"):
        works.settle(Deadline(0.05))


def test_what_failed_on_the_device_is_an_error_that_names_the_peer():
    works = StreamWorks(2)
    works.wait(Work(1, "remote process exited"), ("receive", "x"), ("rank", 7), Deadline(5.0))
    with pytest.raises(TransportError, match="receive x: rank 2 lost rank 7") as caught:
        works.settle(Deadline(5.0))
    assert "remote process exited" in str(caught.value)


@pytest.mark.parametrize("works", [Works(3), StreamWorks(3)])
def test_what_cannot_be_started_has_lost_its_peer(works):
    def begin():
        raise RuntimeError("connection reset")

    with pytest.raises(TransportError, match="send y: rank 3 lost rank 4"):
        works.start(begin, ("send", "y"), ("rank", 4))


class Half:
    """One of the two transports of ranks of several hosts."""

    name = ""
    groups = ()
    rank = 0
    world_size = 3
    deadline_s = 5.0

    def flush(self, deadline: Deadline) -> None:
        self.deadline = deadline


def test_a_flush_within_hosts_and_between_them_waits_no_longer_than_one():
    shared = Half()
    gloo = Half()
    MixedTransport(shared, gloo, frozenset([(0, 1)])).flush()
    assert gloo.deadline is shared.deadline
    assert shared.deadline.limit_s == 5.0
