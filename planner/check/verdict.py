"""All faults of a plan, in words."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from planner import schedules
from planner.check.layouts import has_layouts, layer_faults
from planner.check.reckon import Reckoning, reckon
from planner.ir.errors import HalopipeError
from planner.ir.fingerprint import fingerprint
from planner.ir.graph import SAMPLE, Graph, producer
from planner.ir.plan import Decision, Plan
from planner.ir.profile import Profile
from planner.layers import throughout_sites
from planner.layers.boundary import Boundaries
from planner.passes import validate

_TOLERANCE = 1e-9
_STATUSES = ("proven", "within gap", "time limit", "stopped", "heuristic")


def check(plan: Plan, profile: Profile | None) -> tuple[str, ...]:
    """Everything that is wrong with ``plan``; nothing if it is good.

    Args:
        profile: what the plan was made from; without it only the plan's own consistency is looked at.
    """
    faults = [*_own_faults(plan.decision), *_search_faults(plan)]
    if profile is None:
        return tuple(faults)
    profile = profile.corrected_by(plan.inputs.corrections)  # those that the plan was made under
    faults += _fingerprint_faults(plan, profile)
    placement = [*_placement_faults(plan.decision, profile.graph), *_device_faults(plan.decision, profile)]
    if not faults and not placement:
        placement = [*layer_faults(plan.decision, profile.graph), *_part_faults(plan.decision, profile.graph)]
    faults += placement
    if faults and (placement or any("stage" in fault or "micro-batch" in fault for fault in faults)):
        return tuple(faults)  # a program can only be judged on stages that make sense
    try:
        program = Boundaries.of_decision(profile.graph, plan.decision).program(plan.decision)
        validate(program)
        faults += _prediction_faults(plan, profile, reckon(profile, plan.decision, program))
    except (ValueError, HalopipeError) as error:
        faults.append(f"the program is not legal: {error}")
    return tuple(faults)


def _own_faults(decision: Decision) -> Iterator[str]:
    """What can be seen without a profile."""
    if not decision.micro_batches or min(decision.micro_batches) < 1:
        yield f"micro-batches {decision.micro_batches} are not all positive"
        return
    taken: dict[int, int] = {}
    for number, stage in enumerate(decision.stages):
        if not stage.ranks or len(stage.ranks) != len(stage.devices):
            yield f"stage {number} has {len(stage.ranks)} ranks and {len(stage.devices)} devices"
        for rank in stage.ranks:
            if rank in taken and not _shares_a_position(decision, taken[rank], number):
                yield f"rank {rank} is in stage {taken[rank]} and in stage {number}"
            taken[rank] = number
            if not 0 <= rank < decision.num_ranks:
                yield f"stage {number} names rank {rank}, the program has {decision.num_ranks} rows"
        yield from _layout_faults(decision, number)
    for name, placement in decision.layers.items():
        if not 0 <= placement.stage < len(decision.stages):
            yield f"layer {name} is in stage {placement.stage} of {len(decision.stages)} stages"


def _shares_a_position(decision: Decision, first: int, second: int) -> bool:
    """Whether the schedule may run both stages on the same ranks."""
    several = decision.schedule in schedules.names() and schedules.traits(decision.schedule).stages_per_position != 1
    return several and decision.stages[first].ranks == decision.stages[second].ranks


def _layout_faults(decision: Decision, number: int) -> Iterator[str]:
    names, ranks = decision.layers_of(number), decision.stages[number].ranks
    if not names:
        yield f"stage {number} has no layer"
        return
    for name in names:
        placed = decision.layers[name]
        if any(len(p) < 2 or p[0] != 0 or any(a > b for a, b in pairwise(p)) for p in placed.cuts.values()):
            yield f"stage {number} has cut points of {name} that do not ascend from 0: {dict(placed.cuts)}"
            return
        if placed.layout.num_parts != len(ranks):
            yield f"stage {number}: {name} is cut in {placed.layout.num_parts} parts for {len(ranks)} ranks"
            return
    if not has_layouts(decision, number) and not _is_in_parts(decision, number):
        yield from _share_faults(decision, number)


def _is_in_parts(decision: Decision, number: int) -> bool:
    """Whether the shares of a stage are none of samples, but parts of its sites."""
    points = decision.layers[decision.layers_of(number)[0]].cuts.get(SAMPLE, (0,))
    return len(points) > 2 and points[-1] != max(decision.micro_batches)


def _share_faults(decision: Decision, number: int) -> Iterator[str]:
    ranks = decision.stages[number].ranks
    layout = decision.layers[decision.layers_of(number)[0]].layout
    for rows in sorted(set(decision.micro_batches)):
        shares = layout.samples(rows)
        if sum(shares) != rows and len(ranks) > 1:
            yield f"stage {number} shares {sum(shares)} of {rows} samples of a micro-batch"
        if min(shares) < 1:
            yield f"stage {number} leaves rank {ranks[shares.index(min(shares))]} none of a micro-batch of {rows}"


def _search_faults(plan: Plan) -> Iterator[str]:
    search, step_s, batch = plan.search, plan.prediction.step_s, plan.decision.global_batch
    if search.status not in _STATUSES:
        yield f"status {search.status!r} is none of {', '.join(_STATUSES)}"
    if search.bound_s > step_s * (1 + _TOLERANCE):
        yield f"the bound {search.bound_s} s is above the step {step_s} s"
    if search.bound_s > 0 and not _close(search.gap + 1, step_s / search.bound_s):
        yield f"the gap {search.gap} is not step over bound - 1, {step_s / search.bound_s - 1}"
    if search.status == "proven" and search.bound_s < step_s * (1 - 1e-6):
        yield f"called proven with a bound of {search.bound_s} s for a step of {step_s} s"
    if step_s > 0 and not _close(plan.prediction.samples_per_s * step_s, batch):
        yield f"{plan.prediction.samples_per_s} samples/s for {step_s} s is not the global batch of {batch}"


def _fingerprint_faults(plan: Plan, profile: Profile) -> Iterator[str]:
    for what, expected, value in (
        ("model", plan.inputs.model_fingerprint, profile.graph),
        ("profile", plan.inputs.profile_fingerprint, profile.bare),
        ("cluster", plan.inputs.cluster_fingerprint, profile.cluster),
    ):
        found = fingerprint(value)
        if found != expected:
            yield f"the {what} is another one: plan {expected}, here {found}"
    if plan.inputs.model != profile.model or plan.inputs.optimizer != profile.optimizer:
        yield "the plan names another model source or optimiser than the profile"


def _placement_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    names = graph.by_name()
    yield from (f"layer {name} is in no stage" for name in names if name not in decision.layers)
    yield from (f"layer {name} is not in the model" for name in decision.layers if name not in names)
    stage_of = {name: placement.stage for name, placement in decision.layers.items()}
    for layer in graph.layers:
        here = stage_of.get(layer.name)
        for value in layer.inputs:
            there = stage_of.get(producer(value))
            if here is not None and there is not None and there > here:
                yield f"layer {layer.name} of stage {here} reads {value}, which stage {there} makes"


def _part_faults(decision: Decision, graph: Graph) -> Iterator[str]:
    """Stages that share parts of sites: where layers see samples, or a rank would have nothing, shares are samples."""
    throughout = throughout_sites(graph)
    for number in range(len(decision.stages)):
        if has_layouts(decision, number) or not _is_in_parts(decision, number):
            continue
        if not throughout.issuperset(decision.layers_of(number)):
            yield from _share_faults(decision, number)
        elif min(b - a for a, b in pairwise(decision.layout_of(number).cuts[SAMPLE])) < 1:
            yield f"stage {number} leaves a rank none of the sites"


def _device_faults(decision: Decision, profile: Profile) -> Iterator[str]:
    devices = profile.cluster.devices
    for number, stage in enumerate(decision.stages):
        for rank, name in zip(stage.ranks, stage.devices, strict=False):
            if rank >= len(devices):
                yield f"stage {number} names rank {rank}, the cluster has {len(devices)} devices"
            elif devices[rank].name != name:
                yield f"stage {number} has rank {rank} on {name}, in the cluster it is {devices[rank].name}"


def _prediction_faults(plan: Plan, profile: Profile, found: Reckoning) -> Iterator[str]:
    prediction = plan.prediction
    if not _close(prediction.step_s, found.step_s):
        yield f"the predicted step is {prediction.step_s} s, recomputed {found.step_s} s"
    if len(prediction.ranks) != len(found.peak_bytes):
        yield f"{len(prediction.ranks)} ranks are predicted, the program has {len(found.peak_bytes)}"
        return
    # Between sizes measured, of parts of a layer or of a sample there are fractions of bytes, which are rounded for
    # each micro-batch that is held.
    rounded = 2 * len(plan.decision.micro_batches) + 2
    for rank, (said, peak) in enumerate(zip(prediction.ranks, found.peak_bytes, strict=True)):
        if abs(said.peak_bytes - peak) > rounded:
            yield f"rank {rank} is predicted to hold {said.peak_bytes} bytes, recomputed {peak}"
        if peak > said.memory_limit_bytes + rounded:
            yield f"rank {rank} holds {peak} bytes, more than its limit of {said.memory_limit_bytes}"
        if said.memory_limit_bytes > profile.cluster.devices[rank].memory_bytes:
            yield (
                f"rank {rank} has a limit of {said.memory_limit_bytes} bytes, "
                f"its device {profile.cluster.devices[rank].memory_bytes}"
            )


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))
