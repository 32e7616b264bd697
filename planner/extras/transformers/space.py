"""The ways that a search may choose from: all that divide the network, the batch and the devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import gcd
from typing import Any

from planner.extras.catalogue.listing import device, devices
from planner.extras.transformers.cluster import EIGHT_BIT, GpuCluster
from planner.extras.transformers.host import known_host
from planner.extras.transformers.memory import stage_memory, unlike_stages
from planner.extras.transformers.pools import Pools
from planner.extras.transformers.recomputation import CORE, module_sets, modules_of, require_modules
from planner.extras.transformers.shape import (
    ContextExchange,
    Module,
    Offload,
    ParallelDegrees,
    Precision,
    Recompute,
    Transformer,
)
from planner.ir.errors import UsageError

_LOOKED_AT = (
    *("tensor", "pipeline", "data", "micro_batch", "sequence_parallel", "interleave", "recompute", "zero"),
    *("fp32_gradients", "kernels", "launch", "attention", "overlap_tensor", "overlap_parts", "overlap_gradients"),
    *("sends", "schedule", "context", "context_exchange", "scaling", "offload", "blocks", "tensors", "pools"),
    *("shards", "sums_once"),
)
_FURTHER = tuple(part for part in fields(ParallelDegrees) if part.name not in _LOOKED_AT)
"""Parts of a way that the limits of launchers do not speak of."""


@dataclass(frozen=True, slots=True)
class LauncherLimits:
    """What of a way a launcher can be told; by default all.

    Attributes:
        launcher: its name; empty: it is none.
        stages: whether there may be several, of any numbers of blocks, and of several chunks.
        schedules: of stages of one chunk.
        zero: levels of several replicas; of one replica all levels are the same.
        slices_beside: whether a replica of several ranks must be sliced (ZeRO-2, ZeRO-3).
        one_degree: whether all stages have the same tensor degree.
        sequence_parallel: choices beside tensor ranks.
        context: how ranks may share the tokens of a sample.
        context_beside_tensor: whether tensor ranks may be beside those.
        slices_context: whether such ranks must slice what they have alike (ZeRO-2, ZeRO-3).
        offload: what may be in the host's memory.
        offload_zero: levels of several copies, beside which the optimiser may be there.
        offload_alone: whether activations go there where there is one stage alone.
        shards: levels of ZeRO at which groups of copies may have the same slices.
        sums_once: whether such groups sum their gradients once a step; else those of every micro-batch.
        shards_offload: whether such groups may be beside state in the host's memory.
        further: parts of a way beyond these that it can be told.
    """

    launcher: str = ""
    stages: bool = True
    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    slices_beside: bool = False
    one_degree: bool = False
    sequence_parallel: tuple[bool, ...] = (False, True)
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    fp32_gradients: tuple[bool, ...] = (False, True)
    context: tuple[ContextExchange, ...] = (ContextExchange.RING, ContextExchange.ALL_TO_ALL)
    context_beside_tensor: bool = True
    slices_context: bool = False
    offload: tuple[Offload, ...] = tuple(Offload)
    offload_zero: tuple[int, ...] = (1, 2, 3)
    offload_alone: bool = False
    shards: tuple[int, ...] = (1, 2, 3)
    sums_once: bool = True
    shards_offload: bool = True
    further: tuple[str, ...] = ()

    def refusals(self, ways: ParallelDegrees) -> Iterator[str]:
        """What of ``ways`` it cannot be told."""
        of_replica = ways.devices // ways.copies
        if ways.pipeline > 1 and not self.stages:
            yield f"{ways.pipeline} stages: it has one"
        if ways.pipeline > 1 and ways.interleave == 1 and ways.schedule not in self.schedules:
            yield f"the schedule {ways.schedule}: it has {', '.join(self.schedules)}"
        if ways.copies > 1 and ways.zero not in self.zero:
            yield f"ZeRO-{ways.zero} of {ways.copies} replicas: it has the levels {', '.join(map(str, self.zero))}"
        if self.slices_beside and of_replica > 1 and (ways.zero < 2 or ways.copies == 1):
            yield f"whole weights of {of_replica} ranks a replica: beside tensor ranks and stages it slices them"
        if self.one_degree and len(set(ways.degrees)) > 1:
            yield f"tensor degrees {', '.join(map(str, ways.degrees))} of stages: it has one for all"
        if max(ways.degrees) > 1 and ways.sequence_parallel not in self.sequence_parallel:
            yield f"tensor ranks with{'' if ways.sequence_parallel else 'out'} sequence parallelism"
        yield from self._context_refusals(ways)
        yield from self._offload_refusals(ways)
        if ways.shard_groups > 1 and ways.zero not in self.shards:
            yield f"ZeRO-{ways.zero} within groups of {ways.shards}: it has {_levels(self.shards)}"
        if ways.shard_groups > 1 and ways.sums_once != self.sums_once:
            yield f"groups that sum their gradients {'once a step' if ways.sums_once else 'each micro-batch'}"
        if ways.recompute not in self.recompute:
            yield f"recomputation {ways.recompute.value}: it has {', '.join(how.value for how in self.recompute)}"
        if ways.fp32_gradients not in self.fp32_gradients:
            yield f"gradients summed in {'float32' if ways.fp32_gradients else 'half precision'}"
        for part in _FURTHER:
            if part.name not in self.further and getattr(ways, part.name) != part.default:
                yield f"{part.name.replace('_', ' ')} {_words(getattr(ways, part.name))}"

    def _context_refusals(self, ways: ParallelDegrees) -> Iterator[str]:
        if ways.context == 1:
            return
        shared = f"{ways.context} ranks that share the tokens of a sample"
        if ways.context_exchange not in self.context:
            exchanges = ", ".join(f"by {exchange.value}" for exchange in self.context)
            yield f"{shared} by {ways.context_exchange.value}: it has {exchanges}"
        if max(ways.degrees) > 1 and not self.context_beside_tensor:
            yield f"{shared} beside {max(ways.degrees)} tensor ranks"
        if self.slices_context and ways.zero < 2:
            yield f"whole weights of {shared}: it slices them"

    def _offload_refusals(self, ways: ParallelDegrees) -> Iterator[str]:
        if ways.offload not in self.offload:
            yield f"{ways.offload.value} in the host's memory: it has {', '.join(what.value for what in self.offload)}"
        if ways.offload is Offload.OPTIMIZER and ways.copies > 1 and ways.zero not in self.offload_zero:
            yield f"the optimiser in the host's memory beside ZeRO-{ways.zero}"
        if ways.offload is not Offload.NONE and ways.shard_groups > 1 and not self.shards_offload:
            yield f"{ways.offload.value} in the host's memory beside slices within groups of {ways.shards}"
        if ways.offload is Offload.ACTIVATIONS and self.offload_alone and ways.pipeline > 1:
            yield f"activations in the host's memory beside {ways.pipeline} stages"

    def require(self, fixed: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises :class:`UsageError` where one of the fixed choices, by name, is none that it can be told."""
        choices: dict[str, tuple[Any, ...]] = {"zero": self.zero, "recompute": self.recompute, "offload": self.offload}
        choices |= {part.name: (part.default,) for part in _FURTHER if part.name not in self.further}
        if not self.stages:
            choices |= {"pipeline": (1,), "interleave": (1,)}
        for name, values in choices.items():
            if any(value not in values for value in fixed.get(name, ())):
                option = name.replace("_", "-")
                raise UsageError(
                    f"{self.launcher} cannot be told --{option} {_words(fixed[name][0])}",
                    [f"it has {', '.join(map(_words, values))}"],
                    [f"--{option} {_words(values[-1])}", "--for another launcher"],
                )


@dataclass(frozen=True, slots=True)
class DegreesSpace:
    """What may be chosen; an empty tuple leaves it open.

    Attributes:
        tensor: degrees; open: powers of two up to a host, or to the hosts that NVLink joins.
        interleave: chunks a stage, where the blocks divide by the chunks, and the micro-batches by the stages.
        micro_batch: samples; open: powers of two.
        zero: levels; 2 and 3 without a pipeline alone.
        expert: expert ranks; open: powers of two that divide those that they are among, and the experts.
        expert_tensor: ranks that an expert is divided over; open: those of its block, or one.
        context: ranks that share the tokens of a sample; open: powers of two that halves of a sample divide by.
        recompute_modules: sets of modules that selective recomputation may be of; open: all that free something.
        shards: copies that ZeRO divides over; open: all, and those of a host where gradients of every micro-batch
            would leave it (ZeRO-2 and 3; in networks of hosts that are alike far from each other more are of no use).
        base: what is the same in all.
        limits: of the launcher that is to be told.
    """

    tensor: tuple[int, ...] = ()
    pipeline: tuple[int, ...] = ()
    micro_batch: tuple[int, ...] = ()
    interleave: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    sequence_parallel: tuple[bool, ...] = (False, True)
    recompute: tuple[Recompute, ...] = tuple(Recompute)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    expert: tuple[int, ...] = ()
    expert_tensor: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    recompute_modules: tuple[tuple[Module, ...], ...] = ()
    shards: tuple[int, ...] = ()
    base: ParallelDegrees = field(default_factory=ParallelDegrees)
    limits: LauncherLimits = LauncherLimits()

    def divisions(
        self, shape: Transformer, cluster: GpuCluster, devices: int, global_batch: int
    ) -> Iterator[ParallelDegrees]:
        """All into tensor, context, pipeline and data ranks and micro-batches, on at most so many devices."""
        for tensor in self.degrees(shape, min(cluster.joined, devices)):
            for context in self.contexts(shape, tensor, devices // tensor):
                most = devices // (tensor * context)
                for pipeline in self.pipeline or range(1, min(shape.layers, most) + 1):
                    if pipeline > shape.layers:
                        continue
                    for data in _divisors(global_batch, most // pipeline):
                        for micro_batch in self.micro_batches(global_batch, data):
                            ways = replace(
                                self.base, tensor=tensor, context=context, pipeline=pipeline, data=data,
                                micro_batch=micro_batch,
                            )  # fmt: skip
                            if not self.limits.launcher or self.details(shape, cluster, ways, global_batch):
                                yield ways

    def require(self, shape: Transformer, cluster: GpuCluster | Pools) -> None:
        """Raises :class:`UsageError`, and says why, where what all ways are to have cannot be.

        Ranks that share a sample's tokens, of a network; products in 8 bits, on devices; what is in the hosts' memory.
        """
        for number in self.context:
            ways = replace(self.base, context=number, context_exchange=self.limits.context[0])
            if not self.exchanges(shape, ways):
                ways.check_context(shape)
        places = [pool.cluster for pool in cluster.pools] if isinstance(cluster, Pools) else [cluster]
        for place in places:
            if self.base.precision is Precision.FP8:
                _require_eight_bit(place)
            if self.base.offload is not Offload.NONE:
                known_host(place.name, place.host)
        for names in self.recompute_modules:
            require_modules(shape, names)
        if Recompute.NONE not in self.recompute:
            ways = replace(self.base, recompute=self.recompute[0])
            ways.check_recompute(shape)
            if ways.offload is Offload.ACTIVATIONS:
                ways.check_offload()

    def contexts(self, shape: Transformer, tensor: int, most: int) -> list[int]:
        """Ranks that can share a sample's tokens, beside tensor ranks: those that are wanted, or powers of two."""
        numbers = [number for number in self.context or _powers(most) if number <= most]
        of_ranks = (replace(self.base, tensor=tensor, context=number) for number in numbers)
        return [ways.context for ways in of_ranks if self.exchanges(shape, ways)]

    def exchanges(self, shape: Transformer, ways: ParallelDegrees) -> list[ContextExchange]:
        """How the ranks that share a sample's tokens may exchange keys; where there is one rank, one choice."""
        if ways.context == 1:
            return [self.base.context_exchange]
        if shape.seq % (2 * ways.context):
            return []
        return [exchange for exchange in self.limits.context if not ways.context_refusal(shape, exchange)]

    def degrees(self, shape: Transformer, most: int) -> list[int]:
        """Tensor degrees that divide the network: those that are wanted, or powers of two."""
        return [
            tensor
            for tensor in self.tensor or _powers(most)
            if not any(size % tensor for _, size in shape.divided_sizes)
        ]

    def degrees_of_stages(self, shape: Transformer, most: int) -> list[list[int]]:
        """What the stages of one pipeline choose their tensor degrees from: all, or one for all of them."""
        degrees = self.degrees(shape, most)
        return [[degree] for degree in degrees] if self.limits.one_degree else [degrees]

    def micro_batches(self, global_batch: int, data: int) -> list[int]:
        """Samples of a micro-batch that divide those of a replica."""
        share = global_batch // data
        return [size for size in self.micro_batch or _powers(share) if share % size == 0]

    def experts(self, shape: Transformer, ways: ParallelDegrees) -> list[tuple[int, bool]]:
        """Expert ranks that divide those that they are among, and the network's experts; whether experts are whole.

        Those that are wanted, or powers of two.
        """
        choices = []
        for whole in (False, True) if shape.experts and ways.tensor > 1 else (False,):
            divided = replace(ways, whole_experts=whole)
            if divided.expert_tensor in (self.expert_tensor or (divided.expert_tensor,)):
                most = gcd(divided.expert_sharers, shape.experts) if shape.experts else 1
                choices += [(number, whole) for number in self.expert or _powers(most) if most % number == 0]
        return choices

    def details(
        self, shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees, global_batch: int
    ) -> list[ParallelDegrees]:
        """All else of a division."""
        micro_batches = ways.micro_batches(global_batch)
        interleaves = [
            chunks
            for chunks in self.interleave
            if chunks == 1
            or not (ways.pipeline == 1 or shape.layers % (ways.pipeline * chunks) or micro_batches % ways.pipeline)
        ]
        fitting = [
            sequence
            for sequence in self.sequence_parallel
            if not sequence or (ways.tensor > 1 and ways.tokens(shape) % ways.tensor == 0)
        ]
        recomputes = self.recomputes(shape, ways)
        zeros = [level for level in self.zero if level == 0 or (ways.copies > 1 and (level < 2 or ways.pipeline == 1))]
        if ways.offload is Offload.PARAMETERS:
            zeros = [3] if 3 in self.zero and ways.pipeline == 1 else []
        sliced = [(zero, shards) for zero in zeros for shards in self.groups(cluster, ways, zero)]
        choices = [
            replace(
                ways,
                interleave=interleave,
                sequence_parallel=sequence,
                recompute=recompute,
                recompute_modules=modules,
                zero=zero,
                shards=shards,
                sums_once=shards == 0 or self.limits.sums_once,
                expert=expert,
                whole_experts=whole,
                context_exchange=exchange,
            )
            for interleave, sequence, (recompute, modules), (zero, shards), (expert, whole), exchange in product(
                interleaves, fitting, recomputes, sliced, self.experts(shape, ways), self.exchanges(shape, ways)
            )
            if (expert == 1 and not whole) or (shards == 0 and (sequence or ways.tensor == 1))
        ]
        if self.limits.launcher:
            choices = [each for each in choices if not any(self.limits.refusals(each))]
        if ways.offload is not Offload.NONE:
            choices = [each for each in choices if _has_room(shape, cluster, each, micro_batches)]
        timed = cluster.timed if isinstance(cluster, GpuCluster) else None
        return choices if timed is None else [each for each in choices if timed.of(each) is not None]

    def recomputes(self, shape: Transformer, ways: ParallelDegrees) -> list[tuple[Recompute, tuple[Module, ...]]]:
        """What may be computed again; of sets of modules the one that frees most stands for all."""
        if ways.offload is Offload.ACTIVATIONS:
            return [(Recompute.NONE, CORE)] if Recompute.NONE in self.recompute else []
        most = max(self.module_sets(shape), key=lambda names: (Module.MOE in names, len(names)))
        is_of_use = {
            Recompute.SELECTIVE: bool({*most} & {*modules_of(shape)}),
            Recompute.OPERATORS: shape.fused_attention and Recompute.OPERATORS in self.limits.recompute,
        }
        chosen = [how for how in self.recompute if is_of_use.get(how, True)] or self.recompute
        return [(how, most if how is Recompute.SELECTIVE else CORE) for how in chosen]

    def module_sets(self, shape: Transformer) -> tuple[tuple[Module, ...], ...]:
        """Of modules that selective recomputation may be of."""
        if self.recompute_modules:
            return self.recompute_modules
        is_told = not self.limits.launcher or "recompute_modules" in self.limits.further
        return (is_told and module_sets(shape)) or (CORE,)

    def groups(self, cluster: GpuCluster | Pools, ways: ParallelDegrees, zero: int) -> list[int]:
        """Copies that may share slices (0: all), of those that there are."""
        if zero == 0 or isinstance(cluster, Pools):
            return [0] if not self.shards or 0 in self.shards else []
        if self.shards:
            wanted = [
                number if number < ways.copies else 0 for number in self.shards if ways.copies % (number or 1) == 0
            ]
            return sorted({*wanted})
        of_host = cluster.per_host // ways.tensor
        is_apart = zero >= 2 and zero in self.limits.shards and 1 < of_host < ways.copies
        return [0, of_host] if is_apart and ways.copies % of_host == 0 else [0]

    def through_pools(self, shape: Transformer, pools: Pools, global_batch: int) -> Iterator[ParallelDegrees]:
        """Replicas, micro-batches and details of pipelines through several pools, without expert and context ranks."""
        if any(of and 1 not in of for of in (self.interleave, self.expert, self.context)):
            return
        most = pools.devices // 2
        for data in _divisors(global_batch, most):
            for micro_batch in self.micro_batches(global_batch, data):
                divided = replace(self.base, tensor=1, pipeline=2, data=data, micro_batch=micro_batch)
                only = replace(
                    self, interleave=(1,), sequence_parallel=(False,), expert=(1,), context=(1,),
                    recompute_modules=self.recompute_modules or (CORE,),
                )  # fmt: skip
                for ways in only.details(shape, pools, divided, global_batch):
                    for sequence in self.sequence_parallel:
                        if sequence in self.limits.sequence_parallel:
                            yield replace(ways, sequence_parallel=sequence)


def _has_room(shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees, micro_batches: int) -> bool:
    """Whether the host's memory has room for what is in it, of stages that are as even as can be."""
    for stage in unlike_stages(shape, ways):
        place = cluster.at(ways, stage)
        on_host = stage_memory(shape, ways, stage, micro_batches, place.width).host
        if on_host > known_host(place.name, place.host).room_bytes(place.per_host):
            return False
    return True


def _require_eight_bit(cluster: GpuCluster) -> None:
    if cluster.timed is not None:
        raise UsageError(
            "products in 8 bits of layers whose times were measured",
            [f"those of {cluster.name} are in {cluster.dtype}"],
            ["--precision bf16"],
        )
    if EIGHT_BIT not in device(cluster.device).peak_flop_per_s:
        able = [name for name, entry in devices().items() if EIGHT_BIT in entry.peak_flop_per_s]
        raise UsageError(
            f"{cluster.device} ({cluster.name}) does not multiply in 8 bits",
            [f"the catalogue states no peak of it in {EIGHT_BIT}; it does of {', '.join(able)}"],
            ["--precision bf16", "--on another cluster"],
        )


def _words(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _levels(levels: tuple[int, ...]) -> str:
    return f"the levels {', '.join(map(str, levels))} so" if levels else "none so"


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
