from __future__ import annotations

import pytest
import torch
from torch import nn

from cuda_ops.sparse import nn as spnn
from tests.cuda_ops.sparse.nn.clouds import cloud

MODULES = ["ReLU", "LeakyReLU", "SiLU", "GELU", "ELU", "Sigmoid", "Tanh"]


@pytest.mark.parametrize("name", MODULES)
def test_an_activation_is_torchs_on_the_features_and_on_plain_tensors(name: str) -> None:
    ours, theirs, x = getattr(spnn, name)(), getattr(nn, name)(), cloud()
    y = ours(x)
    assert y.geometry is x.geometry
    torch.testing.assert_close(y.feats, theirs(x.feats))
    torch.testing.assert_close(ours(x.feats), theirs(x.feats))


def test_layers_with_parameters_keep_torchs_names() -> None:
    x = cloud()
    linear, plain = spnn.Linear(3, 5).double(), nn.Linear(3, 5).double()
    plain.load_state_dict(linear.state_dict())
    torch.testing.assert_close(linear(x).feats, plain(x.feats))
    torch.testing.assert_close(spnn.LayerNorm(3).double()(x).feats, nn.LayerNorm(3).double()(x.feats))


def test_dropout_drops_in_training_alone() -> None:
    x = cloud()
    drop = spnn.Dropout(0.5)
    assert (drop(x).feats == 0).any()
    torch.testing.assert_close(drop.eval()(x).feats, x.feats)


def test_functional_forms_agree_with_the_modules() -> None:
    x = cloud()
    for one, other in (
        (spnn.functional.relu(x), spnn.ReLU()(x)),
        (spnn.functional.leaky_relu(x, 0.2), spnn.LeakyReLU(0.2)(x)),
        (spnn.functional.silu(x), spnn.SiLU()(x)),
    ):
        torch.testing.assert_close(one.feats, other.feats)


def test_the_face_names_what_it_has() -> None:
    assert all(hasattr(spnn, name) for name in spnn.__all__)
    public = {
        name
        for name, value in vars(spnn).items()
        if isinstance(value, type) and value.__module__.startswith("cuda_ops")
    }
    assert public <= set(spnn.__all__)
