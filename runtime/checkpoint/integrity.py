"""Is a checkpoint what was written?  Hashes, places of files, and the error that names damage."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from planner.ir.errors import CorruptFileError
from runtime.checkpoint.folders import MANIFEST, MANIFEST_HASH, complete_path, complete_steps
from runtime.checkpoint.manifest import Manifest, fault_of_whole, from_text


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in ``path``, its hash compared.

    Raises:
        CorruptFileError: it is damaged, or does not describe a whole checkpoint.
        NewerFileError: a newer release wrote it.
    """
    for name in (MANIFEST, MANIFEST_HASH):
        check_place(path, name)
    content = read_file(path, MANIFEST)
    if read_file(path, MANIFEST_HASH) != manifest_hash(content):
        raise damaged(path, f"{MANIFEST} has another hash than {MANIFEST_HASH} says")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged(path, f"{MANIFEST} is not UTF-8 text: {error.reason}") from None
    manifest = from_text(text, str(path / MANIFEST))
    if path != complete_path(path.parent, manifest.step):
        raise damaged(path, f"{MANIFEST} is that of step {manifest.step}")
    if fault := fault_of_whole(manifest):
        raise damaged(path, f"{MANIFEST}: {fault}")
    return manifest


def manifest_hash(content: bytes) -> bytes:
    """Content of the file beside a manifest; ``sha256sum -c`` takes it."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def check_place(path: Path, name: str) -> None:
    """Refuse what is no file of the checkpoint in ``path``; reading a pipe would wait for ever.

    Raises:
        CorruptFileError: it is missing, no plain file, or a link to outside.
    """
    found = path / name
    if not found.is_file():
        raise damaged(path, f"{name} is missing, or no plain file")
    if not found.resolve().is_relative_to(path.resolve()):
        raise damaged(path, f"{name} is a link to outside: {found.resolve()}")


def read_file(path: Path, name: str, offset: int = 0, length: int | None = None) -> bytes:
    """Bytes of a file whose place has been checked; fewer where it ends before.

    Raises:
        CorruptFileError: the disk cannot read it.
    """
    try:
        with open(path / name, "rb") as file:
            left = max(0, os.fstat(file.fileno()).st_size - offset)
            file.seek(offset)
            return file.read(left if length is None else min(length, left))
    except (OSError, OverflowError) as error:
        raise damaged(path, f"{name} cannot be read: {error}") from None


def compare(path: Path, name: str, content: bytes, expected: str) -> None:
    """Compare hashes.

    Raises:
        CorruptFileError: they differ; ``name`` says of what.
    """
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise damaged(path, f"{name}: SHA-256 is {found[:12]}..., the manifest says {expected[:12]}...")


def damaged(path: Path, fault: str) -> CorruptFileError:
    """The error that names a damaged checkpoint and offers the one before it."""
    earlier = [step for step in complete_steps(path.parent) if step < int(path.name.removeprefix("step-"))]
    remedies = [f"the checkpoint before it: {complete_path(path.parent, earlier[-1])}"] if earlier else []
    return CorruptFileError(f"checkpoint {path} is damaged", [fault], remedies)
