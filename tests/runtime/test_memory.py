from __future__ import annotations

import torch

from runtime.memory import storage_bytes, with_peak

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
