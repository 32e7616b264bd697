"""Ranks as threads, for tests of what they do together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from runtime.monitor.failure import blame
from runtime.transport import Hub, InProcessTransport

T = TypeVar("T")


def on_ranks(
    num_ranks: int,
    run: Callable[[InProcessTransport], T],
    groups: Sequence[tuple[int, ...]] = (),
    *,
    rendezvous: bool = False,
    transport: type[InProcessTransport] = InProcessTransport,
) -> list[T]:
    """What ``run`` gives on each rank; the error to blame for the others is raised."""
    hub = Hub(num_ranks, groups, rendezvous=rendezvous)
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        end = transport(hub, rank)
        try:
            found[rank] = run(end)
        except Exception as error:  # noqa: BLE001  # raised below, in the test's own thread
            errors.append(error)
        finally:
            end.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=blame)
    return [found[rank] for rank in range(num_ranks)]
