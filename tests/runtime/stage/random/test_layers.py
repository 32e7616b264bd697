"""Operators that draw compute what torch's own compute from the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runtime.stage.random.layers import _Masked, drawing, dropout
from runtime.stage.random.streams import CounterRng, NodeStream

ATEN = torch.ops.aten
X = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
P = torch.rand(4, 3, 6, generator=torch.Generator().manual_seed(1))
MASK = torch.ones(6, 6, dtype=torch.bool).tril()

CALLS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "dropout": (ATEN.dropout.default, (X, 0.3, True), {}),
    "dropout off": (ATEN.dropout.default, (X, 0.3, False), {}),
    "dropout of all": (ATEN.dropout.default, (X, 1.0, True), {}),
    "feature dropout": (ATEN.feature_dropout.default, (X, 0.3, True), {}),
    "feature dropout of all": (ATEN.feature_dropout.default, (X, 1.0, True), {}),
    "alpha dropout": (ATEN.alpha_dropout.default, (X, 0.3, True), {}),
    "feature alpha dropout": (ATEN.feature_alpha_dropout.default, (X, 0.3, True), {}),
    "feature alpha dropout of all": (ATEN.feature_alpha_dropout.default, (X, 1.0, True), {}),
    "rrelu off": (ATEN.rrelu.default, (X,), {}),
    "attention": (ATEN.scaled_dot_product_attention.default, (X, X + 1, X * 2, None, 0.3), {}),
    "causal attention": (ATEN.scaled_dot_product_attention.default, (X, X, X, None, 0.3, True), {"scale": 0.2}),
    "masked attention": (ATEN.scaled_dot_product_attention.default, (*[X.mT.contiguous()] * 3, MASK, 0.3), {}),
    "grouped attention": (
        ATEN.scaled_dot_product_attention.default,
        (X.expand(2, 4, 3, 6), *[X[:2].expand(2, 2, 3, 6)] * 2, None, 0.3),
        {"enable_gqa": True},
    ),
    "bernoulli": (ATEN.bernoulli.p, (X, 0.3), {}),
    "uniform": (ATEN.uniform.default, (X, 2.0), {"to": 5.0}),
    "normal": (ATEN.normal_functional.default, (X, 2.0, 3.0), {}),
    "normal of a shape": (ATEN.normal.float_float, (2.0, 3.0, [4, 5]), {"dtype": torch.float32}),
    "exponential": (ATEN.exponential.default, (X, 2.0), {}),
    "log-normal": (ATEN.log_normal.default, (X, -1.2, 0.5), {}),
    "cauchy": (ATEN.cauchy.default, (X,), {"sigma": 0.1}),
    "rand": (ATEN.rand.default, ([4, 5],), {"dtype": torch.float32, "device": torch.device("cpu")}),
    "randn": (ATEN.randn.default, ([4, 5],), {"pin_memory": False}),
    "rand_like": (ATEN.rand_like.default, (X,), {}),
    "randn_like": (ATEN.randn_like.default, (X,), {}),
    "randint": (ATEN.randint.default, (9, [4, 5]), {}),
    "randint from": (ATEN.randint.low, (3, 9, [4, 5]), {"dtype": torch.int32}),
    "randint_like": (ATEN.randint_like.default, (X, 9), {}),
    "randint_like from": (ATEN.randint_like.low_dtype, (X, 3, 9), {}),
}


def noise(step: int = 0) -> NodeStream:
    return NodeStream(CounterRng(7, step, 2, 0, 4, 4), "node", None)


def drawn(operator: Any, *args: Any, **kwargs: Any) -> Any:
    function = drawing(operator)
    assert function is not None, operator
    return function(*args, **kwargs)


def torch_s_own(function: Callable[[], Any], source: NodeStream) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(source.rng.key(source.node))
        return function()


def test_an_operator_gives_what_torch_s_own_gives_from_the_same_numbers() -> None:
    for name in CALLS:  # in one test, so that none is left out: an operator may be in one of them alone
        gives_what_torch_s_own_gives_from_the_same_numbers(name)


def gives_what_torch_s_own_gives_from_the_same_numbers(name: str) -> None:
    operator, args, kwargs = CALLS[name]
    before = torch.get_rng_state()
    found = drawn(operator, noise(), *args, **kwargs)
    assert torch.equal(torch.get_rng_state(), before)
    expected = torch_s_own(lambda: operator(*args, **kwargs), noise())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if "off" not in name and "all" not in name:
        assert not torch.equal(drawn(operator, noise(1), *args, **kwargs), found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["rand_like", "randn_like", "uniform", "normal", "exponential", "dropout"])
def test_numbers_are_the_same_in_every_precision(name: str, dtype: torch.dtype) -> None:
    operator, (x, *others), kwargs = CALLS[name]
    found = drawn(operator, noise(), x.to(dtype), *others, **kwargs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), drawn(operator, noise(), x, *others, **kwargs), rtol=1e-2, atol=1e-2)


def test_native_dropout_tells_what_it_kept() -> None:
    y, mask = drawn(ATEN.native_dropout.default, noise(), X, 0.3, True)
    torch.testing.assert_close(y, X * mask / 0.7)
    assert 0 < mask.double().mean() < 1
    y, mask = drawn(ATEN.native_dropout.default, noise(), X, 0.3, False)
    assert y is X
    assert mask.all()


def test_a_random_relu_takes_slopes_between_its_bounds() -> None:
    y = drawn(ATEN.rrelu.default, noise(), X, 0.2, 0.4, True)
    slopes = (y / X)[X < 0]
    assert torch.equal(y[X >= 0], X[X >= 0])
    assert slopes.min() >= 0.2
    assert slopes.max() <= 0.4
    assert slopes.std() > 0.01


def test_probabilities_may_differ() -> None:
    many = P.expand(2000, 4, 3, 6)
    numbers = drawn(ATEN.bernoulli.default, noise(), many)
    assert set(numbers.unique().tolist()) == {0.0, 1.0}
    assert (numbers.mean(0) - P).abs().max() < 0.06
    assert torch.equal(drawn(ATEN.bernoulli.Tensor, noise(), many, many), numbers)


@pytest.mark.parametrize("replacement", [False, True])
def test_classes_are_drawn_by_their_weights(replacement: bool) -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 4.0], dtype=torch.float64)
    classes = drawn(ATEN.multinomial.default, noise(), weights.expand(4000, 4), 2, replacement)
    first = torch.bincount(classes[:, 0], minlength=4) / len(classes)
    assert (first - weights / 8).abs().max() < 0.03
    assert not (classes == 1).any()
    assert bool((classes[:, 0] == classes[:, 1]).any()) is replacement
    second = torch.bincount(classes[classes[:, 0] == 3, 1], minlength=4).double()
    rest = weights if replacement else weights * torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert (second / second.sum() - rest / rest.sum()).abs().max() < 0.05
    assert drawn(ATEN.multinomial.default, noise(), weights, 3).sort().values.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "arguments", [(X, 2.0), (1.0, P), (X, P)], ids=["spread given", "mean given", "both are tensors"]
)
def test_normal_numbers_about_given_means(arguments: tuple[Any, Any]) -> None:
    mean, std = arguments
    numbers = drawn(ATEN.normal.Tensor_Tensor, noise(), mean, std)
    standard = drawn(ATEN.randn_like.default, noise(), X)
    assert torch.equal(numbers, mean + std * standard)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_between_their_layers(cell: type[nn.RNNBase], bidirectional: bool) -> None:
    torch.manual_seed(0)
    module = cell(6, 5, 2, dropout=0.4, bidirectional=bidirectional)
    names = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}
    operator = getattr(ATEN, names[cell]).input
    state = torch.randn(4 if bidirectional else 2, 3, 5)
    hx = [state, state * 2] if cell is nn.LSTM else state
    weights = [weight for name, weight in module.named_parameters()]
    args = (X, hx, weights, True, 2, 0.4, True, bidirectional, False)
    found = drawn(operator, noise(), *args)
    expected = torch_s_own(lambda: operator(*args), noise())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.allclose(operator(*args[:5], 0.0, *args[6:])[0], found[0])
    samples_first = drawn(operator, noise(), X.transpose(0, 1), *args[1:-1], True)
    assert samples_first[0].shape == found[0].transpose(0, 1).shape
    assert samples_first[1].shape == found[1].shape


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_of_dropout_goes_through_the_same_mask(fused: bool) -> None:
    x = X.double().requires_grad_()
    kept = noise().fill((4, 3, 6), torch.bool, x.device, lambda t, g: t.bernoulli_(0.7, generator=g))
    y = _Masked.apply(x, kept, 1 / 0.7) if fused else dropout(noise(), x, 0.3, True)
    torch.testing.assert_close(y, x * kept / 0.7, rtol=1e-12, atol=1e-12)
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept.double() / 0.7, rtol=1e-12, atol=1e-12)
    assert 0 < kept.double().mean() < 1
