"""Whether a transformer's step fits a cluster, by memory alone, and what would make it fit.

    least       over tensor x context x pipeline, each with as many replicas as there is room for, the smallest
                micro-batch, and what is kept, divided and computed again as is least: the way whose fullest
                rank holds least
    blocks      of its stages: each goes where the fullest rank is then least full (a stage's bytes grow with its blocks
                by a number of its own, so no other division has a less full one)
    changes     of what was asked, one at a time, each tried here: a choice that was fixed left open, or all of them;
                something in the host's memory; more devices, the least that do of 2, 4, ... times as many; shorter
                samples, halved until they fit

More replicas never hold more: state is divided over more of them, and each has fewer micro-batches in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter

from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.memory import Memory, ends_of, in_flight, memory_with
from planner.extras.transformers.shape import MOST_DEGREE, Offload, ParallelDegrees, Transformer
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import fullest
from planner.ir.errors import UsageError

_MOST_DOUBLINGS = 12
_LEAST_SEQ = 128
_CHOICES = (
    *("tensor", "pipeline", "micro_batch", "interleave", "recompute", "zero", "expert", "expert_tensor", "context"),
    "shards",
)
"""Fields of a space that people fix."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """A way, by what its fullest rank holds of what its device may."""

    ways: ParallelDegrees
    memory: Memory
    usable_bytes: float

    @property
    def left_bytes(self) -> float:
        """What is free; below 0: missing."""
        return self.usable_bytes - self.memory.total

    @property
    def fits(self) -> bool:
        """Whether it holds no more than it may."""
        return self.left_bytes >= 0

    def __str__(self) -> str:
        return f"{self.memory.total / 2**30:.1f} of {self.usable_bytes / 2**30:.1f} GiB: {self.ways}"


@dataclass(frozen=True, slots=True)
class Change:
    """Something else to ask for, which fits.

    Attributes:
        opened: fields of the space that were fixed, and are open here.
        fit: of all ways the one that holds least.
    """

    shape: Transformer
    devices: int
    space: DegreesSpace
    opened: tuple[str, ...]
    fit: MemoryFit

    def options(self, shape: Transformer, devices: int, ways: ParallelDegrees | None = None) -> str:
        """As words of the command line, beside those that asked for ``shape`` on ``devices``.

        Args:
            ways: whose values those get that were fixed; None: those of :attr:`fit`.
        """
        chosen = ways or self.fit.ways
        parts = [f"--{name.replace('_', '-')} {getattr(chosen, name)}" for name in self.opened]
        if self.devices != devices:
            parts.append(f"--gpus {self.devices}")
        if self.shape.seq != shape.seq:
            parts.append(f"seq={self.shape.seq}")
        return " ".join(parts)


def least(
    shape: Transformer, cluster: GpuCluster, devices: int, global_batch: int, space: DegreesSpace
) -> MemoryFit | None:
    """Of all ways on so many devices the one whose fullest rank holds least; None: nothing divides them."""
    fits = (
        packed(shape, cluster, ways, global_batch) for ways in _frugal(shape, cluster, devices, global_batch, space)
    )
    return min(fits, key=lambda fit: fit.memory.total, default=None)


def undivided(
    shape: Transformer, devices: int, global_batch: int, per_host: Sequence[int], space: DegreesSpace
) -> UsageError:
    """What to say where no way divides network, devices and batch: which of the fixed choices cannot be, and why."""
    reasons = dict(_impossible(shape, devices, global_batch, max(per_host), space))
    return UsageError(
        f"no way divides {shape.name} and a global batch of {global_batch} over {devices} devices",
        list(reasons.values())
        or [f"{shape.layers} blocks, {shape.heads} heads; hosts of {', '.join(map(str, per_host))}"],
        [f"leave {name} open" for name in reasons]
        or ["another --global-batch or --gpus; leave --tensor, --pipeline and --micro-batch open"],
    )


def _impossible(
    shape: Transformer, devices: int, global_batch: int, per_host: int, space: DegreesSpace
) -> Iterator[tuple[str, str]]:
    """Options that fix what the network, the hosts or the batch do not have, with the two numbers."""
    for tensor in space.tensor:
        undivided_sizes = [f"{size} {what}" for what, size in shape.divided_sizes if size % tensor]
        if undivided_sizes:
            yield "--tensor", f"--tensor {tensor} does not divide {' and '.join(undivided_sizes)}"
        elif tensor > per_host:
            yield "--tensor", f"--tensor {tensor} is more than the {per_host} devices of a host"
    for pipeline in space.pipeline:
        if pipeline > shape.layers:
            yield "--pipeline", f"--pipeline {pipeline} is more than the {shape.layers} blocks that stages share"
        if min(space.zero) > 1 and pipeline > 1:
            yield "--zero", f"ZeRO-2 and 3 are of one stage, and --pipeline is {pipeline}"
    for expert in space.expert:
        if expert > 1 and not shape.experts:
            yield "--expert", f"--expert {expert} is of experts, and {shape.name} has none"
        elif expert > 1 and shape.experts % expert:
            yield "--expert", f"--expert {expert} does not divide the {shape.experts} experts of a block"
    for size in space.micro_batch:
        if global_batch % size:
            yield "--micro-batch", f"--micro-batch {size} does not divide a global batch of {global_batch}"
    least = prod(min(degrees, default=1) for degrees in (space.tensor, space.context, space.pipeline))
    if least > devices:
        yield "a degree", f"the degrees that are fixed take {least} devices, and --gpus is {devices}"
    elif min(space.zero) and least == devices and not max(space.context, default=1) > 1:
        yield "--zero", f"ZeRO-{min(space.zero)} divides over replicas, and --gpus {devices} leaves one"


def packed(shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, global_batch: int) -> MemoryFit:
    """A way with its blocks on stages so that the fullest rank holds least."""
    micro_batches = ways.micro_batches(global_batch)
    if ways.pipeline > 1 and ways.interleave == 1:
        blocks = _blocks(shape, cluster, ways, micro_batches)
        ways = ways if ways.chunks(shape.layers) == blocks else replace(ways, blocks=blocks)
    return MemoryFit(ways, fullest(shape, cluster, ways, micro_batches), cluster.usable_bytes)


def _blocks(shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, micro_batches: int) -> tuple[int, ...]:
    """Of each stage, one at least."""
    inner = False, False
    (none, one), (_, two) = (bytes_by_block(shape, cluster, ways, held, inner) for held in (1.0, 2.0))
    stages = []
    for stage in range(ways.pipeline):
        held = in_flight(ways, stage, micro_batches)
        ends = ends_of(ways, stage)
        empty = none
        each = one + (held - 1) * (two - one)
        if ends != inner:
            empty, each = bytes_by_block(shape, cluster, ways, held, ends)
        stages.append((empty + 2 * each, stage, each))
    heapq.heapify(stages)
    counts = [1] * ways.pipeline
    for _ in range(shape.layers - ways.pipeline):
        with_one_more, stage, each = stages[0]
        counts[stage] += 1
        heapq.heapreplace(stages, (with_one_more + each, stage, each))
    return tuple(counts)


def bytes_by_block(
    shape: Transformer, cluster: GpuCluster, ways: ParallelDegrees, held: float, ends: tuple[bool, bool]
) -> tuple[float, float]:
    """What a rank of a stage without blocks holds, and each block more; as of :func:`memory_with`."""
    none, one = (memory_with(shape, ways, blocks, held, ends, cluster.width).total for blocks in (0, 1))
    return none, one - none


def _frugal(
    shape: Transformer, cluster: GpuCluster, devices: int, global_batch: int, space: DegreesSpace
) -> Iterator[ParallelDegrees]:
    """Ways with one among them that holds least."""
    largest: dict[tuple[int, ...], ParallelDegrees] = {}
    for ways in space.divisions(shape, cluster, devices, global_batch):
        replicas = (ways.data,) if shape.experts else ()  # whose number says how many may share experts
        key = (ways.tensor, ways.context, ways.pipeline, *replicas)
        other = largest.setdefault(key, ways)
        if (ways.data, -ways.micro_batch) > (other.data, -other.micro_batch):
            largest[key] = ways
    unchunked = replace(space, interleave=(1,) if 1 in space.interleave else space.interleave)
    for ways in largest.values():
        yield from _without_waste(unchunked.details(shape, cluster, ways, global_batch))


def _without_waste(choices: Iterable[ParallelDegrees]) -> list[ParallelDegrees]:
    """Of a division's choices those that may hold least.

    Sequence parallelism, ranks that share slices, expert ranks among the same others, and each level of ZeRO up to 2
    hold no more than less of it; level 3 gathers the weights of a block.
    """
    every = list(choices)
    for name in ("sequence_parallel", "shard_ranks"):
        of = attrgetter(name)
        most = max(map(of, every), default=None)
        every = [choice for choice in every if of(choice) == most]
    largest: dict[bool, int] = {}
    for choice in every:
        largest[choice.whole_experts] = max(choice.expert, largest.get(choice.whole_experts, 1))
    kept = [choice for choice in every if choice.expert == largest[choice.whole_experts]]
    level = max((choice.zero for choice in kept if choice.zero < 3), default=0)
    return [choice for choice in kept if choice.zero in (level, 3)]


def changes(
    shape: Transformer, cluster: GpuCluster, devices: int, global_batch: int, space: DegreesSpace
) -> list[Change]:
    """Changes of what is asked that make it fit: choices that are fixed, then more devices, then shorter samples."""
    whole = DegreesSpace(base=space.base)
    fixed = tuple(name for name in _CHOICES if getattr(space, name) != getattr(whole, name))

    def tried(to: Transformer, number: int, opened: tuple[str, ...], offload: Offload | None = None) -> list[Change]:
        freer = replace(space, **{name: getattr(whole, name) for name in opened})
        if offload is not None:
            freer = replace(freer, base=replace(space.base, offload=offload))
            opened = (*opened, "offload")
        fit = least(to, cluster, number, global_batch, freer)
        return [Change(to, number, freer, opened, fit)] if fit is not None and fit.fits else []

    alone = [change for name in fixed for change in tried(shape, devices, (name,))]
    if not alone and len(fixed) > 1:
        alone = tried(shape, devices, fixed)
    if cluster.host is not None and space.base.offload is Offload.NONE:
        for offload in (Offload.OPTIMIZER, Offload.ACTIVATIONS):
            alone = alone + tried(shape, devices, (), offload)
    doubled = (devices << power for power in range(1, _MOST_DOUBLINGS))
    numbers = [number for number in doubled if number <= MOST_DEGREE]
    more = next(filter(None, (tried(shape, number, ()) for number in numbers)), [])
    if not more and not alone and fixed:
        more = next(filter(None, (tried(shape, number, fixed) for number in numbers)), [])
    lengths = [shape.seq >> power for power in range(1, shape.seq.bit_length()) if shape.seq >> power >= _LEAST_SEQ]
    shorter = next(filter(None, (tried(replace(shape, seq=seq), devices, ()) for seq in lengths)), [])
    return [*alone, *more, *shorter]
