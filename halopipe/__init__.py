"""halopipe plans how to train a neural network on a given set of devices, and then trains it that way.

    import halopipe as hp

    prof = hp.profile("profiler.models.resnet:resnet50", input_shape=(8, 3, 64, 64))
    plan = hp.plan(prof, global_batch=16)
    print(hp.explain(plan))
    hp.compare(plan, *hp.baselines(prof)).frame()
    print(hp.what_if(plan, "devices=4"), hp.prices(plan), hp.pareto(prof, num_points=5))
    hp.receptive_field(prof, "layer1.0.conv1")              # what an output reads of the inputs
    hp.save(plan, "plan.json")                              # and hp.load
    engine = hp.execute(plan, model, loss_fn, optimizer)    # under torchrun; engine.step(batch) -> loss
    run = hp.parallelize(model, example, loss_fn=loss_fn)   # or all of it at once, from any script or notebook
    with hp.serve(plan) as serving:                         # or requests without an end, answered in order
        serving.submit(x).result().output

``hp.primitives`` are exchanges with exact adjoints, for modules of one's own.  Names are imported when they are first
used, so that ``import halopipe`` costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from halopipe.guard import check_on_import

if TYPE_CHECKING:
    from halopipe import primitives
    from halopipe.api import (
        baselines,
        compare,
        execute,
        explain,
        load,
        on_cluster,
        parallelize,
        pareto,
        plan,
        prices,
        profile,
        receptive_field,
        report,
        save,
        serve,
        what_if,
        why_not,
    )
    from halopipe.planning.compare import Comparison
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
    "primitives",
    "profile",
    "receptive_field",
    "report",
    "save",
    "serve",
    "what_if",
    "why_not",
]

check_on_import()
if "IPython" in sys.modules:  # a notebook shows plans and timelines as pictures
    from halopipe.extra import FaceExtra
    from planner.ir.extras import extras

    for extra in extras(FaceExtra):
        extra.register_notebook(sys.modules["IPython"].get_ipython())


def __getattr__(name: str) -> Any:
    if name == "primitives":
        return importlib.import_module("halopipe.primitives")
    if name in __all__:
        from halopipe import api

        return getattr(api, name)
    raise AttributeError(f"module 'halopipe' has no attribute {name!r}")
