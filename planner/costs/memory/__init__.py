"""Memory of a rank, action by action.

Read ``levels`` (how high memory rises while a layer runs), ``courses`` (while those of a stage do), ``activations``
(what a stage keeps of a micro-batch), ``messages`` (what they take at both ends), ``holdings`` (what a rank holds,
action by action), then ``peak``, which adds what is there all the time.  ``memory_bound`` is the lower bound that
searches use, and how many micro-batches a schedule keeps.
"""

from __future__ import annotations

__all__: list[str] = []
