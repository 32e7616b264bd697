"""The counting allocator: exact, bounded, safe among threads and processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from cuda_ops import memory
from cuda_ops.device.compiling import CannotCompileError
from cuda_ops.memory import MemoryCounter, counter, counting, install, meter_of

MIB = 2**20


@pytest.fixture
def counted() -> MemoryCounter:
    if why := memory.available():
        pytest.skip(why)
    return install()


def test_bytes_are_counted_as_they_come_and_go(counted: MemoryCounter) -> None:
    before = counted.current_bytes
    made = counted.num_allocations
    tensor = torch.empty(1000, dtype=torch.uint8)
    assert (counted.current_bytes - before, counted.num_allocations - made) == (1000, 1)
    view = tensor[10:]
    del tensor
    assert counted.current_bytes - before == 1000
    del view
    assert counted.current_bytes == before
    assert torch.empty(0).numel() == 0
    assert counted.current_bytes == before


def test_the_peak_is_the_most_at_once(counted: MemoryCounter) -> None:
    with counting() as found:
        start = found.current_bytes
        for _ in range(3):
            torch.empty(MIB, dtype=torch.uint8)
        kept = torch.empty(MIB, dtype=torch.uint8)
        del kept
        assert found.peak_bytes - start == MIB
        found.reset_peak()
        assert found.peak_bytes == found.current_bytes == start


def test_data_is_aligned_and_belongs_to_numpy_as_well(counted: MemoryCounter) -> None:
    before = counted.current_bytes
    array = torch.ones(1000).numpy()
    assert counted.current_bytes - before == 4000
    assert array.sum() == 1000
    assert torch.empty(17).data_ptr() % 64 == 0
    del array
    assert counted.current_bytes == before


def test_beyond_the_limit_torch_is_out_of_memory_and_goes_on_afterwards(counted: MemoryCounter) -> None:
    with counting() as found:
        found.limit(found.current_bytes + MIB)
        refused = found.num_refused
        kept = torch.empty(MIB // 2, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 1048576 bytes; \d+ of a limit of"):
            torch.empty(MIB, dtype=torch.uint8)
        assert (found.num_refused - refused, found.refused_bytes) == (1, MIB)
        del kept
        torch.empty(MIB, dtype=torch.uint8)
    torch.empty(4 * MIB, dtype=torch.uint8)  # no limit any more


def test_memory_that_is_not_there_is_told_alike(counted: MemoryCounter) -> None:
    before = counted.current_bytes
    with pytest.raises(torch.OutOfMemoryError, match="CPU out of memory"):
        torch.empty(1 << 60, dtype=torch.uint8)
    assert counted.current_bytes == before


def test_backward_out_of_memory_can_be_caught(counted: MemoryCounter) -> None:
    x = torch.ones(MIB, requires_grad=True)
    y = (x * 2).sum()
    with counting(counted.current_bytes + MIB), pytest.raises(torch.OutOfMemoryError):
        y.backward()
    assert x.grad is None


def test_threads_do_not_lose_a_byte(counted: MemoryCounter) -> None:
    before = counted.current_bytes

    def churn(seed: int) -> None:
        for size in range(1, 400):
            torch.empty(size * (seed + 1), dtype=torch.uint8)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(8)))
    assert counted.current_bytes == before


def _in_child(channel: multiprocessing.connection.Connection) -> None:
    found = install()
    before = found.current_bytes
    with counting(before + MIB):
        tensor = torch.empty(1000, dtype=torch.uint8)
        more = found.current_bytes - before
        try:
            torch.empty(2 * MIB, dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            channel.send((more, tensor.numel(), str(error)))


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_it_counts_in_new_processes(counted: MemoryCounter, start: str) -> None:
    context = multiprocessing.get_context(start)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(theirs,))
    process.start()
    assert mine.poll(60)
    more, size, text = mine.recv()
    process.join()
    assert (more, size) == (1000, 1000)
    assert "out of memory" in text


def test_tensors_from_before_are_freed_where_they_came_from() -> None:
    """Also those that a library keeps as plain pointers, as oneDNN does with what a convolution has packed."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "conv, x = torch.nn.Conv2d(8, 8, 3), torch.randn(2, 8, 16, 16)\n"
        "conv(x).sum().backward(); old = [torch.randn(n) for n in range(1, 2000)]\n"
        "from cuda_ops.memory import install\n"
        "found = install(); del old\n"
        "assert found.current_bytes == 0, found.current_bytes\n"
        "for n in range(8, 40): conv(torch.randn(2, 8, n, n)).sum().backward()\n"
        "conv.zero_grad(); print('fine')"
    )
    if why := memory.available():
        pytest.skip(why)
    home = Path(memory.__file__).parents[2]
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.strip() == "fine", found.stderr


def test_without_a_compiler_it_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counter._library.cache_clear()
    try:
        assert "no C++ compiler: no-such-compiler not found" in memory.available()
        with pytest.raises(CannotCompileError, match="no-such-compiler"):
            install()
        assert meter_of(torch.device("cpu")) is None
    finally:
        counter._library.cache_clear()
