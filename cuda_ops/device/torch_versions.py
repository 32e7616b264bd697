"""The releases of torch that are tested, and what is raised where one has not what is leant on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["INSTALL", "NEWEST", "OLDEST", "RANGE", "TorchVersionError", "needs_private_names"]

P = ParamSpec("P")
R = TypeVar("R")

OLDEST = (2, 11)
NEWEST = (2, 13)
"""The lower bound of ``pyproject.toml`` and the release of ``constraints.txt``."""
RANGE = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
INSTALL = "pip install 'torch>={}.{},<{}.{}'".format(*OLDEST, NEWEST[0], NEWEST[1] + 1)


class TorchVersionError(ImportError):
    """This torch lacks a private name that halopipe leans on.

    Attributes:
        title: the release, and what it lacks.
        tested: the releases that have it.
        remedy: what to do.
    """

    def __init__(self, lacking: ImportError | AttributeError) -> None:
        import torch

        self.title = f"torch {torch.__version__} lacks what halopipe leans on: {lacking}"
        self.tested = f"tested: torch {RANGE}"
        self.remedy = INSTALL
        super().__init__(f"{self.title} ({self.tested}; {self.remedy})")


def needs_private_names(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which raises `TorchVersionError` where it uses a name that torch lacks; not for what it calls."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (AttributeError, ImportError) as error:
            inside = error.__traceback__ and error.__traceback__.tb_next
            if inside is None or inside.tb_next is not None:
                raise
            raise TorchVersionError(error) from error

    return call
