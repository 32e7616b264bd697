"""What passes take: times by what they are spent on, and layers that were measured."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.extras.kernels.estimates import DATASHEET, NOTHING, TABLE, Estimate
from planner.extras.transformers.shape import ParallelDegrees, Precision, Recompute
from planner.ir.errors import UsageError

OPTIMISER = "optimiser"
HOST = "launches by the host"
"""What the device waits for the host that launches its kernels."""
_HOST_LOW = 0.7
_HOST_HIGH = 1.7
"""Of a host's time: those of Megatron-LM's tests beside A100 take 1.3 to 1.7 times what those beside H100 take."""
_SHOWN = 0.005
"""Smaller shares of a time are not told."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Times by what they are spent on (``products``, ``attention``, ...) and by the kind of evidence.

    The kinds are ``measured table``, ``fitted`` and ``datasheet``: how the evidence of an estimate begins.

    Attributes:
        launches: of kernels, by the host.
    """

    parts: Mapping[tuple[str, str], Estimate] = field(default_factory=dict)
    launches: float = 0.0

    @classmethod
    def of(cls, what: str, estimate: Estimate, times: float = 1.0) -> Cost:
        """One part alone."""
        if not estimate.seconds:
            return cls()
        kind = next((kind for kind in (TABLE, DATASHEET) if estimate.evidence.startswith(kind)), "fitted")
        return cls({(what, kind): estimate * times}, times)

    @classmethod
    def waited(cls, what: str, exchange: Estimate, waited_s: float) -> Cost:
        """What is waited for of an exchange beside a pass; nothing, where the pass is longer (below 0)."""
        return cls.of(what, exchange, waited_s / exchange.seconds) if waited_s > 0 else cls()

    def __add__(self, other: Cost) -> Cost:
        parts = dict(self.parts)
        for key, estimate in other.parts.items():
            parts[key] = parts[key] + estimate if key in parts else estimate
        return Cost(parts, self.launches + other.launches)

    def __mul__(self, factor: float) -> Cost:
        return Cost({key: estimate * factor for key, estimate in self.parts.items()}, self.launches * factor)

    def launched(self, launch_s: float) -> Cost:
        """With what the device waits for a host that takes so long to launch a kernel."""
        waited_s = self.launches * launch_s - self.seconds
        if waited_s <= 0:
            return self
        waited = Estimate(waited_s, _HOST_LOW * waited_s, _HOST_HIGH * waited_s, "fitted")
        return self + replace(Cost.of(HOST, waited), launches=0.0)

    @property
    def total(self) -> Estimate:
        """All parts, one after another; the evidence says what share rests on what."""
        whole = functools.reduce(Estimate.__add__, self.parts.values(), NOTHING)
        kinds = self._by(1)
        shares = sorted(kinds.items(), key=lambda item: -item[1])
        text = ", ".join(
            f"{100 * seconds / whole.seconds:.0f} % {kind}"
            for kind, seconds in shares
            if seconds > _SHOWN * whole.seconds
        )
        return replace(whole, evidence=text or whole.evidence)

    @property
    def by_what(self) -> dict[str, float]:
        """Seconds by what they are spent on."""
        return self._by(0)

    def _by(self, place: int) -> dict[str, float]:
        totals: dict[str, float] = {}
        for key, estimate in self.parts.items():
            totals[key[place]] = totals.get(key[place], 0.0) + estimate.seconds
        return totals

    @property
    def seconds(self) -> float:
        """Of all parts."""
        return sum(estimate.seconds for estimate in self.parts.values())


def costs(parts: Iterable[Cost]) -> Cost:
    """One after another."""
    return functools.reduce(Cost.__add__, parts, Cost())


@dataclass(frozen=True, slots=True)
class Pass:
    """What a micro-batch takes of a rank: forward, and backward with whatever it computes again."""

    forward: Cost
    backward: Cost

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Pass:
        return Pass(self.forward * factor, self.backward * factor)

    def launched(self, launch_s: float) -> Pass:
        """As :meth:`Cost.launched`."""
        return Pass(self.forward.launched(launch_s), self.backward.launched(launch_s))


@dataclass(frozen=True, slots=True)
class Layers:
    """Passes through the embedding, one block, and the head with its loss.

    Attributes:
        update: of the optimiser, of one layer, where it was measured; None: it follows from the bytes that it moves.
    """

    embedding: Pass
    block: Pass
    head: Pass
    update: Cost | None = None


@dataclass(frozen=True, eq=False)
class Timed:
    """Passes that were measured on a kind of GPU, in place of those of kernels.

    Attributes:
        layers: by tensor degree and micro-batch.
    """

    layers: Mapping[tuple[int, int], Layers]

    def of(self, ways: ParallelDegrees) -> Layers | None:
        """Those of a rank; None: nobody measured them (parts of the tokens, attention's core and 8 bits never are)."""
        layers = self.layers.get((ways.tensor, ways.micro_batch))
        parts_of_tokens = ways.sequence_parallel or ways.context > 1
        others = ways.recompute not in (Recompute.NONE, Recompute.FULL) or ways.precision is Precision.FP8
        if layers is None or parts_of_tokens or others:
            return None
        if ways.recompute is Recompute.NONE:
            return layers
        block = layers.block
        return replace(layers, block=Pass(block.forward, block.backward + block.forward))


def timed(blocks: int, times: Mapping[tuple[int, int], Sequence[tuple[float, float, float]]]) -> Timed:
    """Passes as they were measured.

    Args:
        blocks: of the network.
        times: by tensor degree and micro-batch, of each layer in order, embedding, blocks and head: seconds of its
            forward, backward and update.  Blocks count by their mean.

    Raises:
        UsageError: there are times of more or fewer blocks.
    """
    measured: dict[tuple[int, int], Layers] = {}
    for (tensor, micro_batch), layers in times.items():
        if len(layers) != blocks + 2:
            raise UsageError(
                f"the network has {blocks} blocks, and times are of {len(layers) - 2}",
                [f"at tensor degree {tensor}, micro-batch {micro_batch}"],
            )
        ends = (layers[:1], layers[-1:])
        update = _mean(OPTIMISER, [layer[2] for layer in layers])
        embedding, block, head = (_passes(of) for of in (ends[0], layers[1:-1], ends[1]))
        measured[tensor, micro_batch] = Layers(embedding, block, head, update)
    return Timed(measured)


def _passes(layers: Sequence[tuple[float, float, float]]) -> Pass:
    return Pass(*(_mean(what, [layer[at] for layer in layers]) for at, what in enumerate(("forward", "backward"))))


def _mean(what: str, times: Sequence[float]) -> Cost:
    seconds = sum(times) / len(times)
    return Cost.of(what, Estimate(seconds, seconds, seconds, TABLE))
