"""A training job that is to be launched, the script that starts it, and what a launcher is.

``torchrun`` (torch 2.13, ``torch/distributed/run.py``) gives the processes of node rank 0 the first ranks, then those
of node rank 1: hosts are listed in the order of ranks, which is tensor ranks, then those that share a
sample's tokens, then replicas, then stages.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from typing import Any

from planner.extras.export.launchers.network import sizes_beyond
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.pools import Pools
from planner.extras.transformers.shape import MOST_DEGREE, TRANSFORMERS, ParallelDegrees, Transformer
from planner.extras.transformers.space import LauncherLimits
from planner.ir.errors import UsageError

BFLOAT16 = "bfloat16"
FLOAT16 = "float16"
FLOAT32 = "float32"
DTYPES = (BFLOAT16, FLOAT16, FLOAT32)
CHECKPOINTING = "full recomputation: gradient_checkpointing_enable() of a Hugging Face model, in the program"
"""What a program is to do whose launcher does not recompute."""
ARGUMENTS = '"$@"'
"""Of a script: what is given to it."""

_WITHOUT_BFLOAT16 = ("V100", "T4", "Titan", "RTX-2080")
"""NVIDIA's before Ampere."""


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Alike hosts with consecutive node ranks.

    Attributes:
        gpus: that are used of each.
    """

    device: str
    hosts: int
    gpus: int

    def __post_init__(self) -> None:
        for number in (self.hosts, self.gpus):
            if not 1 <= number <= MOST_DEGREE:
                raise UsageError(f"{self.hosts} hosts of {self.gpus} GPUs", [f"from 1 to {MOST_DEGREE} can be meant"])


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A network's step, divided.

    Attributes:
        global_batch: samples a step.
        dtype: of products: ``bfloat16``, ``float16`` or ``float32``; empty: nobody said.
        hosts: in the order of node ranks; empty: nobody said.
    """

    shape: Transformer
    ways: ParallelDegrees
    global_batch: int
    dtype: str
    hosts: tuple[HostGroup, ...]

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPES:
            raise UsageError(f"products in {self.dtype!r}", [f"known: {', '.join(DTYPES)}"])

    @property
    def tensor(self) -> int:
        """The tensor degree that all stages have."""
        return self.ways.degrees[0]

    @property
    def micro_batches(self) -> int:
        """Passes of a rank in a step."""
        return self.ways.micro_batches(self.global_batch)

    @property
    def blocks(self) -> list[int]:
        """Of each chunk, with those of another kind that come first."""
        blocks = list(self.ways.chunks(self.shape.layers))
        blocks[0] += self.shape.first_dense
        return blocks

    @property
    def gpus(self) -> int:
        """Of all hosts."""
        return sum(group.hosts * group.gpus for group in self.hosts)

    @property
    def num_hosts(self) -> int:
        """In all."""
        return sum(group.hosts for group in self.hosts)

    @property
    def has_unlike_hosts(self) -> bool:
        """Whether they have unlike numbers of GPUs."""
        return len({group.gpus for group in self.hosts}) > 1

    def is_of(self, name: str) -> bool:
        """Whether the network has the sizes of the one of that name, and any sequence length."""
        return replace(TRANSFORMERS[name], seq=self.shape.seq) == replace(self.shape, name=name, settings=())

    @property
    def untold(self) -> list[str]:
        """What a configuration says of the network beyond its sizes, for whoever is told these."""
        return [f"{each}: the network's config.json says so, and no option does" for each in self.shape.settings]

    def __str__(self) -> str:
        return (
            f"{self.shape.name}, sequence {self.shape.seq}, {self.dtype}, global batch {self.global_batch}: {self.ways}"
        )


def launch_data(cluster: GpuCluster | Pools, ways: ParallelDegrees) -> dict[str, Any]:
    """What a launch needs beside a way, as plain data: :attr:`TrainingJob.dtype` and :attr:`TrainingJob.hosts`."""
    return {"dtype": dtype_of(cluster, ways), "hosts": [asdict(group) for group in hosts_of(cluster, ways)]}


def hosts_of(cluster: GpuCluster | Pools, ways: ParallelDegrees) -> tuple[HostGroup, ...]:
    """The hosts that a way takes, in the order of its ranks."""
    grouped = groupby(_hosts(cluster, ways))
    return tuple(HostGroup(name, len(list(alike)), gpus) for (name, gpus), alike in grouped)


def _hosts(cluster: GpuCluster | Pools, ways: ParallelDegrees) -> Iterator[tuple[str, int]]:
    """(device, GPUs) of each host."""
    if isinstance(cluster, Pools) and ways.pools:
        used = [
            (place.cluster, gpu // place.cluster.per_host)
            for place in cluster.places(ways)
            for gpu in range(place.start, place.stop)
        ]
        for (pool, _), gpus in groupby(used, key=lambda place: (place[0].name, place[1])):
            yield cluster.pool(pool).cluster.device, len(list(gpus))
    else:
        whole = cluster.at(ways, 0)
        full, rest = divmod(ways.devices, whole.per_host)
        yield from ((whole.device, gpus) for gpus in (*(whole.per_host,) * full, rest) if gpus)


def dtype_of(cluster: GpuCluster | Pools, ways: ParallelDegrees) -> str:
    """What products are computed in: half precision that all devices have; float32, where times of that count."""
    places = [cluster.at(ways, stage) for stage in range(ways.pipeline)]
    if any(place.width == 4 for place in places):
        return FLOAT32
    return FLOAT16 if any(place.device.startswith(_WITHOUT_BFLOAT16) for place in places) else BFLOAT16


@dataclass(frozen=True, slots=True)
class LauncherFiles:
    """What a launcher is given.

    Attributes:
        text: of its file: a script; or a configuration, which ``script`` names.
        script: beside it; empty: ``text`` is one.
        missing: what of the way its user's own code, or its user, has to do.
    """

    text: str
    script: str = ""
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that trains.

    Attributes:
        limits: of the ways that it can be told.
        dtypes: it computes in.
        write: of a job, and the name of the file that a script beside it refers to.
        unlike_hosts: whether hosts may have unlike numbers of processes.
        network: which sizes of a network its options tell; None: the network is its user's own code.
    """

    limits: LauncherLimits
    write: Callable[[TrainingJob, str], LauncherFiles]
    dtypes: tuple[str, ...] = DTYPES
    unlike_hosts: bool = True
    network: Callable[[Transformer], Collection[str]] | None = None

    @property
    def name(self) -> str:
        """As the command line spells it."""
        return self.limits.launcher

    def cluster_of(self, cluster: GpuCluster | Pools) -> GpuCluster | Pools:
        """Without the pools whose GPUs have no dtype that it computes in, if others are left."""
        if isinstance(cluster, GpuCluster):
            return cluster
        kept = [pool for pool in cluster.pools if dtype_of(pool.cluster, ParallelDegrees()) in self.dtypes]
        return replace(cluster, pools=tuple(kept)) if kept else cluster

    def network_refusals(self, shape: Transformer) -> Iterator[str]:
        """What of the network it cannot be told."""
        if self.network is not None:
            yield from (f"a network of {size}: no option says it" for size in sizes_beyond(shape, self.network(shape)))

    def refusals(self, job: TrainingJob) -> Iterator[str]:
        """What of the job it cannot be told."""
        yield from self.limits.refusals(job.ways)
        if job.dtype not in self.dtypes:
            yield f"{job.dtype}: it computes in {', '.join(self.dtypes)}"
        yield from self.network_refusals(job.shape)
        if job.has_unlike_hosts and not self.unlike_hosts:
            yield f"hosts of {', '.join(str(group.gpus) for group in job.hosts)} GPUs: it has as many on each"


def torchrun(job: TrainingJob) -> tuple[str, ...]:
    """The command that starts the processes of a host; of several, NODE_RANK and MASTER_ADDR say which it is."""
    of_first = str(job.hosts[0].gpus)
    if job.num_hosts == 1:
        return ("torchrun", "--standalone", "--nproc-per-node", of_first)
    processes = '"${GPUS[$NODE_RANK]}"' if job.has_unlike_hosts else of_first
    return (
        *("torchrun", "--nnodes", str(job.num_hosts), "--nproc-per-node", processes),
        *("--node-rank", '"$NODE_RANK"', "--master-addr", '"$MASTER_ADDR"'),
        *("--master-port", '"${MASTER_PORT:-29500}"'),
    )


def script(job: TrainingJob, about: str, command: Iterable[Iterable[str]], environment: Iterable[str] = ()) -> str:
    """What is run on each host.

    Args:
        about: whose it is, and what its user gives it, in words.
        command: lines of words; those that begin with a quotation mark are the shell's.
        environment: lines before it.
    """
    where = ", then ".join(f"{group.hosts} of {group.gpus} {group.device}" for group in job.hosts)
    comments = [str(job), f"hosts: {where}", about]
    if job.num_hosts > 1:
        comments.append(f"on each host NODE_RANK (0 to {job.num_hosts - 1}, in that order) and MASTER_ADDR (that of 0)")
    head = ["#!/usr/bin/env bash", *map(_comment, comments), "set -eu", *environment]
    if job.has_unlike_hosts:
        counts = chain.from_iterable([str(group.gpus)] * group.hosts for group in job.hosts)
        head.append(f"GPUS=({' '.join(counts)})")
    lines = [" ".join(word if word.startswith('"') else shlex.quote(word) for word in line) for line in command]
    return "\n".join([*head, " \\\n  ".join(lines)]) + "\n"


def _comment(text: str) -> str:
    """A line that no name of a network or a device ends."""
    return "# " + "".join(letter if letter.isprintable() else " " for letter in text)
