"""A problem's fix and forbid rules, compiled for a search: the stages they allow, all stretches of layers at once.

What a rule means is said in :mod:`planner.ir.constraints`; this is the same in numpy.  What the layers of a network ask
of their stages themselves (:mod:`planner.layers.stage_rules`) is held like what a user fixes.

Rules that no plan can satisfy together, found before any search: the error names the two.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.ir.constraints import (
    DEVICE,
    FAMILY_OF,
    KIND,
    NO,
    RECOMPUTE,
    REPLICAS,
    STAGE,
    TOGETHER,
    YES,
    CutDegrees,
    StageFacts,
    allowed,
    check_names,
    format_rule,
    matching,
)
from planner.ir.errors import InfeasibleError, operator_of, remedies
from planner.ir.graph import producer
from planner.ir.problem import (
    ALWAYS,
    NEVER,
    SAMPLE_DIMS,
    SELECTIVE,
    Problem,
    Rule,
)
from planner.layers import check_samples_apart
from planner.layers.sized import AXES, SizedLayer
from planner.layers.stage_rules import rules_of_state

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """Every rule of a problem with the layers it matches.

    Attributes:
        problem: whose rules they are.
        rules: those of the network itself first, then fixes, then what is forbidden.
        tied: the problem's ties (``Graph.tied_layers``).
    """

    problem: Problem
    rules: tuple[Applied, ...]
    tied: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, problem: Problem) -> Constraints:
        """The rules of ``problem``, compiled once.

        Raises:
            UnknownNameError: a rule matches no layer, or names a device or kind that the cluster does not have.
            InfeasibleError: two rules, or a rule and another constraint, contradict each other.
        """
        graph = problem.graph
        names = tuple(layer.name for layer in graph.layers)
        of_network = rules_of_state(graph, divides_gradients=problem.zero > 1)
        rules = [Applied(rule, True, matching(rule, names), why) for rule, why in of_network.items()]
        for rule, fixed in (*((rule, True) for rule in problem.fix), *((rule, False) for rule in problem.forbid)):
            check_names(rule, problem.cluster)
            rules.append(Applied(rule, fixed, matching(rule, names)))
        check(problem, rules)
        return cls(problem, tuple(rules), graph.tied_layers())

    def allows_stage(
        self,
        layer_indices: Iterable[int],
        ranks: Sequence[int] = (),
        recompute: bool | None = None,
        ways: CutDegrees | None = None,
        number: int | None = None,
    ) -> bool:
        """Whether a stage may have these layers (by index); what is not decided (no ranks, None) is allowed.

        Args:
            ways: of all layers of the stage.
            number: of the stage, from 0.
        """
        members = np.array([np.zeros(len(self)), self._flags(layer_indices)], dtype=np.float64)
        return bool(self._mask(_Between(members), ranks, recompute, ways, number)[0, 1])

    def allows_layer(self, index: int, ways: CutDegrees) -> bool:
        """Whether the layer may be cut so, whatever its stage."""
        return not self._wrong((), None, ways, None)[index]

    def mask(
        self,
        cuts: ArrayLike,
        ranks: Sequence[int] = (),
        recompute: bool | None = None,
        ways: CutDegrees | None = None,
        number: int | None = None,
    ) -> Flags:
        """:meth:`allows_stage` of every stage from one of ``cuts`` to another, [a, b] that between cuts a and b.

        Where no number is given, a stage that starts with nothing before it is number 0 and no other is.  False where
        the one cut is not a smaller part of the other.

        Args:
            cuts: positions in the list of layers; or ideals, 1 where a layer (second index) is in one (first index).
        """
        at = np.asarray(cuts)
        members = at if at.ndim == 2 else np.arange(len(self))[None, :] < at[:, None]
        between = _Between(members.astype(np.float64))
        allowed = self._mask(between, ranks, recompute, ways, number)
        if number is None:
            allowed &= self._start_first(self._by_number(), between)
        return allowed

    def _mask(
        self,
        between: _Between,
        ranks: Sequence[int],
        recompute: bool | None,
        ways: CutDegrees | None,
        number: int | None,
    ) -> Flags:
        """The same, wherever stages start."""
        allowed: Flags = between.nested
        allowed &= between.count(self._wrong(ranks, recompute, ways, number)) == 0
        by_number = self._by_number()
        if number in by_number:
            allowed &= between.count(by_number[number]) == by_number[number].sum()
        held = np.zeros(allowed.shape, dtype=np.int64)
        for flags in by_number.values():
            held += between.count(flags) > 0
        allowed &= held <= 1
        for flags, fixed in self._sets():
            count = between.count(flags)
            total = int(flags.sum())
            allowed &= ((count == 0) | (count == total)) if fixed else (count < total)
        return allowed

    def device_class(self, rank: int) -> tuple[bool, ...]:
        """What the rules tell apart: ranks of equal classes (and equal cost) are interchangeable."""
        device = self.problem.cluster.devices[rank]
        facts = StageFacts((device.name,), (device.kind,))
        return tuple(
            allowed(applied.rule, facts, applied.fixed) for applied in self.rules if applied.rule.what in (DEVICE, KIND)
        )

    def stage_rules(self) -> tuple[tuple[int, bool, tuple[int, ...]], ...]:
        """Rules about the number of a stage: (number, whether fixed, layers)."""
        return tuple(
            (int(applied.rule.value), applied.fixed, applied.layers)
            for applied in self.rules
            if applied.rule.what == STAGE
        )

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.problem.graph.layers)

    def _wrong(
        self, ranks: Sequence[int], recompute: bool | None, ways: CutDegrees | None, number: int | None
    ) -> Flags:
        """The layers that may not be in such a stage."""
        devices = [self.problem.cluster.devices[rank] for rank in ranks]
        facts = StageFacts(
            tuple(device.name for device in devices), tuple(device.kind for device in devices), number, recompute, ways
        )
        wrong = np.zeros(len(self), dtype=bool)
        for applied in self.rules:
            if not allowed(applied.rule, facts, applied.fixed):
                wrong[list(applied.layers)] = True
        return wrong

    def _start_first(self, by_number: Mapping[int, Flags], between: _Between) -> Flags:
        """Number 0 starts with nothing before it, and no other stage does."""
        first = between.count(self._wrong((), None, None, 0)) == 0
        own = by_number.get(0, np.zeros(len(self), dtype=bool))
        inside = between.count(own)
        is_empty = between.members.sum(axis=1) == 0
        return np.asarray(np.where(is_empty[:, None], first & (inside == own.sum()), inside == 0))

    def _by_number(self) -> dict[int, Flags]:
        """The layers fixed to each number of a stage."""
        layers_of: dict[int, list[int]] = {}
        for number, fixed, layers in self.stage_rules():
            if fixed:
                layers_of.setdefault(number, []).extend(layers)
        return {number: self._flags(layers) for number, layers in layers_of.items()}

    def _sets(self) -> list[tuple[Flags, bool]]:
        """Layers of which a stage may not have some (True) or all (False)."""
        together = [
            (self._flags(applied.layers), applied.fixed) for applied in self.rules if applied.rule.what == TOGETHER
        ]
        return together + [(flags, True) for flags in self._by_number().values()]

    def _flags(self, layers: Iterable[int]) -> Flags:
        flags = np.zeros(len(self), dtype=bool)
        flags[list(layers)] = True
        return flags


@dataclass(frozen=True, slots=True, eq=False)
class _Between:
    """Stages between any two ideals; ``members``: 1 where a layer is in an ideal."""

    members: Array

    @property
    def nested(self) -> Flags:
        """[a, b]: whether a is a part of b, and smaller."""
        size = self.members.sum(axis=1)
        shared = self.members @ self.members.T
        return np.asarray((shared == size[:, None]) & (size[:, None] < size[None, :]))

    def count(self, flags: Flags) -> Numbers:
        """How many of ``flags`` are in the stage between two ideals."""
        inside = (self.members @ flags).astype(np.int64)
        return np.asarray(inside[None, :] - inside[:, None])


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule with the layers it matches, by index; fixed, or forbidden.

    Attributes:
        why: of a rule that nobody asked for: what of the network it follows from.
    """

    rule: Rule
    fixed: bool
    layers: tuple[int, ...]
    why: str = ""

    def __str__(self) -> str:
        return self.why or f"--{'fix' if self.fixed else 'forbid'} {format_rule(self.rule)}"


def check(problem: Problem, rules: Sequence[Applied]) -> None:
    """An :class:`InfeasibleError` if two of ``rules``, or one and the rest of the problem, contradict each other."""
    for applied in rules:
        _check_alone(problem, applied)
    names = [layer.name for layer in problem.graph.layers]
    blocks = _blocks(len(names), rules)
    blocks_of = [{blocks[layer] for layer in applied.layers} for applied in rules]
    checked: set[object] = set()
    for layer in sorted({layer for applied in rules for layer in applied.layers}):
        own = tuple(k for k, applied in enumerate(rules) if layer in applied.layers)
        of_block = tuple(k for k, touched in enumerate(blocks_of) if blocks[layer] in touched)
        if (own, of_block) not in checked:
            checked.add((own, of_block))
            stage_wide = [rules[k] for k in of_block if rules[k].rule.what not in (*FAMILY_OF, TOGETHER)]
            _check_layer(names[layer], [rules[k] for k in own if rules[k].rule.what != TOGETHER])
            _check_layer(names[layer], stage_wide)
            _check_devices(problem, names[layer], stage_wide)
    _check_together(rules, blocks)
    _check_order(problem, rules)


def _check_alone(problem: Problem, applied: Applied) -> None:
    """A rule against the problem's other constraints."""
    rule = applied.rule
    family = FAMILY_OF.get(rule.what, "")
    if (family or rule.what == REPLICAS) and applied.fixed:
        if int(rule.value) > len(problem.ranks):
            raise _error(str(applied), f"{len(problem.ranks)} devices may be used", "ask for fewer")
        if family and family not in problem.allow and int(rule.value) > 1:
            remedy = f"--allow {','.join((*problem.allow, family))}"
            raise _error(str(applied), f"--allow {','.join(problem.allow)}", remedy)
        if family and int(rule.value) > 1:
            _check_divisible(problem, applied)
    if rule.what == RECOMPUTE and problem.recompute in (NEVER, SELECTIVE, ALWAYS):
        wanted = YES if (rule.value == YES) == applied.fixed else NO
        if wanted != (YES if problem.recompute == ALWAYS else NO):
            raise _error(str(applied), f"--recompute {problem.recompute}", "--recompute auto")
    if rule.what == STAGE and applied.fixed and 0 < problem.max_stages <= int(rule.value):
        raise _error(str(applied), f"at most {problem.max_stages} stages, counted from 0", "allow more stages")


def _check_divisible(problem: Problem, applied: Applied) -> None:
    """A rule that cuts layers in parts along dims that they cannot be cut along."""
    graph = problem.graph
    what = applied.rule.what
    wanted = int(applied.rule.value)
    values = graph.values()
    mixing = frozenset(check_samples_apart(graph))
    for layer in (graph.layers[index] for index in applied.layers):
        sized = SizedLayer.of(graph, layer, values, max(2, problem.global_batch), layer.name in mixing)
        extents = dict(zip(sized.work.dims, sized.work.shape, strict=True))
        axes = (dims for axis, (family, dims) in AXES.items() if what in (axis, family))
        along = [dim for dims in axes for dim in dims if dim in sized.divisible]
        most = math.prod(extents[dim] for dim in along) if what != SAMPLE_DIMS else problem.global_batch
        if along and most >= wanted:
            continue
        operator = operator_of(layer)
        whole = f"a dim of family {what}" if what == FAMILY_OF[what] else what
        why = f"it has {most} parts at most" if along else f"{operator} cannot be cut along {whole}"
        raise InfeasibleError(
            f"layer {layer.name} ({operator}) cannot be cut in {wanted} parts along {what}",
            [str(applied), why],
            remedies(layer, FAMILY_OF[what]),
        )


def _check_layer(layer: str, rules: Sequence[Applied]) -> None:
    """Two values, or a value fixed and forbidden, for one layer or for layers that are together."""
    for one, two in combinations(rules, 2):
        same = one.rule.what == two.rule.what
        value = one.rule.value == two.rule.value
        if same and one.fixed and two.fixed and not value and one.rule.what not in (DEVICE, KIND):
            raise _error_between(one, two, f"{layer} can have one of them")
        if same and value and one.fixed != two.fixed:
            raise _error_between(one, two, f"drop one of them, for {layer}")
        if _more_parts_than_ranks(one, two) or _more_parts_than_ranks(two, one):
            raise _error_between(one, two, f"{layer} cannot have more parts than its stage has ranks")


def _more_parts_than_ranks(parts: Applied, ranks: Applied) -> bool:
    are_such = parts.rule.what in FAMILY_OF and ranks.rule.what == REPLICAS and parts.fixed and ranks.fixed
    return are_such and int(parts.rule.value) > int(ranks.rule.value)


def _check_devices(problem: Problem, layer: str, rules: Sequence[Applied]) -> None:
    """Rules that leave a layer no device, or fewer than the ranks it is to have."""
    about = [applied for applied in rules if applied.rule.what in (DEVICE, KIND)]
    left = {applied: _devices(problem, applied) for applied in about}
    for one, two in combinations(about, 2):
        if not left[one] & left[two]:
            raise _error_between(one, two, f"no device is left for {layer}")
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
    devices = problem.cluster.devices
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
    graph = problem.graph
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    fixed = {layer: a for a in rules if a.rule.what == STAGE and a.fixed for layer in a.layers}
    latest: dict[int, Applied] = {}
    for position, layer in enumerate(graph.layers):
        before = [latest[index[p]] for p in map(producer, layer.inputs) if index.get(p) in latest]
        latest_read = max(before, key=lambda applied: int(applied.rule.value), default=None)
        own = fixed.get(position)
        if own is not None and latest_read is not None and int(latest_read.rule.value) > int(own.rule.value):
            raise _error(str(latest_read), str(own), f"{layer.name} needs what the later stage makes")
        if own is not None or latest_read is not None:
            latest[position] = own or latest_read  # type: ignore[assignment]


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


def _error_between(one: Applied, two: Applied, remedy: str) -> InfeasibleError:
    """Of two rules; one that follows from the network stays, so that the other has to go."""
    asked = next((str(each) for each in (one, two) if not each.why), "")
    return _error(str(one), str(two), f"leave out {asked}" if asked and (one.why or two.why) else remedy)


def _error(one: str, two: str, remedy: str) -> InfeasibleError:
    return InfeasibleError("two constraints contradict each other", [one, two], [remedy])
