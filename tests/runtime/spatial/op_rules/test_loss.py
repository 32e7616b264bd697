"""What ranks add to the loss sums up to the loss of the whole micro-batch, and so do the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.runtime.spatial.op_rules.test_batch_norm import CUTS
from tests.runtime.spatial.threads import Case, Cuts, case, close, gradient_of, run_on_threads

_ATEN = torch.ops.aten

IMAGE = "sample channel height width"
PIXELS = "sample height width"
SHAPE = (3, 5, 7, 6)
_MEAN, _SUM = 1, 2
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


def check(one: Case, cuts: Cuts, margin: int = 0) -> None:
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
    check(LAYERS[name](), layout, margin)


@pytest.mark.parametrize("cuts", sorted(set(CUTS) - {"height", "channels x empty height", "replicas x height"}))
@pytest.mark.parametrize("name", ["mse", "weighted classes, some ignored, smoothed", "smoothed, some ignored"])
def test_the_same_in_every_layout(name: str, cuts: str) -> None:
    torch.manual_seed(0)
    layout, margin = CUTS[cuts]
    check(LAYERS[name](), layout, margin)


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
    check(one, layout)
    parts = run_on_threads(one, layout)
    assert all(part.step.exchange(0).is_local for part in parts)
    assert any(len(part.step.own[1]) < SHAPE[1] for part in parts)


def test_a_part_of_the_classes_may_be_impossible() -> None:
    one = of_classes("cross_entropy_loss")
    one.arguments["self"][:, 3:] = -torch.inf
    one.arguments["target"].clamp_(max=2)
    check(one, {"channel": (0, 3, 5)})


@pytest.mark.parametrize("cuts", [{"sample": (0, 1, 5)}, {"sample": (0, 5, 5)}, {"feature": (0, 1, 4)}])
def test_other_losses_are_means_over_samples(cuts: Cuts) -> None:
    torch.manual_seed(0)
    tensors = {"self": random(5, 4), "target": torch.tensor([0, 3, 1, 1, 2])}
    dims = {"self": "sample feature", "target": "sample"}
    check(case(_ATEN.multi_margin_loss.default, tensors, dims, ""), cuts)


def test_if_all_targets_are_ignored_there_is_no_mean_as_on_one_device() -> None:
    one = of_classes("cross_entropy_loss")
    one.arguments["target"].fill_(-100)
    check(one, {"height": (0, 3, 7)})
    assert one.whole()[0].isnan()


def test_in_half_precision_the_count_stays_exact() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(1, 3, 40, 40).bfloat16(), torch.randint(0, 3, (1, 40, 40))
    arguments = {"self": x, "target": target, "weight": None, "ignore_index": -100}
    one = case(_ATEN.cross_entropy_loss.default, arguments, {"self": IMAGE, "target": PIXELS}, "")
    parts = run_on_threads(one, {"height": (0, 13, 40)})
    exact = F.cross_entropy(x.double(), target)
    assert parts[0].result.dtype == torch.bfloat16
    torch.testing.assert_close(sum(part.result.double() for part in parts), exact, rtol=2e-2, atol=0)
