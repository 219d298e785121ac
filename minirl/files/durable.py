"""Files and folders that are whole or absent, whenever the process dies.

A file's bytes reach the disk before its name counts; a folder is filled under a temporary name (a leading dot) and
renamed. Digests are SHA-256 of what was written, so that a later reader can tell damage from data.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict


class Digest(TypedDict):
    """What a file must be."""

    num_bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Digest:
    """Write a file through to the disk."""
    sha256, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            sha256.update(chunk)
            num_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Digest(num_bytes=num_bytes, sha256=sha256.hexdigest())


def replace_file(path: Path, content: str) -> None:
    """Write a text file of which readers see the old content or the new one."""
    half_made = path.with_name(f".half-{path.name}")
    write_file(half_made, [content.encode()])
    os.replace(half_made, path)


def damage(path: Path, digest: Digest) -> str | None:
    """How the file differs from its digest, or None."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != digest["num_bytes"]:
        return f"has {size} bytes instead of {digest['num_bytes']}"
    with path.open("rb") as file:
        is_same = hashlib.file_digest(file, "sha256").hexdigest() == digest["sha256"]
    return None if is_same else "has other content than was written (SHA-256)"


def publish(half_made: Path, folder: Path) -> None:
    """Give a folder that is whole its name. Raises OSError when there is a folder of that name that is not empty."""
    for inner in (*(path for path in half_made.rglob("*") if path.is_dir()), half_made):
        sync(inner)
    os.rename(half_made, folder)
    sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder: first its name, so that no half of it is ever taken for the whole."""
    doomed = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
