"""The space that solvers search: pools of like devices, places to cut, micro-batch sizes, schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner import schedules
from planner.costs.stage import PriceBook
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.graph import Graph
from planner.ir.problem import LATENCY, Problem
from planner.layers import batch_wide_layers, check_samples_apart
from planner.solvers.candidates.assemble import split_batch
from planner.solvers.candidates.rules import Constraints

FEW_SAMPLES = 12
"""Up to this global batch every micro-batch size is looked at, also those that leave a smaller last one."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Devices that nothing tells apart: one kind, host and memory size.

    Attributes:
        whole_host: the host has no others, and no links of its own.
        told_apart: what side constraints say of them, see ``Constraints.device_class``.
    """

    kind: str
    host: str
    memory_limit_bytes: int
    ranks: tuple[int, ...]
    whole_host: bool
    told_apart: tuple[bool, ...] = ()

    def interchangeable(self, other: Pool) -> bool:
        """Whether exchanging the two hosts changes nothing."""
        mine = (self.kind, self.memory_limit_bytes, len(self.ranks), self.told_apart)
        theirs = (other.kind, other.memory_limit_bytes, len(other.ranks), other.told_apart)
        return self is other or (self.whole_host and other.whole_host and mine == theirs)


def pools(problem: Problem, constraints: Constraints | None = None) -> tuple[Pool, ...]:
    """The usable ranks as pools, in order of their first rank; ranks that ``constraints`` tell apart are so."""
    found: dict[tuple[str, str, int, tuple[bool, ...]], list[int]] = {}
    for rank in problem.ranks:
        device = problem.profile.cluster.devices[rank]
        told_apart = constraints.device_class(rank) if constraints is not None else ()
        key = (device.kind, device.host, problem.memory_limit_bytes(rank), told_apart)
        found.setdefault(key, []).append(rank)
    hosts = [host for _, host, *_ in found]
    hosts += [end for pair in problem.profile.cluster.pairs for end in (pair.src_host, pair.dst_host)]
    return tuple(
        Pool(kind, host, limit, tuple(ranks), hosts.count(host) == 1, told_apart)
        for (kind, host, limit, told_apart), ranks in found.items()
    )


def schedule_names(problem: Problem) -> tuple[str, ...]:
    """The schedules that may be used with one stage a position.

    Raises:
        UnknownNameError: one of those asked for does not exist.
        UsageError: the objective is latency, and none of them has forward passes alone.
    """
    return tuple(name for name in _schedules(problem) if not _several_a_position(name))


def virtual_schedule_names(problem: Problem) -> tuple[str, ...]:
    """The schedules that may be used and are meant for several stages a position; raises as above."""
    return tuple(name for name in _schedules(problem) if _several_a_position(name))


def _several_a_position(name: str) -> bool:
    traits = schedules.traits(name)
    return traits.trains and traits.stages_per_position != 1


def _schedules(problem: Problem) -> tuple[str, ...]:
    for name in problem.schedules:
        schedules.schedule(name)
    if problem.objective != LATENCY:
        return tuple(dict.fromkeys(problem.schedules)) or schedules.default_names()
    named = problem.schedules or schedules.names()
    forward = tuple(dict.fromkeys(name for name in named if not schedules.traits(name).trains))
    if not forward:
        known = ", ".join(name for name in schedules.names() if not schedules.traits(name).trains)
        raise UsageError(
            "latency is that of forward passes, and no schedule that may be used has these alone",
            [f"asked: {', '.join(problem.schedules)}; forward alone: {known}"],
        )
    return forward


def micro_batch_sizes(problem: Problem, book: PriceBook) -> tuple[int, ...]:
    """Sizes that may be used, ascending.

    By default the divisors of the global batch and the sizes that were measured (all sizes up to ``FEW_SAMPLES``), as
    far as a stage on all ranks stays within what was measured.

    Raises:
        UsageError: the global batch or a size is not positive.
        InfeasibleError: the loss needs the whole batch at once, and it may not be one micro-batch.
    """
    batch = problem.global_batch
    if batch < 1:
        raise UsageError(f"a global batch of {batch} samples", remedies=["give a positive number of samples"])
    if any(size < 1 for size in problem.micro_batch_sizes):
        raise UsageError(f"a micro-batch of {min(problem.micro_batch_sizes)} samples", remedies=["give sizes above 0"])
    covered = sum(book.tables.largest_measured(book.kind(rank)) for rank in problem.ranks)
    if batch_wide_layers(problem.profile.graph):
        return _whole_batch(problem, covered)
    if problem.micro_batch_sizes:
        return tuple(sorted({min(size, batch) for size in problem.micro_batch_sizes}))
    measured = {m.samples for found in problem.profile.measurements.values() for m in found}
    sizes = {size for size in range(1, batch + 1) if batch % size == 0 or batch <= FEW_SAMPLES} | measured
    return tuple(sorted(size for size in sizes if size <= min(batch, covered)))


def _whole_batch(problem: Problem, covered: int) -> tuple[int, ...]:
    """The global batch as the only size."""
    batch, asked = problem.global_batch, problem.micro_batch_sizes
    if max(asked, default=batch) >= batch and (asked or batch <= covered):
        return (batch,)
    why = f"micro-batches of {max(asked)} samples were asked for" if asked else f"up to {covered} were measured"
    raise InfeasibleError(
        "the loss needs all samples of a step at once",
        [
            f"layer {batch_wide_layers(problem.profile.graph)[0]} joins samples: losses of parts do not make up that "
            "of the batch",
            f"a global batch of {batch} samples, {why}",
        ],
        [f"--micro-batch {batch}" if asked else f"profile an example of {batch} samples", "a smaller --batch"],
    )


def is_covered(problem: Problem, book: PriceBook, kind: str, samples: float) -> bool:
    """Whether a device of ``kind`` may be given ``samples`` at once: what was measured, or what the user asks for."""
    return bool(problem.micro_batch_sizes) or samples <= book.tables.largest_measured(kind)


def micro_batches(problem: Problem, size: int) -> tuple[int, ...]:
    """The global batch in micro-batches of ``size``."""
    return split_batch(problem.global_batch, size)


def cut_positions(graph: Graph) -> tuple[int, ...]:
    """Where the list of layers may be cut, both ends included: not between layers that share a parameter."""
    allowed = np.ones(len(graph.layers) + 1, dtype=bool)
    first: dict[str, int] = {}
    for index, layer in enumerate(graph.layers):
        for name in layer.parameters:
            start = first.setdefault(name, index)
            allowed[start + 1 : index + 1] = False
    return tuple(int(position) for position in np.flatnonzero(allowed))


def mixing_layers(graph: Graph) -> frozenset[str]:
    """Layers that mix samples, so that a stage with them cannot be cut by samples."""
    return frozenset(check_samples_apart(graph))


def mixing_text(graph: Graph) -> str:
    """How many layers mix samples, with an example; empty if none does."""
    mixing = mixing_layers(graph)
    count = f"{len(mixing)} layers mix" if len(mixing) > 1 else "1 layer mixes"
    return f"{count} samples, such as {min(mixing)}" if mixing else ""


def require_divisible(graph: Graph) -> None:
    """Raises :class:`InfeasibleError` if a layer of the graph mixes samples."""
    mixing = mixing_text(graph)
    if mixing:
        raise InfeasibleError("the model cannot be cut by samples", [mixing], ["plan with another solver"])
