"""Memory of a rank, action by action.

Read ``lifetimes`` (what a rank holds, from when to when, and the most at once), ``sizes`` (how many bytes that has),
``messages`` (what they take at both ends), ``activations`` (what a stage keeps of a micro-batch), ``action_peaks`` (how
high memory rises while the layers of a stage run), then ``levels`` (while a single one does).  ``memory_bound`` is the
lower bound that searches use, and how many micro-batches a schedule keeps.
"""

from __future__ import annotations

__all__: list[str] = []
