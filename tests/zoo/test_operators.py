"""Networks of one operator each are equal to one device, under every plan of the zoo."""

from __future__ import annotations

import pytest

from cuda_ops.operator_table import OPERATORS
from tests.zoo.entries import PLANS
from tests.zoo.judging import EQUAL, judge
from tests.zoo.operators import CASES


@pytest.mark.parametrize("operator", CASES)
def test_an_operator_computes_what_it_does_on_one_device(operator: str) -> None:
    assert operator in OPERATORS
    verdicts = {verdict.plan: (verdict.outcome, verdict.text) for verdict in judge(CASES[operator])}
    assert verdicts == dict.fromkeys(PLANS, (EQUAL, ""))
