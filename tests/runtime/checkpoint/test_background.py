from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import runtime.checkpoint.saving as saving
from planner.ir.errors import CheckpointError
from runtime.checkpoint import BackgroundSaver, Checkpoint, RankState, complete_steps
from tests.runtime.checkpoint.cases import FINGERPRINTS, alone, of_two_ranks, on_ranks, save_all, whole


def test_training_goes_on_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write_rank = saving.write_rank

    def waiting(*arguments: object) -> object:
        assert may_write.wait(30.0)
        return write_rank(*arguments)

    monkeypatch.setattr(saving, "write_rank", waiting)
    states = of_two_ranks(seed=1)

    def run(rank: int, barrier: Callable[[], None]) -> None:
        saver = BackgroundSaver(tmp_path, rank, 2, barrier)
        saver.save(1, states[rank], FINGERPRINTS)
        barrier()
        for tensor in states[rank].tensors.values():
            tensor.add_(1.0)
        assert complete_steps(tmp_path) == ()
        barrier()
        may_write.set()
        saver.wait()
        assert complete_steps(tmp_path) == (1,)

    assert on_ranks(2, run) == [None, None]
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.verify()
    assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in whole(seed=1).items())


def test_the_next_save_waits_for_the_last_and_old_ones_go(tmp_path: Path) -> None:
    def run(rank: int, barrier: Callable[[], None]) -> None:
        saver = BackgroundSaver(tmp_path, rank, 2, barrier, keep=2)
        for step in range(1, 6):
            saver.save(step, of_two_ranks(seed=step)[rank], FINGERPRINTS)
            assert step == 1 or step - 1 in complete_steps(tmp_path)
        saver.wait()
        saver.wait()

    assert on_ranks(2, run) == [None, None]
    assert complete_steps(tmp_path) == (4, 5)
    for step in (4, 5):
        checkpoint = Checkpoint.open(tmp_path, step)
        checkpoint.verify()
        assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in whole(seed=step).items())


def test_it_takes_the_memory_of_one_copy(tmp_path: Path) -> None:
    weight = torch.randn(10, 3)
    state = alone({"model/a": weight, "model/b": weight, "model/c": weight.t(), "model/d": torch.empty(0)}, {"k": 1})
    saver = BackgroundSaver(tmp_path, 0, 1, lambda: None)
    saver.save(1, state, {})
    copies = dict(saver._copies)
    assert set(copies) == {"model/a", "model/c", "model/d"}
    saver.save(2, state, {})
    assert all(saver._copies[key] is tensor for key, tensor in copies.items())
    saver.wait()
    found = Checkpoint.open(tmp_path)
    assert all(torch.equal(found.read(key), tensor) for key, tensor in state.tensors.items())
    assert (found.number("k"), found.manifest.step) == (1, 2)


def test_a_tensor_and_its_conjugate_are_two(tmp_path: Path) -> None:
    wave = torch.tensor([1 + 2j, 3 - 1j])
    state = alone({"model/a": wave, "model/b": wave.conj(), "model/c": wave})
    for step, write in enumerate((lambda saver: saver.save(0, state, {}), lambda _: save_all(tmp_path, 1, [state]))):
        saver = BackgroundSaver(tmp_path, 0, 1, lambda: None)
        write(saver)
        saver.wait()
        checkpoint = Checkpoint.open(tmp_path, step)
        assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in state.tensors.items())


def test_what_went_wrong_is_raised_at_the_next_call_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank = saving.write_rank

    def full(path: Path, step: int, state: RankState, rank: int, *others: object) -> object:
        if rank == 1 and step == 2:
            raise OSError(28, "No space left on device")
        return write_rank(path, step, state, rank, *others)

    monkeypatch.setattr(saving, "write_rank", full)
    raised: dict[int, Exception] = {}

    def run(rank: int, barrier: Callable[[], None]) -> None:
        saver = BackgroundSaver(tmp_path, rank, 2, barrier)
        for step in (1, 2):
            saver.save(step, of_two_ranks(seed=step)[rank], FINGERPRINTS)
        with pytest.raises(CheckpointError) as caught:
            saver.save(3, of_two_ranks(seed=3)[rank], FINGERPRINTS)
        raised[rank] = caught.value
        saver.save(3, of_two_ranks(seed=3)[rank], FINGERPRINTS)
        saver.wait()

    assert on_ranks(2, run) == [None, None]
    assert "rank 1: [Errno 28] No space left on device" in str(raised[0])
    assert "rank 1 could not write its part" in str(raised[1])
    assert complete_steps(tmp_path) == (1, 3)


def test_a_rank_that_never_writes_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving.SavedPart, "write", lambda self, state, fingerprints: None)
    saver = BackgroundSaver(tmp_path, 0, 1, lambda: None, deadline_s=0.05)
    saver.save(1, alone(whole()), {})
    with pytest.raises(CheckpointError, match="ranks have not written their part: 0"):
        saver.wait()
    assert list(tmp_path.iterdir()) == []
