"""Layers over shared sites are one device's, whoever owns what, forward and backward; no row moves that need not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_ops.sparse.geometry import BuiltGeometry, MapSpec, RouteStep
from runtime.sparse.halo import SampleSums, shared_conv, with_halo
from runtime.spatial.exchange import PeerGroup
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks
from tests.runtime.sparse.shared import OWNERSHIPS, Sharing, close, cloud, halo_rows, one_device, ownership

torch.set_num_threads(1)
_OPS = torch.ops.halopipe
_HALF = RouteStep("strided", (2, 2, 2), (2, 2, 2))
_THIRD = RouteStep("strided", (3, 3, 3), (2, 2, 2))
_FLAT = RouteStep("strided", (3, 3, 3), (1, 2, 2))
_MORE = RouteStep("generated", (3, 3, 3), (2, 2, 2))
MAPS = {
    "submanifold": (MapSpec((), (), (3, 3, 3)), False),
    "submanifold of 5": (MapSpec((), (), (5, 5, 5)), False),
    "dilated": (MapSpec((), (), (3, 3, 3), dilation=(2, 2, 2)), False),
    "along x": (MapSpec((), (), (3, 1, 1)), False),
    "even": (MapSpec((), (), (2, 2, 2)), False),
    "strided 2/2": (MapSpec((), (_HALF,), (2, 2, 2), (2, 2, 2)), False),
    "strided 3/2": (MapSpec((), (_THIRD,), (3, 3, 3), (2, 2, 2)), False),
    "strided 3/1x2x2": (MapSpec((), (_FLAT,), (3, 3, 3), (1, 2, 2)), False),
    "coarse submanifold": (MapSpec((_THIRD,), (_THIRD,), (3, 3, 3)), False),
    "inverse 2/2": (MapSpec((), (_HALF,), (2, 2, 2), (2, 2, 2)), True),
    "inverse 3/2": (MapSpec((), (_THIRD,), (3, 3, 3), (2, 2, 2)), True),
    "transposed 3/2": (MapSpec((_HALF,), (), (3, 3, 3), (2, 2, 2), transposed=True), False),
    "generative": (MapSpec((), (_MORE,), (3, 3, 3), (2, 2, 2), transposed=True), False),
}
RANKS = (2, 3, 4)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def case(name: str, kind: str, num_ranks: int, seed: int = 0) -> tuple[BuiltGeometry, Sharing, MapSpec, bool]:
    geometry = cloud(seed)
    spec, inverse = MAPS[name]
    return geometry, Sharing(geometry, ownership(kind, geometry, num_ranks, seed), num_ranks), spec, inverse


def agree(
    target: object, sharing: Sharing, spec: MapSpec, inverse: bool, channels: int = 3, weight: Tensor | None = None
) -> int:
    """A layer of a map is one device's; bytes that its forward sent."""
    found = sharing.geometry.map(spec)
    found, source, to = (found.inverse(), spec.target, spec.source) if inverse else (found, spec.source, spec.target)
    x = drawn(found.num_inputs, channels, seed=1)
    rest = (found.neighbours, found.reverse)
    dy = drawn(found.num_outputs, channels if weight is None else weight.shape[2], seed=2)
    tensors = {"x": (x, source)} | ({} if weight is None else {"weight": (weight, "whole")})
    parts = sharing.run(target, tensors, rest, (dy, to), spec=spec, inverse=inverse)
    out, gradients = one_device(target, {name: each for name, (each, _) in tensors.items()}, rest, dy)
    close(sharing.together([part.out for part in parts], to), out)
    for name, (_, where) in tensors.items():
        close(sharing.together([part.gradients[name] for part in parts], where), gradients[name])
    assert sum(part.forward_bytes for part in parts) == sum(part.backward_bytes for part in parts)
    return sum(part.forward_bytes for part in parts)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("kind", OWNERSHIPS)
@pytest.mark.parametrize("name", MAPS)
def test_a_convolution_is_one_devices(name: str, kind: str, num_ranks: int) -> None:
    """In two calls where a rank's rows are more than the weights (of one channel), else in one; ranks may differ."""
    _, sharing, spec, inverse = case(name, kind, num_ranks, seed=num_ranks)
    offsets = spec.kernel[0] * spec.kernel[1] * spec.kernel[2]
    channels = 3 if num_ranks == 3 else 1
    weight = drawn(offsets, channels, 4, seed=3)
    agree(_OPS.sparse_conv.default, sharing, spec, inverse, channels, weight)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("kind", OWNERSHIPS)
@pytest.mark.parametrize("name", ["submanifold", "strided 2/2", "strided 3/2", "strided 3/1x2x2"])
@pytest.mark.parametrize("pool", ["sparse_max_pool", "sparse_sum_pool"])
def test_pooling_is_one_devices(pool: str, name: str, kind: str, num_ranks: int) -> None:
    _, sharing, spec, inverse = case(name, kind, num_ranks, seed=num_ranks)
    agree(getattr(_OPS, pool).default, sharing, spec, inverse)


@pytest.mark.parametrize("kind", OWNERSHIPS)
@pytest.mark.parametrize("name", MAPS)
def test_just_the_rows_that_others_read_are_sent(name: str, kind: str) -> None:
    geometry, sharing, spec, inverse = case(name, kind, 3)
    offsets = spec.kernel[0] * spec.kernel[1] * spec.kernel[2]
    found = geometry.map(spec)
    owners = sharing.owners(spec.source), sharing.owners(spec.target)
    needed = halo_rows(found.inverse(), *reversed(owners)) if inverse else halo_rows(found, *owners)
    for weight in (None, drawn(offsets, 3, 4)):
        target = _OPS.sparse_sum_pool.default if weight is None else _OPS.sparse_conv.default
        assert agree(target, sharing, spec, inverse, weight=weight) == needed * 3 * 8


@pytest.mark.parametrize("seed", range(12))
def test_rows_of_others_and_their_gradients_are_adjoint(seed: int) -> None:
    """<y, E x> = <E* y, x>, where every rank's rows and halo are one vector."""
    kind = OWNERSHIPS[seed % 6]
    num_ranks = RANKS[seed % 3]
    _, sharing, spec, inverse = case(list(MAPS)[seed], kind, num_ranks, seed)
    num_sites = sharing.geometry.num_sites(spec.target if inverse else spec.source)
    x = drawn(num_sites, 2, seed=seed)

    def run(end: InProcessTransport) -> tuple[float, float]:
        local = sharing.local(spec, end.rank, inverse)
        own = sharing.part(x, spec.target if inverse else spec.source, end.rank).requires_grad_()
        rows = with_halo(own, local, PeerGroup(end, tuple(range(num_ranks))))
        assert len(rows) == len(own) + local.halo.num_received
        y = drawn(*rows.shape, seed=100 + end.rank)
        rows.backward(y)
        return float((rows.detach() * y).sum()), float((own.grad * own.detach()).sum())

    sums = on_ranks(num_ranks, run)
    there, here = (sum(each) for each in zip(*sums, strict=True))
    assert here == pytest.approx(there, rel=1e-13, abs=1e-13)


SHARES = {2: [(2, 2), (0, 4), (3, 1)], 3: [(1, 1, 2), (2, 0, 2)], 4: [(1, 1, 1, 1), (0, 3, 0, 1)]}
SPREADS = [(num_ranks, shares) for num_ranks, each in SHARES.items() for shares in each]


@pytest.mark.parametrize(("num_ranks", "shares"), SPREADS)
@pytest.mark.parametrize("kind", OWNERSHIPS)
@pytest.mark.parametrize("name", ["segment_sum", "segment_max"])
def test_reductions_over_the_sites_of_a_sample_are_one_devices(
    name: str, kind: str, num_ranks: int, shares: tuple[int, ...]
) -> None:
    geometry = cloud(num_ranks)
    sharing = Sharing(geometry, ownership(kind, geometry, num_ranks, 1), num_ranks, shares)
    segments = geometry.segments(())
    x = drawn(geometry.num_sites(()), 3)
    dy = drawn(4, 3, seed=1)
    rest = (segments.starts, segments.lengths)
    target = getattr(_OPS, name).default
    parts = sharing.run(target, {"x": (x, ())}, rest, (dy, "samples"))
    out, gradients = one_device(target, {"x": x}, rest, dy)
    close(sharing.together([part.out for part in parts], "samples"), out)
    close(sharing.together([part.gradients["x"] for part in parts], ()), gradients["x"])


@pytest.mark.parametrize(("num_ranks", "shares"), SPREADS)
@pytest.mark.parametrize("kind", OWNERSHIPS)
def test_samples_spread_over_their_sites_are_one_devices(kind: str, num_ranks: int, shares: tuple[int, ...]) -> None:
    geometry = cloud(num_ranks)
    sharing = Sharing(geometry, ownership(kind, geometry, num_ranks, 1), num_ranks, shares)
    segments = geometry.segments(())
    num_sites = geometry.num_sites(())
    y = drawn(4, 3)
    dy = drawn(num_sites, 3, seed=1)
    rest = (segments.starts, segments.lengths, num_sites)
    target = _OPS.segment_expand.default
    parts = sharing.run(target, {"y": (y, "samples")}, rest, (dy, ()))
    out, gradients = one_device(target, {"y": y}, rest, dy)
    close(sharing.together([part.out for part in parts], ()), out)
    close(sharing.together([part.gradients["y"] for part in parts], "samples"), gradients["y"])


@pytest.mark.parametrize(("num_ranks", "shares"), SPREADS)
def test_sums_of_samples_and_their_spread_are_adjoint(num_ranks: int, shares: tuple[int, ...]) -> None:
    parts = drawn(num_ranks, 4, 2)
    own = drawn(4, 2, seed=1)
    cuts = own.split(list(shares))

    def run(end: InProcessTransport) -> tuple[float, float, bool]:
        sums = SampleSums(shares, PeerGroup(end, tuple(range(num_ranks))))
        forward = float((sums.sum(parts[end.rank]) * cuts[end.rank]).sum())
        whole = sums.whole(cuts[end.rank])
        return forward, float((whole * parts[end.rank]).sum()), torch.equal(whole, own)

    there, here, same = zip(*on_ranks(num_ranks, run), strict=True)
    assert sum(there) == pytest.approx(sum(here), rel=1e-13)
    assert all(same)


def test_of_equal_values_of_several_ranks_one_gets_the_gradient() -> None:
    """As on one device, where it is the first row."""

    def run(end: InProcessTransport) -> tuple[list[float], list[float]]:
        x = torch.tensor([[1.0, float(end.rank)]], dtype=torch.float64, requires_grad=True)
        out = SampleSums((1, 0, 0), PeerGroup(end, (0, 1, 2))).largest(x)
        out.sum().backward()
        return out.flatten().tolist(), x.grad.flatten().tolist()

    assert on_ranks(3, run) == [([1.0, 2.0], [1.0, 0.0]), ([], [0.0, 0.0]), ([], [0.0, 1.0])]


def test_what_nobody_shares_is_sent_to_nobody() -> None:
    _, sharing, spec, inverse = case("submanifold", "only_last", 3)
    assert agree(_OPS.sparse_conv.default, sharing, spec, inverse, weight=drawn(27, 3, 4)) == 0


@pytest.mark.parametrize("name", ["submanifold", "strided 2/2", "inverse 2/2"])
def test_ranks_with_whole_samples_do_what_one_device_does_and_meet_nowhere(name: str) -> None:
    """To the bit, under autocast too; an exchange would raise, as there is no transport."""
    spec, inverse = MAPS[name]
    geometry = cloud(3)
    sharing = Sharing(geometry, lambda route: geometry.coordinates(route)[:, 0].long() // 2, 2)
    found = geometry.map(spec)
    found, source, target = (
        (found.inverse(), spec.target, spec.source) if inverse else (found, spec.source, spec.target)
    )
    x = drawn(found.num_inputs, 3)
    dy = drawn(found.num_outputs, 4, seed=1)
    weight = drawn(len(found.neighbours), 3, 4, seed=2)
    out, gradients = one_device(_OPS.sparse_conv.default, {"x": x}, (weight, found.neighbours, found.reverse), dy)
    for position in (0, 1):
        local = sharing.local(spec, position, inverse)
        peers = PeerGroup(None, (0, 1))  # type: ignore[arg-type]
        assert local.halo.is_empty
        own = sharing.part(x, source, position).requires_grad_()
        assert with_halo(own, local, peers) is own
        y = shared_conv(own, weight, local, peers)
        y.backward(sharing.part(dy, target, position))
        assert torch.equal(y, sharing.part(out, target, position))
        assert torch.equal(own.grad, sharing.part(gradients["x"], source, position))
        with torch.autocast("cpu", torch.bfloat16):
            assert shared_conv(own.detach().float(), weight.float(), local, peers).dtype == torch.bfloat16


def test_a_layer_that_needs_no_input_gradient_sends_nothing_back() -> None:
    geometry, sharing, spec, _ = case("submanifold", "random_sites", 2)
    found = geometry.map(spec)

    def run(end: InProcessTransport) -> tuple[int, bool]:
        peers = PeerGroup(end, (0, 1))
        x = sharing.part(drawn(found.num_inputs, 2), (), end.rank)
        weight = drawn(27, 2, 2).requires_grad_()
        out = shared_conv(x, weight, sharing.local(spec, end.rank), peers)
        sent_bytes = peers.sent_bytes
        out.sum().backward()
        return peers.sent_bytes - sent_bytes, bool(weight.grad.any())

    assert on_ranks(2, run) == [(0, True), (0, True)]
