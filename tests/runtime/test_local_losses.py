"""Losses that are local to stages: no gradient crosses from one to the next, and each trains by its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.ir.graph import Graph
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.schedule import Op
from planner.layers.boundary import loss_terms, without_gradient
from profiler.models.example import Example, normal
from profiler.source.source import load_model
from tests.captures import capture
from tests.runtime.engines import Network, trained
from tests.runtime.plans import assert_equal, batch_of, decide, train_serially

WIDTH = 6
CLASSES = 4
BLOCKS = 4


class Local(nn.Module):
    """Blocks that see no gradient of one another, each with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x.detach())
            found.append(head(x))
        return tuple(found)


def sum_of_losses(outputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    return sum((nn.functional.mse_loss(each, targets) for each in outputs), torch.zeros((), dtype=torch.float64))


def local(*, input_shape: tuple[int, ...] = (4, WIDTH)) -> Example:
    return Local(), (normal(input_shape, 0), normal((input_shape[0], CLASSES), 1)), sum_of_losses


@cache
def network() -> Network:
    model = load_model(ModelSource(f"{__name__}:local", {}, (4, WIDTH), "float64"))
    return model, capture(model)


def by_stage(graph: Graph, num_stages: int) -> tuple[Graph, list[str]]:
    """The layers in the order of the stages that blocks are shared out to, losses with them; the first of each."""
    stage_of: dict[str, int] = {}
    for layer in graph.layers:
        block = next((int(part) for part in layer.name.split(".") if part.isdigit()), None)
        before = max((stage_of.get(value.partition(":")[0], 0) for value in layer.inputs), default=0)
        stage_of[layer.name] = before if block is None else block * num_stages // BLOCKS
    order = sorted(graph.layers, key=lambda layer: stage_of[layer.name])
    firsts = [next(layer.name for layer in order if stage_of[layer.name] == s) for s in range(1, num_stages)]
    return replace(graph, layers=tuple(order)), firsts


def decision_of(
    num_stages: int,
    name: str,
    micro_batches: tuple[int, ...] = (2, 1, 3, 2),
    ranks: tuple[tuple[int, ...], ...] | None = None,
) -> Decision:
    graph, firsts = by_stage(network()[1].graph, num_stages)
    shares = None if ranks is None else [tuple(range(1, len(group) + 1)) for group in ranks]
    decision = decide(graph, firsts, micro_batches, ranks, shares, name)
    return replace(decision, layers={layer.name: decision.layers[layer.name] for layer in network()[1].graph.layers})


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "1f1b-windowed"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_no_gradient_is_sent_and_all_is_as_on_one_device(num_stages: int, name: str) -> None:
    decision = decision_of(num_stages, name)
    ops = {action.op for row in decision.rows() for action in row}
    assert Op.SEND_FORWARD in ops
    assert not ops & {Op.SEND_BACKWARD, Op.RECV_BACKWARD}
    assert_equal(trained(network(), decision, 2), train_serially(network()[0], decision.micro_batches, 2))


@pytest.mark.parametrize("ranks", [((0, 1), (2,)), ((0,), (1, 2)), ((0, 1), (2, 3)), ((0,), (1, 2), (3,))])
def test_ranks_that_share_a_stage_count_its_loss_once(ranks: tuple[tuple[int, ...], ...]) -> None:
    decision = decision_of(len(ranks), "1f1b", (3, 6, 3), ranks)
    assert_equal(trained(network(), decision, 2), train_serially(network()[0], decision.micro_batches, 2))


def test_gradients_are_those_of_each_block_trained_by_its_own_loss() -> None:
    model = network()[0]
    decision = decision_of(4, "1f1b")
    (x,), (targets,) = batch_of(model, decision.global_batch, 0)
    twin = copy.deepcopy(model.module)
    assert isinstance(twin, Local)
    for block, head in zip(twin.blocks, twin.heads, strict=True):
        x = block(x)
        nn.functional.mse_loss(head(x), targets).backward()
        x = x.detach()
    found = trained(network(), decision, 1).gradients
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=0, atol=1e-12)


def test_stages_keep_one_micro_batch_each_under_1f1b() -> None:
    for row in decision_of(4, "1f1b").rows():
        computes = [action.op for action in row if action.op in (Op.FORWARD, Op.BACKWARD)]
        assert computes == [Op.FORWARD, Op.BACKWARD] * 4


def test_terms_are_what_is_added_up_once() -> None:
    graph = network()[1].graph
    terms = loss_terms(graph)
    assert len(terms) == 2 * BLOCKS - 1  # four losses, and the sums but the last
    assert {graph.values()[value].shape for value in terms} == {()}
    last = graph.by_name()[graph.loss]
    doubled = replace(last, attributes={**last.attributes, "alpha": 2.0})
    other = replace(graph, layers=tuple(doubled if layer is last else layer for layer in graph.layers))
    assert loss_terms(other) == frozenset()
    assert without_gradient(graph) > terms
