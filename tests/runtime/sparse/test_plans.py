"""Sparse networks under plans of one to five ranks compute what one device computes; in float64.

Stages share out the sites of a micro-batch, each by its own shares, or have it all; clouds are of uneven sizes, and may
be empty.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.schedule import Pipeline, Schedule
from planner.schedules import names, positions, schedule, traits
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.numerics.single_device import serial_step
from runtime.pipeline.executor import Executor
from runtime.sparse.share import SiteShare
from tests.runtime.engines import Network, on_engines, trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, sgd, split_backward, train_serially

torch.set_num_threads(1)
OWN = ("unet", "residual", "mean_pooled", "max_pooled", "averaged", "per_sample", "generated", "above")
REFERENCE = {
    "minkunet_tiny": ("profiler.models.minkunet", (4, 40, 4)),
    "sparse_resnet_tiny": ("profiler.models.sparse_resnet", (4, 40, 4)),
    "sparse_vgg16_tiny": ("profiler.models.sparse_vgg", (4, 40, 1)),
}
LAYOUTS = {
    "one rank": ([], [(0,)], [(1,)]),
    "one rank, then one": ([0.3], [(0,), (1,)], [(1,), (1,)]),
    "three stages": ([0.15, 0.35], [(0,), (1,), (2,)], [(1,), (1,), (1,)]),
    "two ranks": ([], [(0, 1)], [(1, 1)]),
    "three ranks": ([], [(2, 0, 1)], [(1, 3, 2)]),
    "four ranks": ([], [(0, 1, 2, 3)], [(1, 1, 1, 1)]),
    "two ranks, then one": ([0.3], [(0, 1), (2,)], [(2, 1), (1,)]),
    "one rank, then two": ([0.2], [(0,), (1, 2)], [(1,), (1, 3)]),
    "two ranks, then three": ([0.3], [(0, 1), (2, 3, 4)], [(1, 1), (2, 1, 1)]),
    "three, one and two ranks": ([0.15, 0.35], [(0, 1, 2), (3,), (4, 5)], [(1, 2, 1), (1,), (1, 1)]),
}
SHARED = ("three ranks", "one rank, then two", "two ranks, then three")
Tensors = tuple[Tensor, ...]


@cache
def network(name: str) -> Network:
    module, shape = REFERENCE.get(name, ("tests.runtime.sparse.networks", ()))
    model = load_model(ModelSource(f"{module}:{name}", {}, shape, "float64"))
    return model, capture(model)


@cache
def serial(name: str, micro_batches: tuple[int, ...], steps: int = 2) -> Trained:
    return train_serially(network(name)[0], micro_batches, steps)


def decision_of(name: str, layout: str, micro_batches: tuple[int, ...], how: object = "1f1b") -> Decision:
    cuts, ranks, shares = LAYOUTS[layout]
    return decide(network(name)[1].graph, cuts, micro_batches, ranks, shares, how)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OWN)
def test_every_kind_of_layer_under_every_layout_computes_what_one_device_computes(name: str, layout: str) -> None:
    micro_batches = (4,) if len(layout) % 2 else (1, 3)
    assert_equal(
        trained(network(name), decision_of(name, layout, micro_batches)), serial(name, micro_batches), tolerance=1e-11
    )


@pytest.mark.parametrize("layout", ["three stages", "two ranks", "two ranks, then three"])
@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_networks_compute_what_one_device_computes(name: str, layout: str) -> None:
    micro_batches = (4,) if name == "sparse_vgg16_tiny" else (3, 1)  # its last sites are few
    found = trained(network(name), decision_of(name, layout, micro_batches), 1)
    assert_equal(found, serial(name, micro_batches, 1), tolerance=1e-11)


def test_a_loss_of_every_level_is_one_devices_where_no_stage_shares_out_sites() -> None:
    found = trained(network("levels"), decision_of("levels", "three stages", (2, 2)))
    assert_equal(found, serial("levels", (2, 2)), tolerance=1e-11)
    with pytest.raises(UnsupportedModelError, match="stage 0 cannot share out sites: a term of its loss") as caught:
        trained(network("levels"), decision_of("levels", "two ranks", (2, 2)))
    assert "one rank" in caught.value.remedies[0]


BACKBONES = {"sparse_resunet42": {"width": "0.125"}, "sparse_resnet21d": {"width": "0.25", "side": "32"}}


@pytest.mark.exhaustive("some 200 layers each; `levels` and `above` are their small siblings")
@pytest.mark.parametrize("name", BACKBONES)
def test_torchsparses_backbones_compute_what_one_device_computes(name: str) -> None:
    source = ModelSource(f"profiler.models.sparse_backbones:{name}", BACKBONES[name], (4, 150, 4), "float64")
    model = load_model(source)
    captured = capture(model)
    cuts, ranks, shares = LAYOUTS["one rank, then two"]
    found = trained((model, captured), decide(captured.graph, cuts, (2, 2), ranks, shares, "1f1b"))
    assert_equal(found, train_serially(model, (2, 2), 2), tolerance=1e-11)


@pytest.mark.parametrize("micro_batches", [(1, 1, 2), (3, 2), (1,)])
@pytest.mark.parametrize("layout", ["four ranks", "two ranks, then three"])
@pytest.mark.parametrize("name", ["unet", "max_pooled"])
def test_micro_batches_may_have_fewer_samples_than_a_stage_has_ranks(
    name: str, layout: str, micro_batches: tuple[int, ...]
) -> None:
    assert_equal(trained(network(name), decision_of(name, layout, micro_batches)), serial(name, micro_batches))


def serially(model: LoadedModel, batches: Sequence[tuple[Tensors, Tensors]]) -> Trained:
    """One device, on batches of two micro-batches of two samples."""
    twin = copy.deepcopy(model)
    optimizer = sgd(twin.module.parameters())
    losses = [serial_step(twin.loss, optimizer, *batch, (2, 2)) for batch in batches]
    named = dict(twin.module.named_parameters())
    gradients = {key: torch.zeros_like(each) if each.grad is None else each.grad for key, each in named.items()}
    return Trained(losses, gradients, twin.module.state_dict())


def emptied(batch: tuple[Tensors, Tensors], samples: Sequence[int]) -> tuple[Tensors, Tensors]:
    """``batch``, in which some clouds have no points."""
    (coordinates, features, counts), targets = batch
    counts = counts.clone()
    counts[list(samples)] = 0
    return (coordinates, features, counts), targets


@pytest.mark.parametrize("samples", [(1,), (0, 3), (2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("layout", ["one rank", "two ranks, then three"])
@pytest.mark.parametrize("name", ["unet", "max_pooled", "per_sample"])
def test_clouds_without_points_count_as_on_one_device(name: str, layout: str, samples: tuple[int, ...]) -> None:
    """Some of a micro-batch, all of one, or all there are."""
    model, _ = network(name)
    batches = [emptied(batch_of(model, 4, step), samples) for step in range(2)]
    expected = serially(model, batches)
    found = trained_on(
        network(name),
        decision_of(name, layout, (2, 2)),
        lambda engine: [engine.step(*batch).loss for batch in batches],
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("layout", SHARED)
@pytest.mark.parametrize("name", ["unet", "max_pooled"])
def test_recomputed_stages_compute_the_same(name: str, layout: str) -> None:
    decision = decision_of(name, layout, (3, 1))
    decision = replace(decision, stages=tuple(replace(stage, recompute=True) for stage in decision.stages))
    assert_equal(trained(network(name), decision), serial(name, (3, 1)))


@pytest.mark.parametrize("layout", SHARED)
@pytest.mark.parametrize("name", ["unet", "per_sample"])
def test_backward_may_come_in_two_halves(name: str, layout: str) -> None:
    assert_equal(trained(network(name), decision_of(name, layout, (3, 1), split_backward)), serial(name, (3, 1)))


SYNCHRONOUS = tuple(name for name in names() if traits(name).trains and traits(name).synchronous)


def scheduled(name: str, kind: str, micro_batches: tuple[int, ...]) -> Decision:
    """Two groups of ranks, one of two and one of one; two stages on each where the schedule allows it."""
    groups = ((0, 1), (2,))
    shares = ((1, 2), (1,))
    where = positions(name, 2, 1 if traits(name).stages_per_position == 1 else 2)

    def order(pipeline: Pipeline) -> Schedule:
        return schedule(name)(replace(pipeline, positions=where))

    cuts = [cut / len(where) for cut in range(1, len(where))]
    ranks = [groups[position] for position in where]
    return decide(network(kind)[1].graph, cuts, micro_batches, ranks, [shares[position] for position in where], order)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_every_schedule_computes_what_one_device_computes(name: str) -> None:
    decision = scheduled(name, "unet", (2, 1, 1))
    assert_equal(trained(network("unet"), decision), serial("unet", (2, 1, 1)))


@pytest.mark.parametrize("layout", ["three stages", "three ranks", "two ranks, then three"])
@pytest.mark.parametrize("name", ["max_pooled", "unet"])
def test_evaluation_gives_the_loss_and_outputs_of_one_device(name: str, layout: str) -> None:
    model, _ = network(name)
    inputs, targets = batch_of(model, 4, 1)
    decision = decision_of(name, layout, (3, 1))
    found = on_engines(network(name), decision, lambda engine: engine.evaluate(inputs, targets))
    twin = copy.deepcopy(model)
    twin.module.eval()
    parts = [([t[a:b] for t in inputs], [t[a:b] for t in targets], (b - a) / 4) for a, b in ((0, 3), (3, 4))]
    expected = sum(weight * float(twin.loss(tuple(some), tuple(aims)).detach()) for some, aims, weight in parts)
    (loss,) = {each.loss for each in found if each.loss is not None}
    assert loss == pytest.approx(expected, rel=1e-12)
    judging = decision.stages[decision.layers["last.add" if name == "unet" else "head.2"].stage].ranks
    rows = []
    for m, (some, aims, _) in enumerate(parts):
        made = twin.module(*twin.clouds.prepared(tuple(some), tuple(aims))[0])
        whole = made if isinstance(made, Tensor) else made.feats
        of_ranks = [next(iter(found[rank].outputs[m].values()))[1] for rank in judging]
        rows.append((torch.cat(of_ranks), whole.detach(), isinstance(made, Tensor)))
    for here, there, in_order in rows:
        assert here.shape == there.shape
        if not in_order:  # sites are in the order of their blocks
            here, there = (each[each[:, 0].argsort()] for each in (here, there))
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-13)


def test_a_loss_that_is_no_mean_over_samples_is_refused_on_a_stage_of_several_ranks() -> None:
    decision = decision_of("site_mean", "two ranks", (4,))
    with pytest.raises(UnsupportedModelError, match="stage 0 cannot share out sites: layer loss needs"):
        trained(network("site_mean"), decision, 1)
    assert_equal(trained(network("site_mean"), decision_of("site_mean", "one rank", (4,))), serial("site_mean", (4,)))


def test_batches_of_other_sizes_follow_each_other() -> None:
    """Nothing of one batch's maps is left for the next; the padding may differ as well."""
    model, _ = network("unet")
    first = batch_of(model, 4, 0)
    second = emptied(batch_of(model, 4, 1), (3,))
    (coordinates, features, counts), targets = second
    points = int(counts.max())
    second = (coordinates[:, :points], features[:, :points], counts), tuple(t[:, :points] for t in targets)
    batches = [first, second, first]
    expected = serially(model, batches)
    found = trained_on(
        network("unet"),
        decision_of("unet", "two ranks, then three", (2, 2)),
        lambda engine: [engine.step(*batch).loss for batch in batches],
    )
    assert_equal(found, expected)


def test_what_a_step_made_of_its_clouds_goes_with_it() -> None:
    """Not only when Python looks for cycles: maps are large, and every batch has its own."""
    model, _ = network("unet")
    batches = [batch_of(model, 4, 0), emptied(batch_of(model, 4, 1), (3,)), batch_of(model, 4, 2)]
    decision = decision_of("unet", "two ranks, then three", (2, 2))

    def left_by(count: int) -> int:
        gc.collect()
        gc.disable()
        try:
            on_engines(
                network("unet"), decision, lambda engine: [engine.step(*batch).loss for batch in batches[:count]]
            )
            return sum(type(each) in (Executor, SiteShare) for each in gc.get_objects())
        finally:
            gc.enable()

    assert left_by(3) == left_by(1)  # those of the last step


@pytest.mark.parametrize("name", ["unet", "residual", "max_pooled", "per_sample"])
def test_shared_sites_under_autocast_compute_what_one_rank_computes(name: str) -> None:
    model = load_model(ModelSource(f"tests.runtime.sparse.networks:{name}", {}, (), "float32", autocast="bfloat16"))
    given = model, capture(model)
    graph = given[1].graph
    micro_batches = (3, 1)
    alone = trained(given, decide(graph, [], micro_batches), steps=1)
    shared = trained(given, decide(graph, [], micro_batches, [(0, 1, 2)], [(1, 1, 1)]), steps=1)
    assert shared.losses == pytest.approx(alone.losses, rel=0.02)
    for key, gradient in alone.gradients.items():
        assert shared.gradients[key].dtype == gradient.dtype
        assert (shared.gradients[key] - gradient).norm() <= 0.1 * gradient.norm() + 1e-3, key
