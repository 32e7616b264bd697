"""Receptive-field inference: an image larger than a device's memory, in tiles whose overlap is computed again.

A small U-Net (:mod:`profiler.models.unet2d`) with running statistics of its own segments one image on two ranks under
a cap on the memory of each, planned from a profile of a smaller image.  The job's loss is the mean squared error to
what the module itself gives, strip by strip: strips overlap by the receptive field and share no code with the plan.
Memory is counted in torch's allocator, and the image and the reference, which are mapped from a file, are added to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.report import Row, at_most
from benchmarks.seeds.jobs import folder_of, halopipe
from planner.ir.codec import load
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource, Profile
from planner.layers.division import overlap
from planner.layers.receptive_field import receptive_field
from profiler import load_model

_MODEL = """
from pathlib import Path

import torch
from torch.nn import functional

from profiler.models.unet2d import UNet2D


def model(input_shape=(1, 1, 128, 128)):
    module = UNet2D(in_channels=1, num_classes=1, width=4, depth=2)
    generator = torch.Generator().manual_seed(1)
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_mean.copy_(torch.randn(part.num_features, generator=generator) / 4)
            part.running_var.copy_(torch.rand(part.num_features, generator=generator) + 0.5)
    image = torch.randn(input_shape)
    varying = {"height": [("inputs", 2), ("targets", 2)], "width": [("inputs", 3), ("targets", 3)]}
    return module, (image, torch.zeros_like(image)), functional.mse_loss, varying


def images():
    pair = torch.load(Path(__file__).with_name("images.pt"), mmap=True)
    while True:
        yield tuple(pair)
"""

EXTENT = 8192
CAP = "1GiB"
"""Rows and columns of the image; memory of each rank."""

_MULTIPLE = 4
"""Of the network: what it halves its input to."""


def rows(quick: bool) -> Iterator[Row]:
    """Latency and memory, predicted and measured, under the cap; what is computed again; the error."""
    if quick:
        yield from _of_size(256, "4MiB", 64, "float32", 1e-6, is_exact=False)
        return
    yield from _of_size(EXTENT, CAP, 512, "float32", 1e-6, is_exact=True)
    yield from _of_size(256, "6MiB", 64, "float64", 1e-10, is_exact=False)


def _of_size(extent: int, cap: str, example: int, dtype: str, tolerance: float, *, is_exact: bool) -> Iterator[Row]:
    """Of one image; ``is_exact``: parts of layers are measured at their own shapes."""
    title = f"Tiles, {extent} x {extent} {dtype}"
    with folder_of(_MODEL) as folder:
        sizes = f"height={extent},width={extent}"
        inputs = f"1,1,{example},{example}"
        of_model = ("model.py:model", "--input", inputs, "--size", sizes, "--dtype", dtype)
        parts = ("--allow", "spatial", "--ranks", "2") if is_exact else ()
        halopipe(folder, "profile", *of_model, "--quick", *parts)
        asked = ("--objective", "latency", "--allow", "spatial", "--global-batch", "1", "--confidence", "0")
        halopipe(folder, "plan", "profile.json", *asked, "-o", "roomy.json")
        halopipe(folder, "plan", "profile.json", *asked, "--memory", cap, "--fix", "*=replicas:2")
        profile = load(folder / "profile.json", Profile)
        plan = load(folder / "plan.json", Plan)
        scale = _write_images(folder, profile, extent, dtype)
        told = halopipe(folder, "run", "plan.json", *_RUN, "--memory-limit", cap)
        yield from _figures(
            f"Tiles, {extent} x {extent} {dtype}", profile, plan, load(folder / "roomy.json", Plan), told
        )
        error = math.sqrt(max(json.loads(told)["losses"])) / scale
        yield at_most(f"{title}: root mean square error", error, "relative", tolerance)


_RUN = ("--data", "model.py:images", "--steps", "3", "--no-check-first-step", "--json")


def _figures(name: str, profile: Profile, plan: Plan, roomy: Plan, told: str) -> Iterator[Row]:
    measured = json.loads(told)["measured"]
    mebi = 2**20
    limit = plan.prediction.ranks[0].memory_limit_bytes
    peak = max(rank.peak_bytes for rank in plan.prediction.ranks)
    yield Row(f"{name}: latency, predicted", plan.prediction.step_s, "s")
    yield Row(f"{name}: latency, measured", measured["step_s"], "s")
    yield Row(f"{name}: latency without a cap, predicted", roomy.prediction.step_s, "s")
    yield at_most(f"{name}: memory of the fullest rank, predicted", peak / mebi, "MiB", limit / mebi)
    yield at_most(
        f"{name}: memory of the fullest rank, counted", max(measured["peak_bytes"]) / mebi, "MiB", limit / mebi
    )
    most = max(rank.peak_bytes for rank in roomy.prediction.ranks)
    yield Row(f"{name}: memory without a cap, predicted", most / mebi, "MiB")
    tiles = max((block.num_tiles for stage in plan.decision.stages for block in stage.blocks), default=1)
    yield Row(f"{name}: tiles of a rank", tiles, "")
    yield Row(f"{name}: computed again", 100 * overlap(profile.graph, plan.decision, 0), "%")


def _write_images(folder: Path, profile: Profile, extent: int, dtype: str) -> float:
    """An image and what the module makes of it; gives the root mean square of the latter."""
    source = ModelSource(str(folder / "model.py:model"), {}, (1, 1, 64, 64), dtype)
    module = load_model(source, 0).module.eval()
    generator = torch.Generator().manual_seed(2)
    image = torch.randn(1, 1, extent, extent, generator=generator, dtype=getattr(torch, dtype))
    field = max(receptive_field(profile.graph, "head").along["inputs"], key=lambda along: along.size)
    reference = in_strips(module, image, rows=256, margin=-(-field.size // _MULTIPLE) * _MULTIPLE)
    torch.save((image, reference), folder / "images.pt")
    return float(reference.double().square().mean().sqrt())


@torch.no_grad()
def in_strips(module: nn.Module, image: Tensor, *, rows: int, margin: int) -> Tensor:
    """What ``module`` makes of ``image``, so many rows at a time, ``margin`` more being read on each side."""
    found = []
    extent = image.shape[2]
    for start in range(0, extent, rows):
        low = max(0, start - margin)
        high = min(extent, start + rows + margin)
        found.append(module(image[:, :, low:high])[:, :, start - low : start - low + min(rows, extent - start)])
    return torch.cat(found, dim=2)
