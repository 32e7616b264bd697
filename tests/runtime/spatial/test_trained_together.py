"""Networks of many kinds of layers and losses, divided and trained, give what one device gives."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.ir.graph import Layer
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from runtime.engine import Engine
from runtime.numerics.single_device import serial_step
from runtime.stage.random.streams import CounterRng
from tests.runtime.divided import Cuts, at_random, by_stage, divided
from tests.runtime.engines import Network, drawing_loss, network_of, trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, sgd, train_serially
from tests.runtime.spatial.one_layer import random_cuts

SEED = 5
CODES = 3
WEIGHTS = torch.tensor([0.5, 1.0, 2.5], dtype=torch.float64)


class Images(nn.Module):
    """Pools, interpolation, padding, slices, skips and normalisation inside a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.slope = nn.PReLU(4)
        self.scale = nn.Parameter(torch.randn(1, 4, 1, 11))
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slope(self.first(x))
        down = self.norm(F.max_pool2d(x, 3, 2, 1))
        left, right = down.chunk(2, 1)
        down = torch.cat((right * 2, left.tanh()), 1)
        up = F.interpolate(down, size=x.shape[2:], mode="bilinear") * self.scale
        x = torch.cat((F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), up), 2)
        x = self.instance(self.second(F.pad(x, (1, 2, 0, 3), mode="reflect")))[:, :, 1:-2:2]
        x = F.adaptive_avg_pool2d(x, 3).softmax(1)
        return self.head(x.flatten(1))


class Words(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        heads = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in self.project(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(x + y.transpose(1, 2).flatten(2))


class Loose(nn.Module):
    """Operators that leave an input alone, or all of them: backward takes the same way on every rank all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x, second, third, fourth, fifth = self.convs[0](x), *self.convs[1:]
        y = second(x).type_as(third(x)) + fourth(x).detach()
        return y * torch.ones_like(fifth(y))


class Dropping(nn.Module):
    """Everything that drops something."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.drop = nn.Dropout(0.4)
        self.channels = nn.Dropout2d(0.4)
        self.slopes = nn.RReLU()
        self.alpha = nn.AlphaDropout(0.2)
        self.project = nn.Linear(4, 24)
        self.head = nn.Linear(8, 3)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(self.channels(self.drop(self.conv(x))))
        x = self.alpha(x + torch.rand_like(x)).flatten(2).transpose(1, 2)
        heads = (each.unflatten(2, (2, -1)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(*heads, dropout_p=0.3, is_causal=True).transpose(1, 2).flatten(2)
        y = y * y.new_empty((y.shape[0], 1, 1)).bernoulli_(0.7)
        return self.head(self.lstm(y)[0])


class Segments(nn.Module):
    """Normalised by the batch, with a gate that looks at all of space (Hu et al. 2018), and a class for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(6, momentum=None)
        self.down = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.norm2 = nn.BatchNorm2d(6, affine=False)
        self.frozen = nn.BatchNorm2d(6)
        self.gate = nn.Conv2d(6, 6, 1)
        self.head = nn.Conv2d(6, CODES, 3, padding=1)
        self.norm3 = nn.BatchNorm2d(CODES, track_running_stats=False)
        self.frozen.eval()
        self.frozen.num_batches_tracked = None  # which no layer reads: it would be in no stage

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.first(x)).relu()
        y = self.frozen(self.norm2(self.down(x)))
        y = y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid() + F.adaptive_avg_pool2d(y, 1)
        return self.norm3(self.head(x + F.interpolate(y, size=x.shape[2:])))


def by_pixel(weights: Tensor, found: Tensor, target: Tensor) -> Tensor:
    """Classes weigh differently, and one is ignored."""
    return F.cross_entropy(found, target, weights, ignore_index=1, label_smoothing=0.1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "two terms": lambda y, t: F.mse_loss(y, t) + 0.1 * y.abs().mean(),
    "a constant": lambda y, t: F.mse_loss(y, t) + 1.0,
    "a root": lambda y, t: F.mse_loss(y, t).sqrt(),
    "a product": lambda y, t: F.mse_loss(y, t) * y.square().mean().exp(),
    "mean of an expression": lambda y, t: (2 * (y - t) ** 2).mean(),
    "means of samples": lambda y, t: ((y - t) ** 2).flatten(1).mean(1).mean(),
    "weighted elements": lambda y, t: (F.mse_loss(y, t, reduction="none") * t.square()).mean(),
    "divergence over the batch": lambda y, t: F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "sum": lambda y, t: F.mse_loss(y, t, reduction="sum") / y.shape[0],
    "overlap": lambda y, t: 1 - ((y * t).sum((1, 2, 3)) / (1 + (y.square() + t.square()).sum((1, 2, 3)))).mean(),
}
WHOLE = ("a root", "a product")
"""Those that need the whole batch."""
CLASSES: dict[str, Callable[..., Tensor]] = {
    "squares": F.mse_loss,
    "classes": F.cross_entropy,
    "weighted classes": lambda y, t: by_pixel(WEIGHTS, y, t),
}
"""Losses of segments."""
REFERENCE = {
    "resnet": ("resnet:resnet18", (3, 3, 64, 48), {"num_classes": 5, "width": 4}),
    "unet": ("unet3d:unet3d", (2, 3, 8, 16, 8), {"num_classes": 3, "width": 2, "depth": 2}),
    "mesh": ("mesh_tangling:mesh_tangling_128", (2, 18, 32, 48), {"width": 1 / 64}),
    "cosmoflow": ("cosmoflow:cosmoflow", (2, 2, 16, 16, 16), {"levels": 2, "width": 2, "dropout": 0.3}),
    "gpt": ("gpt:gpt", (3, 6), {"vocabulary": 17, "width": 8, "layers": 2, "heads": 2, "context": 9}),
}
FAMILIES = {
    "space": ("spatial",),
    "samples and space": ("sample", "spatial"),
    "all": ("sample", "spatial", "channel"),
}


def example(name: str) -> tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]:
    """A network, its input, its target and its loss."""
    if name in LOSSES:
        module = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh())
        return module, torch.randn(5, 2, 6, 5), torch.randn(5, 3, 6, 5), LOSSES[name]
    if name in CLASSES:
        target = torch.randn(5, CODES, 9, 7) if name == "squares" else torch.randint(CODES, (5, 9, 7))
        return Segments(), torch.randn(5, 2, 9, 7), target, CLASSES[name]
    return {
        "images": lambda: (Images(), torch.randn(4, 2, 9, 11), torch.randn(4, 3), F.mse_loss),
        "words": lambda: (Words(), torch.randint(11, (4, 6)), torch.randn(4, 6, 5), F.mse_loss),
        "loose": lambda: (Loose(), torch.randn(4, 2, 6, 5), torch.randn(4, 2, 6, 5), F.mse_loss),
        "dropping": lambda: (Dropping(), torch.randn(4, 2, 5, 6), torch.randn(4, 30, 3), F.mse_loss),
    }[name]()


@cache
def network(name: str) -> Network:
    if name in REFERENCE:
        return network_of(*REFERENCE[name])
    torch.manual_seed(0)
    module, x, target, loss = example(name)
    x, target = (each.double() if each.is_floating_point() else each for each in (x, target))
    model = LoadedModel(module.double(), (x,), (target,), TrainedLoss(loss, unpacked=True))
    return model, capture(model)


def rows(name: str) -> tuple[int, ...]:
    """Micro-batches; the second may be smaller: its parts are cut otherwise, and some are empty."""
    if name in REFERENCE:
        samples = REFERENCE[name][1][0]
        return samples, samples - 1
    if name in WHOLE:
        return (5,)
    return (3, 2) if name in LOSSES or name in CLASSES else (3, 3)


def steps(name: str) -> int:
    """As many as show what a step leaves to those after it; fewer of networks that are dear, or of one layer."""
    return 2 if name in REFERENCE or name in LOSSES or name == "dropping" else 3


@cache
def serial(name: str) -> Trained:
    if name in ("dropping", "weighted classes"):
        return serial_by_step(name)
    found = train_serially(network(name)[0], rows(name), steps(name))
    gradients = {key: g for key, g in found.gradients.items() if g is not None}
    graph = network(name)[1].graph_module
    used = {key for key, _ in (*graph.named_parameters(), *graph.named_buffers())}
    # Of what no operator reads (`type_as` reads a dtype) a rank has nothing; `hp.execute` adds it from the module.
    state = {key: tensor for key, tensor in found.state.items() if key in used or name != "loose"}
    return replace(found, gradients=gradients, state=state)


def serial_by_step(name: str) -> Trained:
    """One device, whose random numbers or weights of terms are other at each step."""
    model, captured = copy.deepcopy(network(name))
    draw = CounterRng(SEED)
    optimizer = sgd(model.module.parameters())
    losses = []
    loss_of = drawing_loss(captured, draw)
    for step in range(steps(name)):
        draw.step = step
        batch = batch_of(network(name)[0], sum(rows(name)), step)
        if name == "dropping":
            losses.append(serial_step(loss_of, optimizer, *batch, rows(name), draw))
        else:
            losses.append(serial_step(by_terms(model, _terms(batch[1][0])), optimizer, *batch, rows(name)))
    return Trained(losses, {n: p.grad for n, p in model.module.named_parameters()}, model.module.state_dict())


def by_terms(model: LoadedModel, total: Tensor) -> Any:
    """The loss of a micro-batch, which a step weighs by its rows, as its share in a mean over ``total`` terms."""

    def loss_of(inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        share = _terms(targets[0]) / total
        return model.loss(inputs, targets) * share * sum(rows("weighted classes")) / len(targets[0])

    return loss_of


def _terms(target: Tensor) -> Tensor:
    return WEIGHTS[target[target != 1]].sum()


CUTS: dict[tuple[str, ...], list[Cuts]] = {
    ("images",): [
        {"height": (0, 1, 2)},
        {"height": (0, 2, 2, 9)},
        {"height": (0, 3, 9), "width": (0, 5, 11)},
        {"channel": (0, 1, 4)},
        {"sample": (0, 1, 3), "channel": (0, 3, 4)},
        {"replica": (0, 1, 2)},
    ],
    ("words",): [
        {"time": (0, 1, 3, 6)},
        {"feature": (0, 1, 4)},
        {"head": (0, 1, 2), "time": (0, 2, 6)},
        {"channel": (0, 1, 2)},
    ],
    ("dropping",): [
        {"height": (0, 1, 5)},
        {"sample": (0, 1, 3), "channel": (0, 1, 4)},
        {"time": (0, 7, 30)},
        {"head": (0, 1, 2), "height": (0, 2, 5)},
        {"width": (0, 0, 2, 6)},
    ],
    tuple(CLASSES): [
        {"height": (0, 1, 2)},
        {"height": (0, 2, 2, 9)},
        {"sample": (0, 1, 3), "width": (0, 3, 7)},
        {"channel": (0, 1, 3), "height": (0, 4, 9)},
        {"replica": (0, 1, 2), "height": (0, 4, 9)},
    ],
    tuple(LOSSES): [
        {"height": (0, 2, 6)},
        {"sample": (0, 1, 3), "width": (0, 3, 5)},
        {"channel": (0, 1, 3), "replica": (0, 1, 2)},
    ],
}
EACH = [(name, cuts) for names, each in CUTS.items() for name in names for cuts in each]


def check(name: str, decision: Any) -> None:
    options = {"seed": SEED} if name == "dropping" else {}
    assert_equal(trained(network(name), decision, steps(name), **options), serial(name))


@pytest.mark.cases(30)
@pytest.mark.parametrize(
    ("name", "cuts"), [(n, c) for names, each in CUTS.items() for n in names for c in each], ids=str
)
def test_every_layer_cut_alike(name: str, cuts: Cuts) -> None:
    check(name, divided(network(name)[1].graph, cuts, rows(name)))


@pytest.mark.parametrize("name", ["images", "words", "loose"])
@pytest.mark.parametrize("seed", range(3))
def test_every_layer_cut_otherwise(name: str, seed: int) -> None:
    rng = random.Random(seed)

    def cuts(layer: Layer) -> dict[str, tuple[int, ...]]:
        dim = rng.choice(("sample", "channel", "height", "width", "time", "replica"))
        return {dim: random_cuts(rng, 12, 3)}

    check(name, divided(network(name)[1].graph, cuts, rows(name)))


@pytest.mark.parametrize("seed", range(4))
def test_layouts_at_random_with_margins(seed: int) -> None:
    name = list(CLASSES)[seed % 3]
    families = ("sample", "spatial", "channel")
    check(name, at_random(network(name)[1].graph, 4, families, random.Random(seed), rows(name), halo_depth=2))


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["a root", "two terms", "overlap"])
def test_wherever_a_stage_ends(name: str, after: int) -> None:
    """The number of layers after the boundary."""
    graph = network(name)[1].graph
    cuts: list[Cuts] = [{"height": (0, 2, 6)}, {"width": (0, 2, 5)} if after % 2 else {}]
    check(name, by_stage(graph, [graph.layers[-after].name], cuts, rows(name)))


@pytest.mark.parametrize("cuts", CUTS[tuple(CLASSES)][1:4], ids=str)
def test_evaluation_takes_the_running_statistics_of_all_parts(cuts: Cuts) -> None:
    loaded, captured = network("classes")
    sizes = rows("classes")
    batch = batch_of(loaded, sum(sizes), 0)

    def work(engine: Engine) -> list[float | None]:
        return [engine.step(*batch).loss, engine.evaluate(*batch).loss]

    found = trained_on((loaded, captured), divided(captured.graph, cuts, sizes), work)
    twin = copy.deepcopy(loaded)
    first = serial_step(twin.loss, sgd(twin.module.parameters()), *batch, sizes)
    twin.module.eval()
    parts = zip(*(each.split(sizes) for each in (batch[0][0], batch[1][0])), strict=True)
    with torch.no_grad():
        second = sum(len(x) / sum(sizes) * twin.loss((x,), (target,)).item() for x, target in parts)
    assert found.losses == pytest.approx([first, second], rel=1e-12)


@pytest.mark.parametrize("name", ["resnet", "unet", "mesh"])
@pytest.mark.parametrize("families", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
def test_a_layout_for_every_layer(name: str, families: str, seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 4, 6])
    changes = rng.choice([0.1, 0.5, 1.0])
    graph = network(name)[1].graph
    decision = at_random(graph, ranks, FAMILIES[families], rng, rows(name), changes=changes)
    check(name, decision)


@pytest.mark.parametrize("name", ["mesh", "unet"])
def test_ranks_may_work_beyond_their_parts(name: str) -> None:
    rng = random.Random(7)
    graph = network(name)[1].graph
    decision = at_random(graph, 4, FAMILIES["samples and space"], rng, rows(name), halo_depth=3, changes=0.2)
    assert any(placement.margin for placement in decision.layers.values())
    check(name, decision)


def test_features_heads_and_time_of_a_transformer() -> None:
    rng = random.Random(3)
    decision = at_random(network("gpt")[1].graph, 4, FAMILIES["all"], rng, rows("gpt"), changes=0.5)
    check("gpt", decision)


def test_dropout_drops_the_same_wherever_a_volume_is_cut() -> None:
    made = network("cosmoflow")
    everything = FAMILIES["all"]
    plans = (at_random(made[1].graph, n, everything, random.Random(n), rows("cosmoflow")) for n in (2, 4))
    one, many = (trained(made, plan, steps("cosmoflow")) for plan in plans)
    assert_equal(one, many)
