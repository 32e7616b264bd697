"""By how much layers take longer while the other devices of a host compute, too: cores share caches and memory.

Beside the first measuring process stands one for each other device, with the same network, pinned as a rank is.  They
sleep, but for every second of some passes of the first one's, which they spend on passes of their own:

    first     pass   pass   pass   pass   pass   pass      by turns: what drifts on the machine is in both alike
    others    -      passes -      passes -      passes

What they tell of the layers is in :mod:`profiler.measure.slowdowns`.  There are as many turns as it takes to know what
whole passes lose, or as there is time for.

The processes share numbers: what the first asks for (samples; 0: to rest; below: to end), then the state of each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from planner.ir.lazy import Memo
from planner.ir.profile import Slowdown
from profiler.measure.deduplicated import FirstPasses, LayerSeconds, ShorterPass
from profiler.measure.noise import LapClock, ThreadClock, clock_for, timed
from profiler.measure.slowdowns import PassPair, loss_of_passes, slowdowns_of
from profiler.measure.timing import SegmentedPass, run_pass, segments
from profiler.source.model import LoadedModel, example_of
from runtime.captured import CapturedModule

_POLL_S = 2e-3
_FIRST_POLL_S = 50e-3
"""A look takes 40 us: 2 % of a core where they are 2 ms apart, while layers are measured beside it."""
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
        least, most: pairs; no more than the least once they took ``longest_s``, or once it is known what passes lose.
        least_long: the least where passes are so long that ``least`` pairs would take more than that.
    """

    least: int = 4
    most: int = 40
    longest_s: float = 6.0
    least_long: int = 4


QUICK_PAIRS = PairEffort(3, 12, 1.5, 2)


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
    pause_s = _FIRST_POLL_S  # nobody asks until all layers are measured
    while (order := signals.order) != _END:
        if order == _REST:
            time.sleep(pause_s)
            continue
        pause_s = _POLL_S

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
    kinds = {layer.name: layer.kind for layer in captured.graph.layers}
    parts = segments(captured)

    samples = first.samples
    stand_ins = first.stand_ins
    asked = [part for part in parts if part.name not in stand_ins]

    def one_pass() -> LayerSeconds:
        times = run_pass(asked, lambda _: ShorterPass(parts, stand_ins, captured, tensors, samples, clock), split=False)
        return times | {name: times[each.nearer] for name, each in stand_ins.items()}

    turns = list[PassPair]()
    is_long = 2 * effort.least * first.seconds > effort.longest_s
    least = effort.least_long if is_long else effort.least
    pass_s = first.seconds if is_long else timed(ThreadClock(), one_pass)  # which warms up
    patience_s = _MOST_WAIT_S + _MOST_PASSES * pass_s
    begun_s = time.monotonic()
    while len(turns) < effort.most:
        alone = one_pass()
        try:
            with signals.all_compute(samples, patience_s):
                together = one_pass()
        except TimeoutError:
            return ()
        turns.append((alone, together))
        is_enough = time.monotonic() - begun_s > effort.longest_s or loss_of_passes(turns, kinds).is_known
        if len(turns) >= least and is_enough:
            break
    return slowdowns_of(turns, kinds, samples, signals.num_devices)
