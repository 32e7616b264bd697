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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.ir.profile import BACKWARD, FORWARD, Slowdown
from profiler.measure.contention import spread, trimmed_mean, trimmed_mean_variance
from profiler.measure.deduplicated import LayerSeconds

LEAST_SLOWDOWN = 0.005
"""Passes that lose less than that lose nothing that can be told."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A pass alone, and the next one, together: seconds by layer."""

    alone: LayerSeconds
    together: LayerSeconds


Pairs = Sequence[tuple[float, float]]
"""Seconds alone and together, by turn."""


@dataclass(frozen=True, slots=True)
class Loss:
    """By what part something takes longer together.

    Attributes:
        share: of its seconds alone.
        variance: of ``share``; infinite where too few pairs tell it.
        alone_s: its seconds alone.
    """

    share: float
    variance: float
    alone_s: float

    @property
    def error(self) -> float:
        """The standard error of ``share``."""
        return math.sqrt(self.variance)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The forward or the backward of a layer; ``levels`` are the groups that it is in, from the widest to itself."""

    levels: tuple[str, ...]
    pairs: Pairs


def slowdowns_of(
    turns: Sequence[Turn], kinds: Mapping[str, str], samples: int, num_devices: int
) -> tuple[Slowdown, ...]:
    """Of each layer; empty if passes lose nothing.

    Args:
        kinds: of the layers, by name.
    """
    passes = loss_of_passes(turns)
    if passes.share < max(LEAST_SLOWDOWN, passes.error):
        return ()
    pieces = [_piece(name, kind, way, turns) for name, kind in kinds.items() for way in (FORWARD, BACKWARD)]
    shares = _shared_out(passes.share, pieces)
    apart = round(spread([b / a for a, b in _passes(turns)]), 4)

    def factor(layer: str, way: str) -> float:
        return round(1 + shares[way, kinds[layer], layer], 4)

    return tuple(
        Slowdown(name, samples, num_devices, factor(name, FORWARD), factor(name, BACKWARD), apart) for name in kinds
    )


def loss_of_passes(turns: Sequence[Turn]) -> Loss:
    """What passes over all layers lose."""
    return loss_of(_passes(turns))


def loss_of(pairs: Pairs) -> Loss:
    """What pairs of passes, or of parts of them, lose."""
    logarithms = [math.log(b / a) for a, b in pairs if a > 0 and b > 0]
    if not logarithms:  # no work, such as the backward of what has no gradient
        return Loss(0.0, math.inf, 0.0)
    share = math.expm1(trimmed_mean(logarithms))
    variance = trimmed_mean_variance(logarithms) * (1 + share) ** 2
    return Loss(share, variance, trimmed_mean([a for a, _ in pairs]))


def is_known(loss: Loss) -> bool:
    """Whether more pairs would tell no more that matters: twice the error is below what can be told."""
    return 2 * loss.error <= LEAST_SLOWDOWN


def pulled(losses: Sequence[Loss], towards: float) -> list[float]:
    """Each loss, as much nearer to ``towards`` as it is noise; none below 0."""
    known = [each for each in losses if each.variance < math.inf]
    known_s = sum(each.alone_s for each in known)
    beyond = sum(each.alone_s * ((each.share - towards) ** 2 - each.variance) for each in known)
    if beyond <= 0:
        return [towards] * len(losses)
    true_variance = beyond / known_s
    return [
        max(0.0, towards + (each.share - towards) * true_variance / (true_variance + each.variance)) for each in losses
    ]


def _shared_out(lost: float, pieces: Sequence[_Piece], level: int = 0) -> dict[tuple[str, ...], float]:
    """What each piece loses, by its levels; together they lose ``lost``."""
    if level == len(pieces[0].levels):
        return {piece.levels: lost for piece in pieces}
    groups: dict[str, list[_Piece]] = {}
    for piece in pieces:
        groups.setdefault(piece.levels[level], []).append(piece)
    losses = [loss_of(_together([piece.pairs for piece in group])) for group in groups.values()]
    shares = pulled(losses, lost)
    whole_s = sum(each.alone_s for each in losses)
    shared_s = sum(share * each.alone_s for share, each in zip(shares, losses, strict=True))
    if shared_s == 0:
        return {piece.levels: lost for piece in pieces}
    found: dict[tuple[str, ...], float] = {}
    for share, group in zip(shares, groups.values(), strict=True):
        found |= _shared_out(share * lost * whole_s / shared_s, group, level + 1)
    return found


def _together(series: Sequence[Pairs]) -> Pairs:
    """The sums, pair by pair."""
    return [(sum(a for a, _ in each), sum(b for _, b in each)) for each in zip(*series, strict=True)]


def _passes(turns: Sequence[Turn]) -> Pairs:
    return [(_pass_s(turn.alone), _pass_s(turn.together)) for turn in turns]


def _pass_s(times: LayerSeconds) -> float:
    return sum(_seconds(times, layer, way) for layer in times for way in (FORWARD, BACKWARD))


def _piece(layer: str, kind: str, way: str, turns: Sequence[Turn]) -> _Piece:
    pairs = [(_seconds(turn.alone, layer, way), _seconds(turn.together, layer, way)) for turn in turns]
    return _Piece((way, kind, layer), pairs)


def _seconds(times: LayerSeconds, layer: str, way: str) -> float:
    forward_s, backward = times[layer]
    return forward_s if way == FORWARD else backward.both_s
