"""What ``benchmarks.planner`` plans: published profiles on clusters, and large synthetic networks.

Profiles are PipeDream's (their mini-batch taken as 128 samples; costs in proportion to samples).  Devices hold 16 GiB.
A flat cluster has links of one rate.  Links between hosts have that rate, those inside a faster one (``WITHIN``).
Types of device are as fast as the profile says, three quarters and half as fast.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.baselines.common import as_profile as clusters
from planner.baselines.common.as_profile import as_profile
from planner.baselines.pipedream import format as pipedream
from planner.baselines.pipedream.format import LayerGraph, Node
from planner.ir.cluster import Cluster
from planner.ir.problem import Problem

FILES = Path(__file__).parents[2] / "tests" / "data" / "profiles" / "pipedream"
NETWORKS = {"VGG-16": "vgg16", "ResNet-50": "resnet50", "GNMT": "gnmt"}
SAMPLES = 128
GLOBAL_BATCH = 1024
SPEEDS = {"fast": 1.0, "middle": 0.75, "half": 0.5}
WITHIN = {1.25e9: 1e10, 1e10: 3e10}
"""Bytes a second inside a host, by bytes a second between hosts."""

FLAT = (4, 8, 16)
HOSTS = ((2, 4), (2, 8), (4, 4))
MIXED: tuple[Mapping[str, int], ...] = (
    {"fast": 2, "half": 2},
    {"fast": 4, "half": 4},
    {"fast": 3, "middle": 3, "half": 2},
    {"fast": 8, "half": 8},
)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with its name; planning it should take at most ``limit_s`` CPU seconds (0: no such goal)."""

    name: str
    num_devices: int
    problem: Problem
    limit_s: float = 0.0


def cases(sizes: tuple[int, ...], time_limit_s: float, names: frozenset[str] = frozenset()) -> Iterator[Case]:
    """Networks x clusters x rates; those of ``names`` alone if there are any."""
    for network, file in NETWORKS.items():
        for rate in WITHIN:
            for shape, cluster in _clusters(rate):
                name = f"{network}, {shape}, {rate / 1e9:g} GB/s"
                if not names or name in names:
                    profile = as_profile(_graph(file), cluster, SAMPLES, SPEEDS)
                    problem = Problem(profile, GLOBAL_BATCH, micro_batch_sizes=sizes, time_limit_s=time_limit_s)
                    yield Case(name, len(cluster.devices), problem)


def large() -> Mapping[str, Case]:
    """Large synthetic problems; the time limits leave room to prove, for 1,024 devices to stop within the goal."""
    types = clusters.mixed({"fast": 8, "middle": 8, "half": 8}, 1e10)
    many = clusters.hosts(64, 16, 1e11, 1.25e10)
    found = (
        _synthetic("chain of 1500 layers, 16 devices", 1500, clusters.flat(16, 1e10), 64, 2.0, 30.0),
        _synthetic("chain of 300 layers, 3 types x 8 devices", 300, types, 64, 5.0, 30.0),
        _synthetic("1000 layers, 64 hosts x 16 devices", 1000, many, 1024, 60.0, 50.0),
    )
    return {case.name: case for case in found}


def _clusters(rate: float) -> Iterator[tuple[str, Cluster]]:
    for machines in FLAT:
        yield f"{machines}", clusters.flat(machines, rate)
    for hosts, each in HOSTS:
        yield f"{hosts}x{each}", clusters.hosts(hosts, each, WITHIN[rate], rate)
    for counts in MIXED:
        yield " + ".join(f"{count} {kind}" for kind, count in counts.items()), clusters.mixed(counts, rate)


@functools.cache
def _graph(file: str) -> LayerGraph:
    return pipedream.read(FILES / f"{file}.graph.txt")


def _synthetic(name: str, layers: int, cluster: Cluster, size: int, limit_s: float, time_limit_s: float) -> Case:
    """16 micro-batches of ``size`` samples."""
    profile = as_profile(network(layers), cluster, SAMPLES, SPEEDS)
    problem = Problem(profile, 16 * size, micro_batch_sizes=(size,), time_limit_s=time_limit_s)
    return Case(name, len(cluster.devices), problem, limit_s)


def network(layers: int, seed: int = 0) -> LayerGraph:
    """A chain with the trend of a CNN: activations shrink and parameters grow with depth; no two layers are alike.

    About half of the layers are cheap and without parameters (normalisation, pointwise).  A mini-batch takes 2 s
    forward and backward, saves 20 GB, and there are 2 GB of parameters, whatever the number of layers.
    """
    draw = random.Random(seed)
    heavy = [draw.random() < 0.5 for _ in range(layers)]
    work = [draw.lognormvariate(0.0, 0.5) * (1.0 if h else 0.1) for h in heavy]
    weights = [draw.lognormvariate(0.0, 0.5) * math.exp(3.0 * k / layers) if h else 0.0 for k, h in enumerate(heavy)]
    saved = [draw.lognormvariate(0.0, 0.3) * math.exp(-3.0 * k / layers) for k in range(layers)]
    nodes = tuple(
        Node(
            name=f"node{k + 1}",
            description="Conv2d" if heavy[k] else "ReLU",
            forward_s=2.0 / 3.0 * work[k] / sum(work),
            backward_s=4.0 / 3.0 * work[k] / sum(work),
            activation_bytes=2e10 * saved[k] / sum(saved),
            parameter_bytes=2e9 * weights[k] / sum(weights),
        )
        for k in range(layers)
    )
    return LayerGraph(f"chain of {layers}", nodes, tuple((k, k + 1) for k in range(layers - 1)))
