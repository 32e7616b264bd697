"""What layers ask of their stages: recorded by the capture, kept to by the search, refused by the runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import solvers
from planner.ir.constraints import REPLICAS, TOGETHER
from planner.ir.errors import InfeasibleError, UnsupportedModelError
from planner.ir.graph import KEEPS_SAMPLES, NOT_LINEAR_BACKWARD, SHARED_STATE, SHARED_STATISTICS, Graph
from planner.ir.problem import Problem
from planner.layers.stage_rules import require_stages, rules_of_state, stage_errors
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from tests.captures import capture
from tests.planner.networks import priced_graph
from tests.runtime.divided import divided
from tests.runtime.plans import decide


class Teacher(nn.Module):
    """A mean teacher: an average of weights alone, which follows from no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4)
        self.teacher.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            aim = self.teacher(x)
        return self.student(x) - aim


class Watching(Teacher):
    """Its teacher also keeps a mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            aim = self.teacher(x - self.mean)
        return self.student(x) - aim


class Counted(nn.Module):
    """One batch norm without weights, met twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 4), nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.norm(x))))


class Means(nn.Module):
    """A mean of pictures, which a plan might cut along height."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.mean.mul_(0.9).add_(h.detach().mean((0, 2, 3)), alpha=0.1)
        return self.b(h.relu()).mean((2, 3))


class Roots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.sign() * gradient.abs().sqrt()


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Roots.apply(self.a(x)).relu()).mean((2, 3))


class Tied(nn.Module):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 6), nn.Linear(6, 8, bias=False)
        self.middle = nn.Linear(6, 6)
        self.head.weight = self.table.weight
        self.table.weight.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.table(x)))


ROWS, PICTURES, TOKENS = torch.zeros(4, 6), torch.zeros(4, 2, 8, 6), torch.zeros(4, dtype=torch.long)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    "teacher": (Teacher, ROWS, 4),
    "watching": (Watching, ROWS, 4),
    "counted": (Counted, ROWS, 4),
    "means": (Means, PICTURES, 4),
    "rooted": (Rooted, PICTURES, 4),
    "tied": (Tied, TOKENS, 8),
    "frozen": (lambda: Tied(trained=False), TOKENS, 8),
}


def graph_of(name: str) -> Graph:
    make, example, num_classes = NETWORKS[name]
    torch.manual_seed(0)
    inputs = torch.randn_like(example) if example.is_floating_point() else torch.randint(8, example.shape)
    targets = torch.arange(4) % num_classes
    return capture(
        LoadedModel(make(), (inputs,), (targets,), TrainedLoss(functional.cross_entropy, unpacked=True))
    ).graph


def named(graph: Graph, attribute: str) -> list[str]:
    return [layer.name for layer in graph.layers if attribute in layer.attributes]


def test_an_average_of_weights_may_be_on_several_ranks_and_a_mean_of_samples_not() -> None:
    teacher, watching = graph_of("teacher"), graph_of("watching")
    assert not named(teacher, KEEPS_SAMPLES)
    require_stages(decide(teacher, [], (4,), ranks=[(0, 1)], shares=[(2, 2)]), teacher)
    assert named(watching, KEEPS_SAMPLES)
    with pytest.raises(UnsupportedModelError, match="writes the buffer mean from the rows it sees"):
        require_stages(decide(watching, [], (4,), ranks=[(0, 1)], shares=[(2, 2)]), watching)


def test_what_is_written_inside_of_no_grad_or_by_batch_norm_keeps_its_users_together() -> None:
    for name in ("counted", "watching"):
        graph = graph_of(name)
        rules = [rule for rule in rules_of_state(graph) if rule.what == TOGETHER]
        assert bool(rules) == bool(named(graph, SHARED_STATE))
    counted = graph_of("counted")
    assert named(counted, SHARED_STATE) == [layer.name for layer in counted.layers if layer.kind == "batch_norm"]
    with pytest.raises(UnsupportedModelError, match=r"the buffer norm\.\w+ is used by layer .* on stage 0"):
        require_stages(decide(counted, [0.5], (4,)), counted)


@pytest.mark.parametrize(("name", "dim"), [("means", "height"), ("rooted", "height"), ("tied", "feature")])
def test_no_search_proposes_what_the_runtime_refuses(name: str, dim: str) -> None:
    graph = graph_of(name)
    rivals = divided(graph, {dim: (0, 2, 4)}, (4,))
    assert list(stage_errors(rivals, graph))
    profile = priced_graph(graph, {layer.name: 1e9 for layer in graph.layers}, sizes=(1, 2, 4))
    problem = Problem(profile, 4, allow=("spatial", "channel"), max_stages=1)
    assert not list(stage_errors(solvers.solver("best-first")(problem).decision, graph))


def test_the_reason_why_a_solver_cannot_divide_samples_is_the_true_one() -> None:
    graph = graph_of("means")
    assert [rule.what for rule in rules_of_state(graph)] == [REPLICAS]
    profile = priced_graph(graph, {}, sizes=(1, 2, 4))
    with pytest.raises(InfeasibleError, match="writes what it makes of samples to the buffer mean"):
        solvers.solver("data-parallel")(Problem(profile, 4))


def test_batch_norms_with_the_same_statistics_are_not_cut_along_channels() -> None:
    graph = graph_of("counted")
    first, second = named(graph, SHARED_STATISTICS)
    cuts = {first: {"replica": (0, 1, 2)}, second: {"channel": (0, 3, 6)}}
    decision = divided(graph, lambda layer: cuts.get(layer.name, {"sample": (0, 2, 4)}), (4,))
    with pytest.raises(UnsupportedModelError, match=r"norm.running_\w+ cannot be divided over the ranks of stage 0"):
        require_stages(decision, graph)
    require_stages(divided(graph, {"sample": (0, 2, 4)}, (4,)), graph)


def test_a_frozen_weight_is_whole_on_every_rank() -> None:
    graph = graph_of("frozen")
    by_feature = divided(graph, {"feature": (0, 3, 6)}, (4,))
    assert "feature" in by_feature.layers["middle"].cuts
    assert "feature" not in by_feature.layers["table"].cuts
    assert "feature" not in by_feature.layers["head"].cuts


def test_a_backward_that_is_not_linear_is_cut_along_samples_alone() -> None:
    graph = graph_of("rooted")
    assert named(graph, NOT_LINEAR_BACKWARD) == ["Roots"]
    require_stages(divided(graph, {"sample": (0, 2, 4)}, (4,)), graph)
    with pytest.raises(UnsupportedModelError, match="whose gradient ranks would have in shares"):
        require_stages(divided(graph, {"height": (0, 4, 8)}, (4,)), graph)


def test_gradients_stay_whole_where_parameters_are_in_parts() -> None:
    graph = graph_of("tied")
    decision = divided(graph, {"sample": (0, 2, 4)}, (4,))
    stage = replace(decision.stages[0], sharded=True, zero=2)
    require_stages(replace(decision, stages=(stage,)), graph)
    by_feature = divided(graph, {"feature": (0, 3, 6)}, (4,))
    with pytest.raises(UnsupportedModelError, match="cannot divide its gradients over its 2 ranks"):
        raise next(error for _, error in stage_errors(replace(by_feature, stages=(stage,)), graph))
