"""Costs of a board with two memories, from those of another device by their rooflines."""

from __future__ import annotations

from dataclasses import replace

from planner.costs.layers.roofline import on_cluster, work_of
from tests.planner.costs.layers.test_roofline import PROFILE, THERE, cluster, costs


def test_a_board_with_two_memories_has_two_kinds_of_costs() -> None:
    board = replace(THERE, on_chip_bytes=2**20, on_chip_bytes_per_s=1e6)
    found = on_cluster(PROFILE, cluster(board))
    assert set(found.measurements) == {"there", "there, weights off chip"}
    fast = on_cluster(PROFILE, cluster(replace(board, on_chip_bytes_per_s=None)))
    one = on_cluster(PROFILE, cluster())
    work = work_of(PROFILE.graph, PROFILE.graph.values(), PROFILE.graph.layers[2], 1)
    assert work.num_bytes == 2 * 4096 + 8192
    assert costs(found, "there, weights off chip", "l2") == costs(one, "there", "l2")
    assert costs(found, "there", "l2", 1)[0] == 8192 / 1e6  # read on chip, which is slow here
    assert costs(fast, "there", "l1") == costs(one, "there", "l1")  # it has no parameters
    assert fast.parameters["there"]["l2"].update_s == 0.0
    assert fast.parameters["there, weights off chip"] == one.parameters["there"]
