"""The calls of ``import halopipe as hp``: profile, plan, compare (with baselines), explain, execute, serve.

Read first :mod:`halopipe.api.files` (profiles and plans as objects or by their files), then ``plans`` (from a model to
plans), ``questions`` (what one may ask about them) and ``running``.

Besides:

    arguments   What a script gives to the calls of ``hp``, looked at before anything is done with it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halopipe.api.files import load, save
from halopipe.api.plans import baselines, on_cluster, pareto, plan, profile
from halopipe.api.questions import compare, explain, prices, receptive_field, report, what_if, why_not
from halopipe.api.running import execute, parallelize, serve
from halopipe.planning.compare import Comparison

if TYPE_CHECKING:
    from halopipe.training.session import Execution

__all__ = [
    "Comparison",
    "Execution",
    "baselines",
    "compare",
    "execute",
    "explain",
    "load",
    "on_cluster",
    "parallelize",
    "pareto",
    "plan",
    "prices",
    "profile",
    "receptive_field",
    "report",
    "save",
    "serve",
    "what_if",
    "why_not",
]


def __getattr__(name: str) -> Any:
    if name == "Execution":  # its module loads torch
        from halopipe.training.session import Execution

        return Execution
    raise AttributeError(f"module 'halopipe.api' has no attribute {name!r}")
