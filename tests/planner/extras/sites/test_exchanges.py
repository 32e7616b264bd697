from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.extras.sites.exchanges import SiteExchanges, halo_rows
from planner.ir.cluster import GRADIENT_SUMS, NORMALISATION, SITES, WITHIN_HOST, Collective
from planner.ir.cluster import PARTIAL_SUMS as SUMS
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, TensorSpec
from planner.ir.profile import Profile, SiteHalo
from planner.ir.schedule import Op
from tests.planner.costs.plain_prices import message_s
from tests.planner.costs.stages.test_coverage import asked
from tests.planner.factories import chain_decision
from tests.planner.sparse_networks import classifier, sparse_profile

GRAPH = classifier(samples=4, sites=1000)
PROFILE = sparse_profile(GRAPH, (1.0,) * 4, halo_rows=100)
FIRST = GRAPH.layers[0]


def site_exchange_s(
    profile: Profile,
    layer: Layer,
    x: TensorSpec,
    group: tuple[int, ...],
    op: Op,
    samples: int,
    sum_s: Callable[[int], float],
) -> float:
    """What a layer exchanges in a forward or backward (for inputs), written a second time, by loops.

    Args:
        x: the layer's first input.
        sum_s: seconds of a sum of so many bytes over the group.
    """
    if layer.kind in ("segment", "segment_expand"):
        spec = layer.outputs[0]
        return sum_s(samples * spec.shape[-1] * BYTES_PER_ELEMENT[spec.dtype])
    if layer.kind not in ("sparse_conv", "sparse_pool"):
        return 0.0
    if op is not Op.FORWARD and layer.inputs[0] in profile.graph.inputs:
        return 0.0
    cluster, others = profile.cluster, len(group) - 1
    size = _rows(profile, layer, x, len(group), samples) * x.shape[-1] * BYTES_PER_ELEMENT[x.dtype] / others
    if size <= 0:
        return 0.0
    between = cluster.group_link_class(group)
    links = [cluster.link(a, b) for a in group for b in group if a != b and cluster.link_class(a, b) == between]
    each = max(message_s(link, size) for link in links)
    return others * each if all(link.duplex for link in links) else 2 * others * each


def _rows(profile: Profile, layer: Layer, x: TensorSpec, parts: int, samples: int) -> float:
    points = sorted((h.parts / h.samples, max(1e-9, h.rows)) for h in profile.site_halos if h.layer == layer.name)
    if not points:
        total = x.shape[0] * samples / profile.graph.samples
        return float(min(total * (1 - 1 / parts), 6 * (total / parts) ** (2 / 3)))
    cut = parts / samples
    if cut <= points[0][0]:
        return _or_none(points[0][1])
    for (a, low), (b, high) in pairwise(points):
        if cut <= b:
            return _or_none(low * (high / low) ** (math.log(cut / a) / math.log(b / a)))
    return _or_none(points[-1][1] * (points[-1][0] / cut) ** (2 / 3))


def _or_none(rows: float) -> float:
    return rows if rows >= 0.5 else 0.0


def test_what_was_measured_is_read_by_parts_a_sample() -> None:
    measured = (SiteHalo("a", 2, 1, 100), SiteHalo("a", 8, 1, 50))
    assert halo_rows(measured, GRAPH, 4000, 2, 1) == pytest.approx(100)
    assert halo_rows(measured, GRAPH, 4000, 4, 2) == pytest.approx(100)
    assert halo_rows(measured, GRAPH, 4000, 4, 1) == pytest.approx((100 * 50) ** 0.5)
    assert halo_rows(measured, GRAPH, 4000, 2, 4) == pytest.approx(100)  # whole samples: one is cut all the same
    assert halo_rows(measured, GRAPH, 4000, 64, 1) == pytest.approx(50 / 4)  # 8 times finer: a quarter of the surface


def test_ranks_with_whole_samples_exchange_no_rows_and_pay_for_none() -> None:
    assert halo_rows((SiteHalo("a", 2, 8, 0), SiteHalo("a", 2, 1, 100)), GRAPH, 4000, 2, 8) == 0.0
    whole = tuple(SiteHalo(halo.layer, 2, 4, 0) for halo in PROFILE.site_halos)
    calls = (Collective(SITES, 1, WITHIN_HOST, ((64, 1.0), (1 << 20, 1.0))),)
    cluster = replace(PROFILE.cluster, collectives=(*PROFILE.cluster.collectives, *calls))
    known = replace(PROFILE, cluster=cluster, site_halos=(*PROFILE.site_halos, *whole))
    convolutions = [index for index, layer in enumerate(GRAPH.layers) if layer.kind == "sparse_conv"]
    assert not np.array(SiteExchanges(known).seconds((0, 1), 4))[:, convolutions].any()
    assert np.array(SiteExchanges(known).seconds((0, 1), 1))[0, convolutions] == pytest.approx(
        1.0, abs=0.1
    )  # one is cut


def test_unmeasured_halos_are_surfaces_of_cubes_and_no_more_than_the_others_rows() -> None:
    assert halo_rows((), GRAPH, 4000, 8, 8) == pytest.approx(6 * 100)
    assert halo_rows((), GRAPH, 40, 2, 1) == pytest.approx(5)


def test_a_halo_travels_there_and_its_gradient_back() -> None:
    forward, backward = SiteExchanges(PROFILE).seconds((0, 1), 1)
    index = next(i for i, layer in enumerate(GRAPH.layers) if layer.kind == "sparse_conv" and i > 0)
    size = 100 * 8 * 4
    assert forward[index] == backward[index] == pytest.approx(size / 1e9)
    assert forward[0] > 0
    assert backward[0] == 0  # features have no gradient


def test_what_goes_to_samples_is_summed() -> None:
    forward, backward = SiteExchanges(PROFILE).seconds((0, 1, 2, 3), 4)
    index = next(i for i, layer in enumerate(GRAPH.layers) if layer.kind == "segment")
    assert forward[index] == backward[index] == pytest.approx(2 * 3 / 4 * 1024 / 1e9)  # no message below 1 KiB


def test_what_each_rank_computes_around_rows_and_sums_is_paid_where_there_is_an_exchange() -> None:
    calls = tuple(Collective(each, 1, WITHIN_HOST, ((64, s), (1 << 20, s))) for each, s in ((SITES, 1.0), (SUMS, 16.0)))
    known = replace(PROFILE, cluster=replace(PROFILE.cluster, collectives=(*PROFILE.cluster.collectives, *calls)))
    without, found = (np.array(SiteExchanges(each).seconds((0, 1), 4)) for each in (PROFILE, known))
    halos, sums = (
        np.array([layer.kind in kinds for layer in GRAPH.layers])
        for kinds in (("sparse_conv", "sparse_pool"), ("segment", "segment_expand"))
    )
    expected = 1.0 * halos + 16.0 * sums
    assert found[0] - without[0] == pytest.approx(expected)
    assert found[1] - without[1] == pytest.approx(expected * (np.arange(len(expected)) > 0))  # of features no gradient
    assert not np.any(SiteExchanges(known).seconds((0,), 4))


def test_one_rank_exchanges_nothing_nor_does_a_dense_network() -> None:
    assert not np.any(SiteExchanges(PROFILE).seconds((0,), 1))
    cost_model = CostModel(chain_profile(3))
    pairs = zip(cost_model.exchanges_s((0, 1), 4), cost_model.norms_s((0, 1)), strict=True)
    assert all(exchanged is of_norms for exchanged, of_norms in pairs)


def test_halos_make_a_shared_stage_slower() -> None:
    decision = chain_decision(PROFILE, micro_batches=(2, 2), ranks=((0, 1),))
    fewer = replace(PROFILE, site_halos=tuple(replace(halo, rows=1) for halo in PROFILE.site_halos))
    assert predict(PROFILE, decision)[0].step_s > predict(fewer, decision)[0].step_s


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(("ranks", "samples"), [((0, 1), 1), ((0, 1, 2), 1), ((0, 1, 2, 3), 4), ((1, 3), 3)])
@pytest.mark.parametrize("duplex", [True, False])
def test_layer_by_layer_it_is_the_same(ranks: tuple[int, ...], samples: int, measured: bool, duplex: bool) -> None:
    links = {name: replace(link, duplex=duplex) for name, link in PROFILE.cluster.links.items()}
    more = tuple(SiteHalo(halo.layer, 3, 1, 70) for halo in PROFILE.site_halos)
    halos = (*PROFILE.site_halos, *more) if measured else ()
    profile = replace(PROFILE, cluster=replace(PROFILE.cluster, links=links), site_halos=halos)
    found, values = SiteExchanges(profile).seconds(ranks, samples), GRAPH.values()
    network = CostModel(profile).network
    for number, op in enumerate((Op.FORWARD, Op.BACKWARD)):
        for index, layer in enumerate(GRAPH.layers):
            seconds = site_exchange_s(
                profile,
                layer,
                values[layer.inputs[0]],
                ranks,
                op,
                samples,
                lambda size: network.all_reduce_s(ranks, size),
            )
            assert seconds == pytest.approx(found[number][index], rel=1e-12)


def test_what_is_not_measured_of_it_is_asked_for_where_ranks_share_sites() -> None:
    clouds = sparse_profile(classifier(samples=4), (1.0, 1.0))
    shared = chain_decision(clouds, (), (4,), ((0, 1),), ((1, 1),))
    assert asked(clouds, shared) == (NORMALISATION, SITES, SUMS, GRADIENT_SUMS)
    alone = chain_decision(clouds, (3,), (4,), ((0,), (1,)), ((1,), (1,)))
    assert asked(clouds, alone) == ()
