"""Run folders: one run each, found again by its name, with the newest checkpoint that is intact to go on from.

runs/NAME/lock                  held while a run is going on; who holds it
runs/NAME/args.json             the flags, which a resumed run must repeat
runs/NAME/checkpoints/000050/   manifest.json has the digest of every other file
"""

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from minirl.errors import InputError, refuse
from minirl.files import durable
from minirl.files.redaction import redacted
from minirl.ranks.process_group import broadcast_object, print0, rank

FORMAT = 1  # of checkpoints
# Flags that change neither the weights nor the samples, and may differ in a resumed run.
FREE_FLAGS = frozenset(
    "run_name resume wandb save_every keep_checkpoints keep_rollouts eval_every hang_timeout reward_timeout "
    "park_frozen".split()
)


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process group holds."""

    path: Path
    checkpoint: Path | None  # what to go on from
    token: str  # of this start: no name of a temporary file is taken twice
    lock: IO[str] | None  # rank 0's; the system lets go of it when the process ends


def runs_root() -> Path:
    """Where runs go: $MINIRL_RUNS, or ./runs."""
    return Path(os.environ.get("MINIRL_RUNS", "runs"))


def open_run_folder(name: str, flags: Mapping[str, Any], *, resume: str = "auto") -> RunFolder:
    """Make the folder of a new run, or take up the run of that name where its newest intact checkpoint is (collective).

    resume: "auto" needs the same flags (but `FREE_FLAGS`), "force" takes the new ones, "never" needs a new name.
    Damaged checkpoints are named and renamed; left-overs of a killed save are removed. Raises InputError on every rank
    for a name that is a path, a folder that cannot be written or is in use, other flags, or only damaged checkpoints.
    """
    found: Any = None
    lock = None
    if rank() == 0:
        try:
            folder = _make_folder(name)
            lock = _take_lock(folder)
            _refuse_changes(folder, flags, resume)
            found = folder, _newest_checkpoint(folder), secrets.token_hex(4)
        except InputError as error:
            found = str(error)
    found = broadcast_object(found)
    if isinstance(found, str):
        raise InputError(found)
    folder, checkpoint, token = found
    print0(f"run {folder}; the same command with --run-name {name} resumes it")
    return RunFolder(folder, checkpoint, token, lock)


def _make_folder(name: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_][\w.+=-]*", name):
        raise InputError(
            f"--run-name {name}: must be a plain name, not a path; $MINIRL_RUNS says where runs go"
        )
    folder = runs_root() / name
    if folder.is_dir() and not (folder / "args.json").is_file():
        own = {"lock", "checkpoints", "rollouts", ".half-args.json"}
        strangers = {path.name for path in folder.iterdir()} - own
        refuse(
            strangers,
            f"{folder}: has {sorted(strangers)[:3]} but no args.json, it is no run; choose another --run-name",
        )
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; see --run-name and $MINIRL_RUNS") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be written to; see --run-name and $MINIRL_RUNS")
    return folder


def _take_lock(folder: Path) -> IO[str]:
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise InputError(
            f"{folder}: in use by {lock.read().strip()}; wait for it or take another --run-name"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _refuse_changes(folder: Path, flags: Mapping[str, Any], resume: str) -> None:
    if not (folder / "args.json").is_file():  # it was never started
        return
    if resume == "never":
        raise InputError(f"{folder}: there is a run of this name; choose another --run-name")
    try:
        old = json.loads((folder / "args.json").read_text())["flags"]
    except (ValueError, KeyError):
        raise InputError(f"{folder}/args.json: cannot be read; choose another --run-name") from None
    new = json.loads(json.dumps(redacted(flags)))
    names = [name for name in {**old, **new} if name not in FREE_FLAGS and old.get(name) != new.get(name)]
    changes = ", ".join(f"--{n.replace('_', '-')} {new.get(n)} (was {old.get(n)})" for n in names)
    if changes and resume == "auto":
        raise InputError(
            f"{folder}: this run was started with other flags: {changes}. Repeat its command to resume it, take "
            "another --run-name to start afresh, or --resume force to go on with the new ones"
        )
    if changes:
        print0(f"resuming with other flags: {changes}")


def _newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint; newer ones that are damaged are named and put aside."""
    checkpoints = folder / "checkpoints"
    for left_over in (*checkpoints.glob(".tmp-*"), *checkpoints.glob(".old-*")):
        shutil.rmtree(left_over)
    reasons: dict[Path, str] = {}
    for checkpoint in reversed(checkpoints_in(folder)):
        reason = _damage(checkpoint)
        if reason is None:
            for bad, why in reasons.items():
                print0(f"warning: {bad}: {why}; going back to {checkpoint.name}")
                os.rename(bad, bad.with_name(f"{bad.name}-damaged-{secrets.token_hex(2)}"))
            return checkpoint
        reasons[checkpoint] = reason
    if reasons:
        listed = "; ".join(f"{path}: {why}" for path, why in reasons.items())
        raise InputError(
            f"no checkpoint of {folder} is intact: {listed}. Take another --run-name to start afresh"
        )
    if (folder / "args.json").is_file():
        print0(f"{folder} has no checkpoint yet: starting again from the first step")
    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    return sorted(path for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """`format`, `state` (of the script), `score`, `world_size` and `files` with their digests."""
    return json.loads((checkpoint / "manifest.json").read_text())


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Raises InputError for one of a later version of minirl."""
    try:
        manifest = read_manifest(checkpoint)
        version, digests = manifest["format"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "manifest.json is missing or cannot be read"
    if version != FORMAT:
        raise InputError(
            f"{checkpoint}: has format {version}, this version of minirl reads {FORMAT}; update minirl"
        )
    with ThreadPoolExecutor() as pool:
        reasons = pool.map(lambda name: durable.damage(checkpoint / name, digests[name]), digests)
        return next(
            (f"{name} {reason}" for name, reason in zip(digests, reasons, strict=True) if reason), None
        )
