"""How far off predictions of ``ways`` were on runs that others published, by kind of run: what its range is made of.

kind      framework, kind of GPU, dense or experts, one host or several, and whether kernels are so short that they
          may wait for the host
evidence  errors of the runs of that kind, each predicted as ``ways`` predicts it; from ``evidence.json``, which
          ``python -m benchmarks.published`` makes
range     of the printed step: in which eight of ten such runs lay.  Of fewer than ``FEW`` runs at least the range
          that the kernels' own tables have; without a run that range alone, and the answer says so
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from statistics import mean

import numpy as np

from planner.extras.kernels.estimates import Estimate
from planner.extras.transformers.cluster import GpuCluster
from planner.extras.transformers.layers import layers_for
from planner.extras.transformers.passes import HOST
from planner.extras.transformers.pools import Pools
from planner.extras.transformers.shape import ParallelDegrees, Transformer
from planner.ir.codec import from_json

FEW = 5
SHORT_S = 1e-3
"""A block whose kernels take less in forward may wait for the host: that of GPT-2 small needs 2 ms of Python for both
passes of a block (docs/gpu.md: 26 ms an iteration, of 12)."""
MEGATRON = "Megatron-LM"
FRAMEWORKS: Mapping[str, str] = {
    "": MEGATRON,
    "megatron": MEGATRON,
    "megatron-bridge": "Megatron-Bridge",
    "torchtitan": "torchtitan",
    "deepspeed": "DeepSpeed",
    "accelerate": "PyTorch FSDP",
}
"""By launcher, whose runs its answer is held against."""
OWN_LAYERS = "layers of one's own table"
_OF_TEN = (10, 90)


@dataclass(frozen=True, slots=True)
class RunKind:
    """Runs that are alike in what predictions of them get wrong.

    Attributes:
        device: of the catalogue; several, where they are not alike.
        short: whether a block's forward is shorter than ``SHORT_S``.
    """

    framework: str
    device: str
    experts: bool
    several_hosts: bool
    short: bool

    def __str__(self) -> str:
        parts = [self.framework, self.device, "experts" if self.experts else "dense"]
        parts.append("several hosts" if self.several_hosts else "one host")
        return ", ".join([*parts, "short kernels"] if self.short else parts)


@dataclass(frozen=True, slots=True)
class KindEvidence:
    """Published runs of a kind beside their predictions.

    Attributes:
        sources: runs by source.
        mean_error: of predicted / measured - 1, with their signs.
        mean_size, largest: of the same without signs.
        low, high: of measured / predicted, between which eight of ten runs lay.
    """

    kind: RunKind
    sources: Mapping[str, int]
    mean_error: float
    mean_size: float
    largest: float
    low: float
    high: float

    @property
    def runs(self) -> int:
        """Of all sources."""
        return sum(self.sources.values())

    def __str__(self) -> str:
        sources = "; ".join(f"{name} {count}" for name, count in self.sources.items())
        return (
            f"{self.runs}, predicted {100 * self.mean_size:.0f} % off on average, {100 * self.largest:.0f} % at most,"
            f" {abs(100 * self.mean_error):.0f} % too {'long' if self.mean_error > 0 else 'short'} in all ({sources})"
        )


def summed(kind: RunKind, errors: Mapping[str, Sequence[float]]) -> KindEvidence:
    """The evidence that runs of a kind are.

    Args:
        errors: by source, predicted / measured - 1 of its runs.
    """
    every = [error for of_source in errors.values() for error in of_source]
    sizes = [abs(error) for error in every]
    low, high = np.percentile([1 / (1 + error) for error in every], _OF_TEN)
    sources = {name: len(of_source) for name, of_source in errors.items()}
    return KindEvidence(kind, sources, mean(every), mean(sizes), max(sizes), float(low), float(high))


def kind_of(framework: str, shape: Transformer, cluster: GpuCluster | Pools, ways: ParallelDegrees) -> RunKind:
    """The kind of a run; of unlike devices blocks are not looked at."""
    alone = cluster.alone(ways)
    if isinstance(alone, Pools):
        return RunKind(framework, alone.device, shape.experts > 0, True, False)
    if alone.timed is not None:
        framework = OWN_LAYERS
    forward = layers_for(shape, alone, ways).block.forward
    kernels_s = forward.seconds - forward.by_what.get(HOST, 0.0)
    several_hosts = ways.devices > alone.per_host
    return RunKind(framework, alone.device, shape.experts > 0, several_hosts, kernels_s < SHORT_S)


@functools.cache
def published() -> Mapping[RunKind, KindEvidence]:
    """What ``evidence.json`` holds."""
    text = (files("halopipe.extras.transformers") / "evidence.json").read_text("utf-8")
    return {evidence.kind: evidence for evidence in from_json(text, tuple[KindEvidence, ...])}


def range_of(step: Estimate, evidence: KindEvidence | None) -> tuple[float, float]:
    """Seconds between which a step of that kind is expected; the prediction is among them."""
    if evidence is None:
        return step.low, step.high
    low = step.seconds * min(1.0, evidence.low)
    high = step.seconds * max(1.0, evidence.high)
    if evidence.runs < FEW:
        return min(low, step.low), max(high, step.high)
    return low, high
