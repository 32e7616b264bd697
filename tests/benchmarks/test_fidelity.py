from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fidelity
from benchmarks.devices.sleeping import Case, Order, link_points, step_s
from benchmarks.fidelity import LOOPBACK_BYTES_PER_S, OVERHEAD_S, cases, network_of, simulated_s
from planner.ir.schedule import Op

INSTANT = ((4096, 1e-9), (2**23, 2e-9))
FOUND = {case.name: case for case in cases(LOOPBACK_BYTES_PER_S, 4)}


def test_every_schedule_of_the_goal_is_there_and_its_program_is_legal() -> None:
    assert list(FOUND) == ["GPipe", "1F1B", "1F1B-SO", "ZB-H1", "interleaved", "DAG with a skip"]
    for case in FOUND.values():
        program = case.program()  # validated
        assert len(program.rows) == 2
        assert any(action.op is Op.BACKWARD_WEIGHT for row in program.rows for action in row) == (case.name == "ZB-H1")
    assert {(edge.src, edge.dst) for edge in FOUND["DAG with a skip"].program().stages.edges} >= {(0, 3)}


def test_without_transfers_gpipe_takes_its_closed_form() -> None:
    case = replace(FOUND["GPipe"], tilt=0.0)
    forward, inward, weight = case.seconds
    expected = (case.num_microbatches + 1) * (forward + inward + weight + 2 * OVERHEAD_S)
    assert simulated_s(case, network_of(INSTANT)) == pytest.approx(expected, rel=0.02)


def test_a_send_that_keeps_its_rank_makes_the_step_longer() -> None:
    size = FOUND["GPipe"].activation_bytes
    arrival, kept = ((4096, 5e-3), (2 * size, 5.1e-3)), ((4096, 2e-3), (2 * size, 2e-3))
    free_s, kept_s = (simulated_s(FOUND["GPipe"], network_of(arrival, sending)) for sending in ((), kept))
    more = kept_s - free_s
    assert more == pytest.approx(2e-3 * 4, rel=0.3)


def test_orders_come_through_a_file_whole(tmp_path: Path) -> None:
    order = Order("store", 2, tuple(FOUND.values()), (4096, 8192), 3)
    order.write(tmp_path / "order.json")
    assert Order.read(tmp_path / "order.json") == order


def test_steps_and_links_are_read_across_ranks() -> None:
    assert step_s([[(1.0, 2.0), (3.0, 5.5)], [(1.1, 2.5), (2.9, 5.0)]]) == pytest.approx([1.5, 2.6])
    ranks = [{"link": [[(0.0, 0.1), (1.0, 1.3)]]}, {"link": [[(0.5, 0.5), (1.9, 1.9)]]}]
    arrival, sending = link_points((64,), ranks)
    assert (arrival[0], sending[0]) == ((64, pytest.approx(0.7)), (64, pytest.approx(0.2)))


@pytest.mark.exhaustive("every case in two processes")
def test_two_processes_sleep_and_talk_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "SIZES", (4096, 8192, 16384))
    small = tuple(
        replace(case, seconds=(1e-3, 1e-3, 1e-3), activation_bytes=4096, num_microbatches=3) for case in FOUND.values()
    )
    found = fidelity._execute(None, small, 1)
    for case in small:
        assert len(step_s([rank["steps"][case.name] for rank in found])) == 1
        floor = 3 * sum(case.seconds) * case.num_stages / 2
        assert step_s([rank["steps"][case.name] for rank in found])[0] > floor
    assert [len(size) for size in found[0]["link"]] == [9, 9, 9]


def test_without_namespaces_the_reason_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "unavailable", lambda: "network namespaces need root")
    monkeypatch.setattr(fidelity, "_rows", lambda *arguments: iter(()))
    (row,) = fidelity.measure(True)
    assert row.name == "no testbed, loopback alone: network namespaces need root"


def test_a_case_sleeps_longer_on_later_stages() -> None:
    case = Case("", "gpipe", 2, 2, 1, (1.0, 2.0, 3.0), 4096, tilt=0.5)
    rows = case.program().rows
    assert [case.action_s(action) for action in rows[1] if action.op in (Op.FORWARD, Op.BACKWARD)] == [1.5, 7.5]
