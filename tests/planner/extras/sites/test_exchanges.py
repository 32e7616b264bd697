"""What ranks exchange that share sites: beside loops over layers, and what of it is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.extras.sites.exchanges import SiteExchanges, halo_rows
from planner.ir.cluster import GRADIENT_SUMS, NORMALISATION, PARTIAL_SUMS, SITES, WITHIN_HOST, Collective
from planner.ir.graph import BYTES_PER_ELEMENT, Layer
from planner.ir.profile import Profile, SiteHalo
from planner.ir.schedule import Op
from tests.planner.costs.plain_prices import message_s
from tests.planner.costs.stages.test_coverage import asked
from tests.planner.factories import chain_decision
from tests.planner.sparse_networks import classifier, sparse_profile

GRAPH = classifier(samples=4, sites=1000)
PROFILE = sparse_profile(GRAPH, (1.0,) * 4, halo_rows=100)
CALLS = {SITES: 1.0, PARTIAL_SUMS: 16.0}
"""Seconds that each rank computes around an exchange, of any size."""


def site_exchange_s(profile: Profile, layer: Layer, group: tuple[int, ...], op: Op, samples: int) -> float:
    """What a layer exchanges in a forward or backward (for inputs), without what is computed around it."""
    x = profile.graph.values()[layer.inputs[0]]
    network = CostModel(profile).network
    if layer.kind in ("segment", "segment_expand"):
        spec = layer.outputs[0]
        return network.all_reduce_s(group, samples * spec.shape[-1] * BYTES_PER_ELEMENT[spec.dtype])
    if layer.kind not in ("sparse_conv", "sparse_pool"):
        return 0.0
    if op is not Op.FORWARD and layer.inputs[0] in profile.graph.inputs:
        return 0.0  # features have no gradient
    cluster = profile.cluster
    others = len(group) - 1
    size = _rows(profile, layer, x.shape[0], len(group), samples) * x.shape[-1] * BYTES_PER_ELEMENT[x.dtype] / others
    if size <= 0:
        return 0.0
    between = cluster.group_link_class(group)
    links = [cluster.link(a, b) for a in group for b in group if a != b and cluster.link_class(a, b) == between]
    each = max(message_s(link, size) for link in links)
    return others * each if all(link.duplex for link in links) else 2 * others * each


def _rows(profile: Profile, layer: Layer, rows: int, parts: int, samples: int) -> float:
    points = sorted((h.parts / h.samples, max(1e-9, h.rows)) for h in profile.site_halos if h.layer == layer.name)
    if not points:
        total = rows * samples / profile.graph.samples
        return float(min(total * (1 - 1 / parts), 6 * (total / parts) ** (2 / 3)))
    cut = parts / samples
    if cut <= points[0][0]:
        found = points[0][1]
    elif cut > points[-1][0]:
        found = points[-1][1] * (points[-1][0] / cut) ** (2 / 3)
    else:
        (a, low), (b, high) = next(pair for pair in pairwise(points) if cut <= pair[1][0])
        found = low * (high / low) ** (math.log(cut / a) / math.log(b / a))
    return found if found >= 0.5 else 0.0


def known(calls: Mapping[str, float]) -> Profile:
    more = tuple(Collective(name, 1, WITHIN_HOST, ((64, s), (1 << 20, s))) for name, s in calls.items())
    return replace(PROFILE, cluster=replace(PROFILE.cluster, collectives=(*PROFILE.cluster.collectives, *more)))


MEASURED: Mapping[str, tuple[SiteHalo, ...]] = {
    "nothing": (),
    "two sizes": (*PROFILE.site_halos, *(SiteHalo(halo.layer, 3, 1, 70) for halo in PROFILE.site_halos)),
    "whole samples": (*PROFILE.site_halos, *(SiteHalo(halo.layer, 2, 4, 0) for halo in PROFILE.site_halos)),
}


@pytest.mark.cases(12)
@pytest.mark.parametrize("measured", MEASURED)
@pytest.mark.parametrize(
    ("ranks", "samples"), [((0, 1), 1), ((0, 1), 4), ((0, 1, 2), 1), ((0, 1, 2, 3), 4), ((1, 3), 3), ((0,), 4)]
)
@pytest.mark.parametrize("duplex", [True, False])
def test_layer_by_layer_it_is_the_same(ranks: tuple[int, ...], samples: int, measured: str, duplex: bool) -> None:
    """With what each rank computes around rows and sums, where anything is exchanged at all."""
    links = {name: replace(link, duplex=duplex) for name, link in PROFILE.cluster.links.items()}
    plain, around = (
        replace(each, cluster=replace(each.cluster, links=links), site_halos=MEASURED[measured])
        for each in (PROFILE, known(CALLS))
    )
    found, with_calls = (np.array(SiteExchanges(each).seconds(ranks, samples)) for each in (plain, around))
    for number, op in enumerate((Op.FORWARD, Op.BACKWARD)):
        for index, layer in enumerate(GRAPH.layers):
            expected = site_exchange_s(plain, layer, ranks, op, samples) if len(ranks) > 1 else 0.0
            assert found[number, index] == pytest.approx(expected, rel=1e-12)
            call_s = CALLS[PARTIAL_SUMS if layer.kind.startswith("segment") else SITES] if expected else 0.0
            assert with_calls[number, index] - found[number, index] == pytest.approx(call_s)


def test_halos_are_read_by_parts_a_sample_and_are_surfaces_of_cubes_where_none_was_measured() -> None:
    measured = (SiteHalo("a", 2, 1, 100), SiteHalo("a", 8, 1, 50))
    assert halo_rows(measured, GRAPH, 4000, 4, 2) == pytest.approx(100)
    assert halo_rows(measured, GRAPH, 4000, 4, 1) == pytest.approx((100 * 50) ** 0.5)
    assert halo_rows(measured, GRAPH, 4000, 64, 1) == pytest.approx(50 / 4)  # 8 times finer: a quarter of the surface
    assert halo_rows((), GRAPH, 4000, 8, 8) == pytest.approx(6 * 100)


def test_a_dense_network_exchanges_nothing_more() -> None:
    cost_model = CostModel(chain_profile(3))
    pairs = zip(cost_model.exchanges_s((0, 1), 4), cost_model.norms_s((0, 1)), strict=True)
    assert all(exchanged is of_norms for exchanged, of_norms in pairs)


def test_what_is_not_measured_of_it_is_asked_for_where_ranks_share_sites() -> None:
    clouds = sparse_profile(classifier(samples=4), (1.0, 1.0))
    shared = chain_decision(clouds, (), (4,), ((0, 1),), ((1, 1),))
    assert asked(clouds, shared) == (NORMALISATION, SITES, PARTIAL_SUMS, GRADIENT_SUMS)
    alone = chain_decision(clouds, (3,), (4,), ((0,), (1,)), ((1,), (1,)))
    assert asked(clouds, alone) == ()
