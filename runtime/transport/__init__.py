"""Moving tensors between ranks: every message carries its key, every wait has a deadline.

:mod:`~runtime.transport.inprocess` has ranks that are threads of one process, :mod:`~runtime.transport.gloo` ranks that
are processes.  Both frame their messages alike (:mod:`~runtime.transport.frame`) and pass the same tests.
"""

from __future__ import annotations

from runtime.transport.base import Key, Pending, Spec, Transport
from runtime.transport.gloo import GlooTransport, open_gloo
from runtime.transport.hub import Hub
from runtime.transport.inprocess import InProcessTransport

__all__ = ["GlooTransport", "Hub", "InProcessTransport", "Key", "Pending", "Spec", "Transport", "open_gloo"]
