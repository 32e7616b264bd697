"""Models that draw random numbers compute the same under every plan as on one device, and other numbers each time."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.numerics.single_device import serial_step
from runtime.stage.cut import cut_stage
from runtime.stage.modes import MicrobatchShard
from runtime.stage.random.streams import CounterRng, NodeStream, RandomNodes
from tests.captures import capture
from tests.runtime.engines import drawing_loss
from tests.runtime.plans import (
    Trained,
    assert_equal,
    batch_of,
    decide,
    folded,
    model_of,
    run_ranks,
    sgd,
    split_backward,
    train_by_plan,
    train_serially,
)

SEED = 5


def gpt(dropout: float = 0.2) -> LoadedModel:
    return model_of("gpt:gpt", (4, 6), vocabulary=11, width=8, layers=2, heads=2, dropout=dropout)


class Mixture(nn.Module):
    """What else draws: recurrent layers, channels, whole samples (stochastic depth), slopes, noise."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, dropout=0.3, batch_first=True)
        self.gru = nn.GRU(6, 6, 2, dropout=0.3)
        self.channels = nn.Dropout1d(0.3)
        self.slopes = nn.RReLU()
        self.alpha = nn.AlphaDropout(0.2)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)
        self.mean = nn.Linear(6, 6)
        self.spread = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        x = self.gru(x.transpose(0, 1))[0].transpose(0, 1)  # samples lie along dim 1
        x = x + self.slopes(self.channels(x)) * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7)
        x = x + self.attention(x, x, x)[0]
        mean = self.mean(x)
        spread = self.spread(x)
        return self.alpha(mean + functional.softplus(spread) * torch.empty_like(spread).normal_())


def mixture() -> Any:
    return Mixture(), (torch.randn(4, 5, 4),)


PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"cuts": [], "micro_batches": (3, 3)},
    "two ranks": {"cuts": [0.5], "micro_batches": (3, 3)},
    "three ranks, gpipe": {"cuts": [0.3, 0.6], "micro_batches": (3, 3), "schedule": "gpipe"},
    "two stages on one rank": {
        "cuts": [0.3, 0.6],
        "micro_batches": (3, 3),
        "ranks": [(0,), (1,), (0,)],
        "schedule": folded,
    },
    "replicas 2 to 1, then one": {
        "cuts": [0.5],
        "micro_batches": (3, 3),
        "ranks": [(0, 1), (2,)],
        "shares": [(2, 1), (1,)],
    },
    "replicas, the second without rows, split": {
        "cuts": [0.5],
        "micro_batches": (3, 3),
        "ranks": [(0,), (1, 2)],
        "shares": [(1,), (7, 1)],
        "schedule": split_backward,
    },
}
SHARED = ("replicas 2 to 1, then one", "replicas, the second without rows, split")
CASES = [
    *(("gpt", layout, False) for layout in PLANS),
    *(("gpt", layout, True) for layout in ("two ranks", *SHARED)),
    *(("mixture", layout, False) for layout in ("three ranks, gpipe", *SHARED)),
    ("mixture", SHARED[0], True),
]


@cache
def network(name: str) -> tuple[LoadedModel, CapturedModule]:
    model = gpt() if name == "gpt" else load_model(ModelSource(f"{__name__}:{name}", {}, (), "float64"))
    return model, capture(model)


def train_by_graph(name: str, seed: int = SEED, steps: int = 3) -> Trained:
    """One device, on a copy of the module and its graph."""
    model, captured = copy.deepcopy(network(name))
    draw = CounterRng(seed)
    optimizer = sgd(model.module.parameters())
    losses = []
    loss_of = drawing_loss(captured, draw)
    for step in range(steps):
        draw.step = step
        losses.append(serial_step(loss_of, optimizer, *batch_of(model, 6, step), (3, 3), draw))
    gradients = {name: parameter.grad for name, parameter in model.module.named_parameters()}
    return Trained(losses, gradients, model.module.state_dict())


@cache
def serial(name: str) -> Trained:
    return train_by_graph(name)


def plan(name: str, layout: str, recompute: bool = False) -> Decision:
    decision = decide(network(name)[1].graph, **PLANS[layout])
    return replace(decision, stages=tuple(replace(stage, recompute=recompute) for stage in decision.stages))


@pytest.mark.parametrize(("name", "layout", "recompute"), CASES)
def test_a_plan_draws_what_one_device_draws(name: str, layout: str, recompute: bool) -> None:
    found = train_by_plan(network(name)[0], plan(name, layout, recompute), seed=SEED)
    assert_equal(found, serial(name))


def test_two_runs_of_one_seed_are_equal_to_the_bit() -> None:
    model = network("mixture")[0]
    decision = plan("mixture", "replicas 2 to 1, then one")
    first, second = (train_by_plan(model, decision, seed=SEED) for _ in range(2))
    assert first.losses == second.losses
    for kind in ("gradients", "state"):
        here = getattr(first, kind)
        there = getattr(second, kind)
        assert all(torch.equal(here[name], there[name]) for name in here)


def test_a_model_whose_dropout_is_off_draws_nothing_and_is_the_user_s_own() -> None:
    model = gpt(dropout=0.0)
    captured = capture(model)
    assert RandomNodes(captured).layers == ()
    decision = decide(captured.graph, **PLANS["two ranks"])
    assert_equal(train_by_plan(model, decision, seed=SEED), train_serially(model, (3, 3)))


def test_layers_that_draw_are_named() -> None:
    layers = RandomNodes(network("gpt")[1]).layers
    assert layers[0] == "blocks.0.attention.scaled_dot_product_attention"
    assert len(layers) == 2 * 3


def test_the_generator_of_the_process_is_left_alone() -> None:
    before = torch.get_rng_state()
    run_ranks(network("gpt")[0], plan("gpt", "two ranks"), [batch_of(network("gpt")[0], 6, 0)], seed=SEED)
    assert torch.equal(torch.get_rng_state(), before)
    noise = NodeStream(CounterRng(1), "node", None)
    rates = torch.full((99,), 3.0)
    first = noise.run(torch.poisson, rates)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert torch.equal(noise.run(torch.poisson, rates), first)


class Masks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack((functional.dropout(x, 0.5), functional.dropout(x, 0.5))).square().mean()


def masks() -> Any:
    return Masks(), (torch.ones(4, 64),)


def drawn(draw: CounterRng) -> tuple[Tensor, ...]:
    captured = network("masks")[1]
    maps = captured.layer_of_node, captured.node_of_value
    names = [layer.name for layer in captured.graph.layers]
    outputs = [name for name in names if "dropout" in name]
    stage = cut_stage(captured.graph_module, outputs, *maps, tuple(outputs), RandomNodes(captured).rule(draw))
    return stage.function(draw.total, torch.ones(4, 64, dtype=torch.float64))


def test_seeds_differ_by_run_step_micro_batch_and_layer() -> None:
    whole = MicrobatchShard(0, 4, 0, 4)
    found = []
    for seed, step, microbatch in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (10, 0, 0), (1, 0, 1), (0, 1, 1)]:
        draw = CounterRng(seed, step)
        draw.at(replace(whole, microbatch=microbatch))
        found += drawn(draw)
    assert all(0.35 < mask.count_nonzero() / mask.numel() < 0.65 for mask in found)
    assert all((a != b).double().mean() > 0.3 for a, b in combinations(found, 2))


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("width", [4, 3000, 20_000])
def test_blocks_are_the_same_however_rows_are_shared_out(width: int, dim: int, each: int) -> None:
    def part(start: int, count: int) -> Tensor:
        draw = CounterRng(1)
        draw.at(MicrobatchShard(0, count, start, 13))
        shape = [2, 2, width]
        shape[dim] = each * count
        fill = partial(Tensor.normal_, mean=0.0, std=1.0)
        return NodeStream(draw, "node", dim).fill(
            tuple(shape), torch.float32, torch.device("cpu"), lambda t, g: fill(t, generator=g)
        )

    whole = part(0, 13)
    assert abs(whole.mean()) < 0.3
    assert abs(whole.std() - 1) < 0.3
    assert len(whole.unique()) > 0.95 * whole.numel()
    for shares in ((13,), (12, 1), (1, 5, 7), (1,) * 13, (6, 0, 7)):
        starts = [sum(shares[:index]) for index in range(len(shares))]
        assert torch.equal(torch.cat(list(map(part, starts, shares)), dim), whole)


class Flattened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x.transpose(0, 1).flatten(0, 1), 0.5)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.poisson(x.abs())


def flattened() -> Any:
    return nn.Sequential(nn.Linear(5, 5), Flattened()), (torch.randn(4, 3, 5),)


def chosen() -> Any:
    return Chosen(), (torch.randn(4, 5),)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flattened", r"layer 1\.dropout draws random numbers[\s\S]*is no interval[\s\S]*stage of one rank"),
        ("chosen", r"layer poisson draws random numbers[\s\S]*in parts \(aten.poisson.default\)"),
    ],
)
def test_what_replicas_cannot_draw_together_is_refused_by_name(name: str, message: str) -> None:
    model, captured = network(name)
    replicas = decide(captured.graph, [], (3, 3), [(0, 1)], [(2, 1)])
    with pytest.raises(UnsupportedModelError, match=message):
        run_ranks(model, replicas, [])
    alone = decide(captured.graph, [0.5], (3, 3))
    assert_equal(train_by_plan(model, alone, seed=SEED), train_by_graph(name))
