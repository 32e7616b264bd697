"""torchvision beside a build of torch that it was not made for."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing() -> None:
    """Lets torchvision be imported beside another build of torch, if its library cannot be loaded there.

    Its operators are linked against one build; beside another (such as the one without CUDA) describing two of them
    fails.  Here nobody calls them, so it is enough that they are declared.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return
    try:
        torch.ops.load_library(str(next(Path(spec.origin).parent.glob("_C*"))))
    except (OSError, StopIteration):
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", _SIGNATURE)
