"""Blocks of layers without exchanges inside, in tiles: what one device gives, in float64."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from halopipe.cli.app import app
from planner.extras.tiles.division import BlockedDivision
from planner.extras.tiles.refusals import block_faults
from planner.ir.box import whole
from planner.ir.graph import Graph
from planner.ir.plan import Block, Decision
from planner.layers.division import Division
from runtime.engine import EvaluationResult
from runtime.pipeline.routing import assemble
from tests.runtime.divided import at_random, divided
from tests.runtime.engines import Network, network_of, on_engines

NETWORKS = {
    "unet2d": ("unet2d:unet2d", (2, 1, 32, 24), {"width": 2}),
    "classes": ("unet2d:unet2d", (1, 2, 24, 16), {"width": 2, "num_classes": 3}),
    "unet3d": ("unet3d:unet3d", (1, 2, 8, 16, 8), {"num_classes": 2, "width": 2, "depth": 2}),
    "resnet": ("resnet:resnet18", (2, 3, 32, 24), {"num_classes": 5, "width": 4}),
}


@cache
def network(name: str) -> Network:
    """With running statistics that are not those of a new module."""
    model, captured = network_of(*NETWORKS[name])
    for part in model.module.modules():
        if isinstance(part, nn.BatchNorm2d | nn.BatchNorm3d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2.0)
    return model, captured


@cache
def serial(name: str, extent: int = 0) -> tuple[float, Tensor]:
    """Loss and output of the module itself, in evaluation mode."""
    model = copy.deepcopy(network(name)[0])
    model.module.eval()
    inputs, targets = batch(name, extent)
    with torch.no_grad():
        return float(model.loss(inputs, targets)), model.module(*inputs)


@cache
def batch(name: str, extent: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The example, or one of another height and width."""
    model = network(name)[0]
    if not extent:
        return model.fed
    pair = *model.inputs, *model.targets
    larger = [torch.nn.functional.interpolate(each, (extent, extent - 4), mode="bilinear") for each in pair]
    return (larger[0],), (larger[1],)


def in_blocks(graph: Graph, ranks: int, rng: random.Random, dims: Sequence[str], most: int = 3) -> Decision:
    """A forward plan of one stage, some of whose layers are in blocks, some of these in tiles."""
    samples = graph.samples
    decision = at_random(graph, ranks, ("spatial",), rng, (samples,), changes=0.0)
    blocks = []
    names = list(decision.layers)
    first = 0
    while first < len(names):
        last = min(len(names), first + rng.choice([1, 3, 8, 20]))
        tiles = {dim: rng.randint(1, most) for dim in dims}
        while last > first and any(block_faults(graph, names[first:last], tiles)):
            last -= 1
        if last > first and rng.random() < 0.9:
            blocks.append(Block(tuple(names[first:last]), tiles))
        first = max(last, first + 1)
    return forward(decision, tuple(blocks))


def forward(decision: Decision, blocks: tuple[Block, ...]) -> Decision:
    program = tuple(tuple(text for text in row if "F" in text) for row in decision.program)
    stage = replace(decision.stages[0], blocks=blocks)
    return replace(decision, schedule="forward", stages=(stage,), program=program)


def assert_exact(name: str, decision: Decision, extent: int = 0) -> list[EvaluationResult]:
    inputs, targets = batch(name, extent)
    loss, output = serial(name, extent)
    found = on_engines(network(name), decision, lambda engine: engine.evaluate(inputs, targets))
    (value,) = {value for each in found for value in each.outputs.get(0, {})}
    pieces = [each.outputs[0][value] for each in found if each.outputs.get(0)]
    torch.testing.assert_close(
        assemble(pieces, whole(tuple(output.shape)), output.dtype), output, rtol=1e-11, atol=1e-12
    )
    assert all(each.loss == pytest.approx(loss, rel=1e-11) for each in found)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_at_random_give_what_one_device_gives(name: str, seed: int) -> None:
    rng = random.Random(seed)
    dims = ("depth", "height", "width") if name == "unet3d" else ("height", "width")
    decision = in_blocks(network(name)[1].graph, (1, 2, 3, 4)[seed], rng, dims)
    assert decision.stages[0].blocks
    assert_exact(name, decision)


def test_a_whole_network_in_one_block_exchanges_nothing() -> None:
    graph = network("unet2d")[1].graph
    plain = divided(graph, {"height": (0, 1, 2)}, (2,))
    names = tuple(plain.layers)
    sent = []
    for blocks in ((), (Block(names),), (Block(names, {"height": 2, "width": 3}),)):
        decision = forward(plain, blocks)
        assert_exact("unet2d", decision)
        sent.append(messages(decision))
    assert sent[0] > 0
    assert sent[1:] == [0, 0]


def messages(decision: Decision) -> int:
    """Exchanges inside the stage, from the division alone."""
    graph = network("unet2d")[1].graph
    division = Division.of(graph, decision, 0, 2)
    blocks = division.blocks if isinstance(division, BlockedDivision) else ()
    inside = {name for block in blocks for name in block.layers}
    found = sum(
        len(division.moves(layer.name, index))
        for layer in graph.layers
        if layer.name not in inside
        for index in range(len(layer.inputs))
    )
    return found + sum(len(division.moves_to(v, boxes)) for b in blocks for v, boxes in b.wanted.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_may_be_of_another_size_than_the_capture(ranks: int) -> None:
    rng = random.Random(ranks)
    decision = in_blocks(network("unet2d")[1].graph, ranks, rng, ("height", "width"))
    assert_exact("unet2d", decision, 52)


@pytest.mark.exhaustive("profiles, plans and runs two ranks")
def test_an_image_is_planned_from_a_smaller_one_and_run_in_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    network = ("profiler.models.unet2d:unet2d", "--input", "1,1,32,32", "--arg", "width=2")
    call("profile", *network, "--quick", "--sizes", "1", "--size", "height=128,width=128")
    asked = ("--objective", "latency", "--allow", "spatial", "--global-batch", "1", "--fix", "*=replicas:2")
    call("plan", "profile.json", *asked, "--memory", "512KiB")
    assert "tiles" in call("explain", "plan.json", "--profile", "profile.json")
    call("check", "plan.json", "--profile", "profile.json")
    told = json.loads(call("run", "plan.json", "--steps", "2", "--memory-limit", "512KiB", "--json"))
    assert max(told["measured"]["peak_bytes"]) <= 512 * 1024
    assert told["numerics"]["worst"]["loss"]["error"] < 1e-5
