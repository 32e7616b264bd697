from __future__ import annotations

import random

import pytest

from planner.extras.transformers import pipeline
from planner.extras.transformers.pipeline import Chunks, chunked, even_s, stay_s
from planner.extras.transformers.shape import Sends


@pytest.mark.parametrize(
    ("stages", "interleave", "micro_batches"), [(1, 1, 5), (2, 1, 4), (4, 1, 9), (4, 2, 8), (3, 4, 6)]
)
def test_alike_chunks_take_the_closed_form_the_simulated_and_the_least_time(
    stages: int, interleave: int, micro_batches: int
) -> None:
    number = stages * interleave
    chunks = Chunks((1.0,) * number, (2.0,) * number, stages)
    closed = 3.0 * interleave * (micro_batches + (stages - 1) / interleave)
    assert chunks.step_s(micro_batches) == pytest.approx(closed)
    assert chunks.least_s(micro_batches) == pytest.approx(closed)


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_is_shorter_than_the_least(seed: int) -> None:
    draw = random.Random(seed)
    stages, interleave = draw.randint(1, 5), draw.randint(1, 3)
    passes = [(draw.random(), draw.random()) for _ in range(stages * interleave)]
    hops = [draw.choice((0.0, 0.2 * draw.random())) for _ in passes[1:]]
    chunks = chunked(passes, hops, draw.choice(list(Sends)), stages)
    for micro_batches in (1, stages, 3 * stages):
        name = "gpipe" if interleave == 1 and draw.random() < 0.3 else "1f1b"
        assert chunks.step_s(micro_batches, name) >= chunks.least_s(micro_batches) - 1e-9


@pytest.mark.parametrize(
    ("chunks", "name"),
    [
        (Chunks((1.0, 2.0, 1.5, 1.0), (2.0, 4.0, 3.0, 2.0), 4), "1f1b"),
        (Chunks((1.0,) * 6, (2.0,) * 6, 3), "1f1b"),
        (Chunks((1.0, 2.0, 1.5), (2.0, 4.0, 5.0), 3), "gpipe"),
        (Chunks((1.0,) * 4, (4.0,) * 4, 4, overlapped_s=2.5), "gpipe"),
    ],
)
def test_many_micro_batches_are_read_off_fewer(chunks: Chunks, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chunks.step_s(60, name)
    monkeypatch.setattr(pipeline, "MOST_ACTIONS", 150)
    assert chunks.step_s(60, name) == pytest.approx(whole, rel=1e-9)


def test_messages_cost_more_the_less_they_overlap() -> None:
    times = [
        chunked([(1.0, 2.0)] * 4, [0.1] * 3, sends, 4).step_s(8)
        for sends in (Sends.OVERLAPPED, Sends.EXCHANGED, Sends.BLOCKING)
    ]
    assert times == sorted(times)
    assert times[2] > times[1] > times[0]


def least_1f1b_s(chunks: Chunks, micro_batches: int) -> float:
    """V(0) of the module's text."""
    span_s, below_s, flies_s = 0.0, 0.0, 2 * chunks.overlapped_s
    for window in range(1, chunks.stages + 1):
        forward_s, backward_s = chunks.forward_s[-window], chunks.backward_s[-window]
        between_s = flies_s if window > 1 else 0.0
        stay = stay_s(forward_s, backward_s, below_s + between_s, window, micro_batches)
        span_s = max(stay, forward_s + backward_s + between_s + span_s)
        below_s += between_s + forward_s + backward_s
    return span_s


@pytest.mark.parametrize("seed", range(40))
def test_no_1f1b_is_shorter_than_its_least_which_is_mostly_its_time(seed: int) -> None:
    draw, equal = random.Random(seed), 0
    for _ in range(5):
        stages = draw.randint(2, 6)
        micro_batches = draw.choice((1, 2, stages, stages + 1, 3 * stages, 8 * stages))
        blocks = [draw.choice((7, 8, 8, 8, 9)) for _ in range(stages)]
        passes = [(1.0 * number, 2.0 * number) for number in blocks]
        passes[-1] = passes[-1][0] + draw.random(), passes[-1][1] + 2 * draw.random()
        hops = [draw.choice((0.0, 0.3, 1.0))] * (stages - 1)
        chunks = chunked(passes, hops, draw.choice(list(Sends)), stages)
        least, simulated = least_1f1b_s(chunks, micro_batches), chunks.step_s(micro_batches)
        assert least <= simulated * (1 + 1e-9)
        assert least >= chunks.least_s(micro_batches) * (1 - 1e-9)
        work_s = sum(chunks.forward_s) + sum(chunks.backward_s)
        assert even_s(stages, micro_batches, work_s) <= least * (1 + 1e-9)
        equal += simulated <= least * (1 + 1e-9)
    assert equal >= 3


def test_alike_stages_of_1f1b_take_their_least() -> None:
    for stages, micro_batches in ((2, 2), (4, 4), (4, 9), (6, 40)):
        chunks = Chunks((1.0,) * stages, (2.0,) * stages, stages)
        assert least_1f1b_s(chunks, micro_batches) == pytest.approx(3.0 * (micro_batches + stages - 1))
