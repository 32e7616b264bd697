from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import captures


@pytest.fixture(autouse=True)
def one_capture_of_a_model() -> Iterator[None]:
    """What ranks make of a capture is tested here, and captures elsewhere."""
    with captures.shared():
        yield
