"""The exact search.

Read ``solver`` (the program it solves), ``search`` and ``prefixes``; what they ask: ``graph_cuts``, ``device_groups``
and what the problem leaves open (``priced_groups.Freedom``); the bounds: ``bound`` over suffixes, made of
``priced_groups`` (with the prices of ``planner.costs.stages.stage_bound``) and ``message_bound``, and ``leaf_bound``
over complete pipelines.  ``device_bound`` needs no groups.  ``hybrids`` (of ``hybrid_shapes``), ``incumbents`` and
``warm_start`` are what it starts from, ``infeasible`` what is said where nothing fits, ``layout_search`` with
``layout_bound`` the search beyond samples.
"""

from __future__ import annotations

__all__: list[str] = []
