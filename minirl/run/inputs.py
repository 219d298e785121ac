"""The files that a run was started with: a copy of the script, and what has changed since."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from minirl.files.durable import file_sha256
from minirl.run.config import RunConfig


def input_digests(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the script, the data files and the reward files, by path. Files that are gone are left out."""
    rewards = [spec.rpartition(":")[0] for spec in config.reward]
    named = [sys.argv[0], config.data, *config.eval_data, *rewards]
    paths = [Path(name) for name in named if name]
    return {str(path): file_sha256(path) for path in paths if path.is_file()}


def changed_inputs(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """The files that are not what they were when the run in this folder was last started."""
    try:
        before = json.loads((folder / "args.json").read_text())["inputs"]
    except (OSError, ValueError, KeyError):
        return []
    return [path for path, digest in digests.items() if path in before and before[path] != digest]


def keep_script(folder: Path, *, step: int) -> None:
    """Copy the script into the run's folder; a later version beside the first, named after the step."""
    script = Path(sys.argv[0])
    if script.suffix != ".py" or not script.is_file():
        return
    copies = sorted(folder.glob(f"{script.stem}*.py"))
    content = script.read_bytes()
    if any(copy.read_bytes() == content for copy in copies):
        return
    name = f"{script.stem}-from-step-{step + 1}.py" if copies else script.name
    shutil.copyfile(script, folder / name)
