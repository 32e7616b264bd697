"""Networks are captured, and measurements are asked for and put together, as the frozen files say."""

from __future__ import annotations

import json

import pytest

from tests.frozen.files import differences, read
from tests.frozen.profiling import values

VALUES = values()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", VALUES)
def test_the_profiler_makes_of_it_what_it_made(name: str) -> None:
    now = json.loads(json.dumps(VALUES[name]()))
    lines = [*differences(read("profiling", name), now)]
    assert not lines, "\n".join([*lines, "if this is right: python -m tests.frozen profiling --why TEXT"])
