"""Calls into a compiled library: what goes wrong there comes back as an error, from every thread."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from cuda_ops.device.compiling import LibrarySources, compiled
from cuda_ops.sparse import native
from cuda_ops.sparse.native.functions import Library, NativeOperators

UNITS = """
#include "calls.h"

halopipe::ParallelFor halopipe::parallel_for = nullptr;

HALOPIPE_CALL use_threads(halopipe::ParallelFor parallel_for) {
  halopipe::parallel_for = parallel_for;
  return halopipe::kDone;
}

HALOPIPE_CALL numbered(int64_t count, int64_t* to, int64_t failing) {
  return halopipe::done([&] {
    halopipe::for_each(count, [&](int64_t i) {
      if (i == failing) throw std::bad_alloc();
      to[i] = i;
    });
  });
}
"""


@pytest.fixture(scope="module")
def operators() -> NativeOperators:
    found = native.load()
    if found is None:
        pytest.skip("no compiler for the native operators")
    return found


@pytest.fixture(scope="module")
def library(operators: NativeOperators, tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("library")
    sources = folder / "source"
    sources.mkdir()
    for name in ("arrays.h", "calls.h"):
        shutil.copy(native.SOURCES.folder / name, sources)
    (sources / "numbered.cpp").write_text(UNITS)
    return Library(compiled({**os.environ, "XDG_CACHE_HOME": str(folder)}, LibrarySources("numbered", sources)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_finds_no_memory_fails_the_call(library: Library, threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        numbers = torch.zeros(100, dtype=torch.int64)
        library.call("numbered", 100, numbers, -1)
        assert torch.equal(numbers, torch.arange(100))
        for failing in (0, 99):
            with pytest.raises(MemoryError, match="numbered"):
                library.call("numbered", 100, numbers, failing)
    finally:
        torch.set_num_threads(1)


def test_memory_that_cannot_be_had_is_an_error(operators: NativeOperators) -> None:
    weight = torch.zeros(1).expand(2**23, 2**20, 16)
    with pytest.raises(MemoryError, match="sparse_conv"):
        operators.sparse_conv(torch.zeros(0, 2**20), weight, torch.zeros(1, 1, dtype=torch.int32), weight)


def test_a_tensor_whose_rows_do_not_follow_each_other_is_refused(operators: NativeOperators) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        operators.reversed_map(torch.zeros(3, 4, dtype=torch.int32).T, 3)
