"""What devices of a host take from one another: who runs when; no time counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest

from cuda_ops import core_of
from planner.ir.profile import ModelSource, Optimizer
from profiler.measure import together
from profiler.measure.deduplicated import FirstPasses
from profiler.measure.job import MeasuringJob
from profiler.measure.noise import ThreadClock
from profiler.measure.together import PairEffort, Signals, compute_beside, measure_slowdowns
from profiler.measure.worker import fork_beside
from tests.profiler.capture.test_graph import captured, loaded
from tests.profiler.measure.test_timing import RESNET, Net, passed, tensors_of


class SlowBesideOthers(ThreadClock):
    """A lap is 1 s long; 2 s while others compute."""

    def __init__(self) -> None:
        self.lap = 1.0

    def stop(self, started: float) -> float:
        return self.lap


class ToldSignals(Signals):
    """Others that answer at once, and slow the first down by turns; it keeps what they were asked for."""

    def __init__(self, path: Path, clock: SlowBesideOthers, *slow: float) -> None:
        path.write_bytes(bytes(16))
        super().__init__(path, 2)
        self.asked: list[int] = []
        self.clock = clock
        self.slow = cycle(slow)

    @contextmanager
    def all_compute(self, samples: int, longest_s: float) -> Iterator[None]:
        self.asked.append(samples)
        slow = next(self.slow, 0.0)
        if not slow:
            raise TimeoutError
        self.clock.lap = slow
        yield
        self.clock.lap = 1.0


@pytest.mark.parametrize(
    ("slow", "turns", "known"),
    [((2.0,), 3, 2.0), ((2.0, 2.4), 5, 2.13), ((1.0,), 3, 0.0), ((1.0, 1.04), 5, 0.0), ((), 1, 0.0)],
)
def test_passes_alone_and_together_take_turns(
    slow: tuple[float, ...], turns: int, known: float, tmp_path: Path
) -> None:
    """Until it is known what they lose, or there are enough; where others do not answer nothing is known."""
    graph = captured(RESNET)[0]
    clock = SlowBesideOthers()
    signals = ToldSignals(tmp_path / "signals", clock, *slow)
    found = measure_slowdowns(graph, tensors_of(RESNET, 2), FirstPasses(2), signals, PairEffort(3, 5, 600.0), clock)
    assert signals.asked == [2] * turns
    assert {round(one.forward, 2) for one in found} == ({known} if known else set())
    assert [one.layer for one in found] == ([layer.name for layer in graph.graph.layers] if known else [])


def test_passes_that_take_long_are_not_warmed_up_and_take_fewer_turns(tmp_path: Path) -> None:
    graph = captured(RESNET)[0]
    clock = SlowBesideOthers()
    signals = ToldSignals(tmp_path / "signals", clock, 2.0)
    effort = PairEffort(3, 5, 1e-9, least_long=2)
    first = FirstPasses(2, seconds=1.0)
    assert measure_slowdowns(graph, tensors_of(RESNET, 2), first, signals, effort, clock)
    assert signals.asked == [2] * 2


def test_another_process_computes_when_it_is_asked_to_until_it_is_told_to_end(tmp_path: Path) -> None:
    path = tmp_path / "signals"
    path.write_bytes(bytes(16))
    signals = Signals(path, 2)
    assert not Signals(path, 2).wait(together._RESTING, 0.01)
    graph = captured(RESNET)[0]
    other = threading.Thread(target=compute_beside, args=(graph, loaded(RESNET, 4), Signals(path, 2), 1), daemon=True)
    other.start()
    assert signals.wait_for_all(60)
    for samples in (2, 2, 4):
        with signals.all_compute(samples, 60):
            assert int(signals._words[1]) == together._COMPUTING
        assert int(signals._words[1]) == together._RESTING
    signals.ask(-1)
    other.join(60)
    assert not other.is_alive()


class ScriptedSignals(Signals):
    """The first asks for one thing at each look."""

    def __init__(self, path: Path, *orders: int) -> None:
        path.write_bytes(bytes(16))
        super().__init__(path, 2)
        self._orders = iter(orders)

    @property
    def order(self) -> int:
        return next(self._orders)


def test_another_process_seldom_looks_until_it_is_first_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While layers are measured it shall take nothing from them."""
    pauses: list[float] = []
    monkeypatch.setattr(together, "time", SimpleNamespace(sleep=pauses.append))
    signals = ScriptedSignals(tmp_path / "signals", 0, 0, 2, 0, 0, -1)  # asked, and while it begins told to rest
    compute_beside(captured(RESNET)[0], loaded(RESNET, 4), signals, 1)
    assert pauses == [together._FIRST_POLL_S, together._FIRST_POLL_S, together._POLL_S]


def test_another_process_is_forked_with_the_network_and_ends_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "signals"
    pids = list[int]()
    fork = os.fork

    def noted() -> int:
        pids.append(pid := fork())
        return pid

    monkeypatch.setattr("profiler.measure.worker.os.fork", noted)
    path.write_bytes(bytes(16))
    graph = captured(RESNET)[0]
    signals = Signals(path, 2)
    job = MeasuringJob(ModelSource("a:b"), Optimizer("SGD", {}), (), True, num_devices=2, signals=str(path))
    fork_beside(job, loaded(RESNET, 4), graph, 1, core_of(1))
    assert signals.wait_for_all(60)
    assert os.sched_getaffinity(pids[0]) == {core_of(1)}
    with signals.all_compute(2, 60):
        assert int(signals._words[1]) == together._COMPUTING
    signals.end()
    assert os.waitpid(pids[0], 0) == (pids[0], 0)


def test_layers_that_others_stand_for_lose_what_those_do(tmp_path: Path) -> None:
    graph, tensors, stand_ins = passed(Net(6))
    clock = SlowBesideOthers()
    first = FirstPasses(6, stand_ins=stand_ins)
    signals = ToldSignals(tmp_path / "signals", clock, 2.0)
    found = measure_slowdowns(graph, tensors, first, signals, PairEffort(3, 5, 600.0), clock)
    assert stand_ins
    assert [(one.layer, one.forward) for one in found] == [(layer.name, 2.0) for layer in graph.graph.layers]


def test_one_that_does_not_come_is_told_to_end(tmp_path: Path) -> None:
    path = tmp_path / "signals"
    path.write_bytes(bytes(16))
    signals = Signals(path, 2)
    assert not signals.wait_for_all(0.01)
    assert signals.order == -1
    with pytest.raises(TimeoutError), signals.all_compute(2, 0.01):
        pass
    assert signals.order == 0
