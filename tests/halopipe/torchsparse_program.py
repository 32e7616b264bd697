"""A user's program, as it is written for torchsparse 2.1; the tests change its imports and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.utils.data
import torchsparse
import torchsparse.nn.functional as F
from torch import amp, nn
from torchsparse import PointTensor, SparseTensor
from torchsparse import nn as spnn
from torchsparse.backbones.modules import SparseConvBlock, SparseConvTransposeBlock, SparseResBlock
from torchsparse.nn.utils import fapply
from torchsparse.utils import make_ntuple
from torchsparse.utils.collate import sparse_collate_fn
from torchsparse.utils.quantize import sparse_quantize


class Scenes(torch.utils.data.Dataset[Any]):
    """Points around a hill: a voxel's class is whether it lies above it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = np.random.default_rng(index)
        points = numbers.uniform(-4, 4, size=(300, 4)).astype(np.float32)
        coords, indices = sparse_quantize(points[:, :3] - points[:, :3].min(0), 0.8, return_index=True)
        coords = torch.tensor(coords, dtype=torch.int)
        feats = torch.tensor(points[indices], dtype=torch.float)
        above = torch.tensor(points[indices, 2] > 0, dtype=torch.long)
        return {
            "input": SparseTensor(coords=coords, feats=feats),
            "label": SparseTensor(coords=coords, feats=above),
            "name": f"scene {index}",
        }


class Residual(nn.Module):
    """Down and up again, beside the way through."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = SparseConvBlock(channels, channels, kernel_size=2, stride=2)
        self.deep = SparseResBlock(channels, channels, kernel_size=3)
        self.up = SparseConvTransposeBlock(channels, channels, kernel_size=2, stride=2)

    def forward(self, x: SparseTensor) -> SparseTensor:
        y = torchsparse.cat([self.up(self.deep(self.down(x))), fapply(x, torch.tanh)])
        y.F = y.F * 0.5
        return y


def main(device: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    F.set_kmap_mode("hashmap")
    F.set_conv_mode(2)
    batches = torch.utils.data.DataLoader(Scenes(), batch_size=4, collate_fn=sparse_collate_fn)
    model = nn.Sequential(
        spnn.Conv3d(4, 16, kernel_size=make_ntuple(3, 3), stride=1),
        spnn.BatchNorm(16),
        spnn.ReLU(True),
        Residual(16),
        spnn.Conv3d(32, 2, 1),
    ).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = amp.GradScaler(device, enabled=False)
    losses = []
    for _ in range(4):
        for feed in batches:
            inputs = feed["input"].to(device=device)
            labels = feed["label"].to(device=device)
            with amp.autocast(device, enabled=False):
                outputs = model(inputs)
                loss = criterion(outputs.feats, labels.feats)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    points = PointTensor(outputs.F, outputs.C.float())
    assert points.F.shape == outputs.feats.shape
    return losses
