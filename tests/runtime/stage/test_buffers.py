from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.ir.errors import UnsupportedModelError
from planner.layers.stage_rules import require_stages
from profiler.capture.graph import capture
from profiler.source.losses import mean_of_squares
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from tests.runtime.plans import decide


class Shared(nn.Module):
    """One buffer that two layers count in, one weight that two layers use, one table that both read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * self.table
        self.count.add_(1)
        z = self.last(y.relu()) * self.table
        self.count.view(1)[0].mul_(2)
        return z + self.count


class Tied(Shared):
    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x) * self.table).relu()) * self.table


class Tracking(nn.Module):
    """Keeps a mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x))
        self.mean.lerp_(y.detach().mean(0), 0.1)
        return y * 2


def instances() -> nn.Module:
    return nn.Sequential(nn.InstanceNorm1d(4, track_running_stats=True))


NETWORKS = {"shared": Shared, "tied": Tied, "tracking": Tracking, "instances": instances}


@cache
def network(name: str) -> CapturedModule:
    x = torch.randn((4, 4, 6) if name == "instances" else (4, 4), dtype=torch.float64)
    return capture(LoadedModel(NETWORKS[name]().double(), (x,), (), lambda found, _: mean_of_squares(found)))


def check(name: str, cuts: list[str], **layout: object) -> None:
    captured = network(name)
    require_stages(decide(captured.graph, cuts, (2, 2), **layout), captured.graph)


def test_a_buffer_that_is_written_must_be_on_one_stage() -> None:
    with pytest.raises(UnsupportedModelError, match=r"buffer count is used by .* on stage 0 and by .* on stage 1"):
        check("shared", ["last"])


def test_parameters_and_constant_tables_may_be_on_several_stages() -> None:
    check("tied", ["last"])  # its weight is that of ``first``, the table is read before and after


@pytest.mark.parametrize(("name", "buffer"), [("tracking", "mean"), ("instances", "0.running_mean")])
def test_several_ranks_must_not_write_what_each_sees(name: str, buffer: str) -> None:
    check(name, [])
    with pytest.raises(UnsupportedModelError, match=rf"writes the buffer {buffer}"):
        check(name, [], ranks=[(0, 1)], shares=[(1, 1)])


def test_statistics_and_counts_of_batch_normalisation_are_not_refused() -> None:
    check("tracking", ["norm"], ranks=[(0,), (1,)])
    names = [layer.name for layer in network("tracking").graph.layers]
    after = names[names.index("norm") + 1]
    check("tracking", ["norm", after], ranks=[(0,), (1, 2), (3,)], shares=[(1,), (1, 1), (1,)])
