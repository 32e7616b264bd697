"""A model on another device than the processor: what is moved, and that a whole pass stays there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profiler.capture import graph
from profiler.capture.graph import capture_for
from profiler.capture.kinds import Rules
from profiler.measure.noise import ThreadClock
from profiler.measure.timing import SegmentedPass, segments
from profiler.source.model import LoadedModel, example_of
from tests.profiler.capture.test_graph import captured, loaded
from tests.profiler.test_models import TINY
from tests.without_memory import META, on_meta

DENSE = [factory for factory in TINY if factory.__name__ in ("resnet18", "gpt", "unet3d")]


class CountingClock(ThreadClock):
    """Counts how often it was waited for."""

    def __init__(self) -> None:
        self.waits = self.laps = 0

    def stop(self, started: float) -> float:
        self.laps += 1
        return super().stop(started)

    def settle(self) -> None:
        self.waits += 1


@pytest.mark.parametrize("factory", DENSE, ids=lambda factory: factory.__name__)
@pytest.mark.parametrize("split", [False, True], ids=["both", "split"])
def test_a_pass_stays_on_the_device_of_the_model_and_waits_for_it_once(
    factory: Callable[..., Any], split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": False)  # this device has none to ask for
    graph, model = captured(factory)
    there = replace(graph, graph_module=on_meta(graph.graph_module))
    fewer = {name: tensor.to(META) for name, tensor in example_of(graph.graph.inputs, model, model.samples).items()}
    clock = CountingClock()
    run = SegmentedPass(there, fewer, model.samples, clock, split)
    parts = segments(there)
    for part in parts:
        run.forward(part)
    run.start_backward()
    for part in reversed(parts):
        run.backward(part)
    assert clock.waits == 0
    assert run.times().keys() == {part.name for part in parts}
    assert clock.waits == 1
    assert clock.laps > len(parts)
    assert run.loss.device == META
    assert {p.grad.device for p in there.graph_module.parameters() if p.grad is not None} == {META}


def test_a_model_is_captured_on_the_processor_and_then_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(graph, "move", lambda tensors, device: moved.append((len(tuple(tensors)), device)))
    factory = DENSE[0]
    model, found = capture_for(loaded(factory, 2), META, Rules())
    tensors = (*found.graph_module.parameters(), *found.graph_module.buffers())
    assert moved[0] == (len(tensors), META)
    assert found.graph == captured(factory)[0].graph, "the graph, and its fingerprint, are the same everywhere"
    assert {tensor.device for tensor in (*model.inputs, *model.targets)} == {META}


def test_what_a_rank_does_not_need_stays_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "move", lambda tensors, device: pytest.fail("moved"))
    given = loaded(DENSE[0], 2)
    model, found = capture_for(given, META, whole=False)
    assert model == replace(given, rows=model.rows)
    assert {tensor.device.type for tensor in found.graph_module.parameters()} == {"cpu"}


def test_under_autocast_a_model_is_captured_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(graph, "move", lambda tensors, device: events.append("moved"))

    def noted(model: LoadedModel, rules: object) -> object:
        events.append(f"captured on {model.inputs[0].device}")
        return SimpleNamespace(graph=SimpleNamespace(inputs={}, samples=2))

    monkeypatch.setattr(graph, "capture", noted)
    capture_for(replace(loaded(DENSE[0], 2), autocast=torch.bfloat16), META, whole=False)
    assert events[0] == "moved"
    assert events[-1] == "captured on meta"
