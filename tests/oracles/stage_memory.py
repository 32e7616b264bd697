"""What a stage holds of a micro-batch on a rank, and how high memory rises in its actions: one loop over its layers.

Follows the same model as ``planner.costs.memory.action_peaks`` but none of its code; what one layer saves and needs
is a price, and given.  ``memory`` asks this of each action of a rank's row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from planner.ir.graph import Graph, Layer, producer
from planner.ir.program import BUCKET_BYTES
from planner.layers.data_movement import copied_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What the account needs to know of a stage on a rank, for one micro-batch.

    Attributes:
        layers: in order.
        saved, levels: by layer, of the rank's share of a micro-batch; no levels where they were not measured.
        own: of ``saved``, without what is saved of inputs beyond the share; empty: all of it.
        gradients: of values, by number of samples, in the whole network: (whose backward makes one, whose is the last
            to be given it, bytes); none where that is not known.
        parts: by layer, of so many samples which share there is; empty: all of ``samples``.
        reads: by layer, of how many samples it reads its inputs, what it saves of these where they lie, and whether it
            reads a copy; empty: as ``levels`` say.
        inputs_left, gradients_left: by layer, of what its weight gradients need later: the layers that made these
            values, and those whose backward made these gradients, with bytes.
        put_off: by layer, what making its weight gradients takes, where ranks that share the stage make them while they
            wait for statistics; None: they are made with those of its inputs.  Empty: all are.
        meets: by layer, whether the ranks wait for statistics in its backward.
        defers: by layer, whether its weight gradients can come later than those of its inputs.
        workspace: of the hungriest layer.
        left: inputs and gradients of outputs of layers whose weight gradients may come later.
        again: what is saved only once it is computed again, of a stage whose layers have layouts of their own.
        prepared: inputs that the host makes.
        samples: the rank's share.
        standing: what its exchanges keep ready throughout.
        made: by layer, gradients of parameters, where the rank has parts of them; else they follow from the graph.
        parameter_bytes: what the rank holds of parameters; ``elsewhere``: of these whose state another rank holds.
        tied: parameters that other stages use too.
        overlaps_sums: whether gradients are summed over ranks while the last backward runs.
        summed: of a stage whose layers have layouts of their own, by parameter in the graph's order: the numbers of the
            ranks that have the same part as this one, and its bytes; of parts that nobody else has nothing.
        on_chip: whether parameters, gradients and the optimiser's state lie in a memory beside this one.
        zero: from 2 on each of ``slices`` ranks keeps its slices of gradients between passes, with 3 of parameters.
        spans: places of layers that alone are computed again, by span.
        kept: by layer, what stays of what those in spans read; ``same``: of what each saves, what is among that.
    """

    layers: Sequence[Layer]
    saved: Sequence[float]
    levels: Sequence[Sequence[float]] | None = None
    own: Sequence[float] = ()
    gradients: Mapping[float, Sequence[tuple[str, str, float]]] = field(default_factory=dict)
    parts: Sequence[tuple[float, float]] = ()
    reads: Sequence[tuple[float, float, bool]] = ()
    inputs_left: Sequence[Mapping[str, float]] = ()
    gradients_left: Sequence[Mapping[str, float]] = ()
    put_off: Sequence[float | None] = ()
    meets: Sequence[bool] = ()
    defers: Sequence[bool] = ()
    workspace: float
    left: float
    again: float = 0.0
    prepared: int
    samples: float
    standing: float = 0.0
    made: Sequence[float] = ()
    parameter_bytes: int
    elsewhere: int = 0
    tied: frozenset[str] = frozenset()
    overlaps_sums: bool = False
    summed: Mapping[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    on_chip: bool = False
    recompute: bool
    has_layouts: bool = False
    zero: int = 0
    slices: int = 1
    spans: Sequence[Sequence[int]] = ()
    kept: Sequence[float] = ()
    same: Sequence[float] = ()

    @property
    def gradient_bytes(self) -> int:
        """What is kept of gradients from one backward to the next."""
        return 0 if self.on_chip else self.parameter_bytes - (self.elsewhere if self.zero > 1 else 0)


Received = tuple[int, int, int, int, int]
"""Of what came of a micro-batch: buffers of tensors on their own, these tensors, and what came in one piece; then what
was put together of what several ranks sent, which is among the first two, and the buffers of its parts."""


class Rises:
    """How high memory rises in the actions of a stage, above what there is without what the stage saved."""

    def __init__(
        self, stage: Holding, graph: Graph, seeds: Received, first: bool, sums: bool, there: tuple[float, ...]
    ) -> None:
        self._stage = stage
        self._seeds = seeds[0] + seeds[2] + seeds[4]
        self._first = first
        self._saved = [saved - less for saved, less in zip(stage.saved, there, strict=False)]
        self._span = {place: span for span in stage.spans for place in span}
        self._kept = [stage.kept[at] if at in self._span else own for at, own in enumerate(self._saved)]
        self._same = [stage.same[at] if at in self._span else own for at, own in enumerate(self._saved)]
        self._more = [max(0.0, own - same) for own, same in zip(self._saved, self._same, strict=True)]
        self.saved = round(sum(self._kept)) if stage.spans else round(sum(stage.saved) - sum(there))
        self._again = stage.again
        if stage.spans:
            self._again = max(sum(self._more[place] for place in span) for span in stage.spans)
        self.left = round(max(sum(stage.saved), stage.left))
        self._seeds_left = [0.0] * len(stage.layers)
        self._levels: list[list[float]] = []
        self._under_way = _under_way(stage, graph) if stage.gradients else None
        copied = frozenset[str]() if self._under_way is None else self._under_way.copied
        self._put_off = () if stage.spans or self._under_way is None else stage.put_off
        if stage.levels is not None:
            names = {layer.name for layer in stage.layers}
            theirs = [0.0] * len(names)
            for place, each in enumerate(stage.gradients_left if self._under_way is not None else ()):
                if stage.layers[place].name not in copied:
                    theirs[place] = sum(size for maker, size in each.items() if maker not in names)
            if self._under_way is None and not stage.has_layouts:
                self._seeds_left[0] = _seeds_left(stage, graph, self._seeds)
            elif self._seeds:
                room = still_there(seeds, sum(theirs)) / max(1.0, sum(theirs))
                self._seeds_left = [size * room for size in theirs]
            for one, own, less, other in zip(stage.levels, self._saved, there, theirs, strict=True):
                left = one[4] - min(less, max(0.0, one[4] - one[7] - own))  # of what it saves besides, all may be left
                left -= min(other, left) if self._seeds else 0.0  # these gradients lie where they were received
                self._levels.append([one[0] - less, *one[1:4], left, *one[5:]])
            self.left = round(sum(levels[4] for levels in self._levels) + sum(self._seeds_left))
        buckets = buckets_in(stage, graph) if sums and stage.overlaps_sums else []
        self._copied = [0] * len(stage.layers)
        for place, size in buckets if len(buckets) > 1 else ():
            self._copied[place] = max(size, self._copied[place])
        self._made = _made(stage, graph)
        self._whole, self._making, self._together = ([0.0] * len(stage.layers) for _ in range(3))
        self._bucket_bytes = self._bucket_needs = 0
        if stage.zero > 1 and not stage.on_chip:
            self._follow_buckets(graph)
        defers = stage.defers or (True,) * len(self._made)
        self._early = [0.0 if later else size for later, size in zip(defers, self._made, strict=True)]
        self._late = [size - early for size, early in zip(self._made, self._early, strict=True)]
        self.early = round(sum(self._early))

    def _follow_buckets(self, graph: Graph) -> None:
        """Where buckets of parameters are whole, where gradients of theirs are made, and what stays of these."""
        stage = self._stage
        sizes = {name: spec.num_bytes for name, spec in graph.parameters.items()}
        buckets = buckets_of(stage.layers, graph, stage.tied)
        bytes_of = [sum(sizes[name] for name in names) for names in buckets]
        self._bucket_bytes = max(bytes_of, default=0)
        copies = [1 + (len(names) > 1 and stage.zero < 3) for names in buckets]
        self._bucket_needs = max((size * times for size, times in zip(bytes_of, copies, strict=True)), default=0)
        for names in buckets:
            users = {n: [p for p, layer in enumerate(stage.layers) if n in layer.parameters] for n in names}
            first = min(map(min, users.values()))
            last = max(map(max, users.values()))
            total = sum(sizes[name] for name in names)
            for place in range(first, last + 1):
                self._whole[place] += total if stage.zero > 2 else 0
                self._making[place] += sum(sizes[name] for name in names if users[name][0] >= place)
            if len(names) > 1 and stage.zero < 3:  # with ZeRO-3 its parameters went before
                self._together[first] = max(self._together[first], total)
            if stage.levels is not None:
                for name in names:
                    self._made[users[name][0]] -= sizes[name]
                self._made[first] += total / stage.slices
        if stage.levels is None:
            self._made = [stage.gradient_bytes, *[0.0] * (len(stage.layers) - 1)]
        self._made = [max(0.0, size) for size in self._made]
        self._making = [a + b for a, b in zip(self._making, self._together, strict=True)]

    def forward(self) -> float:
        """While forward runs and keeps what it saves."""
        if self._stage.levels is None:
            return self.saved + round(self._stage.workspace + self._most_of_a_bucket)
        below = most = 0.0
        steps = zip(self._kept, self._levels, self._whole, strict=True)
        for place, (kept, levels, whole) in enumerate(steps):
            is_inside = place in self._span and place - 1 in self._span[place]
            most = max(most, below + (self._more[place - 1] if is_inside else 0.0) + levels[0] + whole)
            below += kept
        return round(most)

    @property
    def _most_of_a_bucket(self) -> float:
        return self._bucket_bytes if self._stage.zero > 2 else 0

    def unrecorded(self) -> float:
        """While forward runs and keeps nothing."""
        if self._stage.levels is None:
            return self.saved + round(self._stage.workspace + self._most_of_a_bucket)
        before = most = 0.0
        for saved, levels, whole in zip(self._saved, self._levels, self._whole, strict=True):
            most = max(most, before + levels[0] + whole)
            before = saved
        return round(most)

    def backward(self) -> float:
        """While a whole backward runs."""
        if self._stage.levels is None:
            recomputed_bytes = round(self._again)
            needs = round(self._stage.workspace + max(self._copied, default=0) + self._most_of_a_bucket)
            making = self._bucket_needs if self._stage.zero > 1 else 0
            return self.saved + recomputed_bytes + needs + making + (self._all_made if self._first else 0)
        return self._down(1, self._kept, self._made)

    def halved(self) -> float:
        """While the gradients of inputs are computed alone."""
        if self._stage.levels is None:
            needs = round(self._stage.workspace)
            return max(self.left + needs, self.saved + round(self._again) + needs)
        return self._down(2, self._kept, self._early)

    def weights(self) -> float:
        """While those of weights are."""
        if self._stage.levels is None:
            needs = round(self._stage.workspace + max(self._copied, default=0))
            return self.left + needs + (self._all_made if self._first else 0)
        left = [levels[4] + beside for levels, beside in zip(self._levels, self._seeds_left, strict=True)]
        return self._down(3, left, self._late)

    @property
    def _all_made(self) -> int:
        return round(sum(self._made))

    def _down(self, which: int, held: Sequence[float], makes: Sequence[float]) -> float:
        """From the last layer to the first, each of which lets go of what it held, and makes gradients."""
        levels = self._levels
        there = sum(held)
        made = 0.0
        left = 0.0
        most = 0.0
        waiting = list[tuple[float, float]]()  # of weight gradients put off: what they are made of, and need besides
        for place in reversed(range(len(held))):
            span = self._span.get(place, ()) if which != 3 else ()
            if span and place == span[-1]:  # it runs again, and has back what it saved
                for at in span:
                    most = max(most, there + max(0.0, levels[at][0] - self._same[at]) + made * self._first + left)
                    there += self._more[at]
            made = made + makes[place] if self._first else 0.0 if self._stage.zero > 1 else makes[place]
            if self._stage.meets and self._stage.meets[place] and waiting:
                most = max(most, there + made + self._seeds + self._flow("begin", place) + _all_made(waiting))
                waiting.clear()
            level = levels[place][which] + (0.0 if which == 3 else self._given(place, levels[place][which]))
            level += sum(size for size, _ in waiting)
            own = self._put_off[place] if which != 3 and self._put_off else None
            if own is not None:
                level += waiting.pop(0)[1] if len(waiting) > 1 else 0.0
                waiting.append((held[place] + self._flow("given", place), own))
            sliced = self._whole[place] + (self._making[place] if which == 1 else 0.0)
            most = max(most, there + level + made + left + sliced)
            if self._copied[place] and which != 2:
                own_bytes = self._more[place] if span else held[place]
                most = max(most, there - own_bytes + made + self._beside_bucket(which, place, level))
            there -= self._more[place] if span else held[place]
            there -= sum(held[at] for at in span) if span and place == span[0] else 0.0
            left += levels[place][4] if which == 2 else 0.0
        if waiting:
            most = max(most, made * self._first + self._seeds + self._flow("after", 0) + _all_made(waiting))
        return round(most)

    def _flow(self, what: str, place: int) -> float:
        """Gradients that the stage made: under way when the backward of a layer begins, that go with it, or behind."""
        by_layer: list[float] = getattr(self._under_way, what)
        return by_layer[place]

    def _given(self, place: int, level: float) -> float:
        """What received gradients add to the level of a layer: where it has them itself, the room behind them alone."""
        if self._under_way is None:
            return self._seeds if place < len(self._levels) - 1 else 0.0
        outside = self._under_way.outside
        shared = self._under_way.shared
        return max(shared[place] + self._seeds - min(outside[place], self._seeds), -level)

    def _beside_bucket(self, which: int, place: int, level: float) -> float:
        """A bucket put together when the layer has run, and gradients of values that are under way then."""
        copied = self._copied[place]
        if which == 3:
            return copied
        if self._under_way is None:
            return copied + level + (self._more[place] if place in self._span else self._saved[place])
        return copied + self._seeds + self._under_way.after[place]


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients of values by layer of a stage, in bytes.

    Attributes:
        outside: that others made, when its backward begins.
        begin: that the stage made, when its backward begins; ``after``: when it has run; ``given``: that go with it.
        shared: of ``begin``, parts of a concatenation's gradient that are sent on, in memory that others still read.
        copied: layers that are given a gradient of others as a copy, which counts as the stage's own.
    """

    outside: list[float]
    begin: list[float]
    after: list[float]
    given: list[float]
    shared: list[float]
    copied: frozenset[str]


def _under_way(stage: Holding, graph: Graph) -> _Gradients:
    at = {layer.name: number for number, layer in enumerate(graph.layers)}
    mine = [at[layer.name] for layer in stage.layers]
    inside = set(mine)
    parts = stage.parts or [(stage.samples, 1.0)] * len(mine)
    outside, begin, after, with_layer, shared = ([0.0] * len(mine) for _ in range(5))
    copies: dict[str, str] = {}

    def add(target: list[float], first: int, behind: int, samples: float, size: float) -> None:
        for place in range(bisect_left(mine, first), bisect_left(mine, behind)):
            if parts[place][0] == samples:
                target[place] += size * parts[place][1]

    def made_here(last: int, maker: int, samples: float, size: float) -> None:
        add(begin, last, maker, samples, size)
        add(with_layer, last, last + 1, samples, size)
        add(after, last + 1, maker + 1, samples, size)

    for samples, pairs in stage.gradients.items():
        for layer in stage.layers if pairs else ():
            own = [at[last] for maker, last, _ in pairs if maker == layer.name and at[last] in inside]
            if layer.kind == "concat" and own:
                sent = sum(size for maker, last, size in pairs if maker == layer.name and at[last] not in inside)
                made_here(min(own), at[layer.name], samples, sent)
                add(shared, min(own), at[layer.name], samples, sent)
        for maker, last, size in pairs:
            if at[maker] in inside:
                made_here(at[last], at[maker], samples, size)
                continue
            if last not in copies:
                copies[last] = _copy_of(stage, graph, last) if at[last] in inside else ""
            if copies[last]:
                copy = at[copies[last]]
                add(outside, copy + 1, at[maker], samples, size)
                made_here(at[last], copy, samples, size)
            else:
                add(outside, at[last], at[maker], samples, size)
    return _Gradients(
        outside, begin, after, with_layer, shared, frozenset(name for name, copy in copies.items() if copy)
    )


def _all_made(waiting: Sequence[tuple[float, float]]) -> float:
    """The most while weight gradients that wait are made, one after the other: each lets go of what it was made of."""
    rest = [sum(size for size, _ in waiting[place:]) for place in range(len(waiting))]
    return max(size + needs for size, (_, needs) in zip(rest, waiting, strict=True))


def _copy_of(stage: Holding, graph: Graph, name: str) -> str:
    """The reshape between a layer and the end of its stage that copies the gradient that comes; empty: none does."""
    names = {layer.name for layer in stage.layers}
    layers = graph.by_name()
    values = graph.values()
    chain: list[Layer] = []
    readers = readers_of(graph, name)
    while names.issuperset(readers):
        if len(readers) != 1 or layers[readers[0]].kind != "reshape":
            return ""
        chain.append(layers[readers[0]])
        readers = readers_of(graph, readers[0])
    place = copied_at(chain, [values[layer.inputs[0]].shape for layer in chain])
    return "" if place is None else chain[place].name


def still_there(received: Received, needed: float) -> int:
    """Of buffers, those that hold what is needed: of one piece all, of tensors on their own in proportion."""
    buffers, tensors, pieces, *_ = received
    return round(buffers * min(1.0, needed / max(1, tensors))) + (pieces if needed > 0 else 0)


def _seeds_left(stage: Holding, graph: Graph, seeds: int) -> float:
    """Of gradients received, what stays for weight gradients in buffers larger than the gradients themselves."""
    names = {layer.name for layer in stage.layers}
    levels = stage.levels or ()
    kept = sum(
        one[7]
        for layer, one in zip(stage.layers, levels, strict=True)
        if names.isdisjoint(readers_of(graph, layer.name))
    )
    kept = min(kept, sum(one[4] for one in levels))
    return max(0.0, seeds - kept) if kept > 0 else 0.0


def buckets_in(stage: Holding, graph: Graph) -> list[tuple[int, int]]:
    """Of each bucket of gradients: its earliest layer in the stage, and its bytes if they have to be put together."""
    earliest = {name: place for place, layer in reversed([*enumerate(stage.layers)]) for name in layer.parameters}
    sizes = {name: graph.parameters[name].num_bytes for name in earliest}
    buckets = buckets_of(stage.layers, graph, stage.tied)
    if stage.has_layouts:
        sizes |= {name: size for name, (_, size) in stage.summed.items()}
        groups = dict.fromkeys(group for group, _ in stage.summed.values())
        of_groups = [[name for name, (of_name, _) in stage.summed.items() if of_name == group] for group in groups]
        buckets = [bucket for names in of_groups for bucket in _in_buckets(names, sizes)]
        order = {name: place for place, name in enumerate(stage.summed)}
        buckets.sort(key=lambda names: -min(order[name] for name in names))
    copied = [sum(sizes[name] for name in names) if len(names) > 1 else 0 for names in buckets]
    return [(min(earliest[name] for name in names), size) for names, size in zip(buckets, copied, strict=True)]


def exchanged_sums(stage: Holding, graph: Graph, num_ranks: int) -> Iterator[int]:
    """What comes from others in sums of gradients that two ranks exchange, or all where each has its piece."""
    sizes = {name: graph.parameters[name].num_bytes for layer in stage.layers for name in layer.parameters}
    if stage.has_layouts:
        for group in dict.fromkeys(group for group, _ in stage.summed.values() if len(group) == 2):
            mine = {name: size for name, (of_name, size) in stage.summed.items() if of_name == group}
            yield from (sum(mine[name] for name in names) for names in _in_buckets([*mine], mine))
        return
    totals = [sum(sizes[name] for name in names) for names in buckets_of(stage.layers, graph, stage.tied)]
    if stage.zero:
        for piece in sorted({-(-total // num_ranks) for total in totals}):
            yield from [piece] * (num_ranks - 1)
    elif num_ranks == 2:
        yield from totals


def buckets_of(layers: Sequence[Layer], graph: Graph, tied: Collection[str]) -> list[list[str]]:
    """Names of the parameters whose gradients move together, the last ones of the stage first."""
    names = dict.fromkeys(name for layer in layers for name in layer.parameters if name not in tied)
    return _in_buckets([*names], {name: graph.parameters[name].num_bytes for name in names})


def _in_buckets(names: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    buckets: list[list[str]] = []
    room = 0
    for name in reversed(names):
        if not buckets or sizes[name] > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(name)
        room -= sizes[name]
    return buckets


def _made(stage: Holding, graph: Graph) -> list[float]:
    """Gradients of parameters by layer; those that an earlier stage uses too come with the first layer."""
    if stage.made:
        return list(stage.made)
    names = [layer.name for layer in stage.layers]
    made_bytes = [0.0] * len(names)
    if stage.on_chip:
        return made_bytes
    first_user: dict[str, str] = {}
    for layer in graph.layers:
        for name in layer.parameters:
            first_user.setdefault(name, layer.name)
    for parameter in {name for layer in stage.layers for name in layer.parameters}:
        user = first_user[parameter]
        made_bytes[names.index(user) if user in names else 0] += graph.parameters[parameter].num_bytes
    if stage.levels is None:
        return [stage.parameter_bytes, *[0.0] * (len(names) - 1)]
    return made_bytes


def readers_of(graph: Graph, name: str) -> list[str]:
    """The layers that read any output of a layer."""
    return [
        layer.name for layer in graph.layers if any(x not in graph.inputs and producer(x) == name for x in layer.inputs)
    ]
