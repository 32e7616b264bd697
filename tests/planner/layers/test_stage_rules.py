"""What layers ask of their stages: recorded by the capture, kept to by the search, refused by the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import solvers
from planner.ir.constraints import REPLICAS, TOGETHER
from planner.ir.errors import InfeasibleError, UnsupportedModelError
from planner.ir.graph import KEEPS_SAMPLES, NOT_LINEAR_BACKWARD, SHARED_STATE, SHARED_STATISTICS, Graph
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.layers.stage_rules import require_stages, rules_of_state, stage_errors
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from tests.captures import capture
from tests.planner.networks import priced_graph
from tests.runtime.divided import divided
from tests.runtime.plans import decide


class Teacher(nn.Module):
    """A mean teacher, an average of weights alone, which follows from no sample; one that watches keeps a mean of x."""

    def __init__(self, watches: bool = False) -> None:
        super().__init__()
        self.watches = watches
        self.student = nn.Linear(6, 4)
        self.teacher = nn.Linear(6, 4)
        self.teacher.requires_grad_(requires_grad=False)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            if self.watches:
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            aim = self.teacher(x - self.mean if self.watches else x)
        return self.student(x) - aim


class Counted(nn.Module):
    """One batch norm without weights, met twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(self.norm(x))))


class Roots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.sign() * gradient.abs().sqrt()


class Pictures(nn.Module):
    """Convolutions, which a plan might cut along height, with a mean of pictures or a Function between."""

    def __init__(self, keeps_mean: bool) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.keeps_mean = keeps_mean
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.keeps_mean:
            self.mean.mul_(0.9).add_(h.detach().mean((0, 2, 3)), alpha=0.1)
        else:
            h = Roots.apply(h)
        return self.b(h.relu()).mean((2, 3))


class Tied(nn.Module):
    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.middle = nn.Linear(6, 6)
        self.head.weight = self.table.weight
        self.table.weight.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.table(x)))


ROWS = torch.zeros(4, 6)
PICTURES = torch.zeros(4, 2, 8, 6)
TOKENS = torch.zeros(4, dtype=torch.long)
NETWORKS: Mapping[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "teacher": (Teacher, ROWS),
    "watching": (lambda: Teacher(watches=True), ROWS),
    "counted": (Counted, ROWS),
    "means": (lambda: Pictures(keeps_mean=True), PICTURES),
    "rooted": (lambda: Pictures(keeps_mean=False), PICTURES),
    "tied": (Tied, TOKENS),
    "terms": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 8)), ROWS),
    "frozen": (lambda: Tied(trained=False), TOKENS),
}


def graph_of(name: str) -> Graph:
    make, example = NETWORKS[name]
    torch.manual_seed(0)
    inputs = torch.randn_like(example) if example.is_floating_point() else torch.randint(8, example.shape)
    loss = TrainedLoss(_two_terms if name == "terms" else functional.cross_entropy, unpacked=True)
    return capture(LoadedModel(make(), (inputs,), (torch.arange(4),), loss)).graph


def _two_terms(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target) + 0.1 * output.square().mean()


def named(graph: Graph, attribute: str) -> list[str]:
    return [layer.name for layer in graph.layers if attribute in layer.attributes]


def replicas(graph: Graph) -> Decision:
    return decide(graph, [], (4,), ranks=[(0, 1)], shares=[(2, 2)])


def two_stages(graph: Graph) -> Decision:
    return decide(graph, [0.5], (4,))


def sum_apart(graph: Graph) -> Decision:
    """The last layer, which adds the terms of the loss up, in a stage of its own."""
    return decide(graph, [graph.layers[-1].name], (4,), ranks=[(0, 1), (2,)], shares=[(2, 2), (4,)])


def cut(dim: str, *points: int) -> Callable[[Graph], Decision]:
    return lambda graph: divided(graph, {dim: points}, (4,))


def zero_2(decision_of: Callable[[Graph], Decision]) -> Callable[[Graph], Decision]:
    def sharded(graph: Graph) -> Decision:
        decision = decision_of(graph)
        first, *others = decision.stages
        return replace(decision, stages=(replace(first, sharded=True, zero=2), *others))

    return sharded


def one_norm_by_channels(graph: Graph) -> Decision:
    first, second = named(graph, SHARED_STATISTICS)
    cuts = {first: {"replica": (0, 1, 2)}, second: {"channel": (0, 3, 6)}}
    return divided(graph, lambda layer: cuts.get(layer.name, {"sample": (0, 2, 4)}), (4,))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "decision_of", "refusal"),
    [
        ("teacher", replicas, ""),
        ("watching", replicas, "writes the buffer mean from the rows it sees"),
        ("counted", two_stages, r"the buffer norm\.\w+ is used by layer .* on stage 0"),
        ("counted", one_norm_by_channels, r"norm.running_\w+ cannot be divided over the ranks of stage 0"),
        ("counted", cut("sample", 0, 2, 4), ""),
        ("rooted", cut("sample", 0, 2, 4), ""),
        ("rooted", cut("height", 0, 4, 8), "whose gradient ranks would have in shares"),
        ("tied", zero_2(cut("sample", 0, 2, 4)), ""),
        ("tied", zero_2(cut("feature", 0, 3, 6)), "cannot divide its gradients over its 2 ranks"),
        ("terms", zero_2(replicas), ""),
        ("terms", sum_apart, ""),
        ("terms", zero_2(sum_apart), "which make the loss of terms, are in several stages"),
    ],
)
def test_a_plan_that_breaks_what_a_layer_asks_of_its_stage_is_refused(
    name: str, decision_of: Callable[[Graph], Decision], refusal: str
) -> None:
    graph = graph_of(name)
    if not refusal:
        require_stages(decision_of(graph), graph)
        return
    with pytest.raises(UnsupportedModelError, match=refusal):
        require_stages(decision_of(graph), graph)


def test_what_layers_ask_is_in_the_graph_and_in_the_rules_of_a_search() -> None:
    """What is written inside of no_grad, or by batch norm, keeps its users together."""
    assert named(graph_of("rooted"), NOT_LINEAR_BACKWARD) == ["Roots"]
    assert not named(graph_of("teacher"), KEEPS_SAMPLES)
    assert named(graph_of("watching"), KEEPS_SAMPLES)
    for name in ("counted", "watching"):
        graph = graph_of(name)
        rules = [rule for rule in rules_of_state(graph) if rule.what == TOGETHER]
        assert bool(rules) == bool(named(graph, SHARED_STATE))
    counted = graph_of("counted")
    assert named(counted, SHARED_STATE) == [layer.name for layer in counted.layers if layer.kind == "batch_norm"]


def test_a_search_that_divides_gradients_keeps_the_terms_of_a_loss_together() -> None:
    graph = graph_of("terms")
    assert not rules_of_state(graph)
    profile = priced_graph(graph, {layer.name: 1e9 for layer in graph.layers}, sizes=(1, 2, 4))
    decision = solvers.solver("best-first")(Problem(profile, 4, shard="always", zero=2, confidence=0.0)).decision
    assert not list(stage_errors(decision, graph))
    assert any(stage.level == 2 for stage in decision.stages)


@pytest.mark.parametrize(("name", "dim"), [("means", "height"), ("rooted", "height"), ("tied", "feature")])
def test_no_search_proposes_what_the_runtime_refuses(name: str, dim: str) -> None:
    graph = graph_of(name)
    assert list(stage_errors(divided(graph, {dim: (0, 2, 4)}, (4,)), graph))
    profile = priced_graph(graph, {layer.name: 1e9 for layer in graph.layers}, sizes=(1, 2, 4))
    problem = Problem(profile, 4, allow=("spatial", "channel"), max_stages=1, confidence=0.0)
    assert not list(stage_errors(solvers.solver("best-first")(problem).decision, graph))


def test_the_reason_why_a_solver_cannot_divide_samples_is_the_true_one() -> None:
    graph = graph_of("means")
    assert [rule.what for rule in rules_of_state(graph)] == [REPLICAS]
    with pytest.raises(InfeasibleError, match="writes what it makes of samples to the buffer mean"):
        solvers.solver("data-parallel")(Problem(priced_graph(graph, {}, sizes=(1, 2, 4)), 4, confidence=0.0))


def test_a_frozen_weight_is_whole_on_every_rank() -> None:
    layers = divided(graph_of("frozen"), {"feature": (0, 3, 6)}, (4,)).layers
    assert ["feature" in layers[name].cuts for name in ("table", "middle", "head")] == [False, True, False]
