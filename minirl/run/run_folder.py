"""Run folders: the folder of a run, by its name.

runs/NAME/lock                  locked while a run uses the folder
runs/NAME/args.json             the flags
runs/NAME/checkpoints/000050/   the checkpoint after step 50, see `minirl.run.checkpoint`
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

PRIVATE = 0o700  # mode of a run's folder: only its owner reads the files in it


@dataclass(frozen=True)
class RunFolder:
    """The locked folder of a run."""

    path: Path
    args: Mapping[str, Any]  # args.json of the last start; {} in a new run
    checkpoint: Path | None  # to resume from; None: start from the first step
    lock: IO[str] | None  # on rank 0, the locked file, which the system unlocks when the process ends


@contextlib.contextmanager
def lock_run_folder(name: str) -> Iterator[RunFolder]:
    """Lock the folder of the run `name`, made if it does not exist; the block sets the run up (collective).

    The lock outlives the block. If the block raises InputError and nothing else is in the folder yet, it is removed. A
    run resumes from its newest checkpoint; what a killed save left is removed.

    Raises InputError if the name is a path, or if the folder is in use, not a run's, not writable, or not shared by all
    nodes.
    """
    refuse(
        not re.fullmatch(r"[A-Za-z0-9_][\w.+=-]*", name),
        f"--run-name {name}: must be a plain name, not a path; $MINIRL_RUNS says where runs go",
    )
    folder = runs_root() / name
    lock = found = None
    if rank() == 0:
        lock = _take_lock(folder)
        found = _previous_start(folder)
    args, checkpoint = broadcast_object(found)
    try:
        path = folder / "lock"
        # Each start adds to this file, so a folder of the same name on another node differs.
        require_same(path.exists() and path.read_text(), f"{folder}: the run's folder ($MINIRL_RUNS)")
        yield RunFolder(folder, args, checkpoint, lock)
    except InputError:
        if rank() == 0 and os.listdir(folder) == ["lock"]:
            shutil.rmtree(folder)
            with contextlib.suppress(OSError):  # other runs are there
                folder.parent.rmdir()
        raise


def _previous_start(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Return args.json and the newest checkpoint, {} and None in a new folder; remove half-made checkpoints."""
    if os.listdir(folder) == ["lock"]:
        return {}, None
    for left_over in (folder / "checkpoints").glob(".*"):
        shutil.rmtree(left_over, ignore_errors=True)
    saved = folder / "args.json"
    args = read_json_object(saved) if saved.is_file() else {}
    return args, next(reversed(checkpoints_in(folder)), None)


def _take_lock(folder: Path) -> IO[str]:
    """Make the folder, unless it exists, and lock it for this process. Raises InputError."""
    path = folder / "lock"
    is_foreign = folder.is_dir() and not path.exists() and any(folder.iterdir())
    refuse(is_foreign, f"{folder}: is not a run's folder; choose another --run-name")
    try:
        folder.mkdir(PRIVATE, parents=True, exist_ok=True)
        lock = path.open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print(secrets.token_hex(4), file=lock, flush=True)
    except BlockingIOError:
        raise InputError(
            f"{folder}: another run is using it; wait for it or choose another --run-name"
        ) from None
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; see --run-name and $MINIRL_RUNS") from None
    return lock


def runs_root() -> Path:
    """The folder that holds all run folders: $MINIRL_RUNS, or ./runs."""
    return Path(os.environ.get("MINIRL_RUNS", "runs"))


def find_run(name: str, required_file: str) -> Path:
    """A run's folder by its path or its name among the runs, whichever has this file or folder.

    Raises InputError if neither does.
    """
    folders = [Path(name), runs_root() / name]
    for folder in folders:
        # Unlike Path.exists, it does not raise for a name that no file can have.
        if os.path.exists(folder / required_file):
            return folder
    raise InputError(
        f"{name}: no {required_file} in {folders[0]} or {folders[1]}; give a run's folder or name"
    )
