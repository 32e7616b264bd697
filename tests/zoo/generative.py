"""Networks that generate: codebooks, flows, diffusion, adversaries, penalties on gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import DATA, PIPELINE, SPATIAL, SPLIT, WHOLE_BATCH, network
from tests.zoo.frozen import images


class Codebook(nn.Module):
    """Vector quantisation whose codes follow what was assigned to them (van den Oord et al. 2017, appendix A.1)."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, num_codes: int = 5, width: int = 4, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        codes = torch.randn(num_codes, width)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(num_codes))
        self.register_buffer("sums", codes.clone())

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = z.reshape(-1, z.shape[-1])
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        chosen = distances.argmin(1)
        hot = F.one_hot(chosen, self.codes.shape[0]).type_as(flat)
        quantised = F.embedding(chosen, self.codes).view_as(z)
        if self.training:
            with torch.no_grad():
                self.counts.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(hot.t() @ flat, alpha=1 - self.decay)
                total = self.counts.sum()
                smooth = (self.counts + 1e-5) / (total + self.counts.shape[0] * 1e-5) * total
                self.codes.copy_(self.sums / smooth.unsqueeze(1))
        commitment = F.mse_loss(z, quantised.detach())
        quantised = z + (quantised - z).detach()
        used = hot.mean(0)
        perplexity = torch.exp(-(used * (used + 1e-10).log()).sum())
        return quantised, commitment, perplexity


class VQVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 4, 2, 1), nn.ReLU(True), nn.Conv2d(6, 4, 3, 1, 1))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Conv2d(4, 6, 3, 1, 1), nn.ReLU(True), nn.ConvTranspose2d(6, 3, 4, 2, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        q, commitment, perplexity = self.codebook(z)
        return {"recon": self.decoder(q.permute(0, 3, 1, 2)), "commit": commitment, "perplexity": perplexity}


_CODES = "buffer (model.)?codebook"


@network(
    "VQ-VAE whose codebook, three buffers, follows the rows seen; a dict with a number that nobody trains",
    mixes=True,
    micro_batches=((5,), (5,), (5,), (5,)),
    refused={DATA: _CODES, SPATIAL: _CODES, SPLIT: "one stage"},
)
def vqvae() -> Network:
    x, _ = images()
    return VQVAE(), (x, x.clone()), lambda out, y: F.mse_loss(out["recon"], y) + 0.25 * out["commit"]


class AssignedCodebook(nn.Module):
    """The same as in the best-known notebook: averages are parameters, and forward makes new ones."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.by_data = by_data
        self.embedding = nn.Embedding(5, 4)
        if by_data:
            self.embedding.weight.requires_grad_(False)
        self.register_buffer("size", torch.ones(5))
        self.ema = nn.Parameter(self.embedding.weight.detach().clone(), requires_grad=not by_data)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(z, self.embedding.weight).argmin(1).unsqueeze(1)
        hot = torch.zeros(chosen.shape[0], 5, device=z.device, dtype=z.dtype)
        hot.scatter_(1, chosen, 1)
        quantised = torch.matmul(hot, self.embedding.weight)
        if self.training:
            self.size = self.size * 0.9 + 0.1 * torch.sum(hot, 0)
            dw = torch.matmul(hot.t(), z).detach()
            if self.by_data:
                self.ema.data.mul_(0.9).add_(dw, alpha=0.1)
                self.embedding.weight.data.copy_(self.ema / self.size.unsqueeze(1))
            else:
                self.ema = nn.Parameter(self.ema * 0.9 + 0.1 * dw)
                self.embedding.weight = nn.Parameter(self.ema / self.size.unsqueeze(1))
        return z + (quantised - z).detach(), F.mse_loss(quantised.detach(), z)


class Autoencoder(nn.Module):
    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 4)
        self.vq = AssignedCodebook(by_data)
        self.dec = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, loss = self.vq(self.enc(x))
        return self.dec(q), loss


@network("VQ-VAE whose averages are parameters that forward replaces by new ones", refused="parameter|called again")
def vqvae_of_new_parameters() -> Network:
    x, _ = classes()
    return Autoencoder(False), (x, x.clone()), lambda out, y: F.mse_loss(out[0], y) + 0.25 * out[1]


@network(
    "VQ-VAE whose averages are frozen parameters written through .data",
    mixes=True,
    micro_batches=((5,), (5,), (5,), (5,)),
    refused={DATA: "writes the buffer", SPLIT: "one stage", PIPELINE: "one stage"},
)
def vqvae_by_data() -> Network:
    x, _ = classes()
    return Autoencoder(True), (x, x.clone()), lambda out, y: F.mse_loss(out[0], y) + 0.25 * out[1]


class Momentum(nn.Module):
    """MoCo's encoders: the frozen one follows the trained one at the beginning of forward."""

    def __init__(self, by_assignment: bool) -> None:
        super().__init__()
        self.q = nn.Linear(6, 4)
        self.k = nn.Linear(6, 4)
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(False)
        self.by_assignment = by_assignment

    @torch.no_grad()
    def follow(self) -> None:
        for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            if self.by_assignment:
                k.data = k.data * 0.9 + q.data * 0.1
            else:
                k.mul_(0.9).add_(q, alpha=0.1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        self.follow()
        with torch.no_grad():
            key = F.normalize(self.k(b), dim=1)
        return F.normalize(self.q(a), dim=1), key


def _views() -> tuple[tuple[Tensor, Tensor], Tensor]:
    a, _ = classes()
    return (a, a + 0.1 * torch.randn_like(a)), torch.zeros(4)


def _apart(out: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    return 2 - 2 * (out[0] * out[1]).sum(1).mean()


_ONE = dict.fromkeys((PIPELINE, SPLIT), "one stage|buffer k")


@network("an encoder of momentum follows at the beginning of forward, in place", mixes=True, refused=_ONE)
def momentum_encoder() -> Network:
    return Momentum(False), _views(), _apart


@network("an encoder of momentum follows by assignment to .data, as in MoCo", mixes=True, refused=_ONE)
def momentum_by_data() -> Network:
    return Momentum(True), _views(), _apart


class Adversaries(nn.Module):
    """Generator and discriminator in one module; the discriminator is frozen by hand while the generator is asked."""

    def __init__(self, toggle: bool) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.toggle = toggle

    def forward(self, real: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fake = self.g(z)
        on_real = self.d(real)
        on_fake = self.d(fake.detach())
        if self.toggle:
            for p in self.d.parameters():
                p.requires_grad_(False)
            fooled = self.d(fake)
            for p in self.d.parameters():
                p.requires_grad_(True)
        else:
            frozen = {name: p.detach() for name, p in self.d.named_parameters()}
            fooled = torch.func.functional_call(self.d, frozen, (fake,))
        return on_real, on_fake, fooled


def _adversarial(out: tuple[Tensor, Tensor, Tensor], _: Tensor) -> dict[str, Tensor]:
    real, fake, fooled = out
    ones = torch.ones_like(real)
    d = F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(fake, 1 - ones)
    return {"d": d, "g": F.binary_cross_entropy_with_logits(fooled, ones)}


def _noise_and_real() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(4, 6), torch.randn(4, 4)), torch.zeros(4)


@network("a GAN in one step: the generator is judged by detached weights through functional_call")
def adversaries() -> Network:
    return Adversaries(False), _noise_and_real(), lambda out, y: sum(_adversarial(out, y).values())


@network("a GAN in one step: forward switches requires_grad of the discriminator off and on")
def adversaries_switched() -> Network:
    return Adversaries(True), _noise_and_real(), lambda out, y: sum(_adversarial(out, y).values())


class Critic(nn.Module):
    """WGAN-GP: the penalty on the critic's gradient between real and fake (Gulrajani et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, real: Tensor, fake: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = self.net(between)
        (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
        penalty = (gradient.flatten(1).norm(2, dim=1) - 1).pow(2)
        return self.net(real), self.net(fake), penalty


@network("WGAN-GP: a penalty on the gradient of the output by the input, trained through")
def gradient_penalty() -> Network:
    def loss(out: tuple[Tensor, Tensor, Tensor], _: Tensor) -> Tensor:
        real, fake, penalty = out
        return fake.mean() - real.mean() + 10.0 * penalty.mean()

    return Critic(), ((torch.randn(4, 6), torch.randn(4, 6), torch.rand(4, 1)), torch.zeros(4)), loss


class Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12))
        self.scale = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        s, t = self.net(x * self.mask).chunk(2, dim=-1)
        s = torch.tanh(s) * self.scale.exp() * (1 - self.mask)
        return x * s.exp() + t * (1 - self.mask), log_det + s.sum(-1)


class RealNVP(nn.Module):
    """Couplings with alternating masks, features turned round between them, the likelihood by a distribution."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.arange(6) % 2).float()
        self.flows = nn.ModuleList([Coupling(mask if k % 2 else 1 - mask) for k in range(3)])
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("cov", torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        log_det = x.new_zeros(x.shape[0])
        for flow in self.flows:
            x, log_det = flow(x, log_det)
            x = x.flip(-1)
        prior = torch.distributions.MultivariateNormal(self.mean, self.cov)
        return -(prior.log_prob(x) + log_det)


@network("RealNVP: masks in buffers, log determinants summed, torch.distributions")
def real_nvp() -> Network:
    x, _ = classes()
    return RealNVP(), (x, torch.zeros(4)), lambda nll, _: nll.mean()


class Denoiser(nn.Module):
    """DDPM: noise is added by a schedule in float64, times are embedded, features scaled and shifted by them."""

    def __init__(self, steps: int = 10) -> None:
        super().__init__()
        kept = torch.cumprod(1 - torch.linspace(1e-4, 0.2, steps, dtype=torch.float64), 0)
        self.register_buffer("kept", kept)
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 16))
        self.inp = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        kept = self.kept[t].to(x.dtype).view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        rates = torch.exp(torch.arange(4, device=x.device) * -(4.0 / 3)).to(x.dtype)
        angles = t[:, None].to(x.dtype) * rates[None]
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None].chunk(2, 1)
        h = F.silu(self.norm(self.inp(noisy)) * (1 + scale) + shift)
        return self.out(torch.cat([h, self.up(F.silu(self.down(h)))], 1))


@network("diffusion: a schedule in float64 that times index, scale and shift from embedded times")
def denoiser() -> Network:
    x, _ = images()
    noise = torch.randn_like(x)
    return Denoiser(), ((x, torch.randint(10, (4,)), noise), noise.clone()), F.mse_loss


class MaskedConv(nn.Conv2d):
    """PixelCNN's, as it is everywhere: forward writes zeros into the data of its own weight."""

    mask: Tensor

    def __init__(self, *args: int, first: bool, **more: int) -> None:
        super().__init__(*args, **more)
        mask = torch.ones_like(self.weight)
        h, w = mask.shape[2:]
        mask[:, :, h // 2, w // 2 + (not first) :] = 0
        mask[:, :, h // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@network("PixelCNN: forward multiplies weight.data by a mask", refused="weight|parameter")
def masked_by_data() -> Network:
    net = nn.Sequential(
        MaskedConv(1, 4, 3, padding=1, first=True), nn.ReLU(), MaskedConv(4, 4, 3, padding=1, first=False), nn.ReLU(),
        nn.Conv2d(4, 5, 1),
    )  # fmt: skip
    y = torch.randint(5, (4, 6, 6))
    return net, (y[:, None].float() / 4, y), F.cross_entropy


class Prototypes(nn.Module):
    """SwAV: the prototypes are normalised in forward, in place and without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 4)
        self.prototypes = nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))
        return self.prototypes(F.normalize(self.enc(x), dim=1))


@network("SwAV: forward normalises a parameter in place under no_grad", refused="prototypes|parameter")
def normalised_prototypes() -> Network:
    x, _ = classes()
    return Prototypes(), (x, torch.randint(5, (4,))), F.cross_entropy


class BarlowTwins(nn.Module):
    """Redundancy reduction: the correlation of features over the batch (Zbontar et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.bn = nn.BatchNorm1d(4, affine=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        c = self.bn(self.backbone(a)).T @ self.bn(self.backbone(b))
        return c / a.shape[0]


def _redundancy(c: Tensor, _: Tensor) -> Tensor:
    on = torch.diagonal(c).add(-1).pow(2).sum()
    n, m = c.shape
    off = c.flatten()[:-1].view(n - 1, m + 1)[:, 1:].pow(2).sum()
    return on + 5e-3 * off


@network(
    "Barlow twins: a correlation over the batch, off-diagonal by views",
    mixes=True,
    refused={**WHOLE_BATCH, PIPELINE: "whole batch|at once|bn", SPLIT: "whole batch|at once|bn"},
)
def barlow_twins() -> Network:
    a, _ = classes()
    return BarlowTwins(), ((a, a + 0.1 * torch.randn_like(a)), torch.zeros(4)), _redundancy


class RDrop(nn.Module):
    """The same batch twice under other dropout (Liang et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        a = self.net(x).log_softmax(-1)
        b = self.net(x).log_softmax(-1)
        kl = F.kl_div(a, b, log_target=True, reduction="batchmean") + F.kl_div(
            b, a, log_target=True, reduction="batchmean"
        )
        return {"loss": F.nll_loss(a, y) + F.nll_loss(b, y) + 0.5 * kl, "logits": a}


@network("R-Drop: two passes under other dropout, the loss in a dict", draws=True)
def r_drop() -> Network:
    x, y = classes()
    return RDrop(), ((x, y), y), lambda out, _: out["loss"]


class Hinged(nn.Module):
    """Free bits: the KL term of each latent is held above a least value, of the mean over the batch."""

    def __init__(self, by_sample: bool) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 6)
        self.dec = nn.Linear(3, 6)
        self.by_sample = by_sample

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, logvar = self.enc(x).chunk(2, 1)
        kl = 0.5 * (mu.pow(2) + logvar.exp() - logvar - 1)
        free = kl.clamp(min=0.3).sum(1).mean() if self.by_sample else kl.mean(0).clamp(min=0.3).sum()
        return self.dec(mu), free


def _elbo(out: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    return F.mse_loss(out[0], x, reduction="none").sum(1).mean() + out[1]


@network("free bits of each sample: clamped, then the mean")
def free_bits() -> Network:
    x, _ = classes()
    return Hinged(True), (x, x.clone()), _elbo


@network("free bits of the batch: the mean over samples, then clamped", refused=WHOLE_BATCH, mixes=True)
def free_bits_of_the_batch() -> Network:
    x, _ = classes()
    return Hinged(False), (x, x.clone()), _elbo
