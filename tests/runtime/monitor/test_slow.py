"""Slow ranks and links are named, and noise is not; ranks are numbers here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pytest

from planner.ir.plan import Decision, Placement, Prediction, RankPrediction, Stage
from planner.ir.timeline import Slow, Span
from runtime.monitor.slow import Moves, SlowWatch, StepLog, busy_s, waits_s

PREDICTED_S = (0.010, 0.012, 0.008, 0.011)
DRIFT = 1.15
"""The machine is slower than in its profile, on all ranks."""


@dataclass(frozen=True)
class Told:
    last: int
    busy_s: tuple[float, ...]
    parts_s: Mapping[str, float] = field(default_factory=dict)
    marked: int = 0
    moves: Moves = ()


def decision(ranks: tuple[tuple[int, ...], ...] = ((0,), (1,), (2,), (3,))) -> Decision:
    stages = tuple(Stage(each, tuple(f"n0/cpu{rank}" for rank in each)) for each in ranks)
    layers = {f"layer{index}": Placement(index) for index in range(len(ranks))}
    return Decision("1f1b", (1,), stages, layers, tuple(() for each in ranks for _ in each))


def watch(predicted_s: tuple[float, ...] = PREDICTED_S, **options: object) -> SlowWatch:
    ranks = tuple(RankPrediction(rank, each, 0.001, 0.0, 0, 0) for rank, each in enumerate(predicted_s))
    return SlowWatch(decision(**options), Prediction(0.03, 1.0, 0.0, ranks, "measured"))


def steps(noise: float, seed: int, count: int = 100) -> Iterator[tuple[int, list[float]]]:
    draw = random.Random(seed)
    for step in range(1, count + 1):
        yield step, [each * DRIFT * draw.gauss(1.0, noise) for each in PREDICTED_S]


def told(step: int, busy: list[float]) -> dict[int, Told]:
    return {rank: Told(step, (each,), {f"stage {rank} forward": each}) for rank, each in enumerate(busy)}


def run(noise: float, seed: int, slow: int = -1, since: int = 30, until: int = 100) -> list[Slow]:
    """What is found where rank ``slow`` takes 1.3 times as long from one step to another."""
    found = []
    watching = watch()
    for step, busy in steps(noise, seed):
        if slow >= 0 and since <= step <= until:
            busy[slow] *= 1.3
        found += watching.note(told(step, busy))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_a_tenth_names_nobody(seed: int) -> None:
    assert run(0.1, seed) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_of_1_3_times_its_prediction_is_named_within_three_steps(seed: int) -> None:
    rank = seed % 4
    since = (1, 30)[seed % 2]
    first, *others = run(0.02, seed, rank, since)
    assert others == []
    assert (first.rank, first.peer) == (rank, None)
    assert first.step == max(since + 2, 8)  # so many say how the others are
    assert first.factor == pytest.approx(1.3, rel=0.05)
    assert f"stage {rank} forward takes " in first.why
    assert ("before" in first.why) == (since > 1)


@pytest.mark.parametrize("seed", range(20))
def test_in_noise_of_a_tenth_it_is_named_all_the_same(seed: int) -> None:
    found = run(0.1, seed, 2)
    assert {each.rank for each in found} == {2}
    assert 32 <= found[0].step < 60


def test_a_rank_that_has_recovered_is_said_to_and_may_be_named_again() -> None:
    found = run(0.02, 0, 1, 30, 60)
    assert [(each.rank, each.step, each.factor == 1.0) for each in found] == [(1, 32, False), (1, 65, True)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("predicted_s", "slower", "named"),
    [
        (PREDICTED_S, lambda step: (3.0,) * 4, []),
        ((0.0,) * 4, lambda step: (1.0, 1.0, 1.0, 1.4 if step > 50 else 1.0), [(3, 53)]),
        ((0.010, 0.020, 0.008, 0.011), lambda step: (1.0, 1.3 if step > 50 else 1.0, 1.0, 1.0), [(1, 53)]),
    ],
    ids=["all slower: the machine", "no prediction: the first steps", "once faster than predicted"],
)
def test_ranks_are_measured_by_one_another_and_by_their_own_first_steps(
    predicted_s: tuple[float, ...], slower: Callable[[int], tuple[float, ...]], named: list[tuple[int, int]]
) -> None:
    watching = watch(predicted_s)
    found = []
    for step, busy in steps(0.02, 0):
        found += watching.note(told(step, [factor * each for factor, each in zip(slower(step), busy, strict=True)]))
    assert [(each.rank, each.step) for each in found] == named


def test_of_ranks_that_wait_for_one_another_one_is_named() -> None:
    watching = watch(ranks=((0,), (1, 2), (3,)))
    found = []
    for step, (first, second, third, last) in steps(0.01, 0):
        found += watching.note(told(step, [first, 1.4 * second, 1.38 * third, last]))
    assert len(found) == 1
    assert found[0].rank in (1, 2)


def message(step: int, flight_s: float) -> dict[int, Told]:
    """Stage 0 sends at 1 ms, stage 1 waits for it from the start."""
    moves = {0: [("0SEND_F0>1", 0.001, 0.0011)], 1: [("1RECV_F0<0", 0.0, 0.001 + flight_s)]}
    return {rank: Told(step, (each,), marked=step, moves=moves.get(rank, ())) for rank, each in enumerate(PREDICTED_S)}


@pytest.mark.parametrize(("since", "named_at"), [(10, 12), (1, 3)])
def test_a_link_of_a_tenth_of_its_bandwidth_is_named(since: int, named_at: int) -> None:
    watching = watch()
    found = []
    for step in range(1, 20):
        found += watching.note(message(step, 0.010 if step >= since else 0.001))
    assert [(each.peer, each.rank, each.step) for each in found] == [(0, 1, named_at)]
    assert found[0].factor >= 5
    assert "messages on their way hold rank 1 up for 10 ms a step" in found[0].why


def test_a_link_behind_which_all_is_hidden_is_not_named() -> None:
    watching = watch()
    assert not [one for step in range(1, 20) for one in watching.note(message(step, 0.002 if step > 9 else 0.0001))]


def test_ranks_whose_messages_are_of_different_steps_say_nothing_of_links() -> None:
    watching = watch()
    for step in range(1, 20):
        late = message(step, 0.01)
        late[1] = message(step + 1, 0.01)[1]
        assert watching.note(late) == []


def test_messages_of_one_step_count_once_however_often_they_are_told() -> None:
    watching = watch()
    for step in range(1, 10):
        watching.note(message(step, 0.001))
    again = [{rank: replace(each, last=last) for rank, each in message(10, 0.010).items()} for last in range(10, 16)]
    assert not [one for each in again for one in watching.note(each)]


def test_a_wait_counts_from_when_the_message_was_sent() -> None:
    moves = {
        0: [("0SEND_F0>1", 1.0, 1.1), ("0RECV_B0<1", 2.0, 4.0)],
        1: [("1RECV_F0<0", 0.0, 1.5), ("1SEND_B0>0", 5.0, 5.1)],
    }
    assert waits_s(moves, [(0,), (1,)]) == pytest.approx({(0, 1): 0.5, (1, 0): 0.0})


def spans(seconds: float) -> tuple[Span, ...]:
    return (
        Span(1, "1RECV_F0<0", 0.0, 5.0),
        Span(1, "1F0", 5.0, 5.0 + seconds),
        Span(1, "1I0", 6.0, 6.5),
        Span(1, "1W0", 6.5, 7.0),
        Span(1, "1SEND_B0>0", 7.0, 8.0),
        Span(1, "1REDUCE_GRAD", 8.0, 9.0),
        Span(1, "1UPDATE", 9.0, 9.25),
    )


def test_own_actions_are_counted_by_stage_and_pass_and_waits_are_not() -> None:
    assert busy_s(spans(0.75)) == {"stage 1 forward": 0.75, "stage 1 backward": 1.0, "stage 1 update": 0.25}


def test_a_rank_tells_its_last_steps_and_the_messages_of_one_that_all_tell_of() -> None:
    noted = StepLog()
    for number in range(1, 21):
        noted.note(number, spans(number / 100), 0.5)
    found = noted.report()
    assert found["last"] == 20
    assert found["busy_s"] == pytest.approx([1.25 + number / 100 for number in range(13, 21)])
    assert found["marked"] == 20  # of every fourth, as they are two seconds apart
    assert [text for text, _, _ in found["moves"]] == ["1RECV_F0<0", "1SEND_B0>0"]
    noted.note(21, spans(0.5), 0.5)
    assert noted.report()["marked"] == 20
