"""Rules that sum over ranks (batch normalisation, pools of all space, losses) are those of one device, however cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from planner.ir.box import whole
from planner.ir.errors import StageFailedError
from runtime.pipeline.routing import slices
from runtime.spatial.deferred import DeferredGradients
from runtime.transport import InProcessTransport
from tests.runtime.spatial.threads import Case, Cuts, Part, added_up, case, close, gradient_of, run_on_threads

MOMENTUM = 0.3
EPS = 1e-3
SHAPE = (3, 5, 7, 6)
IMAGE = "sample channel height width"
_ATEN = torch.ops.aten
AFFINE = ("weight", "bias")
RUNNING = ("running_mean", "running_var")

CUTS: dict[str, tuple[Cuts, int]] = {
    "height": ({"height": (0, 3, 7)}, 0),
    "uneven height": ({"height": (0, 1, 6, 7)}, 0),
    "an empty part of height": ({"height": (0, 4, 4, 7)}, 0),
    "samples": ({"sample": (0, 2, 3)}, 0),
    "samples, one rank without": ({"sample": (0, 3, 3)}, 0),
    "samples x height": ({"sample": (0, 1, 3), "height": (0, 5, 7)}, 0),
    "height x width": ({"height": (0, 2, 7), "width": (0, 4, 6)}, 0),
    "channels": ({"channel": (0, 2, 5)}, 0),
    "more ranks than channels": ({"channel": (0, 2, 2, 4, 5)}, 0),
    "channels x height": ({"channel": (0, 3, 5), "height": (0, 2, 7)}, 0),
    "channels x empty height": ({"channel": (0, 3, 5), "height": (0, 7, 7)}, 0),
    "replicas": ({"replica": (0, 1, 2)}, 0),
    "replicas x height": ({"replica": (0, 1, 2), "height": (0, 3, 7)}, 0),
    "height x replicas": ({"height": (0, 3, 7), "replica": (0, 1, 2)}, 0),
    "a margin": ({"height": (0, 3, 7)}, 2),
    "margins on both sides": ({"height": (0, 2, 4, 7)}, 1),
    "margins of two dims": ({"height": (0, 3, 7), "width": (0, 3, 6)}, 2),
    "margins and an empty part": ({"height": (0, 3, 3, 7)}, 1),
    "replicas with margins": ({"replica": (0, 1, 2), "height": (0, 3, 7)}, 1),
}


def layer(
    shape: tuple[int, ...] = SHAPE, dims: str = IMAGE, *, training: bool = True, keeps: bool = True, affine: bool = True
) -> Case:
    torch.manual_seed(0)
    x = 2 * torch.randn(shape, dtype=torch.float64) + 7
    weight, bias, mean, var = (torch.rand(shape[1], dtype=torch.float64) + 0.5 for _ in range(4))
    arguments = {
        "input": x,
        "weight": weight if affine else None,
        "bias": bias if affine else None,
        "running_mean": mean if keeps else None,
        "running_var": var if keeps else None,
        "training": training,
        "momentum": MOMENTUM,
        "eps": EPS,
        "cudnn_enabled": False,
    }
    one = case(torch.ops.aten.batch_norm.default, arguments, {"input": dims}, dims, *(AFFINE if affine else ()))
    assert one.layer.kind == "batch_norm"
    return one


def check_norm(one: Case, parts: list[Part]) -> None:
    shape = tuple(one.arguments["input"].shape)
    y, tensors = one.whole()
    y.backward(added_up(shape, [(part.step.done, part.dy) for part in parts]))
    for part in parts:
        assert part.reached
        close(part.result, y.detach()[slices(part.step.done, whole(shape))])
        for name in RUNNING:
            if name in tensors:
                close(part.tensors[name], tensors[name][slices(part.boxes[name], whole(tuple(tensors[name].shape)))])
    for name in ("input", *one.parameters):
        close(gradient_of(name, one, parts), tensors[name].grad)


@pytest.mark.parametrize("name", CUTS)
def test_outputs_gradients_and_running_statistics_are_those_of_one_device(name: str) -> None:
    cuts, margin = CUTS[name]
    one = layer()
    check_norm(one, run_on_threads(one, cuts, margin, by_channel=RUNNING))


@pytest.mark.parametrize("name", ["replicas x height", "channels x height", "an empty part of height", "a margin"])
@pytest.mark.parametrize("way", ["frozen", "keeps nothing", "evaluation", "without weight and bias"])
def test_other_ways_to_normalise(name: str, way: str) -> None:
    cuts, margin = CUTS[name]
    one = layer(training=way != "frozen", keeps=way != "keeps nothing", affine="without" not in way)
    if way == "evaluation":
        one = replace(one, target=_in_evaluation)
    state = () if way == "keeps nothing" else RUNNING
    check_norm(one, run_on_threads(one, cuts, margin, by_channel=state, training=way != "evaluation"))


def _in_evaluation(**arguments: Any) -> Tensor:
    """As the runtime's rule for evaluation has it, whatever the captured argument says."""
    return torch.ops.aten.batch_norm.default(**{**arguments, "training": False})


def test_ranks_that_have_the_whole_statistics_write_their_own_channels() -> None:
    one = layer()
    _, tensors = one.whole()
    for part in run_on_threads(one, {"channel": (0, 2, 5), "height": (0, 3, 7)}):
        own = slices(part.step.own[1:2], whole(SHAPE[1:2]))
        for name in RUNNING:
            close(part.tensors[name][own], tensors[name][own])
            others = [c for c in range(SHAPE[1]) if c not in range(*own[0].indices(SHAPE[1]))]
            assert torch.equal(part.tensors[name][others], one.arguments[name][others])


def test_in_one_and_in_three_dims_of_space() -> None:
    for shape, dims in (((4, 3), "sample channel"), ((2, 3, 5, 4, 3), "sample channel depth height width")):
        one = layer(shape, dims)
        cuts = {"sample": (0, 1, 4)} if len(shape) == 2 else {"depth": (0, 2, 5), "width": (0, 1, 3)}
        check_norm(one, run_on_threads(one, cuts, by_channel=RUNNING))


def test_ranks_with_equal_channels_have_the_same_bits() -> None:
    parts = run_on_threads(layer(), {"channel": (0, 3, 5), "height": (0, 2, 7)}, by_channel=RUNNING)
    for a, b in ((0, 1), (2, 3)):
        assert all(torch.equal(parts[a].tensors[name], parts[b].tensors[name]) for name in RUNNING)


class _Counting(InProcessTransport):
    """Notes what is sent."""

    sizes: ClassVar[dict[int, list[int]]] = {}

    def start_exchange(self, sent: Any, received: Any, key: Any = None) -> Any:
        self.sizes.setdefault(self.rank, []).extend(tensor.nbytes for tensor in sent.values())
        return super().start_exchange(sent, received)


@pytest.mark.parametrize(("cuts", "channels"), [({"height": (0, 3, 7)}, 5), ({"channel": (0, 2, 5)}, 0)])
def test_one_message_forward_and_one_backward_and_none_where_channels_are_apart(
    monkeypatch: pytest.MonkeyPatch, cuts: Cuts, channels: int
) -> None:
    monkeypatch.setattr(_Counting, "sizes", {})
    run_on_threads(layer(), cuts, by_channel=RUNNING, transport=_Counting)
    expected = [8 * (1 + 2 * channels), 8 * 2 * channels] if channels else []
    assert all(sizes == expected for sizes in _Counting.sizes.values())
    assert len(_Counting.sizes) == (2 if channels else 0)


def test_fewer_than_two_values_a_channel_have_no_variance() -> None:
    with pytest.raises(StageFailedError, match="batch norm of 1 values a channel"):
        run_on_threads(layer((1, 3), "sample channel"), {"replica": (0, 1, 2)}, by_channel=RUNNING)


FLAT = "sample channel"
POOLS: dict[str, tuple[Callable[..., Tensor], dict[str, Any], str]] = {
    "mean": (_ATEN.mean.dim, {"dim": [2, 3]}, FLAT),
    "mean that keeps dims": (_ATEN.mean.dim, {"dim": [-1, -2], "keepdim": True}, IMAGE),
    "adaptive": (_ATEN.adaptive_avg_pool2d.default, {"output_size": [1, 1]}, IMAGE),
}


def pool(name: str, shape: tuple[int, ...] = (3, 5, 7, 6), dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(0)
    target, options, dims = POOLS[name]
    one = case(target, {"self": torch.randn(shape, dtype=dtype), **options}, {"self": IMAGE}, dims)
    assert one.layer.kind == "global_pool"
    return one


def check_pool(one: Case, parts: list[Part]) -> None:
    result, tensors = one.whole()
    shape = tuple(result.shape)
    boxes = [part.step.division.owned[0][part.step.position] for part in parts]
    result.backward(added_up(shape, [(box, part.dy) for part, box in zip(parts, boxes, strict=True)]))
    for part, box in zip(parts, boxes, strict=True):
        assert part.reached
        close(part.result, result.detach()[slices(box, whole(shape))])
    close(gradient_of("self", one, parts), tensors["self"].grad)


@pytest.mark.parametrize("function", POOLS)
@pytest.mark.parametrize("cuts", CUTS)
def test_the_mean_is_whole_on_every_rank_and_gradients_of_its_copies_are_summed(cuts: str, function: str) -> None:
    layout, margin = CUTS[cuts]
    one = pool(function)
    check_pool(one, run_on_threads(one, layout, margin))


def test_three_dims_of_space() -> None:
    dims = "sample channel depth height width"
    x = torch.randn(2, 3, 4, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    one = case(_ATEN.mean.dim, {"self": x, "dim": [2, 3, 4]}, {"self": dims}, FLAT)
    cuts: Cuts = {"depth": (0, 1, 4), "width": (0, 2, 3)}
    check_pool(one, run_on_threads(one, cuts))


def test_half_precision_is_summed_in_single() -> None:
    one = pool("mean", (1, 2, 300, 300), torch.bfloat16)
    parts = run_on_threads(one, {"height": (0, 150, 300)})
    exact = one.arguments["self"].double().mean((2, 3))
    assert parts[0].result.dtype == torch.bfloat16
    torch.testing.assert_close(parts[0].result.double(), exact, rtol=1e-2, atol=1e-4)


PIXELS = "sample height width"
_MEAN = 1
_SUM = 2
NO_WEIGHT = {"weight": None, "ignore_index": -100}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def of_elements(name: str, prediction: Tensor | None = None, target: Tensor | None = None, **options: Any) -> Case:
    tensors = {"self": random(*SHAPE) if prediction is None else prediction}
    if target is not None:
        tensors["target"] = target
    operator = getattr(_ATEN, name).default
    first = operator._schema.arguments[0].name
    tensors = {first if key == "self" else key: each for key, each in tensors.items()}
    return case(operator, {**tensors, **options}, dict.fromkeys(tensors, IMAGE), "")


def of_classes(name: str, ignored: int | None = None, **options: Any) -> Case:
    target = torch.randint(0, SHAPE[1], (SHAPE[0], *SHAPE[2:]))
    if ignored is not None:
        target[torch.rand(target.shape) < 0.3] = ignored
    defaults = {"weight": None, "ignore_index": -100}
    tensors = {"self": random(*SHAPE), "target": target}
    return case(getattr(_ATEN, name).default, {**defaults, **tensors, **options}, {"self": IMAGE, "target": PIXELS}, "")


ELEMENTS: dict[str, Callable[[], Case]] = {
    "mse": lambda: of_elements("mse_loss", None, random(*SHAPE)),
    "l1": lambda: of_elements("l1_loss", None, random(*SHAPE)),
    "smooth l1": lambda: of_elements("smooth_l1_loss", None, random(*SHAPE), beta=0.7),
    "huber": lambda: of_elements("huber_loss", None, random(*SHAPE), delta=0.4),
    "binary": lambda: of_elements("binary_cross_entropy", random(*SHAPE).sigmoid(), random(*SHAPE).sigmoid()),
    "with logits": lambda: of_elements("binary_cross_entropy_with_logits", None, random(*SHAPE).sigmoid()),
    "with logits, weights and weights of positives": lambda: of_elements(
        "binary_cross_entropy_with_logits",
        None,
        random(*SHAPE).sigmoid(),
        weight=random(7, 6).abs(),
        pos_weight=random(5, 1, 1).abs(),
    ),
    "divergence": lambda: of_elements("kl_div", None, random(*SHAPE).softmax(1)),
    "divergence of logarithms": lambda: of_elements("kl_div", None, random(*SHAPE), log_target=True),
    "poisson": lambda: of_elements(
        "poisson_nll_loss", None, random(*SHAPE).abs(), log_input=True, full=False, eps=1e-8, reduction=_MEAN
    ),
    "mean": lambda: of_elements("mean"),
    "a target that is broadcast": lambda: of_elements("l1_loss", None, random(3, 1, 7, 6)),
    "a prediction that is broadcast": lambda: of_elements("l1_loss", random(3, 1, 7, 6), random(*SHAPE)),
}
WEIGHTS = torch.rand(SHAPE[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
PLACES: dict[str, Callable[[], Case]] = {
    "classes": lambda: of_classes("cross_entropy_loss"),
    "classes, some ignored": lambda: of_classes("cross_entropy_loss", -100),
    "classes, one ignored": lambda: of_classes("cross_entropy_loss", ignore_index=2),
    "weighted classes": lambda: of_classes("cross_entropy_loss", weight=WEIGHTS),
    "weighted classes, some ignored, smoothed": lambda: of_classes(
        "cross_entropy_loss", -1, weight=WEIGHTS, ignore_index=-1, label_smoothing=0.2
    ),
    "smoothed, some ignored": lambda: of_classes("cross_entropy_loss", -100, label_smoothing=0.2),
    "probabilities of classes": lambda: of_elements("cross_entropy_loss", None, random(*SHAPE).softmax(1), **NO_WEIGHT),
    "weighted probabilities": lambda: of_elements(
        "cross_entropy_loss", None, random(*SHAPE).softmax(1), weight=WEIGHTS, ignore_index=-100
    ),
    "logarithms": lambda: of_classes("nll_loss_nd"),
    "logarithms, weighted": lambda: of_classes("nll_loss2d", weight=WEIGHTS),
}
SUMS: dict[str, Callable[[], Case]] = {
    "sum": lambda: of_elements("sum"),
    "sum of squares": lambda: of_elements("mse_loss", None, random(*SHAPE), reduction=_SUM),
    "sum over classes": lambda: of_classes("cross_entropy_loss", -100, reduction=_SUM),
}
LAYERS = {**ELEMENTS, **PLACES, **SUMS}


def check_loss(one: Case, cuts: Cuts, margin: int = 0) -> None:
    assert one.layer.kind == "loss"
    loss, tensors = one.whole()
    loss.backward()
    parts = run_on_threads(one, cuts, margin)
    close(sum(part.result for part in parts), loss.detach())
    for name in one.values:
        if tensors[name].requires_grad:
            assert all(name in part.reached for part in parts)
            close(gradient_of(name, one, parts), tensors[name].grad)
    for part in parts:
        assert part.result.shape == loss.shape
        assert part.step.is_first or part.result == 0


@pytest.mark.parametrize("cuts", ["height", "channels x empty height", "replicas x height", "height x width"])
@pytest.mark.parametrize("name", LAYERS)
def test_shares_of_the_loss_and_of_gradients_sum_up_to_those_of_one_device(name: str, cuts: str) -> None:
    torch.manual_seed(0)
    layout, margin = CUTS[cuts]
    check_loss(LAYERS[name](), layout, margin)


@pytest.mark.parametrize("cuts", sorted(set(CUTS) - {"height", "channels x empty height", "replicas x height"}))
@pytest.mark.parametrize("name", ["mse", "weighted classes, some ignored, smoothed", "smoothed, some ignored"])
def test_the_same_in_every_layout(name: str, cuts: str) -> None:
    torch.manual_seed(0)
    layout, margin = CUTS[cuts]
    check_loss(LAYERS[name](), layout, margin)


@pytest.mark.parametrize("name", [name for name in PLACES if "probabilities" not in name and "logarithms" not in name])
@pytest.mark.parametrize(
    "cuts", ["channels", "more ranks than channels", "channels x height", "samples x channels", "channels x replicas"]
)
def test_classes_are_cut_and_their_logits_stay_where_they_are(name: str, cuts: str) -> None:
    torch.manual_seed(0)
    others = {
        "samples x channels": {"sample": (0, 1, 3), "channel": (0, 2, 5)},
        "channels x replicas": {"channel": (0, 2, 5), "replica": (0, 1, 2)},
    }
    layout = others[cuts] if cuts in others else CUTS[cuts][0]
    one = PLACES[name]()
    check_loss(one, layout)
    parts = run_on_threads(one, layout)
    assert all(part.step.exchange(0).is_local for part in parts)
    assert any(len(part.step.own[1]) < SHAPE[1] for part in parts)


def test_a_part_of_the_classes_may_be_impossible() -> None:
    one = of_classes("cross_entropy_loss")
    one.arguments["self"][:, 3:] = -torch.inf
    one.arguments["target"].clamp_(max=2)
    check_loss(one, {"channel": (0, 3, 5)})


@pytest.mark.parametrize("cuts", [{"sample": (0, 1, 5)}, {"sample": (0, 5, 5)}, {"feature": (0, 1, 4)}])
def test_other_losses_are_means_over_samples(cuts: Cuts) -> None:
    torch.manual_seed(0)
    tensors = {"self": random(5, 4), "target": torch.tensor([0, 3, 1, 1, 2])}
    dims = {"self": "sample feature", "target": "sample"}
    check_loss(case(_ATEN.multi_margin_loss.default, tensors, dims, ""), cuts)


def test_if_all_targets_are_ignored_there_is_no_mean_as_on_one_device() -> None:
    one = of_classes("cross_entropy_loss")
    one.arguments["target"].fill_(-100)
    check_loss(one, {"height": (0, 3, 7)})
    assert one.whole()[0].isnan()


def test_in_half_precision_the_count_stays_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 40, 40).bfloat16()
    target = torch.randint(0, 3, (1, 40, 40))
    arguments = {"self": x, "target": target, "weight": None, "ignore_index": -100}
    one = case(_ATEN.cross_entropy_loss.default, arguments, {"self": IMAGE, "target": PIXELS}, "")
    parts = run_on_threads(one, {"height": (0, 13, 40)})
    exact = F.cross_entropy(x.double(), target)
    assert parts[0].result.dtype == torch.bfloat16
    torch.testing.assert_close(sum(part.result.double() for part in parts), exact, rtol=2e-2, atol=0)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("made", "check"), [(layer, check_norm), (lambda: pool("mean"), check_pool)], ids=["norm", "pool"]
)
def test_what_was_put_off_is_done_while_the_sum_is_on_its_way(
    made: Callable[[], Case], check: Callable[[Case, list[Part]], None]
) -> None:
    done: list[int] = []

    def later() -> DeferredGradients:
        found = DeferredGradients()
        found.put(lambda: done.append(1))
        return found

    one = made()
    state = RUNNING if one.layer.kind == "batch_norm" else ()
    check(one, run_on_threads(one, {"height": (0, 3, 7)}, by_channel=state, later=later))
    assert done == [1, 1]
