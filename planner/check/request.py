"""Whether a decision does what was asked for: every ``inputs.request.*`` that it could break."""

from __future__ import annotations

from collections.abc import Iterator

from planner import schedules
from planner.ir.cluster import Cluster
from planner.ir.constraints import FAMILIES, KIND, WHATS, CutDegrees, broken
from planner.ir.errors import HalopipeError
from planner.ir.plan import Decision, Plan
from planner.ir.problem import (
    ALWAYS,
    AUTO,
    CHANNEL_DIMS,
    LATENCY,
    NEVER,
    SELECTIVE,
    SPATIAL_DIMS,
    TIME_DIMS,
    WHOLE,
    Request,
    Rule,
    memory_limit_bytes,
)
from planner.ir.profile import Profile
from planner.ir.schedule import FORWARD_PASS, Action
from planner.layers import batch_dependent_layers
from planner.layers.division import has_layouts
from planner.layers.recomputed import cores_among
from planner.layers.sized import REPLICA

_PATH = "inputs.request"


def request_faults(plan: Plan, profile: Profile | None, rows: tuple[tuple[Action, ...], ...]) -> Iterator[str]:
    """What was asked for and is not so, or that nobody can ask for.

    Args:
        rows: the program.
    """
    request = plan.inputs.request
    yield from _form_faults(request)
    yield from _schedule_faults(plan, any(action.op not in FORWARD_PASS for row in rows for action in row))
    yield from _size_faults(plan, profile)
    yield from _division_faults(plan)
    yield from _stage_faults(plan, profile)
    if profile is not None:
        yield from _limit_faults(plan, profile)
    elif request.memory_bytes:
        for number, rank in enumerate(plan.prediction.ranks):
            if rank.memory_limit_bytes > request.memory_bytes:
                asked = f"asked for at most {request.memory_bytes}"
                path = f"prediction.ranks[{number}].memory_limit_bytes"
                yield f"{path}: rank {number} has a limit of {rank.memory_limit_bytes} bytes, {asked}"
        yield from _alternative_faults(plan, request.memory_bytes)
    yield from _rule_faults(plan, profile)


def _form_faults(request: Request) -> Iterator[str]:
    for family in request.allow:
        if family not in (*FAMILIES, TIME_DIMS):
            yield f"{_PATH}.allow: {family!r} is none of {', '.join((*FAMILIES, TIME_DIMS))}"
    for name in request.schedules:
        if name not in schedules.names():
            yield f"{_PATH}.schedules: no schedule {name!r}; known: {', '.join(schedules.names())}"
    if not 0 <= request.memory_margin < 1:
        yield f"{_PATH}.memory_margin: {request.memory_margin} is not a share of 0 to 1"
    if not 0 <= request.confidence < 1:
        yield f"{_PATH}.confidence: {request.confidence} is not a probability of 0 or more, below 1"
    if request.gap < 0:
        yield f"{_PATH}.gap: {request.gap} is below 0"


def _schedule_faults(plan: Plan, trains: bool) -> Iterator[str]:
    request = plan.inputs.request
    name = plan.decision.schedule
    by_name = name in request.schedules and _is_forward(name) and not trains
    if (request.objective == LATENCY or request.rate_per_s > 0) == trains and not by_name:
        passes = ("forward passes alone", "training")
        yield f"{_PATH}.objective: asked for {request.objective}, the program is {passes[trains]}"
        return
    streaming = (other for other in schedules.names() if schedules.traits(other).streams)  # where all devices do
    chunked = schedules.chunked_names() if request.opens_chunks(plan.decision.global_batch) else ()
    allowed = request.schedules or ((*schedules.default_names(), *chunked, *streaming) if trains else (name,))
    if name not in allowed:
        whose = "asked for" if request.schedules else "nobody named one; searched then:"
        yield f"decision.schedule: {name}, {whose} {', '.join(allowed)}"


def _is_forward(name: str) -> bool:
    return name in schedules.names() and not schedules.traits(name).trains


def _size_faults(plan: Plan, profile: Profile | None) -> Iterator[str]:
    sizes = plan.inputs.request.micro_batch_sizes
    micro_batches = plan.decision.micro_batches
    most = max(micro_batches)
    if set(micro_batches[:-1]) - {most} or micro_batches[-1] > most:
        yield f"decision.micro_batches: {list(micro_batches)}: only the last may be smaller than the others"
    allowed = {min(size, sum(micro_batches)) for size in sizes}
    if allowed and micro_batches[0] not in allowed:
        asked = ", ".join(map(str, sizes))
        yield f"decision.micro_batches: micro-batches of {micro_batches[0]}, asked for {asked}"
    dependent = () if profile is None else batch_dependent_layers(profile.graph)
    if plan.inputs.request.batch_statistics == WHOLE and dependent and len(micro_batches) > 1:
        counted = f"{len(micro_batches)} micro-batches, and layer {dependent[0]} depends on its batch"
        yield f"decision.micro_batches: {counted}; asked for statistics of the whole batch"


def _division_faults(plan: Plan) -> Iterator[str]:
    """How layers are divided: dims, and rows beyond the part."""
    request = plan.inputs.request
    decision = plan.decision
    if request.token_slices and decision.token_slices != request.token_slices:
        yield f"decision.token_slices: {list(decision.token_slices)}, asked for {list(request.token_slices)}"
    if decision.token_slices and TIME_DIMS not in request.allow:
        allowed = ", ".join(request.allow) or "nothing"
        yield f"decision.token_slices: {len(decision.token_slices)} token slices, allowed to be cut: {allowed}"
    for name, placed in decision.layers.items():
        path = f"decision.layers.{name}"
        if placed.margin > request.halo_depth:
            yield f"{path}.margin: {placed.margin} rows beyond the part, asked for at most {request.halo_depth}"
        ways = CutDegrees.of(placed.cuts)
        for family in FAMILIES:
            if ways.along(family) > 1 and family not in request.allow:
                allowed = ", ".join(request.allow) or "nothing"
                yield f"{path}.cuts: {name} is cut in {ways.along(family)} parts along {family}, allowed: {allowed}"
        for dim, points in placed.cuts.items():
            has_family = dim == "sites" or dim.startswith(REPLICA) or any(dim in dims for dims in FAMILIES.values())
            has_family = has_family or CHANNEL_DIMS in request.allow  # heads of a view, tokens: by `plan --ways` alone
            if len(points) > 2 and not has_family:
                yield f"{path}.cuts: {name} is cut in {len(points) - 1} parts along {dim!r}, which no family has"


def _stage_faults(plan: Plan, profile: Profile | None) -> Iterator[str]:
    request = plan.inputs.request
    decision = plan.decision
    if 0 < request.max_stages < len(decision.stages):
        yield f"decision.stages: {len(decision.stages)} stages, asked for at most {request.max_stages}"
    trains = request.objective != LATENCY and not _is_forward(decision.schedule)
    for number, stage in enumerate(decision.stages):
        path = f"decision.stages[{number}]"
        beyond = [rank for rank in stage.ranks if 0 < request.num_ranks <= rank]
        if beyond:
            yield f"{path}.ranks: rank {beyond[0]} is used, asked for the first {request.num_ranks}"
        gone = [device for device in stage.devices if request.speeds.get(device, 1.0) <= 0]
        if gone:
            yield f"{path}.devices: {gone[0]} is used, and gone by {_PATH}.speeds"
        if stage.blocks and SPATIAL_DIMS not in request.allow:
            allowed = ", ".join(request.allow) or "nothing"
            yield f"{path}.blocks: stage {number} has {len(stage.blocks)} blocks of layers, allowed: {allowed}"
        wanted = {NEVER: False, SELECTIVE: False, ALWAYS: True}.get(request.recompute, stage.recompute)
        if stage.recompute != wanted and (trains or stage.recompute):
            does = "computes its activations again" if stage.recompute else "keeps its activations"
            yield f"{path}.recompute: stage {number} {does}, asked for recompute {request.recompute}"
        if stage.recomputed and trains and request.recompute in (NEVER, ALWAYS):
            does = f"computes {len(stage.recomputed)} spans of layers again"
            yield f"{path}.recomputed: stage {number} {does}, asked for recompute {request.recompute}"
        if profile is not None and trains and request.recompute == SELECTIVE:
            cores = {frozenset(core) for core in cores_among(profile.graph, decision.layers_of(number))}
            if {frozenset(span) for span in stage.recomputed} != cores:
                does = f"computes {len(stage.recomputed)} spans of layers again, its attention has {len(cores)} cores"
                yield f"{path}.recomputed: stage {number} {does}, asked for recompute {request.recompute}"
        could = _can_divide_state(decision, number)
        if stage.sharded and not could:
            why = "its layers have layouts of their own" if len(stage.ranks) > 1 else "it has 1 rank"
            yield f"{path}.sharded: stage {number} divides the optimiser's state, and {why}"
        elif stage.sharded and stage.zero != request.zero:
            yield f"{path}.zero: stage {number} divides at level {stage.zero}, asked for zero {request.zero}"
        elif could and stage.sharded != {NEVER: False, ALWAYS: True}.get(request.shard, stage.sharded):
            does = "divides" if stage.sharded else "does not divide"
            yield f"{path}.sharded: stage {number} {does} the optimiser's state, asked for shard {request.shard}"
    if request.shard == AUTO:
        stages = enumerate(decision.stages)
        divided = {stage.sharded for number, stage in stages if _can_divide_state(decision, number)}
        if len(divided) > 1:
            yield "decision.stages: some of the stages on several ranks divide the optimiser's state, some do not"


def _can_divide_state(decision: Decision, number: int) -> bool:
    """Whether the stage has several ranks, on which layers are cut alike."""
    several = len(decision.stages[number].ranks) > 1
    return several and bool(decision.layers_of(number)) and not has_layouts(decision, number)


def _limit_faults(plan: Plan, profile: Profile) -> Iterator[str]:
    """What each rank may hold: what the device has, less the margin, at most what was asked for."""
    request = plan.inputs.request
    devices = profile.cluster.devices
    limits = [memory_limit_bytes(device, request.memory_margin, request.memory_bytes) for device in devices]
    for number, (rank, limit) in enumerate(zip(plan.prediction.ranks, limits, strict=False)):
        if rank.memory_limit_bytes != limit:
            path = f"prediction.ranks[{number}].memory_limit_bytes"
            asked = f" less {request.memory_margin:.3%}" + (f" and {request.memory_bytes}" * bool(request.memory_bytes))
            device = f"its device has {devices[number].memory_bytes}{asked}: {limit}"
            yield f"{path}: rank {number} has a limit of {rank.memory_limit_bytes} bytes, {device}"
    yield from _alternative_faults(plan, max(limits, default=0))


def _alternative_faults(plan: Plan, limit_bytes: int) -> Iterator[str]:
    """Other plans that would run: they may use devices that this one leaves idle, up to the largest limit of all."""
    for number, other in enumerate(plan.alternatives):
        if other.step_s is not None and other.peak_bytes is not None and other.peak_bytes > limit_bytes:
            holds = f"{other.name} holds {other.peak_bytes} bytes, no device may hold more than {limit_bytes}"
            yield f"alternatives[{number}].peak_bytes: {holds}"


def _rule_faults(plan: Plan, profile: Profile | None) -> Iterator[str]:
    """``--fix`` and ``--forbid``; without a profile nobody knows the kinds of devices."""
    request = plan.inputs.request
    for name, rules in (("fix", request.fix), ("forbid", request.forbid)):
        for number, rule in enumerate(rules):
            path = f"{_PATH}.{name}[{number}]"
            if rule.what not in WHATS:
                yield f"{path}.what: {rule.what!r} is none of {', '.join(WHATS)}"
            elif rule.what != KIND or profile is not None:
                yield from (f"{path}: {line}" for line in _broken(plan, rule, name, profile))


def _broken(plan: Plan, rule: Rule, name: str, profile: Profile | None) -> tuple[str, ...]:
    cluster = profile.cluster if profile is not None else Cluster((), {})
    fix, forbid = ((rule,), ()) if name == "fix" else ((), (rule,))
    try:
        return broken(fix, forbid, plan.decision, cluster)
    except (ValueError, HalopipeError) as error:
        return (f"{error}",)
