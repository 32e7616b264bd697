"""Exchanges by all-to-all give what messages between pairs give, to the bit, forward and backward."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from planner.ir.box import Interval, volume, whole
from planner.ir.errors import TransportError
from planner.layers.division import moves_between
from runtime.extras.compiling.collective import CollectivePeerGroup, open_collectives
from runtime.pipeline.routing import slices
from runtime.spatial.exchange import Exchange, PeerGroup, redistribute
from tests.runtime.spatial.test_exchange import random_case
from tests.runtime.transport.conftest import run_in_processes

STAGES = {0: (0, 1), 1: (0, 1, 2), 2: (3, 1, 0, 2)}
SHARES = [(Interval(0, 4),), (Interval(4, 6),), (Interval(6, 6),), (Interval(6, 9),)]


def cases():
    """By stage, exchanges of so many ranks; some ranks are silent in some of them."""
    for seed in range(120):
        case = random_case(random.Random(seed))
        stage = {2: 0, 3: 1, 4: 2}.get(len(case[1]))
        if stage is not None:
            yield seed, stage, case


def found(exchange, mine, gradient):
    mine = mine.clone().requires_grad_()
    got = redistribute(mine, exchange)
    got.backward(gradient)
    return got.detach(), mine.grad


def test_random_exchanges_equal_those_by_messages(tmp_path):
    def program(transport):
        torch.set_num_threads(1)
        collectives = open_collectives(STAGES, timeout_s=20.0)
        num_silent = 0
        for seed, stage, (shape, owned, held, wanted) in cases():
            if stage not in collectives:
                continue
            x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            groups = (
                PeerGroup(transport, STAGES[stage]),
                CollectivePeerGroup(collectives[stage], STAGES[stage]),
            )
            position = groups[0].position
            moves = moves_between(owned, held, wanted)
            plain = Exchange.of(groups[0], held, wanted, moves)
            joint = groups[1].exchange(held, wanted, moves)
            mine = x[slices(held[position], whole(shape))]
            gradient = torch.randn([len(i) for i in wanted[position]], dtype=torch.float64)
            for one, other in zip(found(plain, mine, gradient), found(joint, mine, gradient), strict=True):
                assert torch.equal(one, other)
            assert groups[0].sent_bytes == groups[1].sent_bytes
            num_silent += bool(moves) and not joint.receives and not joint.sends
        return num_silent

    assert sum(run_in_processes(4, program, (), tmp_path / "store")) > 0


def test_sums_and_gathers_of_parts_of_a_stage(tmp_path):
    def program(transport):
        rank = transport.rank
        stage = open_collectives({7: (0, 1, 2, 3)}, groups=[(0, 2), (1, 3), (0, 1, 2, 3)], timeout_s=20.0)[7]
        half = ((0, 2), (1, 3))[rank % 2]
        everybody = (0, 1, 2, 3)
        term = torch.full((2, 3), float(rank + 1)).t()  # not contiguous
        pending = stage.start_sum(term, half)
        whole_sum = torch.tensor([float(rank)])
        pending.wait()
        stage.all_reduce(whole_sum, everybody)
        assert term.tolist() == [[2.0 * (1 + half[0]) + 2.0] * 2] * 3
        assert whole_sum.item() == 6.0
        for act in (stage.all_gather, transport.all_gather):
            flat = torch.zeros(9)
            flat[slices(SHARES[rank], (Interval(0, 9),))] = rank + 1.0
            act(flat, [volume(box) for box in SHARES], everybody)
            assert flat.tolist() == [1.0] * 4 + [2.0] * 2 + [4.0] * 3
        parts = []
        for act in (stage.reduce_scatter, transport.reduce_scatter):
            flat = torch.arange(9.0) * (rank + 1)
            act(flat, [4, 2, 0, 3], everybody)
            parts.append(flat)
        assert torch.equal(*parts)
        row = torch.tensor([float(rank)])
        came = {other: torch.empty(1) for other in half if other != rank}
        stage.start_exchange(dict.fromkeys(came, row), came).wait()  # the others take no part
        assert [each.item() for each in came.values()] == [float(sum(half) - rank)]
        with pytest.raises(TransportError, match="cannot sum over ranks"):
            stage.all_reduce(row, (0, 1))
        stage.all_reduce(row, (rank,))
        return row.item()

    assert run_in_processes(4, program, (), tmp_path / "store") == [0.0, 1.0, 2.0, 3.0]


def test_a_peer_that_is_gone_is_an_error(tmp_path):
    ends = [(Interval(a, b),) for a, b in pairwise((0, 2, 4))]

    def program(transport):
        stage = open_collectives({0: (0, 1)}, timeout_s=1.0)[0]
        transport.barrier()  # rank 0 has connected, too
        if transport.rank == 1:
            return None
        peers = CollectivePeerGroup(stage, (0, 1))
        wanted = [(Interval(0, 3),), (Interval(1, 4),)]
        exchange = peers.exchange(ends, wanted, moves_between(ends, ends, wanted))
        with pytest.raises(TransportError, match="rank 0 lost one of the ranks"):
            exchange.start(torch.ones(2)).wait()
        return True

    assert run_in_processes(2, program, (), tmp_path / "store")[0]
