"""Run folders: open the folder of a run by its name, lock it, and find the checkpoint to resume from.

runs/NAME/lock                  locked while a run uses the folder; names the process with the lock
runs/NAME/args.json             the flags, which a resumed run must repeat
runs/NAME/reference/            the weights of the reference model, if the run has one
runs/NAME/checkpoints/000050/   the checkpoint after step 50, see `minirl.run.checkpoint`
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from minirl.errors import InputError, refuse
from minirl.files import durable
from minirl.files.json_files import read_json_object
from minirl.files.redaction import redacted
from minirl.files.safetensors_files import nonfinite_tensor
from minirl.ranks.process_group import broadcast_object, launcher, print0, rank
from minirl.run.flags import flag_of

FORMAT = 3  # version of the layout of checkpoints
# Files of a checkpoint with the script's own tensors, where NaN may have a meaning. Without endings.
EXTRA_FILE = "resume/extra"
RECORDS_FOLDER = "resume/records"

# Mode of a run's folder, and of resume/ in a checkpoint, which users may copy elsewhere. A resume needs the rollouts in
# them as they are, so their secrets cannot be masked.
PRIVATE = 0o700

# Flags that change neither weights nor samples: a resumed run may change them.
FREE_FLAGS = {
    "run_name",
    "resume",
    "wandb",
    "save_every",
    "keep_checkpoints",
    "keep_rollouts",
    "eval_every",
    "hang_timeout",
    "reward_timeout",
    "reward_workers",
    "reply_timeout",
    "rollout_workers",
    "park_frozen",
    "dry_run",
    "gpus",
}
# Files that a run killed before writing args.json may leave in its folder.
_LEFT_BEFORE_ARGS = {"lock", "checkpoints", "rollouts", ".half-args.json"}


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. `create` makes the folder of a new run, once the run can really start."""

    path: Path
    args: Mapping[str, Any]  # of the earlier run, see `read_args`; {} in a new run
    checkpoint: Path | None  # to resume from; None: start from the first step
    token: str  # random for each start of the run, to make the names of temporary folders unique
    lock: IO[str] | None  # on rank 0, the locked file, which the system unlocks when the process ends

    def create(self) -> "RunFolder":
        """Make and lock the folder, unless `open_run_folder` found and locked it (collective).

        Raises InputError on every rank if it cannot make the folder, or if another run has just taken its name.
        """

        def made() -> RunFolder:
            if self.lock is not None:
                return self
            _make_folder(self.path)
            lock = _take_lock(self.path)
            is_taken = (self.path / "args.json").is_file()
            refuse(is_taken, f"{self.path}: another run has just taken this name; choose another --run-name")
            return dataclasses.replace(self, lock=lock)

        folder = _on_rank_0(made)
        print0(f"run {folder.path}; the same command with --run-name {folder.path.name} resumes it")
        return folder


def runs_root() -> Path:
    """The folder that holds all run folders: $MINIRL_RUNS, or ./runs."""
    return Path(os.environ.get("MINIRL_RUNS", "runs"))


def find_run(name: str, part: str) -> Path:
    """A run's folder by its path or its name among the runs, whichever has this file or folder.

    Raises InputError if neither does.
    """
    folder = _folder_with(name, part)
    if folder is None:
        raise InputError(f"{name}: no {part} in {name} or {runs_root() / name}; give a run's folder or name")
    return folder


def _folder_with(name: str, part: str) -> Path | None:
    # Unlike Path.exists, os.path.exists does not raise for a name that no file can have.
    folders = (Path(name), runs_root() / name)
    return next((folder for folder in folders if os.path.exists(folder / part)), None)


def run_before_restart() -> str | None:
    """The name of the run that this torchrun began before it restarted its ranks (--max-restarts), or None.

    Not collective. That run's args.json has the same `launcher`.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    for path in runs_root().glob("*/args.json"):
        with contextlib.suppress(InputError):  # a damaged file of another run
            if read_json_object(path).get("launcher") == launcher():
                return path.parent.name
    return None


def open_run_folder(name: str, flags: Mapping[str, Any], *, resume: str = "auto") -> RunFolder:
    """Find and lock the folder of the earlier run `name`, or choose that of a new run (collective).

    An earlier run resumes from its newest intact checkpoint; newer ones, which are damaged, are reported and renamed,
    and the files of a killed save removed. For a new run it makes nothing yet, so a start that fails leaves no folder:
    see `RunFolder.create`.

    resume: "auto": an earlier run must have the same flags, except for `FREE_FLAGS` and a greater num_steps.
    "force": it takes the new flags. "never": it must not exist. "exact": as "auto", for an evaluation: it has no
    checkpoints and takes no other flags.

    Raises InputError on every rank if the name is a path, if the folder is in use or not writable, if the flags differ,
    or if all checkpoints are damaged.
    """

    def found() -> RunFolder:
        path = _checked_path(name)
        token = secrets.token_hex(4)
        if not path.is_dir():
            return RunFolder(path, {}, None, token, None)
        lock = _take_lock(path)
        args = read_args(path)
        _refuse_changes(path, args, flags, resume)
        checkpoint = None if resume == "exact" else _newest_checkpoint(path)
        return RunFolder(path, args, checkpoint, token, lock)

    return _on_rank_0(found)


def _on_rank_0(opened: Callable[[], RunFolder]) -> RunFolder:
    """Rank 0's folder on every rank, or its InputError (collective). The lock stays on rank 0; other ranks get None."""
    own: RunFolder | None = None
    outcome: RunFolder | str | None = None
    if rank() == 0:
        try:
            own = opened()
            outcome = dataclasses.replace(own, lock=None)
        except InputError as error:
            outcome = str(error)
    outcome = broadcast_object(outcome)
    if isinstance(outcome, str):
        raise InputError(outcome)
    return own or outcome


def _checked_path(name: str) -> Path:
    """The folder of this name. Raises InputError for a path, a foreign folder, or one that it cannot write to."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.+=-]*", name):
        raise InputError(
            f"--run-name {name}: must be a plain name, not a path; $MINIRL_RUNS says where runs go"
        )
    folder = runs_root() / name
    if folder.is_dir() and not (folder / "args.json").is_file():
        foreign = {path.name for path in folder.iterdir()} - _LEFT_BEFORE_ARGS
        refuse(
            foreign,
            f"{folder}: has {sorted(foreign)[:3]} but no args.json, so it is not a run; choose another --run-name",
        )
    parents = [folder, *folder.absolute().parents]
    nearest = next(path for path in parents if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"{folder}: cannot be written to; see --run-name and $MINIRL_RUNS")
    return folder


def _make_folder(folder: Path) -> None:
    """Make the folder unless it exists. Raises InputError if that fails."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(PRIVATE, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; see --run-name and $MINIRL_RUNS") from None


def _take_lock(folder: Path) -> IO[str]:
    """Lock the folder for this process. Raises InputError naming the process that has the lock."""
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        raise InputError(f"{folder}: in use by {holder}; wait for it or take another --run-name") from None
    with durable.naming(folder / "lock"):
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
    return lock


def _refuse_changes(folder: Path, args: Mapping[str, Any], flags: Mapping[str, Any], resume: str) -> None:
    """Compare the flags with those in the earlier run's args. Raises InputError if they differ."""
    if not args:
        refuse(
            resume != "force" and checkpoints_in(folder),
            f"{folder}: has checkpoints but no args.json to compare the flags with; choose another --run-name, or "
            "--resume force to continue with these flags",
        )
        return
    if resume == "never":
        raise InputError(f"{folder}: a run has this name; choose another --run-name")
    old = redacted(args["flags"])  # again: an earlier version knew fewer secrets
    # Through JSON, like the old flags: tuples become lists.
    new = json.loads(json.dumps(redacted(flags)))
    changes = []
    for name in {**old, **new}:
        is_longer = name == "num_steps" and old.get(name, 0) < new[name]
        if name not in FREE_FLAGS and not is_longer and old.get(name) != new.get(name):
            changes.append(f"{flag_of(name)} {new.get(name)} (was {old.get(name)})")
    if not changes:
        return
    listed = ", ".join(changes)
    # The tensors of another rank have other shapes.
    is_fixed = resume == "exact" or old.get("lora_rank", 0) != new.get("lora_rank", 0)
    or_force = "" if is_fixed else ", or --resume force to continue with the new flags"
    refuse(
        resume != "force" or is_fixed,
        f"{folder}: this run started with other flags: {listed}. Repeat its command to resume it, take another "
        f"--run-name for a new run{or_force}",
    )
    print0(f"resuming with other flags: {listed}")


def read_args(folder: Path) -> dict[str, Any]:
    """The args.json of a run's folder, or {} without one.

    It has the run's `flags` and the digests of its `inputs`. Raises InputError if it is damaged.
    """
    path = folder / "args.json"
    if not path.is_file():
        return {}
    try:
        args = {"inputs": {}, **json.loads(path.read_text())}
    except (OSError, ValueError, TypeError, RecursionError):
        args = {}
    if not isinstance(args.get("flags"), dict) or not isinstance(args.get("inputs"), dict):
        raise InputError(f"{path}: is damaged; restore it, or choose another --run-name")
    return args


def _newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint, or None without checkpoints. Reports and renames newer, damaged ones.

    Raises InputError, and renames nothing, if all are damaged.
    """
    checkpoints = folder / "checkpoints"
    # Unfinished saves and deletions of a killed process.
    for left_over in (*checkpoints.glob(".tmp-*"), *checkpoints.glob(".old-*")):
        shutil.rmtree(left_over, ignore_errors=True)
    reasons: dict[Path, str] = {}  # of the damaged checkpoints
    for checkpoint in reversed(checkpoints_in(folder)):
        reason = _damage(checkpoint)
        if reason is None:
            for damaged, why in reasons.items():
                print0(f"warning: {damaged}: {why}; going back to {checkpoint.name}")
                os.rename(damaged, damaged.with_name(f"{damaged.name}-damaged-{secrets.token_hex(2)}"))
            return checkpoint
        reasons[checkpoint] = reason
    if reasons:
        listed = "; ".join(f"{path}: {why}" for path, why in reasons.items())
        raise InputError(
            f"no checkpoint of {folder} is intact: {listed}. Start a new run with another --run-name"
        )
    if (folder / "args.json").is_file():
        print0(f"{folder} has no checkpoint yet: starting from the first step")
    return None


def run_of(model: str) -> Path | None:
    """The folder of the run with this path or name, or of the run that saved this checkpoint; None: another model."""
    folder = Path(model)
    if is_checkpoint(folder):
        return folder.resolve().parent.parent
    return None if os.path.exists(folder / "config.json") else _folder_with(model, "args.json")


def newest_checkpoint(model: str, *, flag: str) -> str:
    """The newest checkpoint of the run with this path or name; any other model unchanged.

    Raises InputError, which names the flag, if the run has no checkpoint, or if the policy in it is damaged.
    """
    run = run_of(model)
    if run is None or is_checkpoint(Path(model)):
        return model
    checkpoints = checkpoints_in(run)
    refuse(not checkpoints, f"{flag} {model}: the run {run} has no checkpoint")
    digests = read_json_object(checkpoints[-1] / "manifest.json")["files"]
    damage = durable.damage(checkpoints[-1], {name: digests[name] for name in digests if "/" not in name})
    refuse(damage, f"{checkpoints[-1]}: {damage}; give an earlier checkpoint as {flag}")
    return str(checkpoints[-1])


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first, including damaged ones."""
    return sorted(filter(is_checkpoint, (folder / "checkpoints").glob("*")), key=lambda path: int(path.name))


def is_checkpoint(path: Path) -> bool:
    """True for a checkpoint, even a damaged one, but not for a folder of the user's whose name is a number."""
    has_name = path.name.isdecimal() and path.name == checkpoint_name(int(path.name))
    return has_name and any((path / part).exists() for part in ("manifest.json", "resume"))


def checkpoint_name(step: int) -> str:
    """The name of the folder of the checkpoint after this step."""
    return f"{step:06d}"


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """manifest.json: `format`, the script's `state`, `score`, `world_size`, and the digests of `files`."""
    return json.loads((checkpoint / "manifest.json").read_text())


def _damage(checkpoint: Path) -> str | None:
    """The damage of a checkpoint, or None: a file unlike its manifest, a weight that is not finite. Reads all files.

    Raises InputError if another version of minirl saved it in another format.
    """
    unreadable = "manifest.json is missing or cannot be read"
    try:
        manifest = read_manifest(checkpoint)
        version = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return unreadable
    if version != FORMAT:
        raise InputError(
            f"{checkpoint}: has format {version}, this version of minirl reads {FORMAT}; resume it with the version "
            "that saved it"
        )
    try:
        digests = dict(manifest["files"])
        is_whole = isinstance(manifest["state"]["step"], int) and manifest["world_size"] > 0
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        return unreadable
    fault = durable.damage(checkpoint, digests)
    if fault is not None:
        return fault
    for name in digests:
        is_of_script = name.startswith((f"{EXTRA_FILE}.", f"{RECORDS_FOLDER}/"))
        if name.endswith(".safetensors") and not is_of_script:
            tensor = nonfinite_tensor(checkpoint / name)
            if tensor is not None:
                return f"{name} has values that are not finite in {tensor}"
    return None
