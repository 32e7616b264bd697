"""The optimiser of a plan as torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer


def maker_of(spec: Optimizer) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Makes optimisers of the class and arguments that ``spec`` names.

    Raises:
        UnknownNameError: ``torch.optim`` has no such class.
        UsageError: when called: the class does not take the arguments.
    """
    cls = getattr(torch.optim, spec.name, None)
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        raise UnknownNameError(f"torch.optim has no optimiser {spec.name!r}", [f"torch is {torch.__version__}"])

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            return cls(parameters, **spec.arguments)
        except (TypeError, ValueError) as error:
            arguments = ", ".join(f"{name}={value:g}" for name, value in spec.arguments.items())
            raise UsageError(f"torch.optim.{spec.name}({arguments}) cannot be made", [str(error)]) from error

    return make
