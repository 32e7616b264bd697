"""The sparse operators in C++ on the CPU, compiled at first use.

`load` gives them by the names of the operators; whatever is not among them, or has another dtype than float32 and
float64, is plain torch.  Sums of an output run in one order whatever the number of threads: one thread and many give
the same bits.
"""

from __future__ import annotations

import functools
import logging
import os
from types import SimpleNamespace

from cuda_ops.sparse.native.compiling import CannotCompileError, compiled

__all__ = ["load"]

_LOGGER = logging.getLogger(__name__)


@functools.cache
def load() -> SimpleNamespace | None:
    """The operators by name; None where they cannot be had, with one line in the log that says why.

    The compiler is called here, not at import, and only if no earlier process left the library in the cache folder
    (``$XDG_CACHE_HOME/halopipe`` or ``~/.cache/halopipe``); ``$CXX`` names another compiler.
    """
    import torch

    try:
        library = compiled(dict(os.environ))
        torch.ops.load_library(str(library))
    except (CannotCompileError, OSError) as error:
        _LOGGER.warning("sparse operators run in plain torch, not in C++: %s", error)
        return None
    from cuda_ops.sparse.native import functions

    return SimpleNamespace(**{name: getattr(functions, name) for name in functions.__all__})
