"""Side constraints as text, and what they mean: which stages a rule allows.

    enc.*=stage:0            the layer is in that stage, counted from 0
    head=device:n0/gpu1      its stage runs on no other device; names as in a shell: n0/*
    layer3.*=kind:V100       its stage runs on no other kind of device; names as in a shell
    *=replicas:1             its stage has this many ranks
    conv*=sample:4           it is cut into this many parts along samples; spatial:N, channel:N likewise
    conv*=height:2           the same of one dim of space: depth:N, height:N, width:N
    enc.*=recompute:yes      its stage computes activations again before the backward; or no
    dec.*=together           all of them are in one stage
    a,dec.*=together         several patterns, with commas between

To *fix* a rule is to hold it for every layer that its pattern matches; to *forbid* it is to hold it for none of them
(of a device or kind: no rank of the stage may match; of ``together``: not all of them are in one stage).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from planner.ir.cluster import Cluster
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.plan import Decision
from planner.ir.problem import CHANNEL_DIMS, SAMPLE_DIMS, SPATIAL_DIMS, Rule

STAGE = "stage"
DEVICE = "device"
KIND = "kind"
REPLICAS = "replicas"
RECOMPUTE = "recompute"
TOGETHER = "together"
FAMILIES: Mapping[str, tuple[str, ...]] = {
    SAMPLE_DIMS: ("sample",),
    SPATIAL_DIMS: ("depth", "height", "width", "x", "y", "z"),
    CHANNEL_DIMS: ("channel", "head", "feature", "filter"),
}
"""Dims by family."""

FAMILY_OF: Mapping[str, str] = {
    **{name: name for name in FAMILIES},
    **dict.fromkeys(("depth", "height", "width"), SPATIAL_DIMS),
}
"""The family of whatever a rule may ask parts along: a family, or one dim of space."""

_OTHERWISE: Mapping[str, str] = {
    "samples": SAMPLE_DIMS,
    "space": SPATIAL_DIMS,
    "channels": CHANNEL_DIMS,
    **dict.fromkeys(("head", "feature", "filter"), CHANNEL_DIMS),
}
"""What plans are also said to be cut along: a layer has no more than one of the dims of channels."""

WHATS = (STAGE, DEVICE, KIND, REPLICAS, *FAMILY_OF, RECOMPUTE, TOGETHER)
"""Everything that a rule may be about."""

YES = "yes"
NO = "no"
_MOST_DIGITS = 9
_FORMS = (
    "PATTERN=stage:0, device:NAME, kind:NAME, replicas:N, sample:N, spatial:N, height:N, channel:N, recompute:yes "
    "or together"
)


def parse_rule(text: str) -> Rule:
    """The rule that ``text`` spells; ``Rule.value`` is in its shortest form.

    Raises:
        UsageError: it spells none; the error says what is known.
    """
    pattern, equals, rest = text.rpartition("=")
    pattern = pattern.strip()
    rest = rest.strip()
    if not equals or not pattern or not rest:
        raise UsageError(f"{text!r} is not a rule", ["a rule has a pattern of layer names, =, and what"], [_write()])
    asked, colon, value = (part.strip() for part in rest.partition(":"))
    what = cut_named(asked) or asked
    if what not in WHATS:
        close = get_close_matches(what, WHATS, 1)
        detail = f"known: {', '.join(WHATS)}"
        raise UsageError(f"{text!r}: no rule is about {what!r}", [detail], [f"{close[0]}?" if close else _write()])
    return Rule(pattern, what, _value(text, what, value, bool(colon)))


def cut_named(word: str) -> str:
    """The family of dims, or the dim, that layers may be cut along and that ``word`` stands for; empty: for none."""
    named = _OTHERWISE.get(word, word)
    return named if named in FAMILY_OF else ""


def format_rule(rule: Rule) -> str:
    """The text that :func:`parse_rule` reads as ``rule``."""
    return f"{rule.pattern}={rule.what}" if rule.what == TOGETHER else f"{rule.pattern}={rule.what}:{rule.value}"


def escaped(name: str) -> str:
    """A pattern that a layer of that name matches."""
    return re.sub(r"[*?[]", r"[\g<0>]", name).replace(",", "?")


def matching(rule: Rule, names: Sequence[str]) -> tuple[int, ...]:
    """Indices of the layers that the rule is about.

    Raises:
        UnknownNameError: there are none; the error names the nearest layers.
    """
    patterns = rule.pattern.split(",")
    indices = tuple(index for index, name in enumerate(names) if any(fnmatchcase(name, each) for each in patterns))
    if not indices:
        raise _unknown(rule, "layer", rule.pattern, names)
    return indices


def check_names(rule: Rule, cluster: Cluster) -> None:
    """Raises :class:`UnknownNameError` if the rule is about a device or kind that the cluster does not have."""
    names = {DEVICE: [d.name for d in cluster.devices], KIND: [d.kind for d in cluster.devices]}.get(rule.what)
    if names is not None and not any(fnmatchcase(name, rule.value) for name in names):
        raise _unknown(rule, rule.what, rule.value, list(dict.fromkeys(names)))


@dataclass(frozen=True, slots=True)
class CutDegrees:
    """Into how many parts layers are cut along each family of dims, and along each dim of space."""

    sample: int = 1
    spatial: int = 1
    channel: int = 1
    depth: int = 1
    height: int = 1
    width: int = 1

    @classmethod
    def of(cls, cuts: Mapping[str, Sequence[int]]) -> CutDegrees:
        """Those of a layout, given its cut points by dim."""
        parts = dict.fromkeys(FAMILY_OF, 1)
        for dim, points in cuts.items():
            named = {dim, *(family for family, dims in FAMILIES.items() if dim in dims)}
            for name in named & parts.keys():
                parts[name] *= len(points) - 1
        return cls(**parts)

    def along(self, name: str) -> int:
        """Parts along a family of dims, or along one dim of space."""
        return int(getattr(self, name))


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What is decided of the stage that a layer is in; None (or no devices): not decided yet.

    Attributes:
        devices, kinds: of each rank.
        ways: of the layer.
    """

    devices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    number: int | None = None
    recompute: bool | None = None
    ways: CutDegrees | None = None


def allowed(rule: Rule, facts: StageFacts, fixed: bool) -> bool:
    """Whether a layer that ``rule`` matches may be in such a stage; what is not decided is allowed.

    ``together`` is about several layers: see :func:`allowed_together`.

    Args:
        fixed: whether the rule is to be held, or forbidden.
    """
    match rule.what:
        case "device" | "kind":
            names = facts.devices if rule.what == DEVICE else facts.kinds
            return all(fnmatchcase(name, rule.value) == fixed for name in names)
        case "stage":
            actual = facts.number
        case "replicas":
            actual = len(facts.devices) or None
        case "recompute":
            return facts.recompute is None or (facts.recompute == (rule.value == YES)) == fixed
        case "together":
            return True
        case _:
            actual = None if facts.ways is None else facts.ways.along(rule.what)
    return actual is None or (actual == int(rule.value)) == fixed


def allowed_together(num_inside: int, num_matching: int, fixed: bool) -> bool:
    """Whether a stage may have ``num_inside`` of the layers that a rule ``together`` matches."""
    return num_inside in (0, num_matching) if fixed else num_inside < num_matching


def broken(fix: Iterable[Rule], forbid: Iterable[Rule], decision: Decision, cluster: Cluster) -> tuple[str, ...]:
    """What a decision does that the rules do not allow: a line for each rule and the first layer that breaks it.

    Raises:
        UnknownNameError: a rule matches no layer.
    """
    names = tuple(decision.layers)
    kind_of = {device.name: device.kind for device in cluster.devices}
    lines = []
    for rule, fixed in (*((rule, True) for rule in fix), *((rule, False) for rule in forbid)):
        indices = matching(rule, names)
        culprit = _culprit(rule, fixed, [names[index] for index in indices], decision, kind_of)
        if culprit:
            lines.append(f"{'fix' if fixed else 'forbid'} {format_rule(rule)}: {culprit}")
    return tuple(lines)


def _culprit(rule: Rule, fixed: bool, layers: list[str], decision: Decision, kind_of: Mapping[str, str]) -> str:
    """The first layer that breaks the rule, and where it is; empty if none does."""
    stages = [decision.layers[name].stage for name in layers]
    if rule.what == TOGETHER:
        counts = {stage: stages.count(stage) for stage in stages}
        wrong = [s for s, count in counts.items() if not allowed_together(count, len(layers), fixed)]
        return f"stage {wrong[0]} has {counts[wrong[0]]} of {len(layers)} layers" if wrong else ""
    for name, number in zip(layers, stages, strict=True):
        stage = decision.stages[number]
        facts = StageFacts(
            stage.devices,
            tuple(kind_of.get(device, "") for device in stage.devices),
            number,
            stage.recompute,
            CutDegrees.of(decision.layers[name].cuts),
        )
        if not allowed(rule, facts, fixed):
            return f"{name} is in stage {number} on {', '.join(stage.devices)}"
    return ""


def _value(text: str, what: str, value: str, has_value: bool) -> str:
    if what == TOGETHER:
        if has_value and value != YES:
            raise UsageError(f"{text!r}: together takes no value", [f"found {value!r}"], ["leave out what follows it"])
        return YES
    if not value:
        raise UsageError(f"{text!r} does not say which {what}", ["a value follows the colon"], [_write()])
    if what in (DEVICE, KIND):
        return value
    if what == RECOMPUTE:
        if value not in (YES, NO):
            raise UsageError(f"{text!r}: recompute is yes or no, not {value!r}", (), [_write()])
        return value
    least = 0 if what == STAGE else 1
    if not value.isdecimal() or len(value) > _MOST_DIGITS or int(value) < least:
        raise UsageError(f"{text!r}: {what} is a whole number from {least}, not {value!r}", (), [_write()])
    return str(int(value))


def _write() -> str:
    return f"write {_FORMS}"


def _unknown(rule: Rule, what: str, asked: str, names: Sequence[str]) -> UnknownNameError:
    bare = asked.strip("*?.")
    nearest = get_close_matches(bare, names, 3, 0.4) or [n for n in names if bare and bare in n][:3] or list(names[:3])
    return UnknownNameError(
        f"rule {format_rule(rule)!r} matches no {what}",
        [f"{len(names)} are known, the nearest: {', '.join(nearest)}"],
        [f"correct {asked!r}; * stands for anything"],
    )
