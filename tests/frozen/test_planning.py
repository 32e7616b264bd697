"""The planner decides, predicts and refuses as its frozen files say."""

from __future__ import annotations

import json

import pytest

from tests.frozen.files import differences, read
from tests.frozen.planning import PROBLEMS, frozen


@pytest.mark.cases(30)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_planner_says_what_it_said(name: str) -> None:
    now = json.loads(json.dumps(frozen(name)))
    lines = [*differences(read("planning", name), now)]
    assert not lines, "\n".join([*lines, "if this is right: python -m tests.frozen planning --why TEXT"])
