from __future__ import annotations

import itertools
import sys

import pytest
import torch

from halopipe.data import demo_data as digits
from planner.ir.errors import UsageError

SHAPE = (4, 3, 16, 24)


def test_digits_come_in_the_shape_of_the_input() -> None:
    images, labels = next(digits.digits(5, SHAPE, seed=0))
    assert images.shape == (5, 3, 16, 24)
    assert images.dtype == torch.get_default_dtype()
    assert torch.equal(images[:, 0], images[:, 2])
    assert labels.shape == (5,)
    assert labels.dtype == torch.int64


@pytest.mark.exhaustive("imports scikit-learn")
def test_they_are_scikit_learns_own() -> None:
    from sklearn.datasets import load_digits

    own = load_digits()
    pixels, labels = digits._read_digits()
    assert torch.equal(pixels.double(), torch.as_tensor(own.data))
    assert torch.equal(labels, torch.as_tensor(own.target))


def test_the_same_seed_gives_the_same_batches() -> None:
    first, again, other = (next(digits.digits(8, SHAPE, seed)) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[1], other[1])


def test_a_pass_shows_every_digit_once_and_then_goes_on() -> None:
    batches = itertools.islice(digits.digits(599, (1, 1, 8, 8), seed=0), 6)
    labels = torch.cat([labels for _, labels in batches])
    first, second = labels[:1797], labels[1797:]
    assert first.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # UCI's table
    assert torch.equal(first.bincount(), second.bincount())
    assert not torch.equal(first, second)


def test_whole_images_are_normalised() -> None:
    images, _ = next(digits.digits(1797, (1, 1, 8, 8), seed=0))
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, abs=1e-3)


def test_digits_need_image_dims() -> None:
    with pytest.raises(UsageError, match="has 2 dims"):
        next(digits.digits(4, (4, 10), seed=0))


def test_a_missing_scikit_learn_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError) as caught:
        next(digits.digits(4, SHAPE, seed=0))
    assert caught.value.remedies == ("pip install 'halopipe[demo]'",)


def test_synthetic_labels_follow_from_the_inputs() -> None:
    batches = digits.synthetic(64, (8, 5), seed=0)
    (x, y), (x2, y2) = next(batches), next(batches)
    assert x.shape == (64, 5)
    assert not torch.equal(x, x2)
    assert len(y.unique()) > 3
    x_again, y_again = next(digits.synthetic(64, (8, 5), seed=0))
    assert torch.equal(x, x_again)
    assert torch.equal(y, y_again)
    assert y2.shape == (64,)
