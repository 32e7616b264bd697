"""The clock of a device that keeps to the speed of its first steps."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
from torch import Tensor

from benchmarks.devices.layer_clock import Mirror
from benchmarks.devices.steady_device import REHEARSALS, SteadyDevice
from benchmarks.devices.virtual_device import HeldTransport


def spin(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def step(device: SteadyDevice, *pieces: float) -> None:
    device.begin_step()
    with device.working():
        for piece in pieces[:-1]:
            spin(piece)
            with device.talking():
                pass
        spin(pieces[-1])


@pytest.fixture
def device() -> SteadyDevice:
    return SteadyDevice(2.0, multiprocessing.get_context("fork").Lock())


def test_after_its_rehearsals_a_piece_takes_what_it_took_there(device: SteadyDevice) -> None:
    for _ in range(REHEARSALS):
        step(device, 0.002, 0.004)
    before_s = device.busy_s
    step(device, 0.0, 0.0)  # whatever it takes now
    assert sum(device._seconds) >= 0.006
    assert device.busy_s - before_s == pytest.approx(2 * sum(device._seconds))
    assert device.held_s > 0


def test_rehearsals_of_earlier_runs_count_as_much() -> None:
    lock = multiprocessing.get_context("fork").Lock()
    first = SteadyDevice(1.0, lock)
    for _ in range(REHEARSALS):
        step(first, 0.0)
    assert len(first.rehearsed) == REHEARSALS - 2
    second = SteadyDevice(1.0, lock, [[1.0]] * 5 * REHEARSALS)
    for _ in range(REHEARSALS):
        step(second, 0.0)
    second.begin_step()
    assert second._seconds == pytest.approx([1.0])


def test_who_rehearses_is_alone_but_for_while_it_talks(device: SteadyDevice) -> None:
    device.begin_step()
    with device.working():
        assert not device._alone.acquire(block=False)
        with device.talking():
            assert device._alone.acquire(block=False)
            device._alone.release()


def test_afterwards_ranks_work_side_by_side(device: SteadyDevice) -> None:
    for _ in range(REHEARSALS):
        step(device, 0.0)
    device.begin_step()
    with device.working():
        assert device._alone.acquire(block=False)
        assert not device.mirrors


def test_steps_of_other_pieces_are_refused(device: SteadyDevice) -> None:
    for _ in range(REHEARSALS - 1):
        step(device, 0.0, 0.0)
    step(device, 0.0)
    with pytest.raises(RuntimeError, match=r"steps have \[1, 2\] pieces"):
        device.begin_step()


def test_a_step_with_more_pieces_than_were_rehearsed_is_refused(device: SteadyDevice) -> None:
    for _ in range(REHEARSALS):
        step(device, 0.0)
    with pytest.raises(RuntimeError, match="more than 1 pieces"):
        step(device, 0.0, 0.0)


def test_amid_an_action_whoever_rehearses_goes_on_alone(device: SteadyDevice) -> None:
    device.begin_step()
    assert not device.mirrors
    with device.working():
        assert device.mirrors
        with device.mirroring():
            assert not device._alone.acquire(block=False)
    with device.working(shared=True):
        assert not device.mirrors
    assert [len(pieces) for pieces in device._steps] == [3]


class Sums:
    """A transport that counts what is really done."""

    rank, world_size = 1, 2

    def __init__(self) -> None:
        self.done = 0

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.done += 1

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def test_what_ranks_do_together_amid_work_is_really_done_after_the_rehearsals_alone(device: SteadyDevice) -> None:
    transport = Sums()
    held = HeldTransport(transport, device)  # type: ignore[arg-type]
    tensor = torch.ones(2)
    for _ in range(REHEARSALS):
        device.begin_step()
        with device.working():
            held.all_reduce(tensor, (0, 1))
    assert transport.done == 0
    assert tensor.tolist() == [2.0**REHEARSALS] * 2
    device.begin_step()
    with device.working():
        held.all_reduce(tensor, (0, 1))
    assert transport.done == 1


def test_a_mirror_gives_a_rank_what_it_would_get_of_others_with_the_same() -> None:
    ranks, mirror = (0, 1, 2), Mirror(1)
    flat = torch.arange(1.0, 6.0)
    mirror.reduce_scatter(flat, (2, 2, 1), ranks)
    assert flat.tolist() == [1, 2, 9, 12, 5]
    mirror.all_gather(flat, (2, 2, 1), ranks)
    assert flat.tolist() == [9, 12, 9, 12, 0]
    mirror.all_max(flat, ranks)
    pending = mirror.start_sum(flat, ranks)
    pending.wait()
    assert flat.tolist() == [27, 36, 27, 36, 0]
    came = {0: torch.ones(2, 1), 2: torch.ones(3)}
    mirror.start_exchange({0: flat[:2], 2: flat[:2]}, came, key=3).wait()
    assert came[0].tolist() == [[27], [36]]
    assert came[2].tolist() == [0, 0, 0]
