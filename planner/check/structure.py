"""Whether stages, layers, ranks and shares of a plan make sense together: what needs no profile, then what does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from planner import schedules
from planner.check.layouts import has_layouts
from planner.ir.graph import SAMPLE, Graph, producer
from planner.ir.plan import Decision, Placement
from planner.ir.profile import Profile
from planner.layers import throughout_sites


def structure_faults(decision: Decision) -> Iterator[str]:
    """What can be seen without a profile."""
    if not decision.micro_batches or min(decision.micro_batches) < 1:
        yield f"decision.micro_batches: micro-batches {decision.micro_batches} are not all positive"
        return
    if not decision.stages:
        yield "decision.stages: a plan has at least one stage, here are 0"
    yield from _rank_faults(decision)
    for name, placement in decision.layers.items():
        if not 0 <= placement.stage < len(decision.stages):
            path = f"decision.layers.{name}.stage"
            yield f"{path}: layer {name} is in stage {placement.stage} of {len(decision.stages)} stages"
    for number in range(len(decision.stages)):
        yield from _layout_faults(decision, number)


def _rank_faults(decision: Decision) -> Iterator[str]:
    """Each rank is one device, and runs one stage, or those of one position of the schedule."""
    taken: dict[int, int] = {}
    device_of: dict[int, str] = {}
    rank_on: dict[str, int] = {}
    for number, stage in enumerate(decision.stages):
        path = f"decision.stages[{number}]"
        if not stage.ranks or len(stage.ranks) != len(stage.devices):
            yield f"{path}.ranks: stage {number} has {len(stage.ranks)} ranks and {len(stage.devices)} devices"
        if len(set(stage.ranks)) < len(stage.ranks):
            yield f"{path}.ranks: stage {number} names one rank twice: {list(stage.ranks)}"
        for rank in stage.ranks:
            if rank in taken and not _shares_a_position(decision, taken[rank], number):
                yield f"{path}.ranks: rank {rank} is in stage {taken[rank]} and in stage {number}"
            taken[rank] = number
            if not 0 <= rank < decision.num_ranks:
                yield f"{path}.ranks: stage {number} names rank {rank}, the program has {decision.num_ranks} rows"
        for rank, device in zip(stage.ranks, stage.devices, strict=False):
            if device_of.setdefault(rank, device) != device:
                yield f"{path}.devices: rank {rank} is on {device_of[rank]} and on {device}"
            if rank_on.setdefault(device, rank) != rank:
                yield f"{path}.devices: {device} is the device of rank {rank_on[device]} and of rank {rank}"
    for rank, row in enumerate(decision.program):
        if row and rank not in taken:
            yield f"decision.program[{rank}]: rank {rank} has {len(row)} actions and is in 0 stages"
    if decision.program and taken and decision.num_ranks - 1 > max(taken):
        yield f"decision.program: {decision.num_ranks} rows, the last rank in a stage is {max(taken)}"


def _shares_a_position(decision: Decision, first: int, second: int) -> bool:
    """Whether the schedule may run both stages on the same ranks."""
    several = decision.schedule in schedules.names() and schedules.traits(decision.schedule).stages_per_position != 1
    return several and decision.stages[first].ranks == decision.stages[second].ranks


def form_faults(decision: Decision) -> Iterator[str]:
    """Of ``ways`` and ``margin`` what can be seen without the layers (:func:`planner.check.layouts.layer_faults`)."""
    for name, placed in decision.layers.items():
        yield from _placement_form_faults(name, placed)


def _placement_form_faults(name: str, placed: Placement) -> Iterator[str]:
    path = f"decision.layers.{name}"
    if placed.ways < 1:
        yield f"{path}.ways: layer {name} has ways {placed.ways}; it is 1 or more"
    elif placed.ways > 1 and placed.margin:
        yield f"{path}.ways: layer {name} has ways {placed.ways} and margin {placed.margin}; it can have one of them"
    if placed.margin < 0:
        yield f"{path}.margin: layer {name} has margin {placed.margin}; it is 0 or more"
    dims = [dim for dim, points in placed.cuts.items() if len(points) > 2]
    if placed.ways > 1 and not any((len(placed.cuts[dim]) - 1) % placed.ways == 0 for dim in dims):
        parts = ", ".join(str(len(placed.cuts[dim]) - 1) for dim in dims) or "1"
        yield f"{path}.ways: layer {name} has ways {placed.ways}, which divide none of its parts ({parts})"


def _layout_faults(decision: Decision, number: int) -> Iterator[str]:
    names, ranks = decision.layers_of(number), decision.stages[number].ranks
    if not names:
        yield f"decision.stages[{number}]: stage {number} has no layer"
        return
    for name in names:
        placed, path = decision.layers[name], f"decision.layers.{name}.cuts"
        if any(len(p) < 2 or p[0] != 0 or any(a > b for a, b in pairwise(p)) for p in placed.cuts.values()):
            yield f"{path}: stage {number} has cut points of {name} that do not ascend from 0: {dict(placed.cuts)}"
            return
        if any(p[-1] < 1 for p in placed.cuts.values()):
            yield f"{path}: stage {number} has cut points of {name} that end at 0: {dict(placed.cuts)}"
            return
        if placed.layout.num_parts != len(ranks):
            yield f"{path}: stage {number}: {name} is cut in {placed.layout.num_parts} parts for {len(ranks)} ranks"
            return
    if not has_layouts(decision, number) and not is_in_parts(decision, number):
        yield from _share_faults(decision, number)


def is_in_parts(decision: Decision, number: int) -> bool:
    """Whether the shares of a stage are none of samples, but parts of its sites."""
    points = decision.layers[decision.layers_of(number)[0]].cuts.get(SAMPLE, (0,))
    return len(points) > 2 and points[-1] != max(decision.micro_batches)


def _share_faults(decision: Decision, number: int) -> Iterator[str]:
    ranks = decision.stages[number].ranks
    first = decision.layers_of(number)[0]
    layout, path = decision.layers[first].layout, f"decision.layers.{first}.cuts"
    for rows in sorted(set(decision.micro_batches)):
        shares = layout.samples(rows)
        if sum(shares) != rows and len(ranks) > 1:
            yield f"{path}: stage {number} shares {sum(shares)} of {rows} samples of a micro-batch"
        if min(shares) < 1:
            idle = ranks[shares.index(min(shares))]
            yield f"{path}: stage {number} leaves rank {idle} none of a micro-batch of {rows}"


def model_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """Layers that are missing, unknown, or read what a later stage makes."""
    names = graph.by_name()
    yield from (f"decision.layers: layer {name} is in no stage" for name in names if name not in decision.layers)
    unknown = (name for name in decision.layers if name not in names)
    yield from (f"decision.layers.{name}: layer {name} is not in the model" for name in unknown)
    stage_of = {name: placement.stage for name, placement in decision.layers.items()}
    for layer in graph.layers:
        here = stage_of.get(layer.name)
        for value in layer.inputs:
            there = stage_of.get(producer(value))
            if here is not None and there is not None and there > here:
                path = f"decision.layers.{layer.name}.stage"
                yield f"{path}: layer {layer.name} of stage {here} reads {value}, which stage {there} makes"


def part_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """Stages that share parts of sites: where layers see samples, or a rank would have nothing, shares are samples."""
    throughout = throughout_sites(graph)
    for number in range(len(decision.stages)):
        if has_layouts(decision, number) or not is_in_parts(decision, number):
            continue
        if not throughout.issuperset(decision.layers_of(number)):
            yield from _share_faults(decision, number)
        elif min(b - a for a, b in pairwise(decision.layout_of(number).cuts[SAMPLE])) < 1:
            path = f"decision.layers.{decision.layers_of(number)[0]}.cuts"
            yield f"{path}: stage {number} leaves a rank none of the sites"


def device_faults(decision: Decision, profile: Profile) -> Iterator[str]:
    """Ranks that the cluster has not, or has elsewhere."""
    devices = profile.cluster.devices
    for number, stage in enumerate(decision.stages):
        path = f"decision.stages[{number}].devices"
        for rank, name in zip(stage.ranks, stage.devices, strict=False):
            if rank >= len(devices):
                yield f"{path}: stage {number} names rank {rank}, the cluster has {len(devices)} devices"
            elif devices[rank].name != name:
                yield f"{path}: stage {number} has rank {rank} on {name}, in the cluster it is {devices[rank].name}"
