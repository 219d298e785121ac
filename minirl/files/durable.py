"""Write files and folders that are complete or absent, whenever the process is killed.

A file's content reaches the disk before it gets its name; a folder is filled under a temporary name (with a
leading dot) and then renamed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write; at the end of the block its content is on the disk. Raises OSError naming the file."""
    with add_path_to_oserror(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: str) -> None:
    """Write a text file so that readers see either the old content or the new one, never a part."""
    temporary = path.with_name(f".half-{path.name}")
    with new_file(temporary) as file:
        file.write(content.encode())
    os.replace(temporary, path)


def append_whole(path: Path, content: bytes) -> None:
    """Append all of the content to a file or, if that fails, nothing. Raises OSError naming the file."""
    with add_path_to_oserror(path), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


@contextlib.contextmanager
def add_path_to_oserror(path: Path) -> Iterator[None]:
    """Give an OSError of the block this path if it has none: a write to a full disk names no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def publish(half_made: Path, folder: Path) -> None:
    """Give a complete folder its final name. Raises OSError if that name is taken by a folder with files."""
    # The files are on the disk already (`new_file`); the lists of files in the folders are not.
    for inner in [*half_made.rglob("*/"), half_made]:
        fsync_path(inner)
    os.rename(half_made, folder)
    fsync_path(folder.parent)


def remove_folder(folder: Path) -> None:
    """Rename a folder, then delete it, so that a half-deleted folder never has the name of a complete one."""
    renamed = folder.with_name(f".old-{folder.name}")
    os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
