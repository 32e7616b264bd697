"""A plan for ``torch.distributed.pipelining``: where the model is split, and what each rank does in which order.

Two files.  The CSV has a row a rank, the actions that compute in the plan's order, in the format that torch itself
reads and writes; torch adds the messages, so receives are announced where *it* sees fit.  The JSON says the rest:

    described = json.loads(open("pipeline.json").read())
    split_spec = {module: SplitPoint[point] for module, point in described["split_spec"].items()}
    pipe = pipeline(model, example_micro_batch, split_spec=split_spec)
    on = described["stage_to_rank"]
    stages = [PipelineStage(pipe.get_stage_module(s), s, len(on), device) for s in range(len(on)) if on[s] == rank]
    schedule = _PipelineScheduleRuntime(stages, described["num_microbatches"], loss_fn)
    schedule._load_csv("pipeline.csv", format=described["csv_format"])

``split_spec`` is null where a cut falls inside a module; build the stages by hand then, ``stages`` names the layers.
Whether it can be written at all: torch runs a stage on one rank, hands values to the next stage alone, knows one
version of the weights and one shape of micro-batch, feeds the model's inputs to the first stage and computes the loss
from the output of the last.  (As of torch 2.13.)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.export.decisions import stage_layouts
from planner.export.split_points import SplitPoint, is_loss, split_points
from planner.ir.errors import UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Plan
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, Op
from planner.layers.boundary import Boundaries

CSV_FORMAT = "compute_only"
_BACKWARD = frozenset({Op.BACKWARD, Op.BACKWARD_INPUT})


@dataclass(frozen=True, slots=True)
class TorchPipeline:
    """What is written.

    Attributes:
        description: the JSON.
        schedule: the CSV.
        inside_modules: cuts that ``split_spec`` cannot name, in words; empty if it names all.
    """

    description: str
    schedule: str
    inside_modules: tuple[str, ...]


def torch_pipelining(plan: Plan, graph: Graph, schedule_file: str) -> TorchPipeline:
    """The plan in torch's terms.

    Args:
        schedule_file: the name by which the JSON refers to the CSV.

    Raises:
        UsageError: torch cannot express the plan; ``details`` lists everything that stands in the way.
    """
    decision = plan.decision
    program = Boundaries.of_decision(graph, decision).program(decision)
    faults = [*_faults_of_stages(decision, graph), *_faults_of_edges(program), *_faults_of_rows(program, decision)]
    if faults:
        raise UsageError(
            "torch.distributed.pipelining cannot express this plan",
            faults,
            ["halopipe plan --fix '*=replicas:1' --schedule 1f1b, with micro-batches of one size"],
        )
    points = split_points(graph, {name: placed.stage for name, placed in decision.layers.items()})
    inside = tuple(
        f"stage {point.stage} begins between {point.before} and {point.after}" for point in points if not point.module
    )
    return TorchPipeline(
        json.dumps(_described(decision, points, schedule_file), indent=2) + "\n", _csv(program), inside
    )


def _described(decision: Decision, points: tuple[SplitPoint, ...], schedule_file: str) -> dict[str, Any]:
    complete = all(point.module for point in points)
    layers = [decision.layers_of(stage) for stage in range(len(decision.stages))]
    return {
        "schedule": decision.schedule,
        "csv": schedule_file,
        "csv_format": CSV_FORMAT,
        "num_stages": len(decision.stages),
        "num_microbatches": len(decision.micro_batches),
        "samples_per_microbatch": decision.micro_batches[0],
        "stage_to_rank": [stage.ranks[0] for stage in decision.stages],
        "split_spec": {point.module: point.point for point in points} if complete else None,
        "stages": [
            {
                "stage": number,
                "rank": stage.ranks[0],
                "device": next(iter(stage.devices), ""),
                "recompute": stage.recompute,
                "first_layer": layers[number][0],
                "last_layer": layers[number][-1],
                "num_layers": len(layers[number]),
            }
            for number, stage in enumerate(decision.stages)
        ],
    }


def _csv(program: Program) -> str:
    """A row a rank; messages and updates are left to torch and its user."""
    rows = ([str(action) for action in row if action.op in COMPUTE] for row in program.rows)
    return "".join(",".join(row) + "\n" for row in rows)


def _faults_of_stages(decision: Decision, graph: Graph) -> Iterator[str]:
    for number, stage in enumerate(decision.stages):
        if len(stage.ranks) > 1:
            layouts = ", ".join(stage_layouts(decision, number)) or "whole"
            ranks = ", ".join(map(str, stage.ranks))
            yield f"stage {number} is on ranks {ranks} ({layouts}): torch runs a stage on one rank"
    last = len(decision.stages) - 1
    layers = graph.by_name()
    owner: dict[str, int] = {}
    for name, placed in decision.layers.items():
        here = placed.stage
        if is_loss(graph, name):
            if here != last:
                yield f"{name} of the loss is on stage {here}: torch computes the loss on the last, {last}"
            continue
        for value in layers[name].inputs:
            if value in graph.inputs and here:
                yield f"stage {here} ({name}) reads {value}: torch feeds inputs to stage 0 alone"
        for parameter in layers[name].parameters:
            if owner.setdefault(parameter, here) != here:
                yield f"{parameter} is used by stages {owner[parameter]} and {here}: torch does not sum its gradients"
    if all(is_loss(graph, name) for name in decision.layers_of(last)):
        yield f"stage {last} has nothing but the loss: torch needs a part of the model there"


def _faults_of_edges(program: Program) -> Iterator[str]:
    for edge in program.stages.edges:
        if edge.dst != edge.src + 1:
            values = ", ".join(edge.values[:3])
            yield f"stage {edge.src} hands {values} to stage {edge.dst}: torch hands values to the next stage alone"
        elif not edge.gradient:
            yield f"no gradient comes back from stage {edge.dst} to {edge.src}: torch waits for one"


def _faults_of_rows(program: Program, decision: Decision) -> Iterator[str]:
    if len(set(decision.micro_batches)) > 1:
        sizes = ", ".join(map(str, decision.micro_batches))
        yield f"micro-batches have {sizes} samples: torch has one shape for all, and weighs them alike"
    for rank, row in enumerate(program.rows):
        if not any(action.op in COMPUTE for action in row):
            yield f"rank {rank} has no stage: torch wants one on every rank"
        stale = next((a for a in row if a.version or (a.op is Op.UPDATE and a.microbatch is not None)), None)
        if stale is not None:
            yield f"rank {rank} has {stale}: torch knows one version of the weights in a step"
        blocking = next((action for action in row if action.blocking), None)
        if blocking is not None:
            yield f"rank {rank} has {blocking}: torch has no message that holds its rank"
    if not any(action.op in _BACKWARD for row in program.rows for action in row):
        yield "it has forward passes alone: torch wants a backward for each"
