"""The longest waits of a job, by name, each with its reason.  A wait that lasts longer is an error that names its peer.

Pauses between two looks, and what a rank spins for before it sleeps, are beside the loops that use them.
"""

from __future__ import annotations

WAIT_S = 120.0
"""Of a rank for another inside a step, unless asked otherwise (``--deadline``): a step takes seconds, and a rank that
swaps or shares its core is slow, not gone."""

SETUP_S = 600.0
"""Until a worker says its first word, and of each part of its set-up: to load torch, capture the model and compile on
every rank of a busy host takes minutes."""

TRANSPORT_S = 600.0
"""Of a transport that was told nothing else, and to open one: it is opened during the set-up, by ranks that are ready
as late as that."""

SAVE_S = 600.0
"""Of rank 0 for the other ranks to write their parts of a checkpoint: gigabytes to a slow disk take minutes."""

CONNECT_S = 60.0
"""Until a store answers: its host may start some seconds later, but it loads nothing first."""
