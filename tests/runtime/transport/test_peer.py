"""When buffers are let go and used again."""

from __future__ import annotations

import pytest
import torch

import runtime.transport.gloo as peer_module
from planner.ir.errors import TransportError
from planner.ir.program import ALONE_BYTES
from runtime.transport import Key
from runtime.transport.base import Deadline
from runtime.transport.frame import Frame
from runtime.transport.gloo import Peer
from runtime.transport.works import Works

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
        self.here, self.there = Wire(), Wire()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Wire:
        return self.here.recv(tensors, source, tag)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Wire:
        message = tensors[0].contiguous().view(torch.uint8).flatten()
        self.there.waiting[tag].pop(0)[: message.numel()] = message
        return self.there


def ends() -> tuple[Peer, Peer]:
    left, right = Side(), Side()
    left.there, right.there = right.here, left.here
    return Peer(left, Works(0), 1), Peer(right, Works(1), 0)


def deliver(source: Peer, target: Peer, key: Key, tensor: torch.Tensor) -> torch.Tensor:
    target.post_receive(key, [(tuple(tensor.shape), tensor.dtype)])
    source.send(key, [tensor])
    return target.receive(key, Deadline(1.0))[0]


def forward(microbatch: int) -> Key:
    return Key(0, "F", 0, 1, microbatch)


def backward(microbatch: int) -> Key:
    return Key(0, "B", 1, 0, microbatch)


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
