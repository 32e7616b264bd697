"""Inputs that a host prepares: by whom, and in proportion to the samples where no extra knows more of them."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.chains import cluster
from planner.costs.stages.input_pipeline import Preparations, has_host_beside, input_bytes, spare_cores
from planner.ir.profile import PreparationCost
from tests.planner.sparse_networks import classifier, sparse_profile


def test_inputs_take_what_was_measured_of_the_nearest_size_and_all_of_it_in_the_program() -> None:
    graph = classifier(samples=4)
    maps = ("neighbours_0_0", "reverse_0_0")
    made = (
        PreparationCost("collate", ("lengths",), (), 1.0, 1, 0.5),
        PreparationCost("maps", maps, ("collate",), 8.0, 4),
        PreparationCost("maps", maps, ("collate",), 3.0, 1),
        PreparationCost("unread", ("reverse_1_1",), (), 100.0, 1),
    )
    preparations = Preparations(replace(sparse_profile(graph), preparations={"kind-1": made}))
    for shared in (False, True):
        assert preparations.seconds("kind-1", [0], 1, shared=shared) == 1.0 + 3.0
        assert preparations.seconds("kind-1", [0], 4, shared=shared) == 4 * 1.0 + 8.0
        assert preparations.before_program_s("kind-1", 4, shared=shared) == 0
        assert preparations.before_program_bytes(4, shared=shared) == 0
    assert preparations.seconds("kind-1", [1], 4) == 0  # it reads none
    assert preparations.num_bytes([0], 2, parts=2) == sum(input_bytes(graph, name, 2) for name in maps)


def test_only_cores_of_the_host_prepare_for_themselves() -> None:
    core = cluster((1.0,)).devices[0]
    gpu = replace(core, name="n0/gpu0")
    assert [has_host_beside(device) for device in (core, gpu)] == [False, True]


def test_spare_cores_are_taken_by_turns_and_never_from_another_host() -> None:
    assert spare_cores(cluster((1.0,) * 4), 4) == (None,) * 4
    assert spare_cores(cluster((1.0,) * 5), 3) == (3, 4, 3)
    assert spare_cores(cluster((1.0,) * 4, ("n0", "n1", "n0", "n0")), 2) == (2, None)
    parts = tuple(replace(device, core_share=0.0) for device in cluster((1.0,) * 3).devices)
    assert spare_cores(replace(cluster((1.0,) * 3), devices=parts), 2) == (None, None)
