"""Of which plans a search says that it found the best, in words, and what else one may ask for."""

from __future__ import annotations

from collections.abc import Iterator

from planner.ir.constraints import FAMILIES
from planner.ir.graph import Graph
from planner.ir.plan import ANY_SETS_LAID_OUT, PROVEN, SEVERAL_STAGES, Plan
from planner.ir.problem import CHANNEL_DIMS, MEMORY, NEVER, SAMPLE_DIMS, SPATIAL_DIMS, TIME_DIMS
from planner.ir.profile import Profile
from planner.layers import over_sites
from planner.schedules import chunked_names, default_names, names, traits

_WORDS = {SAMPLE_DIMS: "samples", SPATIAL_DIMS: "space", CHANNEL_DIMS: "channels", TIME_DIMS: "time"}
"""What layers and sequences are cut along, by family of dims."""

_LAID_OUT = (_WORDS[SPATIAL_DIMS], _WORDS[CHANNEL_DIMS])

_INTERLEAVED = "interleaved"
_ZERO_BUBBLE = "zb-h1"
"""Best known of their kind."""

_NEARLY_FULL = 0.9
"""Of a rank's memory: to hold less would let it do otherwise."""


def best_of(plan: Plan, profile: Profile | None = None) -> str:
    """``proven``, and of which plans, where there are others that one may ask for or that no search covers; else it.

    Args:
        profile: that the plan was made from, which says what its network has; without it nothing is ruled out.
    """
    status = plan.search.status
    if not any(not_tried(plan, profile)) and not _cuts_stretches(plan):
        return status
    return f"{status} best of: {space(plan)}" if status == PROVEN else f"{status}: {space(plan)}"


def not_tried(plan: Plan, profile: Profile | None = None) -> Iterator[str]:
    """What the search left out that one may ask for, each with the option that adds it.

    What only changes the optimisation, or is asked for to hold less where nothing is full, is not named.
    """
    request = plan.inputs.request
    schedules = _schedules(plan)
    is_alone = len(profile.cluster.devices if profile is not None else plan.prediction.ranks) == 1
    if not plan.search.bound_s or is_alone or request.num_ranks == 1:
        return
    graph = profile.graph if profile is not None else None
    others = [name for name in (SPATIAL_DIMS, CHANNEL_DIMS) if name not in request.allow and has_dims(graph, name)]
    if others:
        yield f"{' and '.join(_WORDS[name] for name in others)} (--allow {','.join((*request.allow, *others))})"
    has_pipelines = plan.decision.global_batch > 1 and request.max_stages != 1
    if has_pipelines and any(traits(name).trains for name in schedules):
        yield from _other_schedules(schedules)
        if plan.decision.schedule in chunked_names() and not request.schedules and not _are_chunks_known(plan):
            yield f"all pipelines of {SEVERAL_STAGES} (--schedule {plan.decision.schedule})"
    if request.recompute == NEVER and (request.objective == MEMORY or _is_memory_short(plan)):
        yield "activations computed again (--recompute auto)"


def space(plan: Plan) -> str:
    """What was asked for, in a few words: ``samples, space, one stage a device``."""
    schedules = _schedules(plan)
    numbers = {traits(name).stages_per_position for name in schedules if traits(name).trains}
    several = "one or several stages" if len(numbers) > 1 and 1 in numbers else "several stages"
    parts = [_WORDS.get(name, name) for name in plan.inputs.request.allow]
    if _cuts_stretches(plan):
        parts = [f"{part} over stretches of layers" if part in _LAID_OUT else part for part in parts]
    parts.append("one stage a device" if numbers <= {1} else f"{several} a device")
    if any(traits(name).bidirectional for name in schedules):
        parts.append("equal shares of a micro-batch on like devices")
    return ", ".join(parts)


def _cuts_stretches(plan: Plan) -> bool:
    """Whether stages with layouts are of stretches of the network's own order, though it has branches."""
    return any(rejected.what == ANY_SETS_LAID_OUT for rejected in plan.search.rejected)


def _other_schedules(schedules: tuple[str, ...]) -> Iterator[str]:
    """Those that train as the model itself does, of kinds of which none was looked at."""
    alike = [name for name in names() if traits(name).synchronous and traits(name).trains and not traits(name).streams]
    virtual = [name for name in (_INTERLEAVED, *alike) if traits(name).stages_per_position != 1]
    split = [name for name in (_ZERO_BUBBLE, *alike) if traits(name).splits_backward and name not in virtual]
    for what, those in (("several stages a device", virtual), ("split backwards", split)):
        if not set(those) & set(schedules):
            first, *others = dict.fromkeys(those)
            yield f"{what} (--schedule {first}; also {', '.join(others)})"


def _schedules(plan: Plan) -> tuple[str, ...]:
    chunked = chunked_names() if _are_chunks_known(plan) or plan.decision.schedule in chunked_names() else ()
    asked = plan.inputs.request.schedules or (*default_names(), *chunked)
    return tuple(name for name in asked if name in names())


def _are_chunks_known(plan: Plan) -> bool:
    """Whether all pipelines of several stages a device were looked at, though no schedule was named."""
    are_open = plan.inputs.request.opens_chunks(plan.decision.global_batch)
    return are_open and all(rejected.what != SEVERAL_STAGES for rejected in plan.search.rejected)


def has_dims(graph: Graph | None, family: str) -> bool:
    """Whether a network may have layers that can be cut along a family of dims; one over sites has none."""
    if graph is None:
        return True
    outputs = [spec for layer in graph.layers for spec in layer.outputs]
    dims = {dim for spec in outputs for dim, extent in zip(spec.dims, spec.shape, strict=True) if extent > 1}
    return not dims.isdisjoint(FAMILIES[family]) and not over_sites(graph)


def _is_memory_short(plan: Plan) -> bool:
    """Whether a plan that was priced does not fit, or the one that was taken nearly fills a rank."""
    shares = (rank.peak_bytes / max(1, rank.memory_limit_bytes) for rank in plan.prediction.ranks)
    return any(share >= _NEARLY_FULL for share in shares) or any(other.step_s is None for other in plan.alternatives)
