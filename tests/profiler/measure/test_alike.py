"""Which layers stand for which, and that those which are timed run as they would in a network without the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler.capture.graph import capture
from profiler.measure import deduplicated
from profiler.measure.deduplicated import ShorterPass, StandIn, stand_ins_of, time_deduplicated
from profiler.measure.timing import QUICK, BackwardTimes, LayerSegment, SegmentedPass, run_pass, segments
from profiler.source.model import LoadedModel
from profiler.source.parts import model_of
from runtime.captured import CapturedModule


class Block(nn.Module):
    """A residual block, whose input is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of ``x``."""
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """So many blocks; another layer lies ahead of one of them, if that is asked for."""

    def __init__(self, num_blocks: int, wide: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        if wide:
            self.blocks[2].up, self.blocks[2].down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Three numbers a sample."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.arange(6) % 3


def captured(net: nn.Module) -> tuple[CapturedModule, LoadedModel, dict[str, Tensor]]:
    model = model_of("net", (net, BATCH, nn.functional.cross_entropy))
    graph = capture(model)
    return graph, model, dict(zip(graph.graph.inputs, BATCH, strict=True))


def passed(net: nn.Module, **seconds: float) -> tuple[CapturedModule, dict[str, Tensor], dict[str, StandIn]]:
    """The stand-ins where every layer takes a second, but for those that take ``seconds``."""
    graph, _, tensors = captured(net)
    parts, runs = segments(graph), list[SegmentedPass]()

    def start(split: bool) -> SegmentedPass:
        runs.append(SegmentedPass(graph, tensors, 6, None, split))
        return runs[0]

    run_pass(parts, start, split=False)
    times = {part.name: (seconds.get(part.name, 1.0), BackwardTimes()) for part in parts}
    return graph, tensors, stand_ins_of(graph, parts, runs[0], times)


def names(stand_ins: Mapping[str, StandIn], operation: str) -> dict[str, str]:
    return {name: each.nearer for name, each in stand_ins.items() if name.endswith(operation)}


@pytest.mark.parametrize("split", [False, True], ids=["both", "split"])
def test_layers_that_are_timed_run_as_in_a_network_without_the_others(split: bool) -> None:
    net = Net(6)
    graph, tensors, stand_ins = passed(net)
    parts = segments(graph)
    net.zero_grad(set_to_none=True)
    timed = [part for part in parts if part.name not in stand_ins]
    found = run_pass(timed, lambda halves: ShorterPass(parts, stand_ins, graph, tensors, 6, None, halves), split=split)
    assert set(found) == {part.name for part in timed}
    gradients = {name: each.grad for name, each in net.named_parameters()}
    net.blocks = nn.ModuleList([net.blocks[0], net.blocks[5]])
    net.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(net(BATCH[0]), BATCH[1]).backward()
    for index, name in ((0, "blocks.0"), (1, "blocks.5")):
        for own, each in net.blocks[index].named_parameters():
            torch.testing.assert_close(gradients[f"{name}.{own}"], each.grad)
    for each in ("first.weight", "head.bias"):
        torch.testing.assert_close(gradients[each], net.get_parameter(each).grad)
    assert all(gradient is None for name, gradient in gradients.items() if name.split(".")[1] in {"1", "2", "3", "4"})


def test_the_nearer_of_the_first_and_the_last_counts() -> None:
    _, _, found = passed(Net(6))
    assert names(found, "up") == {
        **dict.fromkeys(("blocks.1.up", "blocks.2.up"), "blocks.0.up"),
        **dict.fromkeys(("blocks.3.up", "blocks.4.up"), "blocks.5.up"),
    }


def test_another_shape_is_another_class() -> None:
    _, _, found = passed(Net(6, wide=True))
    assert set(names(found, "up")) == {"blocks.1.up", "blocks.3.up", "blocks.4.up"}
    assert "blocks.2.norm" in found


def test_layers_that_do_not_take_alike_are_timed() -> None:
    _, _, found = passed(Net(6), **{"blocks.3.up": 9.0, **{f"blocks.{k}.down": 2.0 for k in (1, 2, 3, 4)}})
    assert set(names(found, "up")) == {"blocks.1.up", "blocks.2.up", "blocks.4.up"}
    assert not names(found, "down")


def test_every_layer_has_times_and_says_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplicated, "LEAST_PASS_S", 0.0)
    monkeypatch.setattr(deduplicated, "MOST_SUM", 1e9)
    monkeypatch.setattr(deduplicated, "_MATTERS", 1e9)
    graph, _, tensors = captured(Net(6))
    seen: list[Any] = []
    found = time_deduplicated(graph, tensors, 6, QUICK, lambda *slowest: seen.append(slowest))
    assert list(found) == [layer.name for layer in graph.graph.layers]
    assert len(seen) == QUICK.num_warm_ups + QUICK.min_runs + QUICK.split_runs + 1
    assert found["blocks.2.up"].alike == "blocks.0.up"
    assert found["blocks.2.up"].raw_s == found["blocks.0.up"].raw_s
    assert not found["blocks.5.up"].alike


@pytest.mark.parametrize("off", [1.0, 2.0], ids=["as the sum says", "another sum"])
def test_all_are_timed_where_the_sum_is_another_one(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    graph, _, tensors = captured(Net(6))
    asked: list[int] = []

    def timed(parts: list[LayerSegment], *_: object) -> dict[str, deduplicated.TimedLayer]:
        asked.append(len(parts))
        return {part.name: deduplicated.TimedLayer(off, 0.0, 0.0, 0.0, 1, 0.0) for part in parts}

    monkeypatch.setattr(
        deduplicated,
        "run_pass",
        lambda parts, start, split: (
            run_pass(parts, start, split) and {part.name: (1.0, BackwardTimes()) for part in parts}
        ),
    )
    monkeypatch.setattr(deduplicated, "time_segments", timed)
    found = time_deduplicated(graph, tensors, 6, QUICK, lambda *_: None)
    every = len(graph.graph.layers)
    assert len(found) == every
    assert asked == ([every - 4 * 5] if off == 1.0 else [every - 4 * 5, every])
