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


def test_a_chain_ends_where_somebody_computes() -> None:
    assert waits().chain(0, beats("0RECV_B1<1", "1RECV_B1<2", "2B1")) == (
        "rank 0 waits 2.0 s for rank 1 (gradient of micro-batch 1, stage 1 -> stage 0), "
        "which waits 2.0 s for rank 2 (gradient of micro-batch 1, stage 2 -> stage 1), "
        "which is computing stage 2 backward of micro-batch 1 (step 7) for 2.0 s"
    )


def test_only_chains_that_are_no_part_of_another_are_told() -> None:
    found = waits().lines(beats("0RECV_B1<1", "1RECV_B1<2", "2B1"))
    assert len(found) == 1
    assert found[0].startswith("rank 0 waits")
    assert len(waits().lines(beats("0F0", "1RECV_F0<0", "2RECV_F0<1"))) == 1
    assert waits().lines(beats("0F0", "1F0", "2F0")) == ()


def test_a_chain_ends_at_a_rank_that_is_silent() -> None:
    text = waits().chain(2, beats("0RECV_B1<1", "1F2", "2RECV_F2<1", silent=1))
    assert text == (
        "rank 2 waits 2.0 s for rank 1 (activation of micro-batch 2, stage 1 -> stage 2), "
        "which has said nothing for 3.0 s or more (its last word: computing stage 1 forward of micro-batch 2 "
        "(step 7)): it is stopped, or its host or link is gone"
    )
    waiting = waits().chain(2, beats("0F2", "1RECV_F2<0", "2RECV_F2<1", silent=1))
    assert "(its last word: waiting for activation of micro-batch 2, stage 0 -> stage 1 (step 7))" in waiting


def test_a_chain_ends_at_a_rank_that_never_spoke() -> None:
    text = waits().chain(0, beats("0RECV_B0<1", "", "2B0"))
    assert text.endswith("stage 1 -> stage 0), of which nothing is known: it has ended, or never started")


def test_what_was_sent_is_on_the_way() -> None:
    text = waits().chain(1, beats("0RECV_B0<1", "1RECV_F1<0", "2B0"))
    assert text == (
        "rank 1 waits 2.0 s for activation of micro-batch 1, stage 0 -> stage 1; "
        "rank 0 has done its part: it is on the way to rank 1"
    )


def test_ranks_in_other_steps_are_behind_or_ahead() -> None:
    assert "which is computing stage 0 backward of micro-batch 3 (step 6)" in waits().chain(
        1, beats("0B3@6", "1RECV_F0<0", "2RECV_F0<1")
    )
    assert "rank 0 has done its part" in waits().chain(1, beats("0F0@8", "1RECV_F3<0", "2RECV_F3<1"))


def test_the_start_and_the_end_of_a_step_are_waits_too() -> None:
    late = waits().chain(0, beats(START, START, "2UPDATE@6"))
    assert (
        late == "rank 0 waits 2.0 s for rank 2 (the start of the step), which is in stage 2, update (step 6) for 2.0 s"
    )
    data = waits().chain(0, beats(START, START, "between steps@6"))
    assert data.endswith("rank 2 (the start of the step), which is between steps (step 6) for 2.0 s")
    taken = waits().chain(2, beats("0RECV_B3<1", "1B2", END))
    assert taken.startswith("rank 2 waits 2.0 s for rank 1 (its messages to be taken), which is computing stage 1")


def test_a_send_that_blocks_waits_for_who_takes_it() -> None:
    rows = [[Action.parse(text) for text in row.split()] for row in ("0F0 0SEND_F0>1!", "1F9 1RECV_F0<0! 1F0")]
    text = Waits(rows, [(0,), (1,)]).chain(0, beats("0SEND_F0>1!", "1F9"))
    assert text.startswith(
        "rank 0 waits 2.0 s for rank 1 (its messages to be taken), which is computing stage 1 forward"
    )


def test_a_sum_waits_for_the_ranks_that_are_not_there() -> None:
    pair = waits(ranks=[(0, 1), (2,)])
    assert any(action.op.value == "REDUCE_GRAD" for action in pair.rows[0])
    assert pair.chain(0, beats("0REDUCE_GRAD", "0B3", "1UPDATE")) == (
        "rank 0 waits 2.0 s for rank 1 (sum of the gradients of stage 0), "
        "which is computing stage 0 backward of micro-batch 3 (step 7) for 2.0 s"
    )
    both = pair.chain(0, beats("0REDUCE_GRAD", "0REDUCE_GRAD", "1UPDATE"))
    assert both.endswith("sum of the gradients of stage 0; rank 1 has done its part: it is on the way to rank 0")


def test_ranks_of_one_stage_may_wait_for_each_other_inside_an_action() -> None:
    pair = waits(ranks=[(0, 1), (2,)])
    assert pair.chain(0, beats("0F2", "0F1", "1RECV_F1<0")) == (
        "rank 0 waits 2.0 s for rank 1 (stage 0 forward of micro-batch 2, which they do together), "
        "which is computing stage 0 forward of micro-batch 1 (step 7) for 2.0 s"
    )
    assert pair.chain(0, beats("0F1", "0F1", "1RECV_F1<0")).startswith("rank 0 is computing stage 0 forward")


def test_of_several_senders_the_one_furthest_behind_is_followed() -> None:
    three = waits(ranks=[(0, 1), (2,)])
    text = three.chain(2, beats("0F2", "0F1", "1RECV_F2<0"))
    assert text.startswith("rank 2 waits 2.0 s for ranks 1, 0 (activation of micro-batch 2, stage 0 -> stage 1), ")
    assert "of which rank 1 is computing stage 0 forward of micro-batch 1" in text


def test_a_circle_is_told_as_one() -> None:
    rows = [[Action.parse(text) for text in row.split()] for row in ("0RECV_B0<1 0SEND_F0>1", "1RECV_F0<0 1SEND_B0>0")]
    text = Waits(rows, [(0,), (1,)]).chain(0, beats("0RECV_B0<1", "1RECV_F0<0"))
    assert text.endswith("and rank 0 is where this began: they wait for one another")
    assert Waits(rows, [(0,), (1,)]).lines(beats("0RECV_B0<1", "1RECV_F0<0")) == (text,)


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
    store, deadline_s, order = dist.HashStore(), 0.3, []
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
