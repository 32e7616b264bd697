"""Convolutions whose rows are divided over ranks, written with halopipe.primitives, beside torch's own on one device.

torchrun --nproc-per-node 2 docs/examples/divided_convolution.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import conv2d

from halopipe.primitives import Partition, Ranks, Window, all_reduce, broadcast, repartition


class DividedConv2d(nn.Module):
    """Each rank has some rows of the input and makes some of the output; rank 0 has the weights and their gradients."""

    def __init__(self, whole: nn.Conv2d, rows: Partition, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.rows = rows
        self.stride = whole.stride
        self.padding = whole.padding[1]
        made, self.read = rows.windowed({2: Window(whole.kernel_size[0], whole.stride[0], whole.padding[0])})
        self.made = [box[2] for box in made.boxes]
        self.owned = {name: Partition.at(value.shape, 0, ranks.size) for name, value in whole.named_parameters()}
        for name, value in whole.named_parameters():
            mine = value.detach()[self.owned[name].slices(ranks.rank)].clone()
            self.register_parameter(name, nn.Parameter(mine))

    def forward(self, x: Tensor) -> Tensor:
        weight = broadcast(self.weight, self.owned["weight"], self.ranks)  # backward: the sum of gradients, on rank 0
        bias = broadcast(self.bias, self.owned["bias"], self.ranks)
        x = repartition(x, self.rows, self.read, self.ranks)  # halos, and zeros where padding is
        return conv2d(x, weight, bias, self.stride, (0, self.padding))


def main() -> None:
    """Train both for three steps."""
    dist.init_process_group("gloo")
    ranks = Ranks()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2, padding=1)).double()
    x = torch.randn(2, 3, 13, 9).double()
    target = torch.randn(2, 4, 7, 5).double()
    cuts = {2: [0, *range(2, ranks.size + 2)]}  # the first rank has twice the rows of any other
    inputs = Partition.of(x.shape, cuts)
    between = Partition.of((2, 5, 13, 9), cuts)
    divided = nn.Sequential(DividedConv2d(whole[0], inputs, ranks), nn.ReLU(), DividedConv2d(whole[2], between, ranks))
    made = divided[2].made[ranks.rank]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (whole, divided)]
    for step in range(3):
        losses = (
            (whole(x) - target).square().mean(),
            (divided(x[inputs.slices(ranks.rank)]) - target[:, :, made.start : made.stop]).square().sum()
            / target.numel(),
        )
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            total = all_reduce(losses[1], ranks)
        if ranks.rank == 0:
            print(f"step {step}: loss {total.item():.12f} on {ranks.size} ranks, {losses[0].item():.12f} on one device")
    if ranks.rank == 0:
        for mine, theirs in zip(divided.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
