from __future__ import annotations

import threading
import time

import pytest
import torch

from planner.ir.errors import DeadlineError, WorkerError
from runtime.transport import Hub, InProcessTransport, MessageKey, Transport
from tests.runtime.transport.conftest import Program, run_in_threads

SPECS = [((2,), torch.float32)]


def key(microbatch: int) -> MessageKey:
    return MessageKey(0, "F", 0, 1, microbatch)


def errors_of(hub: Hub, program: Program) -> list[str]:
    """What each rank's program raised, each in its own thread."""

    def work(transport: Transport) -> str:
        try:
            program(transport)
        except WorkerError as error:
            return str(error)
        return ""

    return run_in_threads(hub.world_size, work, hub)


def test_ranks_that_wait_for_one_another_are_told_at_once_with_the_chain_of_waits():
    def program(transport):
        peer = (transport.rank + 1) % 3
        transport.post_receive(MessageKey(1, "B", peer, transport.rank, 2), peer, SPECS)
        transport.receive(MessageKey(1, "B", peer, transport.rank, 2), peer)

    for rank, text in enumerate(errors_of(Hub(3), program)):
        assert f"rank {rank} waits for rank {(rank + 1) % 3} forever" in text
        assert "rank 0 waits for rank 1: receive step 1 B 1->0 mb 2" in text
        assert "rank 2 waits for rank 0: receive step 1 B 0->2 mb 2" in text


def test_sends_before_receives_stall_under_rendezvous_and_pass_without():
    def program(transport):
        peer = 1 - transport.rank
        name = MessageKey(0, "F", transport.rank, peer, 0)
        transport.send(name, peer, [torch.ones(2)])
        transport.flush()
        back = MessageKey(0, "F", peer, transport.rank, 0)
        transport.post_receive(back, peer, SPECS)
        transport.receive(back, peer)

    assert errors_of(Hub(2), program) == ["", ""]
    assert all("forever" in text for text in errors_of(Hub(2, rendezvous=True), program))


def test_a_message_wakes_the_rank_that_waits_for_it():
    """All receives are announced before the first message, so that nothing that follows it wakes anybody."""
    announced = threading.Barrier(2)

    def program(transport):
        peer = 1 - transport.rank
        sent = [MessageKey(0, "F", transport.rank, peer, number) for number in range(20)]
        expected = [MessageKey(0, "F", peer, transport.rank, number) for number in range(20)]
        for each in expected:
            transport.post_receive(each, peer, SPECS)
        announced.wait()
        for mine, theirs in zip(sent, expected, strict=True):
            if transport.rank == 1:
                transport.receive(theirs, peer)
            transport.send(mine, peer, [torch.ones(2)])
            if transport.rank == 0:
                transport.receive(theirs, peer)

    assert errors_of(Hub(2), program) == ["", ""]


def test_a_full_channel_holds_the_sender_until_the_receiver_announces_a_message():
    hub = Hub(2, capacity=2)
    sender = InProcessTransport(hub, 0)
    receiver = InProcessTransport(hub, 1)
    sent: list[int] = []

    def work() -> None:
        for microbatch in range(4):
            sender.send(key(microbatch), 1, [torch.full((2,), float(microbatch))])
            sent.append(microbatch)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while len(sent) < 2:
        time.sleep(0.001)
    time.sleep(0.05)  # in which it would send more
    assert sent == [0, 1]
    for microbatch in range(4):
        receiver.post_receive(key(microbatch), 0, SPECS)
    thread.join(30.0)
    assert [receiver.receive(key(number), 0)[0][0].item() for number in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_a_sender_into_a_full_channel_gives_up_after_the_hubs_deadline():
    sender = InProcessTransport(Hub(2, capacity=1, deadline_s=0.05), 0)
    sender.send(key(0), 1, [torch.ones(2)])
    with pytest.raises(DeadlineError, match=r"send step 0 F 0->1 mb 1: rank 0 waited \d+\.\d+ s for rank 1"):
        sender.send(key(1), 1, [torch.ones(2)])


def test_messages_of_a_rank_that_left_can_still_be_received():
    hub = Hub(2)
    sender = InProcessTransport(hub, 0)
    receiver = InProcessTransport(hub, 1)
    sender.send(key(0), 1, [torch.ones(2)])
    sender.close()
    receiver.post_receive(key(0), 0, SPECS)
    assert torch.equal(receiver.receive(key(0), 0)[0], torch.ones(2))


def test_terms_of_different_shape_are_refused_by_name():
    def program(transport):
        transport.all_reduce(torch.ones(2 + transport.rank), (0, 1))

    texts = errors_of(Hub(2), program)
    assert any("(2,) torch.float32" in text and "(3,) torch.float32" in text for text in texts)
    assert all(texts)


def test_a_hub_keeps_nothing_of_messages_and_sums_that_are_done():
    def program(transport):
        transport.barrier()
        if transport.rank == 0:
            transport.send(key(0), 1, [torch.ones(2)])
        else:
            transport.post_receive(key(0), 0, SPECS)
            transport.receive(key(0), 0)

    hub = Hub(2)
    assert errors_of(hub, program) == ["", ""]
    assert not hub.mailboxes
    assert not hub.parcels
