"""Rules that no plan can satisfy together, found before any search: the error names the two.

    fix a=stage:0, fix a=stage:1            two values for the same layer (or for layers that must be together)
    fix a=replicas:2, forbid a=replicas:2   fixed and forbidden
    fix a=kind:X, fix a=device:n0/gpu0      no device is both
    fix a=replicas:4, fix a=kind:X          fewer devices than ranks asked for
    fix a=sample:4, fix a=replicas:2        more parts than ranks
    fix a=stage:1, fix b=stage:0            b needs what a makes
    fix a=spatial:2, --allow sample         a constraint of the problem forbids it
    fix a=spatial:2                         a's operator cannot be cut along space

Not a proof that the others can be satisfied: that is the search's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from planner.costs.grids import AXES
from planner.costs.sized import SizedLayer
from planner.ir.constraints import (
    DEVICE,
    FAMILIES,
    KIND,
    NO,
    RECOMPUTE,
    REPLICAS,
    STAGE,
    TOGETHER,
    YES,
    StageFacts,
    allowed,
    format_rule,
)
from planner.ir.errors import InfeasibleError
from planner.ir.graph import producer
from planner.ir.problem import ALWAYS, NEVER, SAMPLE_DIMS, Problem, Rule
from planner.ir.remedies import operator_of, remedies
from planner.layers import check_samples_apart


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule with the layers it matches, by index; fixed, or forbidden."""

    rule: Rule
    fixed: bool
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return f"--{'fix' if self.fixed else 'forbid'} {format_rule(self.rule)}"


def check(problem: Problem, rules: Sequence[Applied]) -> None:
    """An :class:`InfeasibleError` if two of ``rules``, or one and the rest of the problem, contradict each other."""
    for applied in rules:
        _check_alone(problem, applied)
    names = [layer.name for layer in problem.profile.graph.layers]
    blocks = _blocks(len(names), rules)
    blocks_of = [{blocks[layer] for layer in applied.layers} for applied in rules]
    seen: set[object] = set()
    for layer in sorted({layer for applied in rules for layer in applied.layers}):
        own = tuple(k for k, applied in enumerate(rules) if layer in applied.layers)
        of_block = tuple(k for k, found in enumerate(blocks_of) if blocks[layer] in found)
        if (own, of_block) not in seen:
            seen.add((own, of_block))
            stage_wide = [rules[k] for k in of_block if rules[k].rule.what not in (*FAMILIES, TOGETHER)]
            _check_layer(names[layer], [rules[k] for k in own])
            _check_layer(names[layer], stage_wide)
            _check_devices(problem, names[layer], stage_wide)
    _check_together(rules, blocks)
    _check_order(problem, rules)


def _check_alone(problem: Problem, applied: Applied) -> None:
    """A rule against the problem's other constraints."""
    rule = applied.rule
    if rule.what in (REPLICAS, *FAMILIES) and applied.fixed:
        if int(rule.value) > len(problem.ranks):
            raise _error(str(applied), f"{len(problem.ranks)} devices may be used", "ask for fewer")
        if rule.what in FAMILIES and rule.what not in problem.allow and int(rule.value) > 1:
            remedy = f"--allow {','.join((*problem.allow, rule.what))}"
            raise _error(str(applied), f"--allow {','.join(problem.allow)}", remedy)
        if rule.what in FAMILIES and int(rule.value) > 1:
            _check_divisible(problem, applied)
    if rule.what == RECOMPUTE and problem.recompute in (NEVER, ALWAYS):
        wanted = YES if (rule.value == YES) == applied.fixed else NO
        if wanted != (YES if problem.recompute == ALWAYS else NO):
            raise _error(str(applied), f"--recompute {problem.recompute}", "--recompute auto")
    if rule.what == STAGE and applied.fixed and 0 < problem.max_stages <= int(rule.value):
        raise _error(str(applied), f"at most {problem.max_stages} stages, counted from 0", "allow more stages")


def _check_divisible(problem: Problem, applied: Applied) -> None:
    """A rule that cuts layers in parts along dims that they cannot be cut along."""
    graph, family, wanted = problem.profile.graph, applied.rule.what, int(applied.rule.value)
    values, mixing = graph.values(), frozenset(check_samples_apart(graph))
    for layer in (graph.layers[index] for index in applied.layers):
        sized = SizedLayer.of(graph, layer, values, max(2, problem.global_batch), layer.name in mixing)
        extents = dict(zip(sized.work.dims, sized.work.shape, strict=True))
        along = [dim for name, dims in AXES.values() if name == family for dim in dims if dim in sized.divisible]
        most = math.prod(extents[dim] for dim in along) if family != SAMPLE_DIMS else problem.global_batch
        if along and most >= wanted:
            continue
        operator = operator_of(layer)
        why = f"it has {most} parts at most" if along else f"{operator} cannot be cut along a dim of family {family}"
        raise InfeasibleError(
            f"layer {layer.name} ({operator}) cannot be cut in {wanted} parts along {family}",
            [str(applied), why],
            remedies(layer, family),
        )


def _check_layer(layer: str, rules: Sequence[Applied]) -> None:
    """Two values, or a value fixed and forbidden, for one layer or for layers that are together."""
    for one, two in combinations(rules, 2):
        same, value = one.rule.what == two.rule.what, one.rule.value == two.rule.value
        if same and one.fixed and two.fixed and not value and one.rule.what not in (DEVICE, KIND):
            raise _error(str(one), str(two), f"{layer} can have one of them")
        if same and value and one.fixed != two.fixed:
            raise _error(str(one), str(two), f"drop one of them, for {layer}")
        if _more_parts_than_ranks(one, two) or _more_parts_than_ranks(two, one):
            raise _error(str(one), str(two), f"{layer} cannot have more parts than its stage has ranks")


def _more_parts_than_ranks(parts: Applied, ranks: Applied) -> bool:
    are_such = parts.rule.what in FAMILIES and ranks.rule.what == REPLICAS and parts.fixed and ranks.fixed
    return are_such and int(parts.rule.value) > int(ranks.rule.value)


def _check_devices(problem: Problem, layer: str, rules: Sequence[Applied]) -> None:
    """Rules that leave a layer no device, or fewer than the ranks it is to have."""
    about = [applied for applied in rules if applied.rule.what in (DEVICE, KIND)]
    left = {applied: _devices(problem, applied) for applied in about}
    for one, two in combinations(about, 2):
        if not left[one] & left[two]:
            raise _error(str(one), str(two), f"no device is left for {layer}")
    everything = frozenset(problem.ranks)
    remaining = everything.intersection(*left.values())
    wanted = [applied for applied in rules if applied.rule.what == REPLICAS and applied.fixed]
    for applied in wanted:
        if len(remaining) < int(applied.rule.value) and about:
            binding = min(about, key=lambda other: len(left[other]))
            raise _error(str(applied), str(binding), f"{len(remaining)} devices are left for {layer}")
    if not remaining:
        narrow = sorted(about, key=lambda other: len(left[other]))
        second = str(narrow[1]) if len(narrow) > 1 else f"{len(everything)} devices may be used"
        raise _error(str(narrow[0]), second, f"no device is left for {layer}")


def _devices(problem: Problem, applied: Applied) -> frozenset[int]:
    """The ranks that a rule about devices or kinds leaves."""
    devices = problem.profile.cluster.devices
    return frozenset(
        rank
        for rank in problem.ranks
        if allowed(applied.rule, StageFacts((devices[rank].name,), (devices[rank].kind,)), applied.fixed)
    )


def _check_together(rules: Sequence[Applied], blocks: Sequence[int]) -> None:
    """Layers that must be in one stage, and must not."""
    for applied in rules:
        if applied.rule.what != TOGETHER or applied.fixed or len({blocks[layer] for layer in applied.layers}) > 1:
            continue
        joined = next((other for other in _joining(rules) if set(applied.layers) & set(other.layers)), None)
        second = str(joined) if joined else f"only {len(applied.layers)} layer matches"
        raise _error(str(applied), second, "drop one of them")


def _check_order(problem: Problem, rules: Sequence[Applied]) -> None:
    """Stages against the flow of data: what a layer reads is made in the same stage or in an earlier one."""
    graph = problem.profile.graph
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    fixed = {layer: a for a in rules if a.rule.what == STAGE and a.fixed for layer in a.layers}
    latest: dict[int, Applied] = {}
    for position, layer in enumerate(graph.layers):
        before = [latest[index[p]] for p in map(producer, layer.inputs) if index.get(p) in latest]
        found = max(before, key=lambda applied: int(applied.rule.value), default=None)
        own = fixed.get(position)
        if own is not None and found is not None and int(found.rule.value) > int(own.rule.value):
            raise _error(str(found), str(own), f"{layer.name} needs what the later stage makes")
        if own is not None or found is not None:
            latest[position] = own or found  # type: ignore[assignment]


def _joining(rules: Sequence[Applied]) -> Iterator[Applied]:
    """Rules whose layers are in one stage."""
    return (applied for applied in rules if applied.fixed and applied.rule.what in (STAGE, TOGETHER))


def _blocks(num_layers: int, rules: Sequence[Applied]) -> list[int]:
    """A number for each layer, the same for layers that must be in one stage."""
    block = list(range(num_layers))
    for applied in _joining(rules):
        joined = {block[layer] for layer in applied.layers}
        block = [min(joined) if number in joined else number for number in block]
    for one, two in combinations([a for a in _joining(rules) if a.rule.what == STAGE], 2):
        if one.rule.value == two.rule.value:
            joined = {block[one.layers[0]], block[two.layers[0]]}
            block = [min(joined) if number in joined else number for number in block]
    return block


def _error(one: str, two: str, remedy: str) -> InfeasibleError:
    return InfeasibleError("two constraints contradict each other", [one, two], [remedy])
