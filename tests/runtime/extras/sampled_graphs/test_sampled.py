"""Graph networks under plans of one to five ranks compute what one device computes of the same draws; in float64.

One device is the user's module on the whole micro-batch's neighbourhood, sampled at once; ranks sample for their own.
"""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

from planner.ir.errors import StageFailedError, UnsupportedModelError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.layers.stage_rules import REPLICAS, rules_of_state
from profiler.capture.graph import capture
from profiler.source.source import load_model
from runtime.engine import Engine
from runtime.pipeline.microbatches import WholeBatch
from tests.runtime.engines import Network, evaluated, on_engines, trained, trained_on
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
    model = load_model(ModelSource(f"tests.runtime.extras.sampled_graphs.graph_networks:{name}", {}, (), "float64"))
    return model, capture(model)


@cache
def serial(name: str, micro_batches: tuple[int, ...]) -> Trained:
    return train_serially(network(name)[0], micro_batches, 2)


def decision_of(name: str, layout: str, micro_batches: tuple[int, ...]) -> Decision:
    cuts, ranks, shares = LAYOUTS[layout]
    return decide(network(name)[1].graph, cuts, micro_batches, ranks, shares)


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("name", "layout", "micro_batches"),
    [
        *(
            (name, each, (8,) if each == "two ranks" else (5, 3))
            for name in ("sage", "gat", "plain", "weighted")
            for each in LAYOUTS
        ),
        ("sage", "three ranks", (1, 2)),  # fewer seeds than ranks
        *(("normalised", each, (5, 3)) for each in ("one rank", "two stages")),  # nodes of a micro-batch on one rank
    ],
)
def test_every_layout_computes_what_one_device_computes(name: str, layout: str, micro_batches: tuple[int, ...]) -> None:
    expected = serial(name, (8,) if name == "weighted" else micro_batches)  # targets weigh by the whole batch
    assert_equal(trained(network(name), decision_of(name, layout, micro_batches)), expected, tolerance=1e-10)


@pytest.mark.exhaustive("torch_geometric takes 7 s to import; sage and gat are the same in plain torch")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["their_sage", "their_gat"])
def test_torch_geometrics_layers_compute_what_they_compute_on_one_device(name: str, layout: str) -> None:
    micro_batches = (8,) if layout == "two ranks" else (5, 3)
    found = trained(network(name), decision_of(name, layout, micro_batches))
    assert_equal(found, serial(name, micro_batches), tolerance=1e-10)


@pytest.mark.parametrize(
    ("name", "layer", "remedy"),
    [
        ("normalised", "between mixes nodes", "LayerNorm"),
        ("penalised", "mixes nodes", ""),
        ("dropping", "between draws", "dropout"),
        ("shifted", "mul mixes nodes", ""),
    ],
)
def test_what_parts_cannot_keep_is_refused_by_name_where_ranks_share_seeds(name: str, layer: str, remedy: str) -> None:
    with pytest.raises(UnsupportedModelError, match=layer) as caught:
        trained(network(name), decision_of(name, "two ranks", (8,)))
    assert any(remedy in each for each in caught.value.remedies)


def engines(work: object, layout: str = "two ranks", micro_batches: tuple[int, ...] = (8,)) -> list:
    return on_engines(network("sage"), decision_of("sage", layout, micro_batches), work)


def test_a_batch_that_was_expected_is_sampled_beside_the_step_before() -> None:
    model, _ = network("sage")
    batches = [batch_of(model, 8, step) for step in range(4)]

    def work(engine: Engine) -> tuple[list[float | None], float]:
        bound = [WholeBatch(engine.context.inputs, (*inputs, *targets), (5, 3)) for inputs, targets in batches]
        losses = []
        engine.expect(bound[0])
        for number, batch in enumerate(bound):
            if number + 1 < len(bound):
                engine.expect(bound[number + 1])
            losses.append(engine.step_on(batch).loss)
        assert not engine.preparing._expected  # each was used
        return losses, engine.preparing.clock.busy_s

    found = engines(work, "two ranks, then one", (5, 3))
    expected = trained_on(
        network("sage"),
        decision_of("sage", "two ranks, then one", (5, 3)),
        lambda engine: [engine.step(*batch).loss for batch in batches],
    )
    assert found[2][0] == expected.losses
    assert all(busy_s > 0 for _, busy_s in found)


def test_shares_are_of_edges_not_of_seeds() -> None:
    """A rank of three quarters of the speed takes that much of the edges that the seeds are expected to need."""
    model, _ = network("sage")
    sampler = model.clouds.preparation.sampler
    order = sampler.graph.degrees.argsort()
    seeds = torch.from_numpy(order[[0, 1, 2, 3, 4, -1, -2, -3]].copy())  # few edges first
    labels = torch.from_numpy(sampler.graph.labels)[seeds]

    def work(engine: Engine) -> tuple[int, ...]:
        raw = WholeBatch(engine.context.inputs, (seeds, torch.zeros_like(seeds), labels), (8,))
        return engine.preparing.batch(raw).cuts(0, (1.0, 1.0))

    (cut, *_) = engines(work)
    edges = sampler.work(seeds.numpy())
    assert cut[1] > 4  # half of the seeds would be 4
    assert abs(edges[: cut[1]].sum() / edges.sum() - 0.5) < 0.2


def test_an_evaluation_is_one_devices() -> None:
    model, _ = network("sage")
    inputs, targets = batch_of(model, 8, 0)
    loss, rows = evaluated(network("sage"), decision_of("sage", "two ranks", (5, 3)), inputs, targets)
    assert loss == pytest.approx(model.loss(inputs, targets).item(), rel=1e-10)
    prepared, _ = model.prepared(inputs, targets)
    assert torch.allclose(rows, model.module(*prepared), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("seeds", "draws", "told"),
    [
        ([1, 2, 300, 4, 5, 6, 7, 8], [0] * 8, "seed 300 is no node; the graph has 300"),
        ([1, 2, -1, 4, 5, 6, 7, 8], [0] * 8, "seed -1 is no node"),
        ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 0, 1], "draws 0 and 1 in one micro-batch"),
    ],
)
@pytest.mark.parametrize("layout", ["one rank", "two ranks"])
def test_seeds_that_cannot_be_used_end_the_step(seeds: list[int], draws: list[int], told: str, layout: str) -> None:
    batch = (torch.tensor(seeds), torch.tensor(draws)), (torch.zeros(8, dtype=torch.int64),)
    with pytest.raises(StageFailedError) as caught:
        engines(lambda engine: engine.step(*batch), layout)
    assert told in str(caught.value)


@pytest.mark.parametrize(("name", "pattern"), [("dropping", "between"), ("normalised", r"^\*$")])
def test_what_ranks_that_share_seeds_would_run_otherwise_has_a_rank_of_its_own(name: str, pattern: str) -> None:
    """Of numbers for nodes the layer that draws them; of nodes of several seeds that are mixed every stage."""
    rules = rules_of_state(network(name)[1].graph)
    assert {rule.what for rule in rules} == {REPLICAS}
    assert any(re.search(pattern, rule.pattern) for rule in rules)
