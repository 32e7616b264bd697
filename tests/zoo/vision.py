"""Networks over images and volumes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network
from tests.zoo.entries import network
from tests.zoo.frozen import images


def dense(channels: int = 2, size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, size, size), torch.randn(4, channels, size, size)


class SE(nn.Module):
    def __init__(self, c: int, r: int = 2) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(c, c // r, bias=False), nn.ReLU(inplace=True), nn.Linear(c // r, c, bias=False), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.fc(self.pool(x).view(b, c)).view(b, c, 1, 1)
        return x * y.expand_as(x)


@network("squeeze and excitation", mixes=True)
def squeeze_excite() -> Network:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), SE(4), nn.Conv2d(4, 2, 1))
    return net, dense(), F.mse_loss


class UNet(nn.Module):
    def __init__(self, up: str) -> None:
        super().__init__()
        self.down1 = self.block(3, 4)
        self.down2 = self.block(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2) if up == "transposed" else nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=up == "corners"), nn.Conv2d(8, 4, 1)
        )  # fmt: skip
        self.mid = self.block(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    @staticmethod
    def block(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.LeakyReLU(0.1, inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.up(self.down2(F.max_pool2d(a, 2)))
        dy = a.size(2) - b.size(2)
        dx = a.size(3) - b.size(3)
        b = F.pad(b, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.out(self.mid(torch.cat([a, b], dim=1)))


@network("U-Net with transposed convolutions")
def unet_transposed() -> Network:
    return UNet("transposed"), dense(), F.mse_loss


@network("U-Net with bilinear upsampling and padding to the skip's size, odd images")
def unet_upsample_odd() -> Network:
    return UNet("bilinear"), dense(size=9), F.l1_loss


@network("U-Net with align_corners")
def unet_align_corners() -> Network:
    return UNet("corners"), dense(), F.mse_loss


@network("super-resolution by pixel shuffle, with a bicubic skip")
def pixel_shuffle() -> Network:
    class ESPCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 6, 3, padding=1)
            self.b = nn.Conv2d(6, 12, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            skip = F.interpolate(x, scale_factor=2, mode="nearest")
            return skip + F.pixel_shuffle(self.b(torch.tanh(self.a(x))), 2)

    return ESPCN(), (torch.randn(4, 3, 6, 6), torch.randn(4, 3, 12, 12)), F.l1_loss


class Shuffle(nn.Module):
    """ShuffleNet's unit: split, depthwise, concatenate, shuffle channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.dw = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.pw = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.stem(x).chunk(2, 1)
        out = torch.cat((a, F.relu(self.pw(self.dw(b)))), 1)
        n, c, h, w = out.size()
        out = out.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, -1, h, w)
        return self.fc(out.mean([2, 3]))


@network("channel shuffle")
def channel_shuffle() -> Network:
    return Shuffle(), images(), F.cross_entropy


class SpatialTransformer(nn.Module):
    """An affine grid predicted by the network, grid_sample."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Linear(192, 6)
        self.conv = nn.Conv2d(3, 2, 3, padding=1)
        nn.init.normal_(self.loc.weight, std=1e-2)
        self.loc.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.loc(x.flatten(1)).view(-1, 2, 3)
        return self.conv(F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=False), align_corners=False))


@network("a spatial transformer: affine_grid and grid_sample")
def spatial_transformer() -> Network:
    return SpatialTransformer(), dense(), F.mse_loss


class Windows(nn.Module):
    """Swin's shifted windows: roll, windows as further samples, relative positions by index."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, 6, 1)
        self.qkv = nn.Linear(6, 18)
        self.out = nn.Linear(6, 3)
        self.table = nn.Parameter(torch.randn(49) * 0.1)
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        delta = place[:, :, None] - place[:, None, :] + 3
        self.register_buffer("index", delta[0] * 7 + delta[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).permute(0, 2, 3, 1)
        B, H, W, C = x.shape
        x = torch.roll(x, shifts=(-2, -2), dims=(1, 2))
        w = x.view(B, H // 4, 4, W // 4, 4, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, 16, C)
        q, k, v = self.qkv(w).chunk(3, -1)
        bias = self.table[self.index.view(-1)].view(16, 16)
        w = ((q @ k.transpose(1, 2)) / C**0.5 + bias).softmax(-1) @ v
        x = w.view(B, H // 4, W // 4, 4, 4, C).permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, C)
        return self.out(torch.roll(x, shifts=(2, 2), dims=(1, 2)).mean((1, 2)))


@network("Swin's shifted windows: roll, views of windows into samples")
def shifted_windows() -> Network:
    return Windows(), images(), F.cross_entropy


@network("circular and reflected padding")
def circular_padding() -> Network:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.ReLU(),
        nn.ReflectionPad2d(2), nn.Conv2d(4, 2, 5), nn.ReplicationPad2d(1), nn.AvgPool2d(3, 1),
    )  # fmt: skip
    return net, dense(), F.mse_loss


class FramesAsSamples(nn.Module):
    """Video: frames are folded into the batch for a 2-D network, and averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        h = self.cnn(x.view(b * t, *x.shape[2:])).view(b, t, -1)
        return self.fc(h.mean(1))


@network("video: frames folded into the batch and averaged behind")
def frames_as_samples() -> Network:
    return FramesAsSamples(), (torch.randn(4, 3, 3, 6, 6), torch.randint(3, (4,))), F.cross_entropy


class BatchIntoChannels(nn.Module):
    """Modulated convolution (StyleGAN2): a kernel for each sample, the batch as groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 4, 3, 3, 3) * 0.2)
        self.style = nn.Linear(5, 3)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        b, c, h, w = x.shape
        weight = self.weight * self.style(style).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(b, 4, 1, 1, 1)
        y = F.conv2d(x.view(1, b * c, h, w), weight.view(b * 4, c, 3, 3), padding=1, groups=b)
        return self.out(y.view(b, 4, h, w))


@network("modulated convolution: a kernel for each sample, the batch viewed into channels as groups")
def modulated_convolution() -> Network:
    x, y = dense()
    return BatchIntoChannels(), ((x, torch.randn(4, 5)), y), F.mse_loss


class FourierFeatures(nn.Module):
    """Coordinates as channels, sines of them (CoordConv, NeRF)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("B", torch.randn(2, 4))
        self.conv = nn.Conv2d(11, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack([xs, ys], -1).to(x)
        features = torch.sin(grid @ self.B)
        features = torch.cat([features, features.cos()], -1).permute(2, 0, 1).expand(n, -1, -1, -1)
        return self.conv(torch.cat([x, features], 1))


@network("coordinates as channels, made in forward from the image's size")
def coordinate_channels() -> Network:
    return FourierFeatures(), dense(), F.mse_loss


class Deformed(nn.Module):
    """Offsets predicted by a convolution move the sampling places."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Conv2d(3, 2, 3, padding=1)
        self.conv = nn.Conv2d(3, 2, 3, padding=1, dilation=1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        offset = 0.2 * torch.tanh(self.offset(x)).permute(0, 2, 3, 1)
        base = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(n, 2, 3), (n, 1, h, w), align_corners=True)
        return self.conv(F.grid_sample(x, base + offset, padding_mode="border", align_corners=True))


@network("sampling places moved by predicted offsets")
def deformed() -> Network:
    return Deformed(), dense(), F.mse_loss


class PointNet(nn.Module):
    """Points: neighbours by cdist and topk, gather, max."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 6)
        self.edge = nn.Linear(12, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, x).topk(3, dim=-1, largest=False).indices
        h = self.lift(x)
        b, n, c = h.shape
        around = h.unsqueeze(1).expand(b, n, n, c).gather(2, near.unsqueeze(-1).expand(b, n, 3, c))
        edges = torch.cat([around - h.unsqueeze(2), h.unsqueeze(2).expand_as(around)], -1)
        return self.fc(F.leaky_relu(self.edge(edges), 0.2).max(dim=2)[0].max(dim=1)[0])


@network("points: cdist, topk neighbours, gather, maxima")
def dynamic_graph() -> Network:
    return PointNet(), (torch.randn(4, 7, 3), torch.randint(3, (4,))), F.cross_entropy


@network("a 3-D network with trilinear upsampling")
def volumes() -> Network:
    net = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True), nn.PReLU(4), nn.MaxPool3d(2),
        nn.Conv3d(4, 4, 3, padding=1), nn.ELU(), nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(4, 1, 1),
    )  # fmt: skip
    return net, (torch.randn(4, 2, 4, 8, 4), torch.randn(4, 1, 4, 8, 4)), F.mse_loss


@network("WaveNet: dilated causal convolutions by padding and cropping, gates, skips summed")
def wavenet() -> Network:
    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Conv1d(2, 4, 1)
            self.filters = nn.ModuleList(nn.Conv1d(4, 8, 2, dilation=2**i, padding=2**i) for i in range(3))
            self.skips = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
            self.out = nn.Conv1d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            total = 0
            for filt, skip in zip(self.filters, self.skips, strict=True):
                a, b = filt(x)[..., : x.size(-1)].chunk(2, dim=1)
                h = torch.tanh(a) * torch.sigmoid(b)
                total = total + skip(h)
                x = x + h
            return self.out(F.relu(total))

    return WaveNet(), (torch.randn(4, 2, 12), torch.randn(4, 2, 12)), F.mse_loss
