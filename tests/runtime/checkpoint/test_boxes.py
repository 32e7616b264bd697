"""States of ranks, and tensors of which they have boxes: read whole, in boxes of another plan, or laid flat."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from planner.ir.box import Box, Interval, whole
from planner.ir.errors import CheckpointError, CorruptFileError, StaleFileError
from runtime.checkpoint import BackgroundSaver, Checkpoint, RankState, joined
from runtime.pipeline.routing import slices
from tests.runtime.checkpoint.cases import FINGERPRINTS, alone, forge, on_ranks, save_all, try_save

SIX = torch.ones(6)


def at(rows: tuple[int, int], columns: tuple[int, int], depth: tuple[int, int] = (0, 2)) -> dict[str, object]:
    return {"x": ((Interval(*rows), Interval(*columns), Interval(*depth)), (6, 5, 2))}


CUBE = torch.zeros(6, 5, 2)
ALL = at((0, 6), (0, 5))
NOTHING: frozenset[str] = frozenset()
REFUSED = {
    "to write what is not there": (({"w": SIX}, {}, {}, frozenset({"v", "w"})), "to be written, but not there: v"),
    "a tensor and a number": (({"x": SIX}, {}, {"x": 1}, NOTHING), "both a tensor and a number: x"),
    "a number of numpy": (({}, {}, {"x": np.int64(3)}, NOTHING), "x is neither number"),
    **{
        f"slice {place}": (({"x": SIX}, {"x": place}, {}, NOTHING), r"x has shape \(6,\); it is said to be")
        for place in ((0, 5, (6,)), (2, 8, (7,)), (-1, 5, (8,)), (5, 3, (8,)))
    },
    "a slice of two dims": (({"x": SIX.view(2, 3)}, {"x": (0, 6, (6,))}, {}, NOTHING), r"x has shape \(2, 3\)"),
    "a slice that is not there": (({}, {"x": (0, 6, (6,))}, {}, NOTHING), "x is a slice, but not there"),
    **{
        f"box {number}": (({"x": CUBE}, {}, {}, NOTHING, box), r"x has shape \(6, 5, 2\); it is said to be")
        for number, box in enumerate((at((0, 7), (0, 5)), at((0, 2), (0, 5)), at((1, 7), (0, 5))))
    },
    "a box that is not there": (({}, {}, {}, NOTHING, ALL), "x is a box, but not there"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", REFUSED)
def test_a_state_that_contradicts_itself_is_refused(fault: str) -> None:
    arguments, message = REFUSED[fault]
    with pytest.raises(ValueError, match=message):
        RankState(*arguments)


def test_states_of_a_rank_are_joined() -> None:
    first = RankState({"a": SIX, "m": SIX[:3]}, {"m": (0, 3, (6,))}, {"lr": 0.1}, frozenset({"a", "m"}))
    second = RankState({"a": SIX.data, "b": SIX}, {}, {"lr": 0.1, "k": None}, frozenset({"b", "k"}))
    both = joined([first, second])
    assert set(both.tensors) == {"a", "b", "m"}
    assert (both.slices, both.numbers) == ({"m": (0, 3, (6,))}, {"lr": 0.1, "k": None})
    assert both.writes == {"a", "b", "k", "m"}


def test_states_with_different_things_under_one_key_are_not_joined() -> None:
    with pytest.raises(ValueError, match="another a each"):
        joined([RankState({"a": SIX}, {}, {}, frozenset()), RankState({"a": SIX.clone()}, {}, {}, frozenset())])
    with pytest.raises(ValueError, match=r"another lr each: 0\.1, 0\.2"):
        joined([RankState({}, {}, {"lr": 0.1}, frozenset()), RankState({}, {}, {"lr": 0.2}, frozenset())])


KEY = "model/w"
SHAPE = (6, 5, 2)
W = torch.arange(60.0).view(SHAPE)


def box(*places: tuple[int, int]) -> Box:
    return tuple(Interval(*place) for place in places)


QUARTERS = [box(rows, columns, (0, 2)) for rows in ((0, 2), (2, 6)) for columns in ((0, 4), (4, 5))]


def has(part: Box, tensor: Tensor = W) -> RankState:
    """A rank that has and writes one box."""
    mine = tensor[slices(part, whole(tuple(tensor.shape)))]
    return RankState({KEY: mine}, {}, {}, frozenset({KEY}), {KEY: (part, tuple(tensor.shape))})


def states(parts: Sequence[Box]) -> list[RankState]:
    return [has(part) for part in parts]


def test_boxes_are_put_together_or_read_in_other_boxes(tmp_path: Path) -> None:
    save_all(tmp_path, 1, states(QUARTERS))
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    assert checkpoint.shape(KEY) == SHAPE
    assert torch.equal(checkpoint.read(KEY), W)
    assert torch.equal(checkpoint.read_slice(KEY, 7, 41), W.reshape(-1)[7:41])
    rng = random.Random(0)
    for _ in range(30):
        part = tuple(Interval(*sorted((rng.randint(0, n), rng.randint(0, n)))) for n in SHAPE)
        found = checkpoint.read_box(KEY, part)
        assert torch.equal(found, W[slices(part, whole(SHAPE))])
        assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.parametrize(
    "part", [box((0, 6), (0, 5), (0, 2)), box((1, 3), (4, 5), (0, 1)), box((2, 2), (0, 5), (0, 2))]
)
def test_what_was_saved_whole_or_in_slices_is_read_in_boxes(tmp_path: Path, part: Box) -> None:
    save_all(tmp_path, 1, [alone({KEY: W})])
    flat = [(0, 13), (13, 60)]
    slices_of = [RankState({KEY: W.reshape(-1)[a:b]}, {KEY: (a, b, SHAPE)}, {}, frozenset({KEY})) for a, b in flat]
    save_all(tmp_path, 2, slices_of)
    for step in (1, 2):
        found = Checkpoint.open(tmp_path, step).read_box(KEY, part)
        assert torch.equal(found, W[slices(part, whole(SHAPE))])
        assert found.untyped_storage().nbytes() == found.nbytes


def test_only_the_boxes_that_are_asked_for_are_read(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, states(QUARTERS))
    data = path / "rank-3" / "tensors.safetensors"
    data.write_bytes(bytes(data.stat().st_size))
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.read_box(KEY, box((0, 6), (0, 4), (0, 2))), W[:, :4])
    with pytest.raises(CorruptFileError):
        checkpoint.read(KEY)


def test_an_empty_box_saves_nothing(tmp_path: Path) -> None:
    save_all(tmp_path, 1, states([box((0, 0), (0, 5), (0, 2)), whole(SHAPE), box((6, 6), (0, 5), (0, 2))]))
    checkpoint = Checkpoint.open(tmp_path)
    assert [part.folder for part in checkpoint.manifest.tensors[KEY].parts] == ["rank-1"]
    assert torch.equal(checkpoint.read(KEY), W)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        (QUARTERS[:3], "saved by nobody: 8 of 60"),
        ([*QUARTERS[:3], box((1, 6), (4, 5), (0, 2))], "saved twice"),
        ([*QUARTERS, QUARTERS[0]], "saved twice"),
    ],
)
def test_boxes_that_do_not_fit_together_are_refused(tmp_path: Path, parts: list[Box], fault: str) -> None:
    for error in try_save(tmp_path, 1, states(parts)):
        assert isinstance(error, CheckpointError)
    assert fault in str(try_save(tmp_path, 1, states(parts))[0])


def test_a_box_and_a_slice_of_one_tensor_do_not_fit_together(tmp_path: Path) -> None:
    rest = RankState({KEY: W.reshape(-1)[20:]}, {KEY: (20, 60, SHAPE)}, {}, frozenset({KEY}))
    errors = try_save(tmp_path, 1, [has(box((0, 2), (0, 5), (0, 2))), rest])
    assert "some parts are boxes, others not" in str(errors[0])


@pytest.mark.parametrize("part", [box((0, 7), (0, 5), (0, 2)), box((0, 6), (0, 5))])
def test_a_box_that_the_tensor_has_not_is_refused(tmp_path: Path, part: Box) -> None:
    save_all(tmp_path, 1, states(QUARTERS))
    with pytest.raises(StaleFileError, match="model/w has shape"):
        Checkpoint.open(tmp_path).read_box(KEY, part)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[0, 0, 0], [2, 4, 3]", "is no box of"),
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[0, 0, 0], [2, 5, 2]", "saved twice"),
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[0, 0], [2, 4]", "is no box of"),
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[0, 0, 0], [2, 4]", "is no box of"),
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[0, 0, 2], [2, 4, 0]", "is no box"),
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[], []", "is no box"),
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[0, 0, -1], [2, 4, 2]", "greater than or equal to 0"),
        (r"\[0, 0, 0\], \[2, 4, 2\]", "[0, 0, 0], [2, 4, 99999999999999999999]", "is no box"),
        ("rank-3", "rank-2", "a rank has saved two boxes of it|has folders of|key given twice"),
    ],
)
def test_boxes_with_bad_intent_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = save_all(tmp_path, 1, states(QUARTERS))
    forge(path, lambda text: re.sub(old, new, text))
    with pytest.raises(CorruptFileError) as caught:
        Checkpoint.open(tmp_path)
    assert re.search(message, f"{caught.value.title} {caught.value.details}")


def test_they_are_saved_in_the_background_too(tmp_path: Path) -> None:
    def run(rank: int, barrier: object) -> None:
        tensor = W.clone()
        state = joined([has(QUARTERS[rank], tensor)])
        saver = BackgroundSaver(tmp_path, rank, 4, barrier)
        saver.save(1, state, FINGERPRINTS)
        tensor.zero_()
        saver.wait()

    assert on_ranks(4, run) == [None] * 4
    assert torch.equal(Checkpoint.open(tmp_path).read(KEY), W)
