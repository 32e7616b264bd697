"""Graph networks under plans of one to five ranks compute what one device computes of the same draws; in float64.

One device is the user's module on the whole micro-batch's neighbourhood, sampled at once; ranks sample for their own.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from planner.ir.errors import StageFailedError, UnsupportedModelError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.source import load_model
from runtime.pipeline.microbatches import WholeBatch
from tests.runtime.engines import Network, on_engines, trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, train_serially

torch.set_num_threads(1)
LAYOUTS = {
    "one rank": ([], [(0,)], [(1,)]),
    "two ranks": ([], [(0, 1)], [(3, 1)]),
    "three ranks": ([], [(2, 0, 1)], [(1, 3, 2)]),
    "two stages": ([0.4], [(0,), (1,)], [(1,), (1,)]),
    "two ranks, then one": ([0.4], [(0, 1), (2,)], [(2, 1), (1,)]),
    "two ranks, then three": ([0.6], [(0, 1), (2, 3, 4)], [(1, 3), (2, 1, 1)]),
}


@cache
def network(name: str) -> Network:
    model = load_model(ModelSource(f"tests.runtime.sparse.graph_networks:{name}", {}, (), "float64"))
    return model, capture(model)


@cache
def serial(name: str, micro_batches: tuple[int, ...]) -> Trained:
    return train_serially(network(name)[0], micro_batches, 2)


def decision_of(name: str, layout: str, micro_batches: tuple[int, ...]) -> Decision:
    cuts, ranks, shares = LAYOUTS[layout]
    return decide(network(name)[1].graph, cuts, micro_batches, ranks, shares)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["sage", "gat", "plain", "weighted"])
def test_every_layout_computes_what_one_device_computes(name: str, layout: str) -> None:
    micro_batches = (8,) if layout == "two ranks" else (5, 3)
    expected = serial(name, (8,) if name == "weighted" else micro_batches)  # targets weigh by the whole batch
    assert_equal(trained(network(name), decision_of(name, layout, micro_batches)), expected, tolerance=1e-10)


def test_micro_batches_may_have_fewer_seeds_than_a_stage_has_ranks() -> None:
    found = trained(network("sage"), decision_of("sage", "three ranks", (1, 2)))
    assert_equal(found, serial("sage", (1, 2)), tolerance=1e-10)


@pytest.mark.parametrize(
    ("name", "layer", "remedy"),
    [
        ("normalised", "between mixes nodes", "LayerNorm"),
        ("penalised", "mixes nodes", ""),
        ("dropping", "between draws", "dropout"),
    ],
)
def test_what_parts_cannot_keep_is_refused_by_name_where_ranks_share_seeds(name: str, layer: str, remedy: str) -> None:
    with pytest.raises(UnsupportedModelError, match=layer) as caught:
        trained(network(name), decision_of(name, "two ranks", (8,)))
    assert any(remedy in each for each in caught.value.remedies)


@pytest.mark.parametrize("layout", ["one rank", "two stages"])
def test_batch_norm_over_nodes_is_kept_where_a_micro_batch_is_one_ranks(layout: str) -> None:
    assert_equal(
        trained(network("normalised"), decision_of("normalised", layout, (5, 3))), serial("normalised", (5, 3))
    )
