"""Modules that treat every site alike: torch's own, applied to the features.

They take a plain tensor as well, so that one activation serves the sparse part of a network and what follows it.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from cuda_ops.sparse.nn.checks import require_channels
from cuda_ops.sparse.nn.tensor import SparseTensor

Value = TypeVar("Value", SparseTensor, Tensor)


class Pointwise:
    """Put before a module of torch's: calls it with the features and puts the result on the same sites."""

    def forward(self, input: Value) -> Value:
        """See the class."""
        if isinstance(input, SparseTensor):
            return input.with_feats(super().forward(input.feats))  # type: ignore[misc]
        return super().forward(input)  # type: ignore[misc]


class ReLU(Pointwise, nn.ReLU):
    """The positive part."""


class LeakyReLU(Pointwise, nn.LeakyReLU):
    """The positive part, and a fraction of the negative one."""


class SiLU(Pointwise, nn.SiLU):
    """Each feature times its sigmoid."""


class GELU(Pointwise, nn.GELU):
    """Each feature times the Gaussian's distribution function."""


class ELU(Pointwise, nn.ELU):
    """The exponential linear unit."""


class Sigmoid(Pointwise, nn.Sigmoid):
    """The logistic function."""


class Tanh(Pointwise, nn.Tanh):
    """The hyperbolic tangent."""


class Dropout(Pointwise, nn.Dropout):
    """Zeroes features at random in training."""


class LayerNorm(Pointwise, nn.LayerNorm):
    """Each site's channels to mean 0 and variance 1."""


class Linear(Pointwise, nn.Linear):
    """One matrix for every site; its parameters are torch's ``weight`` (out, in) and ``bias``."""

    def forward(self, input: Value) -> Value:
        """Raises SparseInputError where a sparse tensor has other channels."""
        if isinstance(input, SparseTensor):
            require_channels(input.feats, self.in_features, "Linear")
        return super().forward(input)
