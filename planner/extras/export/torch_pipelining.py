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

Where stages begin, as marks on the user's modules: what ``torch.distributed.pipelining.pipeline`` splits at.

torch splits before or after the call of a module, so a cut between two layers can be told to it where the first layer
behind it begins a module, or the last one before it ends one.  Layers carry the paths of modules, but a layer such as
``relu`` may as well be an operator that a larger module calls itself; only what is certain counts:

- a layer that uses the parameters ``PATH.weight``, ``PATH.bias`` is the call of the module ``PATH``;
- a layer whose last name is not that of its operator (``features.1`` is ``relu``) is the call of a module;
- a module calls an operator itself, or a part named like it, where a layer is called ``PATH.operator``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.costs.rows import stage_layouts
from planner.ir.errors import UsageError
from planner.ir.graph import Graph, Layer
from planner.ir.plan import Decision, Plan
from planner.ir.program import Program
from planner.ir.schedule import COMPUTE, Op
from planner.layers.boundary import Boundaries

BEGINNING = "BEGINNING"
END = "END"
_LOSS = "loss"
_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """Where a stage begins.

    Attributes:
        module: path of a module, called once; empty if the cut falls on no certain boundary of modules.
        point: ``BEGINNING`` or ``END`` of that module, torch's own words.
        before, after: the layers on both sides of the cut.
    """

    stage: int
    module: str
    point: str
    before: str
    after: str


def is_loss(graph: Graph, layer: str) -> bool:
    """Whether the loss function computes ``layer``, which no part of the model does."""
    return layer == graph.loss or layer == _LOSS or layer.startswith(f"{_LOSS}.")


def split_points(graph: Graph, stage_of: Mapping[str, int]) -> tuple[SplitPoint, ...]:
    """Where each stage but the first begins; without a module if stages are no runs of layers in execution order."""
    names = [layer.name for layer in graph.layers]
    stages = [stage_of[name] for name in names]
    modules = _Modules(graph.layers)
    points: list[SplitPoint] = []
    for position, (a, b) in enumerate(pairwise(stages), 1):
        if a != b:
            used_modules = {point.module for point in points}
            candidates = (
                each for each in modules.boundaries(position) if each[1] not in used_modules
            )  # torch takes one each
            point, module = next(candidates, (BEGINNING, "")) if stages == sorted(stages) else (BEGINNING, "")
            points.append(SplitPoint(b, module, point, names[position - 1], names[position]))
    return tuple(points)


class _Modules:
    """The modules that layers are calls of."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._names = [layer.name for layer in layers]
        self._owners = [_owner(layer) for layer in layers]
        self._operations = [_operation(layer) for layer in layers]
        self._num_owned = Counter(owner for owner in self._owners if owner)
        self._numbered = {_plain(name) for name in self._names if _plain(name) != name}

    def boundaries(self, position: int) -> Iterator[tuple[str, str]]:
        """(point, module) of all that begin or end at a cut before the layer of number ``position``."""
        before = position - 1
        after = position
        if module := self._called(after):
            yield BEGINNING, module
        if module := self._called(before):
            yield END, module
        for module in _around(self._names[after]):
            if self._encloses(module) and not any(_inside(name, module) for name in self._names[:after]):
                yield BEGINNING, module
        for module in _around(self._names[before]):
            if self._encloses(module) and not any(_inside(name, module) for name in self._names[after:]):
                yield END, module

    def _called(self, index: int) -> str:
        """The module that this layer is the only call of, if that is certain."""
        name = self._names[index]
        owner = self._owners[index]
        if owner in (name, _plain(name)):
            return owner if self._num_owned[owner] == 1 else ""
        repeated = name in self._numbered or (_plain(name) != name and _plain(name) in self._names)
        is_operator = _plain(_last(name)) == self._operations[index]
        return "" if owner or repeated or is_operator else name

    def _encloses(self, module: str) -> bool:
        """Whether ``module`` is certainly called, and once."""
        inside = [index for index, name in enumerate(self._names) if _inside(name, module)]
        owners = [self._owners[index] for index in inside if self._owners[index]]
        calls = any(
            _parent(self._names[index]) == module and _plain(_last(self._names[index])) == self._operations[index]
            for index in inside
        )
        return calls and bool(owners) and all(self._num_owned[owner] == 1 for owner in owners)


def _owner(layer: Layer) -> str:
    """The module whose parameters the layer uses; empty if there are none, or of several."""
    owners = {_parent(name) for name in layer.parameters}
    return owners.pop() if len(owners) == 1 else ""


def _operation(layer: Layer) -> str:
    """``relu`` of the operator ``aten.relu.default``."""
    return str(layer.attributes.get("op", "")).removeprefix("aten.").partition(".")[0].strip("_")


def _around(name: str) -> tuple[str, ...]:
    """The paths around a layer, innermost first."""
    parts = name.split(".")
    return tuple(".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    """Without the number of a layer that is not the first of its name."""
    return _NUMBER.sub("", name)


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
        json.dumps(_described(decision, points, schedule_file), indent=2) + "\n",
        "".join(",".join(str(action) for action in row if action.op in COMPUTE) + "\n" for row in program.rows),
        inside,
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
