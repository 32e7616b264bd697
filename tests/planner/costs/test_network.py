from __future__ import annotations

import pytest

from planner.costs.network import Network, collective_s, transfer_s
from planner.ir.cluster import ACROSS_HOSTS, DATASHEET, INTERPOLATED, MEASURED, WITHIN_HOST, Cluster, Collective, Link
from planner.ir.cluster import DeviceSpec as Device

POINTS = ((1000, 1e-3), (4000, 2e-3), (16000, 8e-3))
MEASURED_LINK = Link(0.0, 1.0, POINTS, evidence=MEASURED)
SHEET = Link(1e-3, 1e6)


def cluster(collectives: tuple[Collective, ...] = ()) -> Cluster:
    devices = tuple(Device(f"{host}/cpu{rank}", "cpu", host, 2**30) for rank, host in enumerate(("n0", "n0", "n1")))
    return Cluster(devices, {WITHIN_HOST: MEASURED_LINK, ACROSS_HOSTS: SHEET}, collectives)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 0.0), (10, 1e-3), (1000, 1e-3), (2000, 2**0.5 * 1e-3), (4000, 2e-3), (64000, 32e-3)]
)
def test_a_measured_link_is_read_in_log_log(num_bytes: int, seconds: float) -> None:
    assert float(transfer_s(MEASURED_LINK, num_bytes)) == pytest.approx(seconds)


def test_a_link_from_a_datasheet_is_latency_and_bandwidth() -> None:
    assert float(transfer_s(SHEET, 2000)) == pytest.approx(3e-3)
    assert float(transfer_s(SHEET, 0)) == 0.0


def test_a_measured_collective_is_used() -> None:
    table = Collective("all_reduce", 2, WITHIN_HOST, ((100, 1.0), (10000, 3.0)))
    assert float(collective_s(cluster((table,)), "all_reduce", (0, 1), 10000)) == pytest.approx(3.0)


def test_an_unmeasured_all_reduce_is_a_ring() -> None:
    assert float(collective_s(cluster(), "all_reduce", (0, 1, 2), 3000)) == pytest.approx(4 * 2e-3)


def test_alone_there_is_nothing_to_reduce() -> None:
    assert float(collective_s(cluster(), "all_reduce", (0,), 3000)) == 0.0


def test_prices_know_how_well_they_are_known() -> None:
    network = Network(cluster((Collective("all_reduce", 2, WITHIN_HOST, POINTS),)))
    assert network.transfer_s(0, 1, 4000) == pytest.approx(2e-3)
    assert network.transfer_evidence(0, 1, 4000) == MEASURED
    assert network.transfer_evidence(0, 1, 10**9) == INTERPOLATED
    assert network.transfer_evidence(0, 2, 1) == DATASHEET
    assert network.all_reduce_evidence((0, 1), 4000) == MEASURED
    assert network.all_reduce_evidence((0, 2), 4000) == DATASHEET
