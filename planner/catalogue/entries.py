"""What the catalogue says of a device or a link: figures, each with its source and date."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Figure:
    """A number from a data sheet, in base units.

    Attributes:
        text: as it was written.
        source: the document or page it is from.
        date: of the document, or of reading where it has none: ``2023-11``.
    """

    value: float
    text: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device one can buy; what no source states is None or missing.

    Attributes:
        family: ``gpu``, ``cpu``, ``tpu``, ``ipu`` or ``fpga``; names its devices: ``n0/gpu0``.
        peak_flop_per_s: dense, by dtype; ``tfloat32`` is float32 data in tensor cores.
    """

    name: str
    family: str
    vendor: str
    memory_bytes: Figure | None
    memory_bytes_per_s: Figure | None
    peak_flop_per_s: Mapping[str, Figure] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    note: str = ""

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with its name."""
        if self.memory_bytes is not None:
            yield "memory", self.memory_bytes
        if self.memory_bytes_per_s is not None:
            yield "memory-bandwidth", self.memory_bytes_per_s
        yield from ((f"peak {dtype}", figure) for dtype, figure in self.peak_flop_per_s.items())


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """A link; ``bandwidth_bytes_per_s`` is what one device can send to another in one direction.

    Attributes:
        latency_s: None where no source states that of a message.
    """

    name: str
    bandwidth_bytes_per_s: Figure
    latency_s: Figure | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Every figure with its name."""
        yield "bandwidth", self.bandwidth_bytes_per_s
        if self.latency_s is not None:
            yield "latency", self.latency_s
