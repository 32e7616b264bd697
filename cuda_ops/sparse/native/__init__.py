"""The sparse operators in C++ on the CPU, compiled at first use.

`load` gives them by the names of the operators; whatever is not among them, or has another dtype than float32 and
float64, is plain torch.  Sums of an output run in one order whatever the number of threads: one thread and many give
the same bits.

Modules:

    functions   The operators of the compiled library, which take and give what the reference's do
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from cuda_ops.device.compiling import CannotCompileError, LibrarySources, compiled

if TYPE_CHECKING:
    from cuda_ops.sparse.native.functions import NativeOperators

__all__ = ["load"]

_LOGGER = logging.getLogger(__name__)

SOURCES = LibrarySources(
    "sparse",
    Path(__file__).parent / "source",
    # Units of loops that are to be unrolled and vectorized; the others are faster with -O2, maps by two thirds.
    levels={"conv": "-O3", "pool": "-O3"},
)
"""Made without torch's headers: the library runs with any torch that has the function which it calls."""


@functools.cache
def load() -> NativeOperators | None:
    """The operators by name; None where they cannot be had, with one line in the log that says why.

    The compiler is called here, not at import, and only if no earlier process left the library in the cache folder
    (``$XDG_CACHE_HOME/halopipe`` or ``~/.cache/halopipe``), or has failed there within the hour; ``$CXX`` names
    another compiler.
    """
    from cuda_ops.sparse.native.functions import Library, NativeOperators

    try:
        return NativeOperators(Library(compiled(dict(os.environ), SOURCES)))
    except (CannotCompileError, OSError) as error:
        _LOGGER.warning("sparse operators run in plain torch, not in C++: %s", error)
        return None
