from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from benchmarks.chains import chain_profile
from planner.ir.errors import DeadlineError
from planner.ir.schedule import Action
from runtime.monitor.activity import Beat, StatusStore
from runtime.monitor.waits import END, START, RankHeartbeat, Waits
from tests.planner.factories import chain_decision

MICRO_BATCHES = 4
PAIR = chain_decision(chain_profile(2, 2), [1], (2,) * MICRO_BATCHES, [(0,), (1,)], [(2,), (2,)])
"""Two stages of one rank each."""


def waits(num_stages: int = 3, ranks: list[tuple[int, ...]] | None = None) -> Waits:
    """1F1B of a chain; a stage a rank unless given."""
    groups = ranks or [(stage,) for stage in range(num_stages)]
    profile = chain_profile(len(groups), 1 + max(max(group) for group in groups))
    shares = [(2,) * len(group) for group in groups]
    sizes = (sum(shares[0]),) * MICRO_BATCHES
    decision = chain_decision(profile, range(1, len(groups)), sizes, groups, [tuple(s) for s in shares])
    return Waits(decision.rows(), [stage.ranks for stage in decision.stages])


def beats(*whats: str, step: int = 7, silent: int | None = None, seconds: float = 2.0) -> dict[int, Beat]:
    """What each rank says; ``rank: what`` where some say nothing; ``@5`` behind it is another step."""
    found = {}
    for rank, what in enumerate(whats):
        if what:
            text, _, other = what.partition("@")
            beat = Beat(rank, 1, text, int(other or step), seconds, 2.0, 0, None, 0.0)
            found[rank] = beat.aged(3.0) if rank == silent else beat
    return found


def rows(*texts: str, ranks: int = 2) -> Waits:
    return Waits([[Action.parse(text) for text in row.split()] for row in texts], [(rank,) for rank in range(ranks)])


REPLICAS = [(0, 1), (2,)]
CHAINS = {
    "ends where somebody computes": (
        waits(),
        (0, beats("0RECV_B1<1", "1RECV_B1<2", "2B1")),
        (
            "rank 0 waits 2.0 s for rank 1 (gradient of micro-batch 1, stage 1 -> stage 0), "
            "which waits 2.0 s for rank 2 (gradient of micro-batch 1, stage 2 -> stage 1), "
            "which is computing stage 2 backward of micro-batch 1 (step 7) for 2.0 s"
        ),
    ),
    "ends at a rank that is silent": (
        waits(),
        (2, beats("0RECV_B1<1", "1F2", "2RECV_F2<1", silent=1)),
        (
            "rank 2 waits 2.0 s for rank 1 (activation of micro-batch 2, stage 1 -> stage 2), "
            "which has said nothing for 3.0 s or more (its last word: computing stage 1 forward of micro-batch 2 "
            "(step 7)): it is stopped, or its host or link is gone"
        ),
    ),
    "a silent rank's last word was a wait": (
        waits(),
        (2, beats("0F2", "1RECV_F2<0", "2RECV_F2<1", silent=1)),
        "(its last word: waiting for activation of micro-batch 2, stage 0 -> stage 1 (step 7))",
    ),
    "ends at a rank that never spoke": (
        waits(),
        (0, beats("0RECV_B0<1", "", "2B0")),
        "stage 1 -> stage 0), of which nothing is known: it has ended, or never started",
    ),
    "what was sent is on the way": (
        waits(),
        (1, beats("0RECV_B0<1", "1RECV_F1<0", "2B0")),
        (
            "rank 1 waits 2.0 s for activation of micro-batch 1, stage 0 -> stage 1; "
            "rank 0 has done its part: it is on the way to rank 1"
        ),
    ),
    "a rank is a step behind": (
        waits(),
        (1, beats("0B3@6", "1RECV_F0<0", "2RECV_F0<1")),
        "which is computing stage 0 backward of micro-batch 3 (step 6)",
    ),
    "a rank is a step ahead": (waits(), (1, beats("0F0@8", "1RECV_F3<0", "2RECV_F3<1")), "rank 0 has done its part"),
    "the start of a step": (
        waits(),
        (0, beats(START, START, "2UPDATE@6")),
        "rank 0 waits 2.0 s for rank 2 (the start of the step), which is in stage 2, update (step 6) for 2.0 s",
    ),
    "the data": (
        waits(),
        (0, beats(START, START, "between steps@6")),
        "rank 2 (the start of the step), which is between steps (step 6) for 2.0 s",
    ),
    "the end of a step": (
        waits(),
        (2, beats("0RECV_B3<1", "1B2", END)),
        "rank 2 waits 2.0 s for rank 1 (its messages to be taken), which is computing stage 1",
    ),
    "a send that blocks waits for who takes it": (
        rows("0F0 0SEND_F0>1!", "1F9 1RECV_F0<0! 1F0"),
        (0, beats("0SEND_F0>1!", "1F9")),
        "rank 0 waits 2.0 s for rank 1 (its messages to be taken), which is computing stage 1 forward",
    ),
    "a sum waits for the rank that is not there": (
        waits(ranks=REPLICAS),
        (0, beats("0REDUCE_GRAD", "0B3", "1UPDATE")),
        (
            "rank 0 waits 2.0 s for rank 1 (sum of the gradients of stage 0), "
            "which is computing stage 0 backward of micro-batch 3 (step 7) for 2.0 s"
        ),
    ),
    "a sum whose ranks are all there": (
        waits(ranks=REPLICAS),
        (0, beats("0REDUCE_GRAD", "0REDUCE_GRAD", "1UPDATE")),
        "sum of the gradients of stage 0; rank 1 has done its part: it is on the way to rank 0",
    ),
    "ranks of one stage inside an action": (
        waits(ranks=REPLICAS),
        (0, beats("0F2", "0F1", "1RECV_F1<0")),
        (
            "rank 0 waits 2.0 s for rank 1 (stage 0 forward of micro-batch 2, which they do together), "
            "which is computing stage 0 forward of micro-batch 1 (step 7) for 2.0 s"
        ),
    ),
    "ranks of one stage at the same": (
        waits(ranks=REPLICAS),
        (0, beats("0F1", "0F1", "1RECV_F1<0")),
        "rank 0 is computing stage 0 forward",
    ),
    "of several senders the one furthest behind": (
        waits(ranks=REPLICAS),
        (2, beats("0F2", "0F1", "1RECV_F2<0")),
        (
            "rank 2 waits 2.0 s for ranks 1, 0 (activation of micro-batch 2, stage 0 -> stage 1), "
            "of which rank 1 is computing stage 0 forward of micro-batch 1"
        ),
    ),
    "a circle": (
        rows("0RECV_B0<1 0SEND_F0>1", "1RECV_F0<0 1SEND_B0>0"),
        (0, beats("0RECV_B0<1", "1RECV_F0<0")),
        "and rank 0 is where this began: they wait for one another",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_of_waits(case: str) -> None:
    known, (rank, said), text = CHAINS[case]
    assert text in known.chain(rank, said)


def test_only_chains_that_are_no_part_of_another_are_told() -> None:
    (found,) = waits().lines(beats("0RECV_B1<1", "1RECV_B1<2", "2B1"))
    assert found.startswith("rank 0 waits")
    assert len(waits().lines(beats("0F0", "1RECV_F0<0", "2RECV_F0<1"))) == 1
    assert waits().lines(beats("0F0", "1F0", "2F0")) == ()
    circle, (_, said), _ = CHAINS["a circle"]
    assert circle.lines(said) == (circle.chain(0, said),)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_every_receive_of_a_program_has_its_sender(name: str) -> None:
    profile = chain_profile(3, 3)
    decision = chain_decision(profile, (1, 2), (1,) * MICRO_BATCHES, schedule=name)
    known = Waits(decision.rows(), [stage.ranks for stage in decision.stages])
    for rank, row in enumerate(decision.rows()):
        for action in row:
            if action.op.value.startswith("RECV"):
                texts = ["between steps@6"] * 3
                texts[rank] = str(action)
                assert f"for rank {action.peer} (" in known.chain(rank, beats(*texts))


def test_ranks_that_meet_wait_for_one_that_takes_longer_than_a_deadline() -> None:
    store = dist.HashStore()
    deadline_s = 0.3
    order = []
    writes = threading.Event()

    def early() -> None:
        with RankHeartbeat(store, PAIR, 0, deadline_s, 60.0) as rank_heartbeat:
            writes.set()
            rank_heartbeat.meet()
            order.append("early")

    thread = threading.Thread(target=early)
    with RankHeartbeat(store, PAIR, 1, deadline_s, 60.0) as rank_heartbeat:
        thread.start()
        writes.wait(10.0)
        thread.join(3 * deadline_s)  # this rank is busy for so long; its heart beats
        order.append("late")
        rank_heartbeat.meet()
        thread.join()
    assert order == ["late", "early"]


class _Silent(dist.HashStore):
    """A store that answers no question once it is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = threading.Event()

    def check(self, keys: list[str]) -> bool:
        if self.is_cut.is_set():
            threading.Event().wait(5.0)
        return super().check(keys)


@pytest.mark.parametrize("what", ["a rank that is gone", "a store that is silent"])
def test_ranks_that_meet_do_not_wait_for_one_that_is_not_heard_of(what: str) -> None:
    store = _Silent()
    with RankHeartbeat(store, PAIR, 1, 0.2, 60.0):
        pass  # it spoke, and is gone
    with RankHeartbeat(StatusStore(store, 0.1), PAIR, 0, 0.2, 60.0) as rank_heartbeat:
        rank_heartbeat.activity.begin("saving a checkpoint")
        if what == "a store that is silent":
            store.is_cut.set()
        with pytest.raises(DeadlineError, match="waited in vain for rank 1 in saving a checkpoint") as caught:
            rank_heartbeat.meet()
    assert "deadline 0.2 s" in caught.value.details[0]


def test_a_rank_that_met_and_ended_is_not_waited_for() -> None:
    store = dist.HashStore()
    other = threading.Thread(target=lambda: _meets(RankHeartbeat(store, PAIR, 1, 20.0, 60.0)))
    with RankHeartbeat(store, PAIR, 0, 20.0, 60.0) as rank_heartbeat:
        other.start()
        rank_heartbeat.meet()
        other.join()
        with pytest.raises(DeadlineError):
            _impatient(store).meet()


def _meets(rank_heartbeat: RankHeartbeat) -> None:
    with rank_heartbeat:
        rank_heartbeat.meet()


def _impatient(store: dist.Store) -> RankHeartbeat:
    """Rank 0 again, which comes to a second meeting."""
    rank_heartbeat = RankHeartbeat(store, PAIR, 0, 0.1, 60.0)
    rank_heartbeat.activity.meetings = 1
    return rank_heartbeat
