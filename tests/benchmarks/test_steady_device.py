"""The clock of a device that keeps to the speed of its first steps."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from benchmarks.steady_device import REHEARSALS, SteadyDevice


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


def test_who_rehearses_is_alone_but_for_while_it_talks(device: SteadyDevice) -> None:
    device.begin_step()
    with device.working():
        assert not device._alone.acquire(block=False)
        with device.talking():
            assert device._alone.acquire(block=False)
            device._alone.release()
        assert device.finishes


def test_afterwards_ranks_work_side_by_side(device: SteadyDevice) -> None:
    for _ in range(REHEARSALS):
        step(device, 0.0)
    device.begin_step()
    with device.working():
        assert device._alone.acquire(block=False)
    assert not device.finishes


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
