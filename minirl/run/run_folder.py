"""Create, lock and find run folders.

runs/NAME/lock                  lock file, locked while a run uses the folder
runs/NAME/args.json             flags and chosen sizes
runs/NAME/checkpoints/000050/   checkpoint after step 50; see `minirl.run.checkpoint`
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.ranks.process_group import broadcast_object, rank, require_same
from minirl.run.checkpoint import checkpoints_in

PRIVATE = 0o700  # mode of a run folder: only its owner may read it


@dataclass(frozen=True)
class RunFolder:
    """A run's locked folder."""

    path: Path
    args: Mapping[str, Any]  # content of args.json from the previous launch; {} in a new run
    checkpoint: Path | None  # checkpoint to resume from; None in a new run
    lock: IO[str] | None  # lock file, open on rank 0; the OS releases the lock when the process exits


@contextlib.contextmanager
def lock_run_folder(name: str) -> Iterator[RunFolder]:
    """Lock the run folder `name`, creating it if needed, and yield it (collective).

    The body of the `with` statement sets up the run. If the body raises InputError, a folder that contains only the
    lock file is removed. The lock remains held after the `with` statement. Partial checkpoints from a killed save are
    deleted; the run resumes from the newest complete checkpoint.

    Raises InputError if the name is a path, or if the folder is in use, not a run folder, not writable, or not shared
    by all nodes.
    """
    refuse(
        not re.fullmatch(r"[A-Za-z0-9_][\w.+=-]*", name),
        f"--run-name {name}: must be a plain name, not a path; set $MINIRL_RUNS to choose the parent folder",
    )
    folder = runs_root() / name
    lock = args_and_checkpoint = None
    if rank() == 0:
        lock = _take_lock(folder)
        args_and_checkpoint = _read_previous_start(folder)
    args, checkpoint = broadcast_object(args_and_checkpoint)
    try:
        path = folder / "lock"
        # Each launch appends a random token to the lock file, so nodes without a shared file system read different
        # contents.
        require_same(path.exists() and path.read_text(), f"{folder}: the run folder ($MINIRL_RUNS)")
        yield RunFolder(folder, args, checkpoint, lock)
    except InputError:
        if rank() == 0 and os.listdir(folder) == ["lock"]:
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # the parent contains other runs
                folder.parent.rmdir()
        raise


def _read_previous_start(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Delete partial checkpoints; return args.json's content and the newest checkpoint, or {} and None."""
    if os.listdir(folder) == ["lock"]:
        return {}, None
    for leftover in (folder / "checkpoints").glob(".*"):
        shutil.rmtree(leftover, ignore_errors=True)
    args_file = folder / "args.json"
    args = read_json_object(args_file) if args_file.is_file() else {}
    return args, next(reversed(checkpoints_in(folder)), None)


def _take_lock(folder: Path) -> IO[str]:
    """Create the folder if needed, and lock it for this process. Raises InputError if either step fails."""
    path = folder / "lock"
    has_foreign_files = not path.exists() and any(folder.glob("*"))
    refuse(has_foreign_files, f"{folder} is not a run folder; choose another --run-name")
    try:
        folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        lock = path.open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(secrets.token_hex(4), file=lock, flush=True)
    except BlockingIOError:
        raise InputError(
            f"{folder}: another run is using it; wait for that run to end, or choose another --run-name"
        ) from None
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; see --run-name and $MINIRL_RUNS") from None
    return lock


def runs_root() -> Path:
    """Return the parent folder of all runs: $MINIRL_RUNS, or ./runs."""
    return Path(os.environ.get("MINIRL_RUNS", "runs"))


def find_run(name: str, required_file: str) -> Path:
    """Find a run folder by path or by run name. The folder must contain `required_file`, a file or a subfolder.

    Raises InputError if no such folder exists.
    """
    folders = [Path(name), runs_root() / name]
    for folder in folders:
        # Unlike Path.exists, os.path.exists does not raise for an invalid file name.
        if os.path.exists(folder / required_file):
            return folder
    raise InputError(
        f"{name}: no {required_file} in {folders[0]} or {folders[1]}; give a run's folder or name"
    )
