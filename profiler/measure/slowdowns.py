"""What layers lose while the other devices of their host compute, from passes by turns, alone and together.

Of each pair of passes the logarithm of seconds together over seconds alone counts: what drifts on the machine is in
both.  What whole passes lose is known best.  It is shared out, to forward and backward, to the kinds of layers, and to
the layers of a kind, each time by what the shares themselves lost, as far as that is more than noise:

    passes                   6 +- 1 %
      forward, backward      3 +- 1 %, 7 +- 1 %      far apart for their errors: almost as they are
        convolutions, ...    5 +- 2 %, 12 +- 2 %
          conv1, conv2, ...  11 +- 8 %, -3 +- 8 %    no further apart than their errors: as all convolutions

A loss is pulled towards the one above it by its variance over the sum of that and of the variance of true losses, which
is by how much losses are further apart than their own variances explain (empirical Bayes: Efron and Morris 1973).  So
how much is noise is read off the passes; no level is chosen.  Shares add up to what is shared out.  Passes whose loss
is below its own error lose nothing; any other counts whole: a rule that wants more finds too little on average, as
devices that share a memory do lose, and more turns make the error small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.ir.profile import BACKWARD, FORWARD, Slowdown
from profiler.measure.contention import spread, trimmed_mean, trimmed_mean_variance
from profiler.measure.deduplicated import LayerSeconds

LEAST_SLOWDOWN = 0.005
"""Passes that lose less than that lose nothing that can be told."""

PassPair = tuple[LayerSeconds, LayerSeconds]
"""A pass alone, and the next one, together."""

TurnSeconds = Sequence[tuple[float, float]]
"""Seconds alone and together, by turn."""

LayerPass = tuple[str, str, str]
"""The forward or the backward of a layer: which of both, the layer's kind, its name; groups, from wide to narrow."""


@dataclass(frozen=True, slots=True)
class LostShare:
    """By what part something takes longer together.

    Attributes:
        share: of its seconds alone.
        variance: of ``share``; infinite where too few turns tell it.
        alone_s: its seconds alone.
    """

    share: float
    variance: float
    alone_s: float

    @property
    def error(self) -> float:
        """The standard error of ``share``."""
        return math.sqrt(self.variance)

    @property
    def is_known(self) -> bool:
        """Whether more turns would tell no more that matters: twice the error is below what can be told."""
        return 2 * self.error <= LEAST_SLOWDOWN


def slowdowns_of(
    turns: Sequence[PassPair], kinds: Mapping[str, str], samples: int, num_devices: int
) -> tuple[Slowdown, ...]:
    """Of each layer; empty if passes lose nothing.

    Args:
        kinds: of the layers, by name.
    """
    seconds = _seconds(turns, kinds)
    passes = _sums(seconds.values())
    loss = loss_of(passes)
    if loss.share < max(LEAST_SLOWDOWN, loss.error):
        return ()
    shares = _shared_out(loss.share, seconds)
    apart = round(spread([together_s / alone_s for alone_s, together_s in passes]), 4)

    def factor(way: str, layer: str) -> float:
        return round(1 + shares[way, kinds[layer], layer], 4)

    return tuple(
        Slowdown(name, samples, num_devices, factor(FORWARD, name), factor(BACKWARD, name), apart) for name in kinds
    )


def loss_of_passes(turns: Sequence[PassPair], kinds: Mapping[str, str]) -> LostShare:
    """What passes over all layers lose."""
    return loss_of(_sums(_seconds(turns, kinds).values()))


def loss_of(seconds: TurnSeconds) -> LostShare:
    """What passes, or parts of them, lose."""
    logarithms = [math.log(together_s / alone_s) for alone_s, together_s in seconds if alone_s > 0 and together_s > 0]
    if not logarithms:  # no work, such as the backward of what has no gradient
        return LostShare(0.0, math.inf, 0.0)
    share = math.expm1(trimmed_mean(logarithms))
    variance = trimmed_mean_variance(logarithms) * (1 + share) ** 2
    return LostShare(share, variance, trimmed_mean([alone_s for alone_s, _ in seconds]))


def pulled(losses: Sequence[LostShare], towards: float) -> list[float]:
    """Each loss, as much nearer to ``towards`` as it is noise; none below 0."""
    certain = [each for each in losses if each.variance < math.inf]
    beyond = sum(each.alone_s * ((each.share - towards) ** 2 - each.variance) for each in certain)
    if beyond <= 0:
        return [towards] * len(losses)
    true_variance = beyond / sum(each.alone_s for each in certain)
    weights = [true_variance / (true_variance + each.variance) for each in losses]
    return [max(0.0, towards + k * (each.share - towards)) for k, each in zip(weights, losses, strict=True)]


def _shared_out(lost: float, seconds: Mapping[LayerPass, TurnSeconds], level: int = 0) -> dict[LayerPass, float]:
    """What each forward and backward loses; together they lose ``lost``."""
    groups: dict[str, dict[LayerPass, TurnSeconds]] = {}
    for part, own in seconds.items():
        if level == len(part):
            return {part: lost}
        groups.setdefault(part[level], {})[part] = own
    losses = [loss_of(_sums(group.values())) for group in groups.values()]
    shares = pulled(losses, lost)
    whole_s = sum(each.alone_s for each in losses)
    shared_s = sum(share * each.alone_s for share, each in zip(shares, losses, strict=True))
    by_part: dict[LayerPass, float] = {}
    for share, group in zip(shares, groups.values(), strict=True):
        by_part |= _shared_out(share * lost * whole_s / shared_s if shared_s > 0 else lost, group, level + 1)
    return by_part


def _seconds(turns: Sequence[PassPair], kinds: Mapping[str, str]) -> dict[LayerPass, TurnSeconds]:
    """Of each layer, forward and backward."""
    seconds: dict[LayerPass, TurnSeconds] = {}
    for name, kind in kinds.items():
        seconds[FORWARD, kind, name] = [(alone[name][0], together[name][0]) for alone, together in turns]
        seconds[BACKWARD, kind, name] = [(alone[name][1].both_s, together[name][1].both_s) for alone, together in turns]
    return seconds


def _sums(seconds: Iterable[TurnSeconds]) -> TurnSeconds:
    """Turn by turn."""
    return [(sum(a for a, _ in each), sum(b for _, b in each)) for each in zip(*seconds, strict=True)]
