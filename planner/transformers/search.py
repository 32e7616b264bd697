"""The best way to divide a transformer's step over a cluster, with a proof.

    space       tensor x sequence x pipeline x data = devices; interleaving; micro-batch; recomputation; ZeRO: all that
                divide the network and the batch (:class:`Space`), each with what it holds and the least it can take
    order       by the least (:mod:`planner.transformers.step`), the smallest first; each is simulated in turn
    proof       until the least of the next is not below the best step / (1 + gap): nothing behind it is better by more

What does not fit in memory is left out, and counted.  Every division of the space is met: with ``gap`` 0 and no limit
of time the answer is that of exhaustive enumeration (a test says so).  Of alike blocks and stages one is priced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from planner.ir.errors import InfeasibleError, UsageError
from planner.transformers.cluster import Cluster
from planner.transformers.memory import Memory, memory_of
from planner.transformers.shape import Recompute, Transformer, Ways
from planner.transformers.step import Prediction, least_s, predict

TIE = 0.03
"""Two steps that are closer are a tie: runs of one source are as far from their predictions (benchmarks.published)."""
RIVALS = 8


@dataclass(frozen=True, slots=True)
class Space:
    """What may be chosen; an empty tuple leaves it open.

    Attributes:
        tensor: degrees; open: powers of two up to a host.
        interleave: chunks a stage, where the blocks divide by the chunks, and the micro-batches by the stages.
        micro_batch: samples; open: powers of two.
        zero: levels; 2 and 3 without a pipeline alone.
        base: what is the same in all.
    """

    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    interleave: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    sequence_parallel: tuple[bool, ...] = (False, True)
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    base: Ways = field(default_factory=Ways)

    def ways(self, shape: Transformer, cluster: Cluster, devices: int, global_batch: int) -> Iterator[Ways]:
        """All of it that divides the network and the batch."""
        for tensor in self.tensor or _powers(min(cluster.per_host, devices)):
            if devices % tensor or shape.heads % tensor or shape.kv_heads % tensor or shape.ffn % tensor:
                continue
            for pipeline in self.pipeline or range(1, min(shape.layers, devices // tensor) + 1):
                if devices // tensor % pipeline or pipeline > shape.layers:
                    continue
                data = devices // tensor // pipeline
                for micro_batch in self.micro_batch or _powers(global_batch // data):
                    if not global_batch % (data * micro_batch):
                        divided = replace(
                            self.base, tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro_batch
                        )
                        yield from self._details(shape, divided, global_batch // (data * micro_batch))

    def _details(self, shape: Transformer, ways: Ways, micro_batches: int) -> Iterator[Ways]:
        fused = shape.fused_attention  # whose scores are never kept: of several choices this is none
        recomputes = [how for how in self.recompute if not (fused and how is Recompute.SELECTIVE)] or self.recompute
        zeros = [level for level in self.zero if level == 0 or (ways.data > 1 and (level < 2 or ways.pipeline == 1))]
        for interleave in self.interleave:
            if interleave > 1 and (
                ways.pipeline == 1 or shape.layers % (ways.pipeline * interleave) or micro_batches % ways.pipeline
            ):
                continue
            for sequence in self.sequence_parallel:
                if sequence and (ways.tensor == 1 or shape.seq * ways.micro_batch % ways.tensor):
                    continue
                for recompute in recomputes:
                    for zero in zeros:
                        yield replace(
                            ways, interleave=interleave, sequence_parallel=sequence, recompute=recompute, zero=zero
                        )


@dataclass(frozen=True, slots=True)
class Choice:
    """A way and its prediction."""

    ways: Ways
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Found:
    """The best, and what is known of the rest.

    Attributes:
        rivals: the best of other divisions into tensor, pipeline and data ranks that were simulated, by their steps.
        bound_s: no way of the space has a shorter step.
        num_ways: in the space; of those ``num_large`` do not fit in memory, and ``num_simulated`` were simulated.
    """

    best: Choice
    rivals: tuple[Choice, ...]
    bound_s: float
    num_ways: int
    num_large: int
    num_simulated: int
    usable_bytes: float

    @property
    def gap(self) -> float:
        """Best / bound - 1; 0 is a proof."""
        return self.best.prediction.step.seconds / self.bound_s - 1

    @property
    def ties(self) -> tuple[Choice, ...]:
        """Rivals that the model cannot tell from the best."""
        limit = (1 + TIE) * self.best.prediction.step.seconds
        return tuple(rival for rival in self.rivals if rival.prediction.step.seconds <= limit)


def search(
    shape: Transformer,
    cluster: Cluster,
    devices: int,
    global_batch: int,
    space: Space | None = None,
    *,
    gap: float = 0.0,
    time_limit_s: float = 60.0,
    rivals: int = RIVALS,
) -> Found:
    """The way with the shortest step that fits.

    Args:
        gap: stop once the best is proved to be so close (0.01 = 1 %).
        time_limit_s: then the best so far is given, with its gap.
        rivals: divisions to show beside it; they are simulated too.

    Raises:
        UsageError: nothing of the space divides network, devices and batch.
        InfeasibleError: nothing fits in memory.
    """
    stop_s = time.monotonic() + time_limit_s
    every = list((space or Space()).ways(shape, cluster, devices, global_batch))
    if not every:
        raise UsageError(
            f"no way divides {shape.name} and a global batch of {global_batch} over {devices} devices",
            [f"{shape.layers} blocks, {shape.heads} heads; hosts of {cluster.per_host}"],
            ["another --global-batch or --gpus; leave --tensor, --pipeline and --micro-batch open"],
        )
    memories = [memory_of(shape, ways, ways.micro_batches(global_batch)) for ways in every]
    fitting = [ways for ways, memory in zip(every, memories, strict=True) if memory.total <= cluster.usable_bytes]
    if not fitting:
        raise _infeasible(shape, cluster, every, memories)
    bounds = sorted(
        ((least_s(shape, cluster, ways, global_batch), place) for place, ways in enumerate(fitting)),
    )
    simulated: list[Choice] = []
    best_s, bound_s = inf, inf
    for least, place in bounds:
        if least * (1 + gap) >= best_s or (simulated and time.monotonic() > stop_s):
            bound_s = min(least, best_s)
            break
        found = Choice(fitting[place], predict(shape, cluster, fitting[place], global_batch))
        simulated.append(found)
        best_s = min(best_s, found.prediction.step.seconds)
    bound_s = min(bound_s, best_s)
    count = len(simulated)
    best = min(simulated, key=_order)
    others = _rivals(shape, cluster, global_batch, bounds, fitting, simulated, rivals, stop_s)
    return Found(best, others, bound_s, len(every), len(every) - len(fitting), count, cluster.usable_bytes)


def _order(choice: Choice) -> tuple[float, int, int, int, str]:
    """By the step; of equal ones the simpler."""
    ways = choice.ways
    return choice.prediction.step.seconds, ways.interleave, ways.zero, int(ways.sequence_parallel), str(ways)


def _rivals(
    shape: Transformer,
    cluster: Cluster,
    global_batch: int,
    bounds: Sequence[tuple[float, int]],
    fitting: Sequence[Ways],
    simulated: Sequence[Choice],
    number: int,
    stop_s: float,
) -> tuple[Choice, ...]:
    """Of each further division the way that can be the shortest, simulated."""
    found: dict[tuple[int, int, int], Choice] = {}
    for choice in sorted(simulated, key=_order):
        found.setdefault(_division(choice.ways), choice)
    for _, place in bounds:
        if len(found) > number or time.monotonic() > stop_s:
            break
        ways = fitting[place]
        if _division(ways) not in found:
            found[_division(ways)] = Choice(ways, predict(shape, cluster, ways, global_batch))
    return tuple(sorted(found.values(), key=_order)[1 : number + 1])


def _division(ways: Ways) -> tuple[int, int, int]:
    return ways.tensor, ways.pipeline, ways.data


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _infeasible(shape: Transformer, cluster: Cluster, every: Sequence[Ways], memories: Sequence[Memory]) -> Exception:
    least, place = min((memory.total, place) for place, memory in enumerate(memories))
    memory = memories[place]
    gib = 2**30
    largest = max(
        ("state", memory.state), ("activations", memory.activations), ("one pass", memory.working), key=_second
    )
    return InfeasibleError(
        f"{shape.name} does not fit on {every[place].devices} {cluster.device}",
        [
            f"every way needs at least {least / gib:.1f} GiB, usable {cluster.usable_bytes / gib:.1f} GiB",
            f"that is: {every[place]}; largest part: {largest[0]}, {largest[1] / gib:.1f} GiB",
        ],
        ["more --gpus, another --on, or a smaller --global-batch"],
    )


def _second(pair: tuple[str, float]) -> float:
    return pair[1]
