"""Ranks that come too late, leave, or send something else, over every transport."""

from __future__ import annotations

import os
import time

import pytest
import torch

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport import Hub, MessageKey
from tests.runtime.transport.conftest import key, specs_of

LATE_S = 20.0
PROCESSES = pytest.mark.parametrize("run", ["gloo", "shared", "mixed"], indirect=True)


def _receive(transport, ranks):
    transport.post_receive(key(), 1, specs_of(torch.ones(2)))
    transport.receive(key(), 1)


WAYS = {
    "receive": (_receive, "receive step 4 F 0->1 mb 3", 2),
    "sum": (lambda end, ranks: end.all_reduce(torch.ones(1), ranks), "sum over ranks (0, 1), number 1", 2),
    "large sum": (lambda end, ranks: end.all_reduce(torch.ones(300_000), ranks), "sum over ranks (0, 1), number 1", 2),
    "sum of three": (lambda end, ranks: end.all_reduce(torch.ones(1), ranks), "sum over ranks (0, 1, 2), number 1", 3),
    **{
        f"started sum of {size}": (
            lambda end, ranks, size=size: end.start_sum(torch.ones(size), ranks).wait(),
            "started sum over ranks (0, 1), number 1",
            2,
        )
        for size in (2, 300_000)
    },
    **{
        way: (
            lambda end, ranks, name=name: getattr(end, name)(torch.ones(4), (2, 2), ranks),
            f"{way} over ranks (0, 1), number 1",
            2,
        )
        for way, name in {"reduce-scatter": "reduce_scatter", "all-gather": "all_gather"}.items()
    },
    "exchange": (lambda end, ranks: end.start_exchange({}, {1: torch.empty(3)}).wait(), "exchange", 2),
    "barrier": (lambda end, ranks: end.barrier(), "barrier", 3),
}


@pytest.mark.cases(24)
@pytest.mark.parametrize("last", ["is late", "has left", "leaves while it is waited for"])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_does_not_come_is_named_with_what_was_waited_for(run, over, way, last):
    act, what, world_size = WAYS[way]
    ranks = tuple(range(world_size))

    def program(transport):
        if transport.rank == ranks[-1]:
            if last == "is late":
                assert over.wait(LATE_S)
            elif last != "has left":
                time.sleep(0.2)
            return None
        time.sleep(0.2 if last == "has left" else 0.0)
        if last == "is late" and transport.rank == 0:
            transport.deadline_s = 0.1
        with pytest.raises((DeadlineError, TransportError)) as caught:
            act(transport, ranks)
        if transport.rank == 0:
            over.set()
        return str(caught.value)

    text = run(world_size, program)[0]
    assert what in text
    assert f"rank {ranks[-1]}" in text
    if last == "is late":
        assert "error[H503]" in text
        assert "rank 0 waited " in text
        assert "deadline 0.1 s" in text
    else:
        assert "rank 0 lost" in text


@pytest.mark.parametrize("run", ["rendezvous", "gloo", "shared", "mixed"], indirect=True)
def test_a_message_nobody_takes_is_a_deadline_error_of_flush(run, over):
    def program(transport):
        if transport.rank == 1:
            assert over.wait(LATE_S)
            return
        transport.deadline_s = 0.1
        transport.send(key(), 1, [torch.ones(2)])
        with pytest.raises(DeadlineError, match="send step 4 F 0->1 mb 3: rank 0 waited "):
            transport.flush()
        over.set()

    run(2, program)


WRONG = {
    "key": ((torch.ones(2, 3),), "key: expected step 4 F 0->1 mb 3, came step 8 F 0->1 mb 3"),
    "dtype": ((torch.ones(2, 3, dtype=torch.float64),), "dtypes: expected float32, came float64"),
    "larger": ((torch.ones(3, 3),), "payload bytes: expected 24, came 36"),
    "smaller": ((torch.ones(1),), "payload bytes: expected 24, came 4"),
    "shape": ((torch.ones(3, 2),), "checksum of shapes and dtypes: expected"),
    "number": ((torch.ones(2, 3), torch.empty(0)), "number of tensors: expected 1, came 2"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_another_message_than_expected_names_both(run, fault):
    tensors, complaint = WRONG[fault]

    def receive_and_flush(transport):  # where nothing may stop a stream, headers are looked at by flush
        transport.receive(key(), 0)
        transport.flush()

    def program(transport):
        if transport.rank == 0:
            transport.send(key(step=8 if fault == "key" else 4), 1, tensors)  # steps 4 and 8 have the same tag
            return transport.flush()
        transport.post_receive(key(), 0, [((2, 3), torch.float32)])
        with pytest.raises(TransportError) as caught:
            receive_and_flush(transport)
        return str(caught.value)

    text = run(2, program)[1]
    assert "step 4 F 0->1 mb 3: rank 0 sent another message than expected" in text
    assert complaint in text


@pytest.mark.every_case
@pytest.mark.parametrize("groups", [[()], [(1, 0)], [(0, 0)], [(0, 2)], [(-1, 0)]])
def test_a_group_is_an_increasing_tuple_of_ranks(groups):
    with pytest.raises(TransportError, match="not an increasing tuple of ranks below 2"):
        Hub(2, groups)


@PROCESSES
def test_a_killed_process_is_named_by_everybody_who_waits_for_it(run):
    def program(transport):
        if transport.rank == 1:
            time.sleep(0.1)
            os._exit(9)
        transport.post_receive(key(), 1, [((2,), torch.float32)])
        transport.send(MessageKey(4, "B", 1, 0, 0), 1, [torch.ones(2)])
        for act in (
            lambda: transport.receive(key(), 1),
            transport.flush,
            lambda: transport.send(key(), 1, [torch.ones(2)]),
            lambda: transport.all_reduce(torch.ones(2), (0, 1)),
            lambda: transport.all_reduce(torch.ones(300_000), (0, 1)),
            transport.barrier,
        ):
            with pytest.raises(TransportError, match=r"rank 0 lost .*rank 1"):
                act()

    run(2, program)
