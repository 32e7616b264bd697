"""The rule that cuts stages for evaluation (:mod:`cuda_ops.evaluation`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from cuda_ops.evaluation import draws_in_any_mode, evaluated
from planner.ir.errors import UnsupportedModelError


def in_evaluation(node: fx.Node) -> Callable[..., Any] | None:
    """The rule that puts operators in evaluation mode.

    Raises:
        UnsupportedModelError: an operator draws random numbers, and nothing tells whether it would in evaluation mode.
    """
    if draws_in_any_mode(node):
        raise UnsupportedModelError(
            f"node {node.name} draws random numbers ({node.target}), perhaps only in training",
            ["the captured graph does not tell what it does in evaluation mode"],
            ["draw with nn.Dropout, or evaluate the module itself, on one device"],
        )
    return evaluated(node)


def cannot_evaluate(reason: str) -> UnsupportedModelError:
    """The error of a model whose graph is another in evaluation mode, as its capture found."""
    return UnsupportedModelError(
        "the model cannot be evaluated under a plan",
        [reason],
        [
            "evaluate the module itself, on one device",
            "leave what depends on self.training to nn modules, such as nn.Dropout",
        ],
    )
