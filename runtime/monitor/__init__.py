"""Jobs of several processes: started, watched, their activity told, their failures explained.

Modules:

    activity   What each rank is doing, told to the others (heartbeat): a line in the store, renewed by a thread
    failure    Errors that cross processes: written by the worker that met them, read by whoever started it
    slow       Stragglers: ranks and links that are slower than expected while a job runs
    waits      Who waits for whom: the chain of waits and where it ends; a rank's heartbeat
    watch      Watches the worker processes of a plan, on this host or others, and ends all of them when one fails
"""

from __future__ import annotations

__all__: list[str] = []
