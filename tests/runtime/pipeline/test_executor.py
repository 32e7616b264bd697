"""Where a step fails is told: rank, device, stage, step, micro-batch, direction, the others, and the grid around."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from planner.ir.errors import DeadlineError, StageFailedError, TransportError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.engine import Engine
from runtime.monitor.activity import Activity
from runtime.monitor.waits import START
from runtime.pipeline.executor import StopBeforeStepError, clock_of
from runtime.rank import NOTHING, SAVE, STOP
from runtime.transport import InProcessTransport, MessageKey
from tests.captures import capture
from tests.halopipe.bombs import POISON
from tests.runtime.engines import on_engines
from tests.runtime.plans import decide, run_ranks

GOOD = (torch.ones(4, 3),), (torch.zeros(4, 3),)
POISONED = (torch.cat((torch.ones(3, 3), torch.full((1, 3), 2 * POISON))),), (torch.zeros(4, 3),)


@cache
def mined(where: int = -1, direction: str = "F", deed: str = "raise") -> tuple[LoadedModel, Decision]:
    """Three layers on three stages; the bomb is in the last micro-batch of the second step."""
    arguments = {"where": str(where), "direction": json.dumps(direction), "deed": json.dumps(deed)}
    model = load_model(ModelSource("tests.halopipe.bombs:mined", arguments, (4, 3)))
    graph = capture(model).graph
    return model, decide(graph, ["1.linear", "2.linear"], (2, 2))


@pytest.mark.parametrize("direction", ["F", "B"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_that_raises_is_named_with_step_and_micro_batch(stage: int, direction: str) -> None:
    model, decision = mined(stage, direction)
    with pytest.raises(StageFailedError) as caught:
        run_ranks(model, decision, [GOOD, POISONED, GOOD], others=lambda: "rank 9 in 9F9")
    error = caught.value
    word = {"F": "forward", "B": "backward"}[direction]
    where = f"rank {stage} (n0/cpu{stage}, stage {stage}) stopped at step 1, micro-batch 1, {word}"
    assert error.title == f"{where}: ValueError: the bomb went off"
    assert error.exit_code == 5
    assert "bombs.py" in error.details[0]
    assert "the others: rank 9 in 9F9" in error.details
    assert f">>{stage}{direction}1<<" in error.details[-1]
    assert len(error.details[-1].splitlines()) == 3


def test_an_error_from_within_torch_has_its_place_in_the_users_code() -> None:
    model, decision = mined(1, "F", "within torch")
    with pytest.raises(StageFailedError, match="no such reduction") as caught:
        run_ranks(model, decision, [GOOD, POISONED, GOOD])
    assert "bombs.py" in caught.value.details[0]


def test_the_other_ranks_lose_their_peer() -> None:
    model, decision = mined(2, "F")
    errors: list[BaseException] = []
    with pytest.raises(StageFailedError):
        run_ranks(model, decision, [POISONED], errors=errors)
    assert len(errors) == 3
    assert all(isinstance(error, TransportError) for error in errors[1:])
    assert any("stopped at step 0, micro-batch 1, receiving the gradient" in error.title for error in errors[1:])


def test_a_rank_that_never_comes_is_a_deadline_that_names_the_message() -> None:
    model, decision = mined()
    with pytest.raises(DeadlineError) as caught:
        run_ranks(model, decision, [GOOD], only=(0, 1), deadline_s=0.2)
    assert "stopped at step 0, waiting for the others to start the step: barrier" in caught.value.title
    assert "deadline 0.2 s" in caught.value.title


class Recorded(InProcessTransport):
    """Notes the order of what is asked of it."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.calls: list[str] = []

    def post_receive(self, key: MessageKey, source: int, specs: object) -> None:
        self.calls.append(f"post {key.kind}{key.microbatch}")
        super().post_receive(key, source, specs)

    def receive(self, key: MessageKey, source: int) -> tuple[torch.Tensor, ...]:
        self.calls.append(f"take {key.kind}{key.microbatch}")
        return super().receive(key, source)

    def send(self, key: MessageKey, destination: int, tensors: object) -> None:
        self.calls.append(f"send {key.kind}{key.microbatch}")
        super().send(key, destination, tensors)


def test_receives_are_announced_ahead_a_window_at_a_time() -> None:
    model = load_model(ModelSource("tests.halopipe.bombs:mined", {}, (4, 3)))
    decision = decide(capture(model).graph, ["1.linear"], (1, 1, 1, 1), schedule="gpipe")
    engines, _ = run_ranks(model, decision, [GOOD], transport=Recorded, lookahead=2)
    sends = ["send F0", "send F1", "send F2", "send F3"]
    takes = ["take B0", "post B2", "take B1", "post B3", "take B2", "take B3"]
    assert engines[0]._transport.calls == ["post B0", "post B1", *sends, *takes]


def test_a_step_ends_when_all_that_was_sent_has_been_taken() -> None:
    calls: dict[int, list[str]] = {0: [], 1: []}

    class Flushed(Recorded):
        def flush(self) -> None:
            calls[self.rank] += [*self.calls, "flush"]
            self.calls.clear()
            super().flush()

    model = load_model(ModelSource("tests.halopipe.bombs:mined", {}, (4, 3)))
    decision = decide(capture(model).graph, ["1.linear"], (2, 2), schedule="gpipe")
    engines, _ = run_ranks(model, decision, [GOOD, GOOD], transport=Flushed)
    assert [engine._transport.calls for engine in engines] == [[], []]
    for of_rank in calls.values():
        half = len(of_rank) // 2
        assert of_rank[:half] == of_rank[half:]
        assert of_rank.count("flush") == 2
        assert any(call.startswith("send") for call in of_rank)


def test_a_heartbeat_sees_what_is_done_and_that_a_rank_waits_for_the_others_before_a_step() -> None:
    model = mined()[0]
    activity = Activity()
    seen = list[str]()

    class Waiting(InProcessTransport):
        def barrier(self, word: int = 0) -> int:
            seen.append(activity.what)
            return super().barrier(word)

    decision = decide(capture(model).graph, [], (2, 2))
    run_ranks(model, decision, [GOOD, GOOD], activity=activity, transport=Waiting)
    assert seen == [START, START]
    assert (activity.what, activity.step, activity.num_done) == ("between steps", 1, 2)
    assert activity.deadline_s == 20.0


def test_what_one_rank_asks_for_all_agree_on_before_the_same_step() -> None:
    model, decision = mined()
    asked = [NOTHING, SAVE, NOTHING, STOP]

    def work(engine: Engine) -> list[int]:
        agreed = list[int]()
        if "1.linear.weight" in engine.state_dict():  # one rank of three
            engine.context.vote.mine = lambda: asked[len(agreed)]
        for _ in asked[:-1]:
            engine.step(*GOOD)
            agreed.append(engine.context.vote.agreed)
        with pytest.raises(StopBeforeStepError):
            engine.step(*GOOD)
        return agreed

    assert on_engines((model, capture(model)), decision, work) == [asked[:-1]] * 3


class FakeStream:
    """A GPU that works for as long as it is told, after the calls that start its work."""

    def __init__(self) -> None:
        self.done_s = 7.0
        self.waits = 0


class FakeEvent:
    stream: FakeStream

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = -1.0

    def record(self, stream: FakeStream) -> None:
        self.at_s = stream.done_s

    def synchronize(self) -> None:
        self.stream.waits += 1

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1e3 * (other.at_s - self.at_s)


def test_on_a_gpu_actions_end_when_their_work_does_and_only_the_step_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = FakeStream()
    monkeypatch.setattr(FakeEvent, "stream", stream, raising=False)
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)
    clock = clock_of(torch.device("cuda", 0))
    for work_s in (0.25, 0.5, 0.0):
        clock.mark()
        stream.done_s += work_s
    assert stream.waits == 0
    assert clock.seconds() == [0.0, 0.25, 0.75]
    assert stream.waits == 1
