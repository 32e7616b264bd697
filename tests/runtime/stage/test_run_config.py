from __future__ import annotations

import torch

from planner.ir.schedule import Action
from runtime.stage.modes import RunConfig


def run_config(text: str, recompute: bool = False) -> RunConfig:
    return RunConfig.of([Action.parse(each) for each in text.split()], recompute, None)


def test_a_row_of_whole_backwards() -> None:
    assert run_config("0F0 0F1 0B0 0B1 0UPDATE") == RunConfig()
    assert run_config("0F0 0B0", recompute=True) == RunConfig(recompute=True)


def test_halves_are_found_by_micro_batch() -> None:
    assert run_config("0F0 0F1 0I0 0B1 0W0 0UPDATE").split == {0}


def test_forward_passes_alone_keep_nothing_to_compute_again() -> None:
    assert run_config("0F0 0F1", recompute=True) == RunConfig(trains=False)


def test_versions_are_counted_where_updates_come_within_the_step() -> None:
    assert run_config("0F0 0F1 0B0 0UPDATE0 0F2@1 0B1 0B2@1 0UPDATE2").version_uses == {0: 2, 1: 1}
    assert run_config("0F0 0F1 0B0 0B1 0UPDATE").version_uses == {}


def test_precision_is_handed_on() -> None:
    assert RunConfig.of([], False, torch.bfloat16).autocast is torch.bfloat16
