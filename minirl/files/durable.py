"""Write files and folders that are complete or absent, whenever the process is killed.

A file's content reaches the disk before it gets its name; a folder is filled under a temporary name (with a
leading dot) and then renamed. Digests are SHA-256 of the written bytes, so that a later reader detects damage.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict


class Digest(TypedDict):
    """Size and hash of a file's content."""

    num_bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> Digest:
    """Write a file and wait until its content is on the disk. An OSError that it raises names the file."""
    sha256 = hashlib.sha256()
    num_bytes = 0
    with naming(path), path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            sha256.update(chunk)
            num_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Digest(num_bytes=num_bytes, sha256=sha256.hexdigest())


def replace_file(path: Path, content: str) -> None:
    """Write a text file so that readers see either the old content or the new one, never a part."""
    temporary = path.with_name(f".half-{path.name}")
    write_file(temporary, [content.encode()])
    os.replace(temporary, path)


def append_whole(path: Path, content: bytes) -> None:
    """Append all of the content to a file or, if that fails, nothing. Raises OSError naming the file."""
    with naming(path), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of the block this path if it has none: a write to a full disk names no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path, digests: Mapping[str, Digest]) -> str | None:
    """Return which file of a folder differs from its digest, and how; None if none does. Reads all files."""
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _fault(folder / name, digests[name]), digests)
        named = zip(digests, faults, strict=True)
        return next((f"{name} {fault}" for name, fault in named if fault is not None), None)


def _fault(path: Path, digest: Digest) -> str | None:
    """Return how a file differs from its digest, or None if it does not."""
    if not path.is_file():
        return "is missing"
    num_bytes = path.stat().st_size
    if num_bytes != digest["num_bytes"]:
        return f"has {num_bytes} bytes instead of {digest['num_bytes']}"
    if file_sha256(path) != digest["sha256"]:
        return "has other content than was written (SHA-256)"
    return None


def publish(temporary: Path, folder: Path) -> None:
    """Give a complete folder its final name. Raises OSError if that name is taken by a folder with files."""
    # The files are on the disk already (`write_file`); the lists of files in the folders are not.
    for inner in temporary.rglob("*"):
        if inner.is_dir():
            sync(inner)
    sync(temporary)
    os.rename(temporary, folder)
    sync(folder.parent)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then delete it, so that a half-deleted folder never has the name of a complete one."""
    renamed = folder.with_name(f".old-{folder.name}")
    # Left by an earlier call that was killed.
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
