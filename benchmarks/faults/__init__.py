"""Jobs whose ranks, hosts, links, memory or disks fail; see ``python -m benchmarks.faults``.

To read: ``__main__`` (trials on one host, all rows), ``victim`` (what is trained, and where it fails), ``jobs`` (how
a trial is judged, and jobs on several hosts), ``hosts`` (those that are lost), ``limits`` (memory, disks), ``slow``.
"""

from __future__ import annotations

__all__: list[str] = []
