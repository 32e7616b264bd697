"""What a slice costs: read off what was measured, alone and behind other tokens."""

from __future__ import annotations

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.extras.token_slices.prices import SAVED, SlicePrices
from planner.ir.plan import AxisPart
from tests.planner.causal import TOKENS, WIDTH, attention_s, profile


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (4, 8), (8, 16), (12, 14), (6, 10)])
@pytest.mark.parametrize("samples", [1, 2])
def test_attention_behind_other_tokens_costs_what_fits_the_measurements(start: int, stop: int, samples: int) -> None:
    made = profile()
    (kind,) = made.measurements
    table = CostModel(made).beside(SlicePrices).table(kind, AxisPart(samples, start, stop))
    at = [layer.name for layer in made.graph.layers].index("a0")
    own = attention_s(samples, stop - start, 0)
    rise = attention_s(samples, stop - start, start) - own
    alone = CostModel(made).beside(SlicePrices).table(kind, AxisPart(samples, 0, stop - start)).costs[0, at]
    assert table.costs[0, at] - alone == pytest.approx(rise, rel=1e-6, abs=1e-12)
    if stop - start in (2, 4, 8):
        assert alone == pytest.approx(own)


def test_without_such_measurements_a_slice_takes_as_long_as_it_reads_pairs() -> None:
    made = profile(behind=False)
    (kind,) = made.measurements
    prices = CostModel(made).beside(SlicePrices)
    at = [layer.name for layer in made.graph.layers].index("a0")
    first, later = (prices.table(kind, AxisPart(1, start, start + 4)).costs[0, at] for start in (0, 8))
    assert later == pytest.approx(first * (1 + 2 * 8 / 4))


def test_layers_without_attention_add_up_to_the_whole_over_any_slices() -> None:
    made = profile()
    (kind,) = made.measurements
    cost_model = CostModel(made)
    plain = [at for at, layer in enumerate(made.graph.layers) if layer.kind != "attention"]
    parts = [
        cost_model.beside(SlicePrices).table(kind, AxisPart(2, *ends)).costs[:, plain]
        for ends in ((0, 5), (5, 9), (9, 16))
    ]
    whole = np.diff(cost_model.tables.at(kind, 2).forward_s)[plain]
    assert np.sum(parts, axis=0)[0] == pytest.approx(whole)


def test_what_a_slice_reads_of_others_is_kept_and_counted_in_bytes() -> None:
    made = profile()
    (kind,) = made.measurements
    prices = CostModel(made).beside(SlicePrices)
    at = [layer.name for layer in made.graph.layers].index("a0")
    received = [prices.table(kind, AxisPart(2, a, b)).received[at] for a, b in ((0, 8), (8, 16), (0, TOKENS))]
    keys_and_values = 2 * 2 * WIDTH * 4  # of both samples, a token
    assert received == [8 * keys_and_values, 16 * keys_and_values, 0]
    assert prices.table(kind, AxisPart(2, 8, 16)).costs[SAVED + 1, at] == 8 * keys_and_values
