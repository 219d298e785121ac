"""Write files and folders atomically: they are either complete or absent, no matter when the process is killed.

A file's content reaches the disk before the file gets its name. A folder is filled under a temporary name (with a
leading dot) and then renamed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def open_new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it to disk when the block ends. Raises OSError, naming the file."""
    with add_path_to_oserror(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: str) -> None:
    """Write a text file atomically: readers see either the complete old content or the complete new content."""
    temporary_path = path.with_name(f".half-{path.name}")
    with open_new_file(temporary_path) as file:
        file.write(content.encode())
    os.replace(temporary_path, path)


def append_all_or_nothing(path: Path, content: bytes) -> None:
    """Append the whole content to a file, or nothing if a write fails. Raises OSError, naming the file."""
    with add_path_to_oserror(path), path.open("ab", buffering=0) as file:
        original_size = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(original_size)
            raise


@contextlib.contextmanager
def add_path_to_oserror(path: Path) -> Iterator[None]:
    """If the block raises an OSError without a file name (for example on a full disk), add this path to the error."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def publish(staging_folder: Path, folder: Path) -> None:
    """Sync `staging_folder`, then rename it to `folder`. Raises OSError if `folder` already exists and is not empty."""
    # `open_new_file` has already synced the files to disk, but not the directory entries.
    for subfolder in [*staging_folder.rglob("*/"), staging_folder]:
        fsync_path(subfolder)
    os.rename(staging_folder, folder)
    fsync_path(folder.parent)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then delete it, so that a half-deleted folder never has the name of a complete folder."""
    renamed_folder = folder.with_name(f".old-{folder.name}")
    os.rename(folder, renamed_folder)
    shutil.rmtree(renamed_folder, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Sync a file, or a folder's directory entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
