"""Modules that load matplotlib: collecting the tests of all files need not."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def figures() -> ModuleType:
    from halopipe.extras.figures import figures

    return figures


@pytest.fixture(scope="session")
def report() -> ModuleType:
    from halopipe.extras.figures import report

    return report
