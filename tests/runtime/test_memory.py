from __future__ import annotations

import pytest
import torch

from runtime.memory import out_of_memory, storage_bytes, with_peak

MIB = 2**20


def test_shared_memory_counts_once() -> None:
    tensor = torch.zeros(100)
    assert storage_bytes([tensor, tensor[:50], tensor.view(10, 10)]) == 400
    assert storage_bytes([tensor, torch.zeros(1)]) == 404


def test_the_peak_is_that_of_what_lives_at_once() -> None:
    def run() -> torch.Tensor:
        first = torch.zeros(MIB // 4)
        second = first + 1
        del first
        return second.sum()

    result, peak_bytes = with_peak(run)
    assert result.item() == MIB / 4
    assert 2 * MIB <= peak_bytes < 2 * MIB + 4096


def test_memory_that_was_there_before_is_not_seen() -> None:
    kept = [torch.zeros(MIB // 4)]

    def run() -> torch.Tensor:
        kept.clear()
        return torch.zeros(MIB // 2)

    assert 2 * MIB <= with_peak(run)[1] < 2 * MIB + 4096


def test_memory_that_the_kernel_refuses_is_a_lack_of_memory_and_nothing_else_is() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 60, dtype=torch.uint8)
    for error in (refused.value, MemoryError(), torch.OutOfMemoryError("all is used")):
        found = out_of_memory(error)
        assert found is not None
        assert found.details
    assert out_of_memory(RuntimeError("shapes do not fit")) is None
