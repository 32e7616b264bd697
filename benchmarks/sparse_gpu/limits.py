"""A cloud of voxels on a GPU, what its operators must move and multiply, and how fast the GPU does either at best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cuda_ops.sparse import reference

VOXELS, SECOND_LAYER = 100_000, 0.4
CUBE, ONE = (3, 3, 3), (1, 1, 1)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the GPU does at best."""

    bytes_per_s: float
    flop_per_s: float

    def floor_s(self, work: Work) -> float:
        """The least time for some work."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flop_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must move and multiply."""

    num_bytes: int
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Cloud:
    """Sites and their map onto themselves; on the host or a GPU."""

    keys: torch.Tensor
    neighbours: torch.Tensor
    num_pairs: int

    @property
    def num_rows(self) -> int:
        """Of the features."""
        return len(self.keys)

    def convolution(self, in_channels: int, out_channels: int) -> Work:
        """Forward, or the input gradient with the channels exchanged: bfloat16 and a map of int32."""
        read, written = self.num_pairs * in_channels, self.num_rows * out_channels + 27 * in_channels * out_channels
        return Work(2 * (read + written) + 4 * self.neighbours.numel(), self._products(in_channels, out_channels))

    def weight_gradient(self, in_channels: int, out_channels: int) -> Work:
        """Both rows of each pair, and the pair itself."""
        num_bytes = self.num_pairs * (2 * (in_channels + out_channels) + 8) + 2 * 27 * in_channels * out_channels
        return Work(num_bytes, self._products(in_channels, out_channels))

    def pooling(self, channels: int) -> Work:
        """As a convolution that multiplies nothing."""
        return Work(2 * channels * (self.num_pairs + self.num_rows) + 4 * self.neighbours.numel())

    def streaming(self, channels: int) -> Work:
        """Every row read once."""
        return Work(2 * channels * self.num_rows)

    def mapping(self) -> Work:
        """Keys read, a map written."""
        return Work(8 * 2 * self.num_rows + 4 * self.neighbours.numel())

    def _products(self, in_channels: int, out_channels: int) -> int:
        return 2 * self.num_pairs * in_channels * out_channels


def cloud(num_voxels: int, device: str) -> Cloud:
    """A rolling sheet, doubled in places; about so many voxels."""
    draw = torch.Generator().manual_seed(0)
    side = int((num_voxels / (1 + SECOND_LAYER)) ** 0.5) + 1
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    z = (12 * torch.sin(x / 23.0) + 9 * torch.cos(y / 17.0)).round().long() + 32
    sheet = torch.stack([torch.zeros_like(x), x, y, z], -1).reshape(-1, 4)
    above = sheet[torch.rand(len(sheet), generator=draw) < SECOND_LAYER] + torch.tensor([0, 0, 0, 1])
    keys = reference.sorted_sites(torch.cat([sheet, above]).int())[0]
    neighbours = reference.kernel_map(keys, keys, CUBE, ONE, ONE, False)
    return Cloud(keys.to(device), neighbours.to(device), int((neighbours >= 0).sum()))


def median_s(call: Callable[[], object], quick: bool) -> float:
    """Median time of a call."""
    from triton.testing import do_bench

    return 1e-3 * do_bench(call, warmup=25, rep=50 if quick else 200, return_mode="median")


def ceilings(quick: bool) -> Ceilings:
    """Of this GPU: a copy of 2 GiB, bytes read and written, and a product of 8192 x 8192 matrices in bfloat16."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target, matrix = torch.empty_like(source), torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copied = median_s(lambda: target.copy_(source), quick)
    return Ceilings(2 * source.numel() / copied, 2 * 8192**3 / median_s(lambda: matrix @ matrix, quick))
