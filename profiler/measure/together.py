"""By how much layers take longer while the other devices of a host compute, too: cores share caches and memory.

Beside the first measuring process stands one for each other device, with the same network, pinned as a rank is.  They
sleep, but for every second of some passes of the first one's, which they spend on passes of their own:

    first     pass   pass   pass   pass   pass   pass      by turns: what drifts on the machine is in both alike
    others    -      passes -      passes -      passes

Of a layer's forward and backward the median together over the median alone counts.  Layers too short to tell go with
those of their kind, and all are scaled so that they add up to what whole passes lose, which is known best: a layer that
seems to gain by its neighbours is noise, and is not left out of the sum.  Where passes lose nothing after a few turns
(a host with more memory channels than its devices use), that is all, and a profile says nothing.

The processes share numbers: what the first asks for (samples; 0: to rest; below: to end), then the state of each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planner.ir.lazy import Memo
from planner.ir.profile import Slowdown
from profiler.measure.contention import spread
from profiler.measure.deduplicated import FirstPasses, LayerSeconds, ShorterPass
from profiler.measure.noise import LapClock, ThreadClock, clock_for, timed
from profiler.measure.timing import BackwardTimes, SegmentedPass, run_pass, segments
from profiler.source.model import LoadedModel, example_of
from runtime.captured import CapturedModule

LEAST_SLOWDOWN = 0.005
"""Whole passes that lose less than that lose nothing that can be told."""
_OWN_SHARE = 0.02
"""A layer, or those of a kind, whose part of a pass is less is not looked at by itself."""
_MOST_SCALE = 2.0
"""Layers whose own losses are that far from what passes lose are all slowed alike."""
_POLL_S = 2e-3
_MOST_WAIT_S = 10.0
_MOST_PASSES = 10
"""How long another process may take to begin, or to end: so many seconds, and so many passes of the first."""
_REST = 0
_END = -1
_COMING, _RESTING, _COMPUTING = range(3)


@dataclass(frozen=True, slots=True)
class PairEffort:
    """How many pairs of passes, one alone and one together.

    Attributes:
        least, most: pairs; no more than the least once they took ``longest_s``.
        least_long: the least where passes are so long that ``least`` pairs would take more than that.
    """

    least: int = 4
    most: int = 10
    longest_s: float = 6.0
    least_long: int = 4


QUICK_PAIRS = PairEffort(3, 6, 1.5, 2)


class Signals:
    """What the processes of a host's devices tell one another.

    Args:
        path: of a file that all of them open.
        num_devices: the first one's included.
    """

    def __init__(self, path: Path, num_devices: int) -> None:
        self.num_devices = num_devices
        self._words = torch.from_file(str(path), shared=True, size=num_devices, dtype=torch.int64)

    @property
    def order(self) -> int:
        """What the first asks for."""
        return int(self._words[0])

    def ask(self, order: int) -> None:
        """As the first."""
        self._words[0] = order

    def tell(self, device: int, state: int) -> None:
        """As one of the others."""
        self._words[device] = state

    def wait(self, state: int, longest_s: float) -> bool:
        """Whether all others came to it in time."""
        end_s = time.monotonic() + longest_s
        while any(self._words[1:] != state):
            if time.monotonic() > end_s:
                return False
            time.sleep(_POLL_S / 10)
        return True

    def wait_for_all(self, longest_s: float) -> bool:
        """Whether all others have the network in time; if not they are told to end."""
        if self.wait(_RESTING, longest_s):
            return True
        self.end()
        return False

    def end(self) -> None:
        """All others may go."""
        self.ask(_END)

    @contextmanager
    def all_compute(self, samples: int, longest_s: float) -> Iterator[None]:
        """While it is open the others run passes over so many samples.

        Raises:
            TimeoutError: one of them does not begin, or not end, for so long.
        """
        try:
            self.ask(samples)
            if not self.wait(_COMPUTING, longest_s):
                raise TimeoutError
            yield
        finally:
            self.ask(_REST)
        if not self.wait(_RESTING, longest_s):
            raise TimeoutError


class _AskedError(Exception):
    """The first asks for something else."""


def compute_beside(captured: CapturedModule, model: LoadedModel, signals: Signals, number: int) -> None:
    """What the process of device ``number`` does, until the first asks it to end."""
    parts = segments(captured)
    clock = clock_for(next(iter(model.inputs)).device)
    tensors: Memo[int, Mapping[str, Tensor]] = Memo(lambda count: example_of(captured.graph.inputs, model, count))
    signals.tell(number, _RESTING)
    while (order := signals.order) != _END:
        if order == _REST:
            time.sleep(_POLL_S)
            continue

        def look(asked: int = order) -> None:
            if signals.order != asked:
                raise _AskedError

        def start(_: bool, samples: int = order) -> SegmentedPass:
            return SegmentedPass(captured, tensors[samples], samples, ThreadClock())

        with suppress(_AskedError):
            if order not in tensors:
                run_pass(parts, start, False, look)  # warms up
            signals.tell(number, _COMPUTING)
            while True:
                run_pass(parts, start, False, look)
        clock.settle()
        signals.tell(number, _RESTING)


def measure_slowdowns(
    captured: CapturedModule,
    tensors: Mapping[str, Tensor],
    first: FirstPasses,
    signals: Signals,
    effort: PairEffort,
    clock: LapClock | None = None,
) -> tuple[Slowdown, ...]:
    """As the first: what all layers lose; nothing where passes lose nothing, or another process does not answer.

    Args:
        tensors: the graph's inputs by name.
        first: passes at as many samples, which say what layers lose what others do.
        clock: of the device that the tensors are on; by default that of the processor.
    """
    parts = segments(captured)

    samples = first.samples
    stand_ins = first.stand_ins
    asked = [part for part in parts if part.name not in stand_ins]

    def one_pass() -> LayerSeconds:
        times = run_pass(asked, lambda _: ShorterPass(parts, stand_ins, captured, tensors, samples, clock), split=False)
        return times | {name: times[each.nearer] for name, each in stand_ins.items()}

    alone = list[LayerSeconds]()
    together = list[LayerSeconds]()
    is_long = 2 * effort.least * first.seconds > effort.longest_s
    least = effort.least_long if is_long else effort.least
    pass_s = first.seconds if is_long else timed(ThreadClock(), one_pass)  # which warms up
    patience_s = _MOST_WAIT_S + _MOST_PASSES * pass_s
    begun_s = time.monotonic()
    while len(alone) < effort.most:
        alone.append(one_pass())
        try:
            with signals.all_compute(samples, patience_s):
                together.append(one_pass())
        except TimeoutError:
            return ()
        is_enough = time.monotonic() - begun_s > effort.longest_s or not _loses(alone, together)
        if len(alone) >= least and is_enough:
            break
    kinds = {layer.name: layer.kind for layer in captured.graph.layers}
    return slowdowns_of(alone, together, kinds, samples, signals.num_devices)


def slowdowns_of(
    alone: Sequence[LayerSeconds],
    together: Sequence[LayerSeconds],
    kinds: Mapping[str, str],
    samples: int,
    num_devices: int,
) -> tuple[Slowdown, ...]:
    """Of each layer, from passes by turns; empty if the passes lose nothing.

    Args:
        kinds: of the layers, by name.
    """
    if not _loses(alone, together):
        return ()
    forward, backward = (_longer(alone, together, way, kinds) for way in (_forward_s, _backward_s))
    apart = round(spread([b / a for a, b in zip(map(_pass_s, alone), map(_pass_s, together), strict=True)]), 4)
    return tuple(
        Slowdown(name, samples, num_devices, round(1 + forward[name], 4), round(1 + backward[name], 4), apart)
        for name in kinds
    )


def _loses(alone: Sequence[LayerSeconds], together: Sequence[LayerSeconds]) -> bool:
    """Whether passes take longer together, all in all."""
    return _lost(list(map(_pass_s, alone)), list(map(_pass_s, together))) >= LEAST_SLOWDOWN


def _lost(alone_s: Sequence[float], together_s: Sequence[float]) -> float:
    """By what part passes are longer together: the median over pairs, at least 0."""
    ratios = [b / a for a, b in zip(alone_s, together_s, strict=True) if a > 0]
    return max(0.0, statistics.median(ratios) - 1) if ratios else 0.0


def _longer(
    alone: Sequence[LayerSeconds],
    together: Sequence[LayerSeconds],
    way: Callable[[tuple[float, BackwardTimes]], float],
    kinds: Mapping[str, str],
) -> dict[str, float]:
    """By what part each layer is longer one way."""
    alone_s, together_s = (
        {name: statistics.median(way(each[name]) for each in of) for name in kinds} for of in (alone, together)
    )
    whole_s = sum(alone_s.values())
    lost = _lost(*([sum(way(one) for one in each.values()) for each in of] for of in (alone, together)))
    of_kind: dict[str, float] = {}
    for name, kind in kinds.items():
        of_kind[kind] = of_kind.get(kind, 0.0) + alone_s[name]

    def group(name: str) -> tuple[str, str]:
        if alone_s[name] >= _OWN_SHARE * whole_s:
            return kinds[name], name
        return (kinds[name] if of_kind[kinds[name]] >= _OWN_SHARE * whole_s else ""), ""

    members: dict[tuple[str, str], list[str]] = {}
    for name in kinds:
        members.setdefault(group(name), []).append(name)
    longer: dict[str, float] = {}
    for names in members.values():
        before_s, after_s = (sum(of[name] for name in names) for of in (alone_s, together_s))
        longer |= dict.fromkeys(names, max(0.0, after_s / before_s - 1) if before_s > 0 else 0.0)
    lost_s = sum(alone_s[name] * longer[name] for name in kinds)
    scale = lost * whole_s / lost_s if lost_s > 0 else _MOST_SCALE + 1
    if not 1 / _MOST_SCALE <= scale <= _MOST_SCALE:
        return dict.fromkeys(kinds, lost)
    return {name: scale * by for name, by in longer.items()}


def _forward_s(times: tuple[float, BackwardTimes]) -> float:
    return times[0]


def _backward_s(times: tuple[float, BackwardTimes]) -> float:
    return times[1].both_s


def _pass_s(times: LayerSeconds) -> float:
    return sum(_forward_s(one) + _backward_s(one) for one in times.values())
