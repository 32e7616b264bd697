"""Reading a text file of a published format: its lines by number, and faults that name file and line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.ir.errors import FormatError, MissingFileError
from planner.ir.files import read_bytes


@dataclass(frozen=True, slots=True)
class FileText:
    """A file's text.

    Attributes:
        source: the file's name, for messages.
    """

    source: str
    text: str

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines with something on them, stripped, by number from 1; those that begin with ``#`` are left out.

        Only line feeds end a line: a name may hold any other character, such as U+2028.
        """
        text = self.text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        for number, line in enumerate(text.split("\n"), start=1):
            stripped = line.strip()
            if stripped and not stripped.startswith("#"):
                yield number, stripped

    def fault(self, number: int, title: str, *details: str) -> FormatError:
        """The error that says what is wrong in line ``number``."""
        return FormatError(f"{self.source}, line {number}: {title}", details)


def read_text(path: str | Path) -> FileText:
    """A file as UTF-8.

    Raises:
        MissingFileError: there is no such file, or it cannot be read.
        FormatError: it is not UTF-8.
    """
    try:
        data = read_bytes(path)
    except MissingFileError as error:
        raise MissingFileError(
            f"{path} cannot be read", error.details, ["give the path of a file that exists"]
        ) from error
    try:
        return FileText(str(path), data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = data[error.start]
        raise FormatError(
            f"{path}, line {line}: not UTF-8 text", [f"byte {error.start} is 0x{byte:02x}"], ["save the file as UTF-8"]
        ) from None
