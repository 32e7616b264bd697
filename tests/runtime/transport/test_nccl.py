"""What only a communicator for each channel does; over gloo on the CPU, and with NCCL where there are two GPUs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from planner.ir.box import Interval
from planner.ir.errors import TransportError
from planner.ir.program import Message, Part, Program
from planner.ir.schedule import Action, Edge, StageGraph
from runtime.transport import Channel, ChannelTransport, MessageKey, channels_of, open_nccl
from runtime.transport.base import join

from .conftest import run_in_processes

DEADLINE_S = 20.0
SPECS = [((2, 3), torch.float32)]


def key(microbatch: int) -> MessageKey:
    return MessageKey(0, "F", 0, 1, microbatch)


def test_the_edges_of_a_program_are_its_sends_by_pair_of_ranks():
    part = Part("x", (Interval(0, 2),), 8)
    rows = (("0F0", "0SEND_F0>1", "0RECV_B0<1", "0B0"), ("1RECV_F0<0", "1F0", "1B0", "1SEND_B0>0"))
    program = Program(
        tuple(tuple(Action.parse(text) for text in row) for row in rows),
        StageGraph(2, 1, (Edge(0, 1, ("x",)),)),
        ((0,), (1,)),
        {(0, 1, 0): (Message(0, 1, (part,), (part,)),)},
    )
    assert channels_of(program) == (Channel("B", 1, 0, 1, 0), Channel("F", 0, 1, 0, 1))


@pytest.mark.parametrize("run", ["channels"], indirect=True)
def test_messages_announced_in_another_order_are_found_by_flush(run):
    def program(transport):
        if transport.rank == 0:
            for microbatch in range(2):
                transport.send(key(microbatch), 1, [torch.full((2, 3), float(microbatch))])
            return transport.flush()
        for microbatch in (1, 0):
            transport.post_receive(key(microbatch), 0, SPECS)
        transport.receive(key(1), 0)
        with pytest.raises(TransportError) as caught:
            transport.flush()
        transport.receive(key(0), 0)
        return str(caught.value)

    text = run(2, program)[1]
    assert "step 0 F 0->1 mb 1: rank 0 sent another message than expected" in text
    assert "key: expected step 0 F 0->1 mb 1, came step 0 F 0->1 mb 0" in text


@pytest.mark.parametrize("run", ["channels"], indirect=True)
def test_a_message_of_an_edge_that_was_not_declared_is_refused(run):
    def program(transport):
        peer = 1 - transport.rank
        for act in (
            lambda: transport.post_receive(MessageKey(0, "F", 5, 6, 0), peer, SPECS),
            lambda: transport.send(MessageKey(0, "F", 5, 6, 0), peer, []),
        ):
            with pytest.raises(TransportError, match="belongs to no channel"):
                act()

    run(2, program)


def test_messages_between_hosts_need_no_channel_and_no_order(tmp_path):
    def opened(rank, world_size, groups, store):
        make = partial(
            ChannelTransport, [], groups, backend="gloo", device="cpu", host_kinds="HD", timeout_s=20.0, owns_group=True
        )
        return join("gloo", rank, world_size, dist.FileStore(str(store), world_size), 20.0, make)

    def program(transport):
        keys = [MessageKey(turn, "H", 0, 0, 0) for turn in range(2)]
        if transport.rank == 0:
            for number, each in enumerate(keys):
                transport.send(each, 1, [torch.full((2, 3), float(number))])
            transport.flush()
            return transport.num_buffers()
        for each in keys:
            transport.post_receive(each, 0, SPECS)
        came = [transport.receive(each, 0)[0].unique().tolist() for each in reversed(keys)]
        transport.flush()
        return came

    assert run_in_processes(2, program, [], tmp_path / "store", opened) == [(0, 0), [[1.0], [0.0]]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs")
def test_messages_and_sums_over_nccl(tmp_path):
    channels = [Channel("F", 0, 1, 0, 1), Channel("B", 1, 0, 1, 0)]

    def opened(rank, world_size, groups, store):
        return open_nccl(
            f"cuda:{rank}", channels, rank, world_size, dist.FileStore(str(store), world_size), 60.0, groups
        )

    def program(transport):
        device = f"cuda:{transport.rank}"
        for microbatch in range(4):
            value = torch.full((2, 300_000), float(microbatch), device=device)
            if transport.rank == 0:
                transport.post_receive(MessageKey(0, "B", 1, 0, microbatch), 1, [((2, 300_000), torch.float32)])
                transport.send(key(microbatch), 1, [value])
                (came,) = transport.receive(MessageKey(0, "B", 1, 0, microbatch), 1)
                assert torch.equal(came, value + 1)
            else:
                transport.post_receive(key(microbatch), 0, [((2, 300_000), torch.float32)])
                (came,) = transport.receive(key(microbatch), 0)
                transport.send(MessageKey(0, "B", 1, 0, microbatch), 0, [came + 1])
        transport.flush()
        total = torch.ones(5, device=device)
        pending = transport.start_sum(total, (0, 1))
        flat = torch.arange(5.0, device=device)
        transport.reduce_scatter(flat, (2, 3), (0, 1))
        transport.all_gather(flat, (2, 3), (0, 1))
        pending.wait()
        transport.barrier()
        transport.flush()
        return total.tolist(), flat.tolist()

    expected = ([2.0] * 5, [0.0, 2.0, 4.0, 6.0, 8.0])
    assert run_in_processes(2, program, [], tmp_path / "store", opened) == [expected] * 2


@pytest.mark.cuda
def test_tensors_of_a_gpu_come_as_tensors_of_the_cpu():
    from runtime.transport import Hub, InProcessTransport

    hub = Hub(2)
    sender = InProcessTransport(hub, 0)
    receiver = InProcessTransport(hub, 1)
    value = torch.randn(2, 3, device="cuda", requires_grad=True)
    receiver.post_receive(key(0), 0, SPECS)
    sender.send(key(0), 1, [value])
    (came,) = receiver.receive(key(0), 0)
    assert came.device.type == "cpu"
    assert torch.equal(came, value.detach().cpu())
