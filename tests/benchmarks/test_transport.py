"""Every side does the same, in turns, and rows say what was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from torch import nn

from benchmarks import serving
from benchmarks.transport import __main__ as transport
from benchmarks.transport import items
from benchmarks.transport.__main__ import (
    KIB,
    MIB,
    Effort,
    exchanges,
    messages,
    more_s,
    opened,
    sums,
    together,
)
from benchmarks.transport.items import Around
from benchmarks.transport.sides import OPENERS, Place, Side
from tests.halopipe.extras.serving.stand_in import StandIn
from tests.halopipe.extras.serving.test_http import port_of

ONCE = Effort((KIB, 4 * MIB), rounds=1, moved_bytes=0, most=3, few=1)


def open_nothing(**_: object) -> NoReturn:
    raise OSError("no cable")


def raises(place: Place) -> None:
    if place.rank == 1:
        raise ValueError("so it is")


@pytest.fixture(scope="module")
def sides() -> Iterator[list[Side]]:
    """Two, of which gloo is the second as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPENERS, "again", OPENERS["gloo"])
        patch.setattr(items, "WARM_UP", 0)
        patch.setattr(items, "COMPUTATIONS", (("checksum", 1e-4),))
        patch.setattr(items, "WAIT_S", 1e-3)
        patch.setattr(transport, "COMPUTATION_S", 1e-4)
        patch.setattr(transport, "EXCHANGES", (32 * KIB,))
        patch.setattr(transport, "SCATTERED", (MIB,))
        with opened(("gloo", "again"), 2) as found:
            yield found


def test_every_subject_has_a_row_of_every_side(sides: list[Side]) -> None:
    rows = [row for subject in (messages, exchanges, sums) for row in subject(sides, ONCE)]
    rows += items.rows(sides, 1, 1)
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        title, _, side = row.name.rpartition(": ")
        found.setdefault(title, {})[side] = row.value
    assert all(of_side.keys() >= {"gloo", "again"} for of_side in found.values())
    assert all(found[f"message of {size}"][side] > 0 for size in ("1 KiB", "4 MiB") for side in ("gloo", "memcpy"))
    ratios = found["sum of 4 MiB over 2"]
    assert ratios["again / gloo"] == pytest.approx(ratios["again"] / ratios["gloo"])
    assert {row.name for row in rows if row.goal} == {
        "message of 4 MiB: memcpy / again",
        "stream of 4 MiB: memcpy / again",
        "keyed exchange of 32 KiB around 4.6 ms: again",
        *(f"sum of {size} over 2: again / gloo" for size in ("1 KiB", "4 MiB")),
        *(f"{what} of 1 MiB over 2: again / gloo" for what in ("reduce-scatter", "all-gather")),
    }


def test_what_a_rank_raises_is_told_and_the_side_goes_on(sides: list[Side]) -> None:
    with pytest.raises(RuntimeError, match=r"gloo:\nrank 1:\n(.|\n)*ValueError: so it is"):
        sides[0].turn(raises)
    assert sides[0].turn(items.copies, KIB, 1)[1] == []


def test_a_transport_that_cannot_be_opened_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OPENERS, "wire", (f"{__name__}:open_nothing", {}))
    monkeypatch.setitem(OPENERS, "pigeon", ("runtime.transport.pigeon:open_pigeon", {}))
    with opened(("wire", "pigeon"), 1) as found:
        assert found == []
    assert capsys.readouterr().err.splitlines() == [
        "wire, 1 ranks: left out: OSError: no cable",
        "pigeon, 1 ranks: left out: there is no runtime.transport.pigeon.open_pigeon",
    ]


def test_what_ranks_do_together_lasts_from_the_first_start_to_the_last_stop() -> None:
    assert together([[(0.0, 2.0), (5.0, 6.0)], [(1.0, 3.0), (4.0, 4.5)]]) == [3.0, 2.0]
    busy = Around([(0.0, 3.0)], [(0.0, 2.0)]), Around([(1.0, 5.0)], [(0.0, 1.0)])
    assert more_s([busy]) == 5.0 - 2.0


@pytest.mark.parametrize("number", [None, *range(8)])
def test_hostile_requests_and_large_bodies_are_refused_and_right_ones_answered(number: int | None) -> None:
    """Of the benchmark of a service; the bodies are of the size that is asked for."""
    takes = StandIn(nn.Identity())
    size = 2**14
    requests = serving._hostile(18)
    if number is None:
        takes.dtype = torch.float32
    else:
        kind, body = list(serving.large(size))[number]
        assert 0.9 * size < len(body) <= size
        requests = [serving._raw(kind, body)]
    with port_of(takes, size) as port:
        statuses = [serving._asked(port, text) for text in requests]
        assert all(400 <= status < 500 for status in statuses), statuses
        assert serving._asked(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
        assert serving._output(port, '{"inputs": [[1, 2.5]]}') == [[1.0, 2.5]]
