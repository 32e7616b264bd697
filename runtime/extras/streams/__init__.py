"""Batches without an end, of which each stage has its own at the same time (PARTIME, Meloni et al. 2022).

Modules:

    stream   Batches without an end, of which each stage has its own at the same time: a pipeline over time
"""

from __future__ import annotations

HOOKS = {"streams": {"answers": "runtime.extras.streams.stream:setting_of"}}
