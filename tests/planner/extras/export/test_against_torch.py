"""Exported plans, run by torch's own pipeline runtime, give the gradients that ours gives for the same order.

torch 2.13 is right for all of these orders; none is left out.  Torch 2.11 has one channel for all messages between two
ranks, where it mixes up those of ranks with several stages: these orders are left out there.  Its schedules are not
used, only the runtime that reads the CSV (the list that ``Schedule1F1B`` makes is refused by torch's own validator).
Stages are ``PipelineStage``: those of ``pipe.build_stage`` greet their neighbours over the process group even where
both are on one rank, which gloo refuses, so they cannot be laid out as ZB-V's.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from benchmarks.chains import chain_profile
from planner.extras.export.torch_pipelining import TorchPipeline, is_loss, split_points, torch_pipelining
from planner.ir.plan import Decision
from planner.ir.schedule import Pipeline, Schedule
from planner.schedules import positions, schedule
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from tests.captures import capture
from tests.forks import forked
from tests.planner.factories import plan_of
from tests.runtime.plans import batch_of, decide, model_of, run_ranks

MICRO_BATCHES = (2, 2, 2, 2)
TWO = ("blocks.1.norm1",)
FOUR = ("blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2")
CUTS = {**dict.fromkeys(("gpipe", "1f1b", "1f1b-so", "zb-h1", "1f1b-2bp"), TWO), "interleaved": FOUR, "zb-v": FOUR}
KEEPS_STAGES_APART = hasattr(PipelineStage, "_warmup_forward_vote")  # with it came a channel for each pair of stages
RUN_BY_TORCH = [name for name, cuts in CUTS.items() if cuts is TWO or KEEPS_STAGES_APART]

TELLING = {"aten.add.Tensor", "aten.flatten.using_ints", "aten.max_pool2d.default", "aten.gelu.default"}
"""Operators without parameters that traces of both sides call alike."""


@cache
def network() -> tuple[LoadedModel, CapturedModule]:
    model = model_of("gpt:gpt", (8, 6), vocabulary=17, width=8, layers=2, heads=2)
    return model, capture(model)


@cache
def decision_of(name: str) -> Decision:
    where = positions(name, 2, len(CUTS[name]) // 2 + 1)

    def order(pipeline: Pipeline) -> Schedule:
        return schedule(name)(replace(pipeline, positions=where))

    graph = network()[1].graph
    return replace(decide(graph, CUTS[name], MICRO_BATCHES, [(rank,) for rank in where], schedule=order), schedule=name)


@cache
def exported(name: str) -> TorchPipeline:
    plan = replace(plan_of(chain_profile(4), decision_of("gpipe")), decision=decision_of(name))
    return torch_pipelining(plan, network()[1].graph, f"{name}.csv")


@cache
def split_at(points: tuple[tuple[str, str], ...]) -> Any:
    """torch's own split of the network at exported points; on a copy, which it marks."""
    return split_by_torch(copy.deepcopy(network()[0]), dict(points))


def split_by_torch(model: LoadedModel, points: Mapping[str, str]) -> Any:
    """torch's own split of ``model``."""
    split_spec = {module: SplitPoint[point] for module, point in points.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 warns of its own use of LeafSpec
        return pipeline(model.module, (model.inputs[0][:2],), split_spec=split_spec)


def run_by_torch(rank: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of one step of each schedule, of this rank's stages."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    found = {}
    for name in RUN_BY_TORCH:
        described = json.loads((folder / f"{name}.json").read_text())
        model = network()[0]
        pipe = split_at(tuple(described["split_spec"].items()))
        pipe.zero_grad()
        stages = [
            PipelineStage(pipe.get_stage_module(number), number, pipe.num_stages, torch.device("cpu"))
            for number, on in enumerate(described["stage_to_rank"])
            if on == rank
        ]

        def loss_fn(output: torch.Tensor, targets: torch.Tensor, model: LoadedModel = model) -> torch.Tensor:
            return model.loss_fn(output, (targets,))

        runner = _PipelineScheduleRuntime(stages, described["num_microbatches"], loss_fn)
        runner._load_csv(str(folder / described["csv"]), format=described["csv_format"])
        inputs, targets = batch_of(model, sum(MICRO_BATCHES), 0)
        runner.step(*inputs if any(stage.is_first for stage in stages) else (), target=targets[0], losses=[])
        found[name] = {key: p.grad for stage in stages for key, p in stage.submod.named_parameters()}
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients by schedule, of both ranks; all schedules in one pair of forked processes."""
    folder = tmp_path_factory.mktemp("torch")
    for name in RUN_BY_TORCH:
        (folder / f"{name}.json").write_text(exported(name).description)
        split_at(tuple(json.loads(exported(name).description)["split_spec"].items()))  # once, before the fork
        (folder / f"{name}.csv").write_text(exported(name).schedule)
    gradients: dict[str, dict[str, torch.Tensor]] = {name: {} for name in RUN_BY_TORCH}
    for of_rank in forked(2, lambda rank: run_by_torch(rank, folder)):
        for name, more in of_rank.items():
            gradients[name].update(more)
    return gradients


@pytest.mark.parametrize("name", RUN_BY_TORCH)
def test_torch_computes_the_same_gradients_in_the_same_order(
    name: str, by_torch: dict[str, dict[str, torch.Tensor]]
) -> None:
    torch.set_num_threads(1)
    model, _ = network()
    engines, _ = run_ranks(model, decision_of(name), [batch_of(model, sum(MICRO_BATCHES), 0)])
    ours = {key: gradient for engine in engines for key, gradient in engine.gradients().items()}
    theirs = by_torch[name]
    assert sorted(ours) == sorted(theirs) == sorted(key for key, _ in model.module.named_parameters())
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-10, atol=1e-12)


NETWORKS = {
    "gpt": ("gpt:gpt", (2, 6), {"vocabulary": 17, "width": 8, "layers": 2, "heads": 2}),
    "resnet": ("resnet:resnet18", (4, 3, 16, 16), {"width": 4, "num_classes": 5, "depths": (1, 1)}),
    "vgg": ("vgg:vgg16", (4, 3, 32, 32), {"width": 4, "num_classes": 5, "hidden": 8}),
}


@pytest.mark.parametrize("where", ["everywhere", "before layers without parameters"])
@pytest.mark.parametrize("name", NETWORKS)
def test_torch_splits_a_model_exactly_where_the_points_say(name: str, where: str) -> None:
    factory, shape, arguments = NETWORKS[name]
    model = model_of(factory, shape, **arguments)
    graph = capture(model).graph
    layers = [layer for layer in graph.layers if not is_loss(graph, layer.name)]
    begins = [number > 0 and (where == "everywhere" or not layer.parameters) for number, layer in enumerate(layers)]
    stage_of = dict(zip((layer.name for layer in layers), accumulate(map(int, begins)), strict=True))
    last = max(stage_of.values())
    points = [
        point for point in split_points(graph, {layer.name: last for layer in graph.layers} | stage_of) if point.module
    ]
    assert len(points) > sum(begins) / 4
    pipe = split_by_torch(model, {point.module: point.point for point in points})
    assert pipe.num_stages == 1 + len(points)
    names = [layer.name for layer in layers]
    starts = [0, *(names.index(point.after) for point in points), len(layers)]
    for stage, (first, end) in enumerate(pairwise(starts)):
        wanted = {parameter for layer in layers[first:end] for parameter in layer.parameters}
        assert {key for key, _ in pipe.get_stage_module(stage).named_parameters()} == wanted
        found = Counter(operator for operator in operators_of(pipe.get_stage_module(stage)) if operator in TELLING)
        assert found == Counter(op for layer in layers[first:end] if (op := layer.attributes["op"]) in TELLING)


def operators_of(module: torch.nn.Module) -> list[str]:
    """Every operator that the graphs inside ``module`` call."""
    graphs = [part.graph for part in module.modules() if isinstance(getattr(part, "graph", None), torch.fx.Graph)]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]
