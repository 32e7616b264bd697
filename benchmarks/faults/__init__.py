"""Jobs whose ranks, hosts, links, memory or disks fail; see ``python -m benchmarks.faults``.

To read: ``__main__`` (trials on one host, all rows), ``victim`` (what is trained, and where it fails), ``outcomes``
(how a trial is judged), ``limits`` (memory, disks), ``jobs`` and ``hosts`` (several hosts), ``slow`` (ranks, links).
"""

from __future__ import annotations

__all__: list[str] = []
