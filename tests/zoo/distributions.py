"""torch.distributions as everybody calls them, their arguments validated: likelihoods, policies, priors, samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from tests.zoo.autograd import Network
from tests.zoo.entries import network


def mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


@network("a regression with a variance: Normal(mu, std)")
def gaussian_regression() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        mean, log_scale = out.chunk(2, dim=-1)
        return -distributions.Normal(mean, log_scale.exp()).log_prob(y).mean()

    return mlp(4), (torch.randn(4, 6), torch.randn(4, 2)), loss


class Policy(nn.Module):
    """Actor and critic, whose policy is a distribution that forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.actor = nn.Linear(8, 3)
        self.critic = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[distributions.Categorical, Tensor]:
        h = torch.tanh(self.body(x))
        return distributions.Categorical(logits=self.actor(h)), self.critic(h).squeeze(-1)


@network("a policy gradient: forward returns a Categorical, its entropy is a bonus")
def policy_gradient() -> Network:
    def loss(out: tuple[distributions.Categorical, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        policy, value = out
        action, returns = batch
        gain = policy.log_prob(action) * (returns - value.detach())
        return (F.mse_loss(value, returns) - gain.mean()) - 0.01 * policy.entropy().mean()

    return Policy(), (torch.randn(4, 6), (torch.randint(3, (4,)), torch.randn(4))), loss


@network("proximal policy optimisation: Categorical(probs), a ratio of likelihoods, clipped")
def clipped_policy() -> Network:
    def loss(out: Tensor, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        action, old, advantage = batch
        ratio = (distributions.Categorical(out.softmax(-1)).log_prob(action) - old).exp()
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return mlp(3), (torch.randn(4, 6), (torch.randint(3, (4,)), torch.randn(4), torch.randn(4))), loss


@network("a continuous policy: Independent(Normal) squashed by a TransformedDistribution, one scale that is learnt")
def squashed_policy() -> Network:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = mlp(2)
            self.log_scale = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor, action: Tensor) -> Tensor:
            normal = distributions.Independent(distributions.Normal(self.mean(x), self.log_scale.exp()), 1)
            squashed = distributions.TransformedDistribution(normal, [distributions.TanhTransform(cache_size=1)])
            return squashed.log_prob(torch.tanh(action))

    return Actor(), ((torch.randn(4, 6), torch.randn(4, 2)), torch.randn(4)), lambda out, y: -(out * y).mean()


class VariationalAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(8)
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        mean, raw = self.encoder(x).chunk(2, dim=-1)
        posterior = distributions.Normal(mean, F.softplus(raw) + 1e-3)
        prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        likelihood = distributions.Bernoulli(logits=self.decoder(posterior.rsample()))
        divergence = distributions.kl_divergence(posterior, prior).sum(-1)
        return divergence - likelihood.log_prob((x > 0).to(x.dtype)).sum(-1)


@network("a variational autoencoder: rsample, kl_divergence, a Bernoulli of pixels", draws=True)
def variational_autoencoder() -> Network:
    return VariationalAutoencoder(), (torch.randn(4, 6), torch.zeros(4)), lambda bound, _: bound.mean()


@network("a mixture density network: MixtureSameFamily")
def mixture_of_normals() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        logits, mean, log_scale = out.view(-1, 3, 4).unbind(1)
        parts = distributions.Normal(mean, log_scale.exp())
        return -distributions.MixtureSameFamily(distributions.Categorical(logits=logits), parts).log_prob(y).mean()

    return mlp(12), (torch.randn(4, 6), torch.randn(4)), loss


@network("counts: Poisson(rate) and NegativeBinomial(total_count, logits)")
def counts() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        rate, total, logits = out.unbind(-1)
        poisson = distributions.Poisson(rate.exp()).log_prob(y)
        return -(poisson + distributions.NegativeBinomial(total.exp(), logits=logits).log_prob(y)).mean()

    return mlp(3), (torch.randn(4, 6), torch.randint(5, (4,))), loss


@network("shares: Dirichlet and Beta of what a softmax and a sigmoid give")
def shares() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        dirichlet = distributions.Dirichlet(F.softplus(out[:, :3]) + 0.1).log_prob(y[:, :3].softmax(-1))
        beta = distributions.Beta(out[:, 3].exp(), out[:, 4].exp()).log_prob(y[:, 3].sigmoid())
        return -(dirichlet + beta).mean()

    return mlp(5), (torch.randn(4, 6), torch.randn(4, 4)), loss


@network("MultivariateNormal with a covariance matrix, which must be positive definite")
def full_covariance() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        root = out[:, 2:].view(-1, 2, 2)
        covariance = root @ root.mT + torch.eye(2, dtype=out.dtype)
        return -distributions.MultivariateNormal(out[:, :2], covariance).log_prob(y).mean()

    return mlp(6), (torch.randn(4, 6), torch.randn(4, 2)), loss


@network("choices: OneHotCategorical, Multinomial, Geometric")
def choices_of_kinds() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        one_hot = F.one_hot(y, 3).to(out.dtype)
        first = distributions.OneHotCategorical(logits=out).log_prob(one_hot)
        second = distributions.Multinomial(2, logits=out).log_prob(2 * one_hot)
        third = distributions.Geometric(logits=out[:, 0]).log_prob(y)
        return -(first + second + third).mean()

    return mlp(3), (torch.randn(4, 6), torch.randint(3, (4,))), loss


@network("a relaxed choice: RelaxedOneHotCategorical.rsample picks experts", draws=True)
def relaxed_choice() -> Network:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(6, 2)
            self.experts = nn.ModuleList([nn.Linear(6, 3) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            shares = distributions.RelaxedOneHotCategorical(torch.tensor(0.5), logits=self.gate(x)).rsample()
            return sum(share * expert(x) for share, expert in zip(shares.split(1, -1), self.experts, strict=True))

    return Gated(), (torch.randn(4, 6), torch.randint(3, (4,))), F.cross_entropy


@network("heavy tails: StudentT, Laplace, Gamma, LogNormal, Uniform around targets")
def heavy_tails() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        a = out[:, 0]
        b = F.softplus(out[:, 1]) + 0.1
        first = distributions.StudentT(3.0, a, b).log_prob(y) + distributions.Laplace(a, b).log_prob(y)
        second = distributions.Gamma(b, b).log_prob(y.exp()) + distributions.LogNormal(a, b).log_prob(y.exp())
        third = distributions.Uniform(y - b, y + b).log_prob(y)
        return -(first + second + third).mean()

    return mlp(2), (torch.randn(4, 6), torch.randn(4)), loss


class Likelihood(nn.Module):
    """A loss with a scale of its own, as that of a decoder of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return -distributions.Normal(out, self.log_scale.exp()).log_prob(y).mean()


@network("pictures under a Normal whose scale the loss learns")
def picture_likelihood() -> Network:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    return net, (torch.randn(4, 3, 6, 6), torch.randn(4, 3, 6, 6)), Likelihood()


@network("a learnt prior: its parameters are the module's, and validated at each step")
def learnt_prior() -> Network:
    class Prior(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(2)
            self.mean = nn.Parameter(torch.zeros(2))
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return distributions.Normal(self.mean, self.scale).log_prob(self.body(x)).sum(-1)

    return Prior(), (torch.randn(4, 6), torch.zeros(4)), lambda out, _: -out.mean()


@network("a sequence of distributions: ELBO of a recurrent state, step by step", draws=True)
def recurrent_states() -> Network:
    class StateSpace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(2, 4)
            self.prior = nn.Linear(4, 4)
            self.posterior = nn.Linear(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(x.shape[0], 4)
            bound = x.new_zeros(x.shape[0])
            for t in range(x.shape[1]):
                prior = _normal(self.prior(h))
                posterior = _normal(self.posterior(torch.cat([h, x[:, t]], -1)))
                state = posterior.rsample()
                bound = bound + distributions.kl_divergence(posterior, prior).sum(-1)
                h = self.cell(state, h)
            return bound

    return StateSpace(), (torch.randn(4, 3, 3), torch.zeros(4)), lambda bound, _: bound.mean()


def _normal(out: Tensor) -> distributions.Normal:
    mean, raw = out.chunk(2, -1)
    return distributions.Normal(mean, F.softplus(raw) + 0.1)
