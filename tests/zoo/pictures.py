"""Pictures and volumes: gates on skips, windows in three dimensions, places, folds, pools with indices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.zoo.autograd import Network
from tests.zoo.entries import network
from tests.zoo.frozen import images
from tests.zoo.vision import dense


class Gate(nn.Module):
    """Attention on a skip by a coarser signal (Oktay et al. 2018)."""

    def __init__(self, fine: int, coarse: int, inner: int) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Conv2d(coarse, inner, 1), nn.BatchNorm2d(inner))
        self.x = nn.Sequential(nn.Conv2d(fine, inner, 1, stride=2, bias=False), nn.BatchNorm2d(inner))
        self.psi = nn.Sequential(nn.Conv2d(inner, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())
        self.relu = nn.ReLU(inplace=True)

    def forward(self, g: Tensor, x: Tensor) -> Tensor:
        a = self.psi(self.relu(self.g(g) + self.x(x)))
        return x * F.interpolate(a, size=x.shape[2:], mode="bilinear", align_corners=False)


class AttentionUNet(nn.Module):
    """Two outputs at two depths, both in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
        self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True))
        self.gate = Gate(4, 8, 4)
        self.up = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)
        self.dec = nn.Conv2d(8, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 2, 1)
        self.deep = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.enc(x)
        coarse = self.mid(fine)
        h = torch.cat([self.gate(coarse, fine), self.up(coarse)], dim=1)
        return {"out": self.out(F.relu_(self.dec(h))), "deep": self.deep(coarse)}


def _deep(out: dict[str, Tensor], y: Tensor) -> Tensor:
    small = F.interpolate(y[:, None].float(), scale_factor=0.5, mode="nearest").squeeze(1).long()
    return F.cross_entropy(out["out"], y) + 0.4 * F.cross_entropy(out["deep"], small)


@network("attention U-Net: gates on skips, deep supervision on shrunken labels", mixes=True)
def attention_unet() -> Network:
    return AttentionUNet(), (torch.randn(4, 3, 8, 8), torch.randint(2, (4, 8, 8))), _deep


class ASPP(nn.Module):
    """Dilated branches and one of the whole picture, stretched (DeepLab); a random affine-free norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.branches = nn.ModuleList(
            nn.Conv2d(4, 3, 3 if d > 1 else 1, padding=d * (d > 1), dilation=d) for d in (1, 2, 3)
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 3, 1, bias=False), nn.ReLU())
        self.norm = nn.LayerNorm([12, 5, 5])
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        x = F.gelu(self.stem(x))
        every = [branch(x) for branch in self.branches]
        every.append(F.interpolate(self.pool(x), size=x.shape[-2:], mode="bilinear", align_corners=False))
        h = self.norm(torch.cat(every, dim=1))
        return F.interpolate(self.head(h), size, mode="bicubic", align_corners=False)


@network("ASPP on odd pictures: dilations, the whole picture stretched, layer norm over channels and places, bicubic")
def dilated_pyramid() -> Network:
    return ASPP(), dense(size=9), F.mse_loss


class SegNet(nn.Module):
    """Pools with indices, unpooled again."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 2, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        h, where = self.pool(F.elu(self.a(x)))
        return self.b(self.unpool(h, where, output_size=x.shape))


@network("SegNet: max pooling with indices, unpooled by them")
def unpooled() -> Network:
    return SegNet(), dense(), F.mse_loss


class Involution(nn.Module):
    """A kernel for each place, from the place itself (Li et al. 2021): unfold, multiply, sum; then patches by fold."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(4, 2, 1)
        self.span = nn.Conv2d(2, 9 * 2, 1)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.patches = nn.Linear(16, 16)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, c, h, w = x.shape
        kernel = self.span(F.relu(self.reduce(x))).view(b, 2, 1, 9, h, w)
        around = F.unfold(x, 3, padding=1).view(b, 2, c // 2, 9, h, w)
        x = (kernel * around).sum(3).view(b, c, h, w)
        p = self.patches(F.unfold(x, 2, stride=2).transpose(1, 2)).transpose(1, 2)
        return self.out(x + F.fold(p, (h, w), 2, stride=2))


@network("involution: a kernel for each place by unfold; patches through a linear layer and fold")
def involution() -> Network:
    return Involution(), dense(), F.mse_loss


class Axial(nn.Module):
    """Attention along rows, then along columns; places as two tables."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, width, 1)
        self.rows = nn.Parameter(torch.randn(8, width) * 0.1)
        self.cols = None
        self.cols = nn.Parameter(torch.randn(8, width) * 0.1)
        self.h, self.w = (nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        b, c, h, w = x.shape
        x = x + (self.rows[:h, None] + self.cols[None, :w]).permute(2, 0, 1)
        rows = x.permute(0, 2, 3, 1).reshape(b * h, w, c)
        rows = rows + self.w(rows, rows, rows)[0]
        cols = rows.view(b, h, w, c).transpose(1, 2).reshape(b * w, h, c)
        cols = cols + self.h(cols, cols, cols)[0]
        return self.out(cols.view(b, w, h, c).permute(0, 3, 2, 1))


@network("axial attention: rows as samples, then columns as samples")
def axial_attention() -> Network:
    return Axial(), dense(), F.mse_loss


class VideoWindows(nn.Module):
    """Swin in three dimensions: shifted windows with a mask that forward makes, then merged patches."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv3d(2, width, (1, 2, 2), stride=(1, 2, 2))
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.merge = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, 3)

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        b, d, h, w, c = x.shape
        x = x.view(b, d // 2, 2, h // 2, 2, w // 2, 2, c)
        return x.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, 8, c)

    def mask(self, d: int, h: int, w: int) -> Tensor:
        region = torch.zeros(1, d, h, w, 1)
        count = 0
        for i in (slice(-2), slice(-2, -1), slice(-1, None)):
            for j in (slice(-2), slice(-2, -1), slice(-1, None)):
                region[:, :, i, j] = count
                count += 1
        parts = self.windows(region).squeeze(-1)
        return (parts[:, None] - parts[:, :, None]).ne(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).permute(0, 2, 3, 4, 1)
        b, d, h, w, c = x.shape
        y = self.windows(torch.roll(self.norm(x), (-1, -1), (2, 3)))
        q, k, v = self.qkv(y).reshape(-1, 8, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-2, -1)
        mask = self.mask(d, h, w)
        s = s.view(b, -1, 2, 8, 8).masked_fill(mask[None, :, None], -100.0).view(-1, 2, 8, 8)
        y = self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(-1, 8, c))
        y = y.view(b, d // 2, h // 2, w // 2, 2, 2, 2, c).permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(b, d, h, w, c)
        x = x + torch.roll(y, (1, 1), (2, 3))
        x = torch.cat([x[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        return self.head(self.merge(x).mean((1, 2, 3)))


@network("Swin in three dimensions: shifted windows, a mask made in forward by slices, merged patches")
def video_windows() -> Network:
    return VideoWindows(), (torch.randn(4, 2, 2, 8, 8), torch.randint(3, (4,))), F.cross_entropy


class Fused(torch.autograd.Function):
    """A scaled leaky ReLU in place, of which the output is kept, as in-place-ABN does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(scale)
        F.leaky_relu_(x, 0.1)
        ctx.save_for_backward(x, scale)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, scale = ctx.saved_tensors
        before = torch.where(y > 0, y, y / 0.1)
        grad = torch.where(y > 0, grad, 0.1 * grad)
        return grad * scale, (grad * before / scale).sum((0, 2, 3), keepdim=True)


class Stages(nn.Module):
    """ConvNeXt's blocks under checkpointing of both kinds, stochastic depth by layer scale, channels last."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.GroupNorm(1, 4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 5, padding=2, groups=4), nn.Conv2d(4, 4, 1)) for _ in range(2)
        )
        self.tail = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1), nn.Tanh())
        self.scale = nn.Parameter(torch.full((1, 4, 1, 1), 0.5))
        self.fc = nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant) * self.scale
        x = Fused.apply(x * 1.0, self.scale)
        x = checkpoint_sequential(self.tail, 2, x, use_reentrant=self.reentrant)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


@network("checkpoints, also of a sequence, reentrant; an in-place function of its own; channels last")
def checkpointed_stages() -> Network:
    return Stages(True), images(), F.cross_entropy


class Detector(nn.Module):
    """YOLO's head: a grid kept as an attribute and made again when the size changes, boxes by in-place arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.SiLU(inplace=True))
        self.head = nn.Conv2d(6, 2 * 7, 1)
        self.register_buffer("anchors", torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
        self.grid = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.body(x))
        b, _, h, w = y.shape
        y = y.view(b, 2, 7, h, w).permute(0, 1, 3, 4, 2).contiguous()
        if self.grid.shape[2:4] != y.shape[2:4]:
            gy, gx = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            self.grid = torch.stack((gx, gy), 2).view(1, 1, h, w, 2).to(y.dtype)
        y = y.sigmoid().clone()
        y[..., 0:2] = (y[..., 0:2] * 2.0 - 0.5 + self.grid) / w
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * self.anchors.view(1, 2, 1, 1, 2)
        return y.view(b, -1, 7)


@network("YOLO's head: a grid kept as an attribute, boxes written into slices", mixes=True)
def detector() -> Network:
    def loss(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        boxes, scores = y
        objects = F.binary_cross_entropy(out[..., 4].clamp(1e-6, 1 - 1e-6), scores.clamp(0, 1))
        return F.l1_loss(out[..., :4] * scores[..., None], boxes * scores[..., None]) + objects

    y = torch.rand(4, 32, 4), torch.randint(2, (4, 32)).float()
    return Detector(), (torch.randn(4, 3, 8, 8), y), loss


class Retinex(nn.Module):
    """Sums along rows and columns, the brightest places, a histogram by scatter: all of space in each place."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 2, 1)
        self.bins = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        b, _, h, w = x.shape
        integral = x.cumsum(2).cumsum(3) / (h * w)
        place = (x.mean(1).flatten(1).sigmoid() * 5).long().clamp(max=4)
        counts = torch.zeros(b, 5, dtype=x.dtype).scatter_add(1, place, torch.ones_like(place, dtype=x.dtype)) / (h * w)
        brightest = x.flatten(2).topk(3, -1).values.mean(-1)
        low = x.flatten(2).sort(-1).values[..., : h * w // 4].mean(-1)
        x = x + integral * self.bins(counts)[:, :, None, None] + (brightest - low)[..., None, None]
        return self.out(x.flip(2) + F.instance_norm(x).rot90(2, (2, 3)))


@network("integral images, the brightest places, histograms by scatter_add, pictures turned upside down")
def whole_picture() -> Network:
    return Retinex(), dense(), F.mse_loss


class SameSizes(nn.Module):
    """Convolutions of even size with padding 'same', mirrored padding, strides after odd sizes, shuffles both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect")
        self.b = nn.Conv2d(4, 8, (3, 2), padding="same", dilation=(2, 2), groups=2)
        self.c = nn.Conv2d(32, 8, 1)
        self.d = nn.ConvTranspose2d(2, 2, 3, stride=1, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.b(F.mish(self.a(x))))
        x = F.pixel_shuffle(self.c(F.pixel_unshuffle(x, 2)), 2)
        x = F.pad(x, (0, 1, -1, 1))
        return self.d(F.lp_pool2d(x, 2, 3, stride=1) + F.avg_pool2d(x, 3, 1, count_include_pad=False))


@network("even kernels with padding 'same', shuffles both ways, negative padding, LP pooling")
def same_sizes() -> Network:
    return SameSizes(), (torch.randn(4, 3, 8, 8), torch.randn(4, 2, 6, 7)), F.mse_loss


class Vignette(nn.Module):
    """A table of places is made once and read by two layers, each through a view of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(64, dtype=x.dtype).view(8, 8) / 64
        rows = torch.zeros(x.size(0), 4, 1, 1, dtype=x.dtype)
        h = torch.tanh(self.a(x)) * table.t()[None, None] + (rows + 1)
        return self.b(h + table.flip(1).unsqueeze(0) - (rows + 2))


@network("a table and zeros made in forward, each read by two layers through views of their own")
def vignette() -> Network:
    return Vignette(), dense(), F.mse_loss
