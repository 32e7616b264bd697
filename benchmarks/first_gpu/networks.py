"""Profiles of networks by the GPU's own events, and each layer beside what ``--on h100-dgx`` says of it.

iteration     a whole step of the module, and the sum of its layers, each timed alone
memory        what autograd keeps of a forward pass, layer by layer, and as the allocator counts it at once
tables        forward + backward of a layer, predicted by kernels that others measured; nothing is fitted here
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

import halopipe as hp
from benchmarks.first_gpu.frame import Bench, Parts
from benchmarks.report import Row, at_most, error_within
from cuda_ops.memory import meter_of
from planner.ir.codec import load
from planner.ir.profile import Measurement, Profile
from profiler.capture.graph import placed
from profiler.source.source import load_model

GOAL_SUM_PERCENT = 10.0
GOAL_MEMORY_PERCENT = 5.0
GOAL_TABLES_PERCENT = 15.0
SYSTEM = "h100-dgx"
PRECISIONS: Mapping[str, Mapping[str, Any]] = {"float32": {}, "bfloat16": {"autocast": "bfloat16"}}
"""What a profile is asked for beside the network, by the dtype that most of it computes in."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network of ours, whole and small.

    Attributes:
        shape, arguments: of the factory; ``small_shape`` and ``small`` in a rehearsal.
        options: of its profile, beside those of a precision.
    """

    factory: str
    shape: tuple[int, ...]
    arguments: Mapping[str, object]
    small_shape: tuple[int, ...]
    small: Mapping[str, object]
    options: Mapping[str, str] = field(default_factory=dict)

    def asked(self, bench: Bench) -> dict[str, Any]:
        """For :func:`halopipe.profile`."""
        shape, arguments = (self.small_shape, self.small) if bench.rehearses else (self.shape, self.arguments)
        return {
            "model": f"profiler.models.{self.factory}",
            "input_shape": shape,
            "arguments": arguments,
            **self.options,
        }

    def batch(self, bench: Bench) -> int:
        """Samples of a step."""
        return (self.small_shape if bench.rehearses else self.shape)[0]


_NARROW = {"vocabulary": 64, "width": 32, "layers": 1, "heads": 2}
NETWORKS: Mapping[str, Network] = {
    "ResNet-50": Network(
        "resnet:resnet50",
        (32, 3, 224, 224),
        {},
        (4, 3, 32, 32),
        {"width": 4, "num_classes": 5, "depths": [1, 1]},
    ),
    "GPT-2 small": Network("gpt:gpt", (8, 512), {}, (4, 16), _NARROW),
    "3-D U-Net": Network("unet3d:unet3d", (4, 1, 64, 64, 64), {}, (4, 1, 8, 8, 8), {"width": 4, "depth": 1}),
    "MinkUNet": Network(
        "minkunet:minkunet", (4, 20_000, 4), {}, (4, 60, 4), {"channels": [8, 8, 8], "blocks": 1, "num_classes": 3}
    ),
}
BLOCKS: Mapping[str, Network] = {
    f"transformer block, width {width}": Network(
        "gpt:gpt",
        (2, 2048),
        {"vocabulary": 1024, "width": width, "layers": 1, "heads": width // 128, "context": 2048},
        (2, 16),
        _NARROW,
        {"dtype": "bfloat16"},
    )
    for width in (4096, 2048, 8192)
}
"""As Megatron-LM trains them, parameters in bfloat16."""
PRICED = ("ResNet-50", "GPT-2 small", "3-D U-Net")
"""A factory that voxelises a cloud reads values, so MinkUNet cannot be priced without running."""


def profiles(bench: Bench) -> Parts:
    """Each network in each precision."""
    return {f"{name}, {how}": partial(profiled, bench, name, how) for name in NETWORKS for how in PRECISIONS}


def profiled(bench: Bench, name: str, precision: str) -> Iterator[Row]:
    """Writes the profile into a file for later steps."""
    network = NETWORKS[name]
    profile = measured(bench, network, PRECISIONS[precision])
    hp.save(profile, bench.file(f"{name}.{precision}.profile.json"))
    title = f"{name}, {precision}"
    batch = network.batch(bench)
    layers = at(profile, batch)
    iteration_s = profile.provenance.iteration_s[str(batch)]
    (updates,) = profile.parameters.values()
    layers_s = sum(each.passes_s for each in layers) + sum(each.update_s for each in updates.values())
    yield Row(f"{title}: iteration", 1e3 * iteration_s, "ms")
    yield error_within(f"{title}: sum of layers / iteration - 1", layers_s / iteration_s, GOAL_SUM_PERCENT)
    yield Row(f"{title}: machine was at rest", float(not profile.provenance.contended), "at rest")
    saved = sum(each.saved_bytes for each in layers)
    held = _held_bytes(bench, profile)
    yield Row(f"{title}: kept by autograd", held / 2**20, "MiB")
    yield error_within(f"{title}: kept by layers / by the allocator - 1", saved / held, GOAL_MEMORY_PERCENT)


def tables(bench: Bench) -> Parts:
    """The networks that can be priced, in each precision, then transformers' blocks; a rehearsal: one of each."""
    both = [(name, how) for name in PRICED for how in PRECISIONS]
    blocks = list(BLOCKS.items())
    if bench.rehearses:
        both = [(PRICED[0], "bfloat16")]
        blocks = blocks[:1]
    parts = {f"{name}, {how}": partial(_profiled_before, bench, name, how) for name, how in both}
    return parts | {name: partial(_block, bench, name, network) for name, network in blocks}


def _profiled_before(bench: Bench, name: str, precision: str) -> Iterator[Row]:
    profile = load_profile(bench, name, precision)
    yield from beside_tables(bench, f"{name}, {precision}", NETWORKS[name], PRECISIONS[precision], profile)


def _block(bench: Bench, name: str, network: Network) -> Iterator[Row]:
    yield from beside_tables(bench, name, network, {}, measured(bench, network, {}))


def beside_tables(
    bench: Bench, title: str, network: Network, precision: Mapping[str, Any], profile: Profile
) -> Iterator[Row]:
    """Each layer measured, with what the tables say as its goal, which holds within their own range; then errors."""
    batch = network.batch(bench)
    modelled = hp.profile(**network.asked(bench), **precision, on=SYSTEM, cluster=8, sizes=(batch,))
    predicted = {each.layer: each for each in at(modelled, batch)}
    pairs = []
    for each in at(profile, batch):
        other = predicted.get(each.layer)
        if each.alike or other is None or not each.passes_s or not other.passes_s:
            continue
        pairs.append((other.passes_s, each.passes_s))
        low, high = (factor * other.passes_s for factor in (other.low, other.high))
        goal = f"predicted {1e6 * other.passes_s:.4g}"
        yield Row(f"{title}: layer {each.layer}", 1e6 * each.passes_s, "us", goal, low <= each.passes_s <= high)
    if not pairs:
        raise RuntimeError(f"no layer of {title} was both measured and predicted")
    predicted_s, measured_s = np.array(pairs).T
    errors = 100 * np.abs(predicted_s / measured_s - 1)
    yield Row(f"{title}: mean error of a layer", float(errors.mean()), "%")
    weighted = float(np.average(errors, weights=measured_s))
    yield at_most(f"{title}: mean error of a layer, by seconds", weighted, "%", GOAL_TABLES_PERCENT)
    ratio = float(predicted_s.sum() / measured_s.sum())
    yield error_within(f"{title}: all layers, predicted / measured - 1", ratio, GOAL_TABLES_PERCENT)


def measured(bench: Bench, network: Network, precision: Mapping[str, Any]) -> Profile:
    """The profile on one device, of a batch and half of it."""
    batch = network.batch(bench)
    sizes = sorted({max(1, batch // 2), batch})
    return hp.profile(**network.asked(bench), **precision, device=bench.device, cluster=1, sizes=sizes, quick=True)


def load_profile(bench: Bench, name: str, precision: str) -> Profile:
    """What :func:`profiled` wrote.

    Raises:
        RuntimeError: it has not.
    """
    path = bench.file(f"{name}.{precision}.profile.json")
    if not path.exists():
        raise RuntimeError(f"there is no profile of {name} in {precision}: the step profiles comes first")
    return load(path, Profile)


def at(profile: Profile, samples: int) -> Sequence[Measurement]:
    """Whole layers at so many samples."""
    (layers,) = profile.measurements.values()
    return [each for each in layers if each.samples == samples]


def _held_bytes(bench: Bench, profile: Profile) -> int:
    """What a forward pass of the module leaves allocated, as the device's allocator counts."""
    device = torch.device(bench.device)
    meter = meter_of(device)
    if meter is None:
        raise RuntimeError("nothing counts this device's memory")
    model = placed(load_model(profile.model), device)
    model.loss_of_prepared(model.inputs, model.targets)  # libraries take workspaces of their own at first
    before = meter.current_bytes
    loss = model.loss_of_prepared(model.inputs, model.targets)
    held = meter.current_bytes - before
    del loss
    return held
