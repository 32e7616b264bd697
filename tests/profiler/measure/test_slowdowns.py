"""What layers lose beside others: what is made of passes by turns, whose times are made up; no time counts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import fmean

import pytest

from planner.ir.profile import Slowdown
from profiler.measure.slowdowns import PassPair, slowdowns_of
from profiler.measure.timing import BackwardTimes

KINDS = {"a": "conv", "b": "conv", "c": "relu", "d": "relu"}
SECONDS = {"a": (10.0, 20.0), "b": (5.0, 10.0), "c": (3.0, 6.0), "d": (0.1, 0.2)}


def told(turns: list[PassPair], kinds: Mapping[str, str] = KINDS) -> dict[str, Slowdown]:
    return {one.layer: one for one in slowdowns_of(turns, kinds, 4, 2)}


def turn(seconds: Mapping[str, tuple[float, float]], alone: Mapping[str, tuple[float, float]] = SECONDS) -> PassPair:
    before, after = ({name: (f, BackwardTimes(b)) for name, (f, b) in each.items()} for each in (alone, seconds))
    return before, after


def lost_s(found: Mapping[str, Slowdown], seconds: Mapping[str, tuple[float, float]] = SECONDS) -> float:
    """What passes lose by the slow-downs of their layers."""
    return sum(
        forward_s * (found[name].forward - 1) + backward_s * (found[name].backward - 1)
        for name, (forward_s, backward_s) in seconds.items()
    )


def test_what_scatters_by_nothing_is_told_as_it_was() -> None:
    found = told([turn({"a": (10.0, 22.0), "b": (6.0, 10.0), "c": (4.5, 9.0), "d": (0.1, 0.4)})] * 3)
    assert {(one.samples, one.num_devices) for one in found.values()} == {(4, 2)}
    assert [(one.forward, one.backward) for one in found.values()] == [(1.0, 1.1), (1.2, 1.0), (1.5, 1.5), (1.0, 2.0)]


def test_layers_add_up_to_what_passes_lose_where_one_seems_to_gain() -> None:
    """b seems to be faster beside others: its part is taken from what the others seem to lose."""
    found = told([turn({"a": (11.0, 22.0), "b": (4.7, 10.0), "c": (3.0, 6.0), "d": (0.1, 0.2)})] * 3)
    assert found["b"].forward == 1.0
    assert all(one.forward >= 1 and one.backward >= 1 for one in found.values())
    assert lost_s(found) == pytest.approx(2.7, abs=0.01)


@pytest.mark.parametrize("forward_s", [9.0, 10.0, 10.1])
def test_where_nothing_is_lost_nothing_is_said(forward_s: float) -> None:
    assert told([turn({**SECONDS, "a": (forward_s, 20.0)})] * 3) == {}


def test_one_turn_tells_nothing() -> None:
    slower = turn({name: (2 * f, 2 * b) for name, (f, b) in SECONDS.items()})
    assert told([slower]) == {}
    assert told([slower] * 2)


MANY = {f"{kind}{number}": kind for kind in ("conv", "norm", "relu") for number in range(20)}


def scattered(
    seed: int, loss: Callable[[str], float], spread: float, of_passes: float = 0.0, num_turns: int = 6
) -> dict[str, Slowdown]:
    """Of 60 layers that lose so much on average.

    Args:
        spread: of each layer's ratio from turn to turn.
        of_passes: what all ratios of a turn scatter by together.
    """
    draw = random.Random(seed)
    seconds = {name: (1.0 + number % 5, 2.0 + number % 7) for number, name in enumerate(MANY)}

    def slower(name: str, alone_s: float) -> float:
        return alone_s * (1 + loss(name)) * draw.lognormvariate(-(spread**2) / 2, spread)

    turns = []
    for _ in range(num_turns):
        common = draw.lognormvariate(-(of_passes**2) / 2, of_passes)
        together = {name: (common * slower(name, f), common * slower(name, b)) for name, (f, b) in seconds.items()}
        turns.append(turn(together, seconds))
    return told(turns, MANY)


def test_a_loss_that_is_certain_of_all_layers_is_told_of_each_though_none_is_certain_by_itself() -> None:
    """Each loses 6 %, and scatters by 8 %: six turns tell that to 3.5 % of each, to half a per cent of all."""
    found = [one for seed in range(10) for one in scattered(seed, lambda _: 0.06, 0.08).values()]
    errors = [factor - 1.06 for one in found for factor in (one.forward, one.backward)]
    assert len(errors) == 10 * 2 * len(MANY)
    assert abs(fmean(errors)) < 0.005
    assert fmean(error**2 for error in errors) ** 0.5 < 0.02


def test_where_layers_only_scatter_no_loss_is_told() -> None:
    assert not any(scattered(seed, lambda _: 0.0, 0.08, num_turns=40) for seed in range(10))


def test_a_loss_of_passes_that_is_below_its_error_is_not_told() -> None:
    """Passes that scatter by 3 % by themselves: the least that is told is what four turns of them tell."""
    found = [scattered(seed, lambda _: 0.0, 0.0, 0.03, num_turns=4) for seed in range(30)]
    assert sum(map(bool, found)) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_kinds_that_lose_unlike_keep_what_they_lose(seed: int) -> None:
    found = scattered(seed, lambda name: 0.2 if MANY[name] == "norm" else 0.01, 0.08)
    mean = {kind: sum(one.forward for name, one in found.items() if MANY[name] == kind) / 20 for kind in MANY.values()}
    assert mean["norm"] == pytest.approx(1.2, abs=0.04)
    assert mean["conv"] == pytest.approx(1.01, abs=0.04)


def test_a_layer_that_is_known_well_keeps_what_it_loses() -> None:
    found = scattered(0, lambda name: 0.3 if name == "conv3" else 0.02, 0.01)
    assert found["conv3"].forward == pytest.approx(1.3, abs=0.03)
    assert found["conv4"].forward == pytest.approx(1.02, abs=0.02)
