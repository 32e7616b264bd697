"""Jobs of several processes: started, watched, their activity told, their failures explained.

Modules:

    activity   What each rank is doing, told to the others: a line on a notice board (the store), renewed by a thread
    failure    Errors that cross processes: written by the worker that met them, read by whoever started it
    slow       Ranks and links that are slower than expected while a job runs, told from what ranks say of their steps
    waits      Who waits for whom: from what each rank says it does, the chain of waits and where it ends
    watch      Watches the worker processes of a plan, on this host or others, and ends all of them when one fails
"""

from __future__ import annotations

__all__: list[str] = []
