"""What a rank asks the driver of its GPU while it computes: to wait, to time, and for generators of random numbers.

Tensors know their devices; this is what else needs a driver, in one place, so that a rank runs without one where
something stands in for these functions.  On a processor a call ends when its work has.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def synchronize(device: torch.device) -> None:
    """Wait until all that was started on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorded_event(device: torch.device) -> torch.cuda.Event:
    """A timing event after what has been started in the current stream of a GPU."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch does not type its constructor
    event.record(torch.cuda.current_stream(device))
    return event


def generator(device: torch.device) -> torch.Generator:
    """A new generator of numbers on ``device``."""
    return torch.Generator(device)


def kept_generators(device: torch.device) -> AbstractContextManager[None]:
    """Inside, what is drawn of the process's generators, of the host and of ``device``, is drawn again afterwards."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def default_generator(device: torch.device) -> torch.Generator:
    """The process's own generator of numbers on ``device``."""
    if device.type == "cuda":
        own: torch.Generator = torch.cuda.default_generators[device.index or 0]
        return own
    return torch.default_generator
