from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.devices.testbed import RATES, Testbed, unavailable


@pytest.fixture(scope="session")
def no_testbed() -> str:
    """Why this machine cannot have one; empty if it can."""
    return unavailable()


@pytest.fixture
def build(no_testbed: str) -> Iterator[Callable[..., Testbed]]:
    """Builds a testbed of some hosts at a rate by name, which is gone after the test."""
    if no_testbed:
        pytest.skip(no_testbed)
    built: list[Testbed] = []

    def make(num_hosts: int = 2, rate: str = "1gbit") -> Testbed:
        built.append(Testbed.build(num_hosts, RATES[rate]))
        return built[-1]

    yield make
    for testbed in built:
        testbed.close()
